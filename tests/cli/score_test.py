"""score: perplexity as the reference has it, windows, separators. The full 64 windows are a test of the model."""

import array
import json
import pathlib
import shutil
import struct
import tempfile

from vivace import Case, HY3, QWEN, main, vivace


def safetensors(path):
    """Its tensors: name, type, shape and values, in fp32."""
    data = pathlib.Path(path).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    for name, tensor in json.loads(data[8:end]).items():
        if name == "__metadata__":
            continue
        begin, stop = tensor["data_offsets"]
        content = data[end + begin:end + stop]
        if tensor["dtype"] == "BF16":  # the upper halves of fp32
            content = b"".join(b"\0\0" + content[i:i + 2] for i in range(0, len(content), 2))
        yield name, tensor["dtype"], tensor["shape"], array.array("f", content)


class Score(Case):
    def test_counts_and_repeats(self):
        args = ["score", "--model", QWEN, "--text-file", QWEN / "sample.txt", "--window", 128, "--separator-id", 0]
        got = self.ok(*args, "--max-windows", 4, "--json").json
        self.assertEqual(got["tokens"], 4 * 127, "a window's first token is not predicted")
        self.assertGreater(got["perplexity"], 1)
        self.assertLess(got["perplexity"], 4096, "better than guessing among 4,096 tokens")
        self.assertEqual(self.ok(*args, "--max-windows", 4, "--json").json["perplexity"], got["perplexity"])
        text = self.ok(*args, "--max-windows", 4)
        self.assertIn(f"{got['perplexity']:.4g}"[:4], text.text)

    def test_text_that_is_shorter_than_a_window(self):
        with tempfile.NamedTemporaryFile("wb", suffix=".txt") as file:
            file.write("Hello, world!\0naïve".encode())
            file.flush()
            run = self.ok("score", "--model", QWEN, "--text-file", file.name, "--window", 1024, "--json")
            self.assertGreater(run.json["tokens"], 5)

    def test_inputs_of_routers(self):
        """They are rows that the norm before made: over its weight, their mean square is 1."""
        norms = {name: values for name, _, shape, values in safetensors(QWEN / "model.safetensors") if len(shape) == 1}
        score = ["score", "--model", QWEN, "--text-file", QWEN / "sample.txt", "--window", 64, "--max-windows", 2, "--json"]
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "inputs.safetensors"
            self.assertEqual(self.ok(*score, "--router-inputs", file).text, self.ok(*score).text)
            tensors = list(safetensors(file))
            # The last tokens of the two windows predict nothing, so they go no further than the last layer's keys and values.
            self.assertEqual([(name, kind, shape) for name, kind, shape, _ in tensors],
                             [(f"model.layers.{n}.router_input", "F32", [126 if n == 3 else 128, 256]) for n in range(4)])
            for n, (name, _, _, values) in enumerate(tensors):
                weight = norms[f"model.layers.{n}.post_attention_layernorm.weight"]
                for row in range(0, len(values), 256):
                    mean = sum((x / w) ** 2 for x, w in zip(values[row:row + 256], weight)) / 256
                    self.assertLess(abs(mean - 1), 1e-3, (name, row))
            self.fails(2, f"--router-inputs is '{file}', needs a path where nothing is", *score, "--router-inputs", file)
            link = pathlib.Path(folder) / "link"
            link.symlink_to("/nowhere")
            self.fails(2, f"--router-inputs is '{link}', needs a path where nothing is", *score, "--router-inputs", link)
            # Said before the text is even opened.
            for path in ("/nowhere/inputs", folder + "/missing/inputs"):
                self.fails(1, f"--router-inputs: {path}: cannot be written: No such file", "score", "--model", QWEN,
                           "--text-file", "/nowhere/text.txt", "--window", 64, "--router-inputs", path)
            self.assertEqual(sorted(path.name for path in pathlib.Path(folder).iterdir()), ["inputs.safetensors", "link"])

    def test_inputs_of_routers_that_do_not_fit_on_the_disk(self):
        """The perplexity is said all the same, and what was written in part is gone: the same call is not refused."""
        score = ["score", "--model", QWEN, "--text-file", QWEN / "sample.txt", "--window", 64, "--max-windows", 2]
        with tempfile.TemporaryDirectory() as folder:
            run = vivace(*score, "--router-inputs", folder + "/inputs", max_file_bytes=65536)
            self.assertEqual(list(pathlib.Path(folder).iterdir()), [])
        self.assertEqual(run.code, 1)
        self.assertIn("inputs: cannot be written: File too large", run.err)
        self.assertEqual(run.text, self.ok(*score).text)

    def test_a_model_that_gives_no_numbers(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(shutil.copytree(QWEN, pathlib.Path(folder) / "model"))
            path = copy / "model.safetensors"
            data = bytearray(path.read_bytes())
            end = 8 + struct.unpack("<Q", data[:8])[0]
            begin = end + json.loads(data[8:end])["model.norm.weight"]["data_offsets"][0]
            data[begin:begin + 2] = struct.pack("<H", 0x7fc0)
            path.write_bytes(data)
            self.fails(1, "the logits of window 0 are not numbers (NaN), so the text has no perplexity", "score", "--model", copy, "--text-file",
                       QWEN / "sample.txt", "--window", 128, "--max-windows", 1, "--separator-id", 0)

    def test_failures(self):
        base = ["score", "--model", QWEN, "--window", 128]
        self.fails(1, "/nowhere/text.txt", *base, "--text-file", "/nowhere/text.txt")
        with tempfile.NamedTemporaryFile("wb") as empty:
            self.fails(1, empty.name, *base, "--text-file", empty.name)
        self.fails(2, "--window is 99999, needs 2 to", "score", "--model", QWEN, "--text-file", QWEN / "sample.txt", "--window", 99999)
        self.fails(1, "no tokenizer", "score", "--model", HY3, "--text-file", QWEN / "sample.txt", "--window", 128)
        self.fails(2, "77777", *base, "--text-file", QWEN / "sample.txt", "--separator-id", 77777)

    def test_flags_that_the_model_judges(self):
        with tempfile.TemporaryDirectory() as folder:
            model = pathlib.Path(folder) / "model"
            shutil.copytree(QWEN, model)
            (model / "generation_config.json").unlink(missing_ok=True)
            config = json.loads((QWEN / "config.json").read_text())
            del config["eos_token_id"]
            score = ["score", "--model", model, "--window", 64, "--text-file", QWEN / "sample.txt"]
            (model / "config.json").write_text(json.dumps(config))
            self.fails(2, "--separator-id has no default here: the model names no end token", *score)
            (model / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
            self.fails(2, "--router-inputs is '/nowhere/inputs', needs a model with routers", *score, "--separator-id", 0,
                       "--router-inputs", "/nowhere/inputs")


if __name__ == "__main__":
    main()
