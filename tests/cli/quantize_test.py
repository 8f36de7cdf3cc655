"""quantize: an FP8 folder that other commands take, its table and its refusals. Accuracy is a test of the model."""

import json
import pathlib
import shutil
import signal
import struct
import subprocess
import tempfile
import time

from vivace import BINARY, Case, HY3, QWEN, SMOLLM2, main

SAMPLE = QWEN / "sample.txt"


class Quantize(Case):
    def test_per_tensor_is_calibrated_and_runs(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "fp8"
            got = self.ok("quantize", "--model", QWEN, "--out", out, "--scheme", "per-tensor", "--calibration", SAMPLE,
                          "--max-windows", 1, "--scale-dtype", "bf16", "--json").json
            self.assertEqual(got["calibration"]["predictions"], 1023)
            self.assertEqual([group["name"] for group in got["groups"]], ["attention", "experts"])
            for group in got["groups"]:
                self.assertLess(group["rms_relative_error"], 0.04)
            config = json.loads((out / "config.json").read_text())
            self.assertEqual(config["quantization_config"]["activation_scheme"], "static")
            self.assertEqual((out / "tokenizer.json").read_bytes(), (QWEN / "tokenizer.json").read_bytes())
            score = ["--text-file", SAMPLE, "--window", 256, "--max-windows", 2, "--separator-id", 0, "--json"]
            plain = self.ok("score", "--model", QWEN, *score).json["perplexity"]
            for kv in ["f32", "fp8"]:
                fp8 = self.ok("score", "--model", out, "--kv-dtype", kv, *score).json["perplexity"]
                self.assertNotEqual(fp8, plain)
                self.assertLess(abs(fp8 / plain - 1), 0.05)

    def test_block128_needs_no_text(self):
        with tempfile.TemporaryDirectory() as folder:
            # An empty folder is as good as none.
            run = self.ok("quantize", "--model", HY3, "--out", folder, "--scheme", "block128")
            self.assertNotIn("warning", run.err)
            for word in ["attention", "dense mlp", "experts", "shared experts", "kept", "rms error", "became 0", "worst matrix"]:
                self.assertIn(word, run.text)
            told = self.ok("doctor", "--model", folder).text
            self.assertIn("fp8, blocks of 128", told)
            args = ["generate", "--model", folder, "--prompt-ids", "1,2,3", "--max-tokens", 4]
            self.ok(*args)
            fp8 = self.ok(*args, "--kv-dtype", "fp8")
            self.assertIn("no scales for fp8 keys and values", fp8.err)
            self.assertEqual(fp8.err.count("no scales"), 1)

    def test_token_ids_instead_of_a_text(self):
        ids = [(7 * i + i * i) % 512 for i in range(200)]
        with tempfile.TemporaryDirectory() as folder:
            out, file = pathlib.Path(folder) / "fp8", pathlib.Path(folder) / "ids"
            base = ["quantize", "--model", HY3, "--scheme", "per-tensor", "--calibration-ids", file, "--json", "--out"]
            got = []
            for number, text in enumerate([json.dumps(ids), "\n".join(map(str, ids)) + "\n"]):
                file.write_text(text)
                got.append(self.ok(*base, f"{out}{number}").json)
                self.assertEqual(got[-1]["calibration"]["predictions"], 199)
            self.assertEqual(got[0]["calibration"], got[1]["calibration"])
            self.ok("generate", "--model", f"{out}0", "--prompt-ids", "1,2,3", "--max-tokens", 2)
            file.write_text("1 " * 32)
            self.assertRegex(self.ok(*base[:-2], "--out", f"{out}-one").text,
                             r"\n\d+ experts? had no token in the calibration text: the largest range of the layer is taken\n")
            for text, says in [("1 2 512", "id 2 is '512', needs 0 to 511"), ("1,x", "id 1 is 'x'"), ("-1", "id 0 is '-1'"),
                               ("[1, 2, 3]", "has 3 tokens, needs at least 32")]:
                file.write_text(text)
                run = self.fails(1, says, *base, f"{out}-none")
                self.assertIn(f"--calibration-ids {file}", run.err)
            self.assertFalse(pathlib.Path(f"{out}-none").exists())

    def test_one_huge_weight_is_warned_of(self):
        with tempfile.TemporaryDirectory() as folder:
            model = pathlib.Path(folder) / "model"
            shutil.copytree(HY3, model)
            data = bytearray((model / "model.safetensors").read_bytes())
            header_bytes = int.from_bytes(data[:8], "little")
            name = "model.layers.1.self_attn.q_proj.weight"
            begin = json.loads(data[8:8 + header_bytes])[name]["data_offsets"][0] + 8 + header_bytes
            data[begin:begin + 2] = struct.pack("<f", 1e7)[2:]  # bf16
            (model / "model.safetensors").write_bytes(data)
            ids = pathlib.Path(folder) / "ids"
            ids.write_text(" ".join(str(i % 512) for i in range(64)))
            run = self.ok("quantize", "--model", model, "--out", pathlib.Path(folder) / "fp8", "--scheme", "per-tensor",
                          "--calibration-ids", ids, "--json")
            attention = run.json["groups"][0]
            self.assertEqual(attention["worst_matrix"], name)
            self.assertGreater(attention["worst_mean_relative_error"], 0.99)
            self.assertGreater(attention["lost_share"], 0.05)
            self.assertIn(f"warning: {name}: its weights are off by 100 % in the mean", run.err)
            self.assertEqual(run.err.count("warning"), 1)

    def test_a_tokenizer_that_would_not_load_is_not_copied(self):
        with tempfile.TemporaryDirectory() as folder:
            model, out = pathlib.Path(folder) / "model", pathlib.Path(folder) / "out"
            shutil.copytree(QWEN, model)
            (model / "tokenizer.json").write_text("{}")
            self.fails(1, str(model), "quantize", "--model", model, "--out", out, "--scheme", "block128")
            self.assertFalse(out.exists())

    def test_tensors_that_are_not_aligned_name_their_file(self):
        with tempfile.TemporaryDirectory() as folder:
            model = pathlib.Path(folder) / "model"
            shutil.copytree(HY3, model)
            file = model / "model.safetensors"
            data = file.read_bytes()
            header_bytes = int.from_bytes(data[:8], "little") + 1
            file.write_bytes(header_bytes.to_bytes(8, "little") + data[8:7 + header_bytes] + b" " + data[7 + header_bytes:])
            for command in [["generate", "--prompt-ids", "1"], ["quantize", "--out", f"{folder}/out", "--scheme", "block128"]]:
                run = self.fails(1, "begins at an address that is not a multiple of", *command, "--model", model)
                self.assertIn(f"{file}: safetensors: tensor '", run.err)

    def end_while_it_writes(self, base, out, number):
        """Sends the signal once the folder is claimed; a run that had ended before is started again."""
        for _ in range(50):
            run = subprocess.Popen([BINARY, *map(str, base), str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            while run.poll() is None and not (out / "config.json.part").exists():
                time.sleep(0.001)
            run.send_signal(number)
            run.send_signal(number)  # timeout(1) sends two
            _, told = run.communicate(timeout=60)
            if run.returncode != 0:
                self.assertEqual(run.returncode, -number, told)
                return told
            shutil.rmtree(out)
        self.fail("it always ended before the signal")

    def test_an_interrupted_run_leaves_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "out"
            base = ["quantize", "--model", HY3, "--scheme", "block128", "--out"]
            for number in [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]:
                told = self.end_while_it_writes(base, out, number)
                self.assertIn(f"vivace: {out}: quantize was interrupted; what it had written is removed\n", told)
                self.assertFalse(out.exists())
            self.end_while_it_writes(base, out, signal.SIGKILL)
            self.fails(1, "has the files of a quantize that was killed; remove the folder or take another", *base, out)
            shutil.rmtree(out)
            self.ok(*base, out)

    def test_refusals(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "out"
            base = ["quantize", "--model", QWEN, "--out", out]
            self.fails(2, "--calibration or --calibration-ids is needed", *base, "--scheme", "per-tensor")
            for flag, value in [("--margin", 2), ("--max-windows", 1)]:
                self.fails(2, f"{flag} needs --calibration", *base, "--scheme", "block128", flag, value)
            self.fails(2, "--calibration-ids", *base, "--scheme", "per-tensor", "--calibration", SAMPLE, "--calibration-ids",
                       SAMPLE)
            for text, count in [("x", "2 tokens"), ("one two three", "tokens")]:
                short = pathlib.Path(folder) / "short"
                short.write_text(text)
                run = self.fails(1, "needs at least 32", *base, "--scheme", "per-tensor", "--calibration", short)
                self.assertIn(f"--calibration {short} has ", run.err)
                self.assertIn(count, run.err)
            self.fails(1, "--calibration-ids takes token ids", "quantize", "--model", HY3, "--out", out, "--scheme", "per-tensor",
                       "--calibration", SAMPLE)
            self.fails(1, "/nowhere/text", *base, "--scheme", "per-tensor", "--calibration", "/nowhere/text")
            self.fails(2, "needs per-tensor or block128", *base, "--scheme", "int4")
            self.fails(2, "needs a number of at least 1", *base, "--scheme", "block128", "--margin", "0.5")
            self.fails(2, "needs f32 or bf16", *base, "--scheme", "block128", "--scale-dtype", "f16")
            self.fails(2, "--out is required", "quantize", "--model", QWEN, "--scheme", "block128")
            self.fails(1, "not empty", "quantize", "--model", QWEN, "--out", QWEN, "--scheme", "block128")
            if SMOLLM2.exists():
                self.fails(1, "GGUF", "quantize", "--model", SMOLLM2, "--out", out, "--scheme", "block128")
            self.assertFalse(out.exists())


if __name__ == "__main__":
    main()
