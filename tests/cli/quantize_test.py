"""quantize: an FP8 folder that other commands take, its table and its refusals. Accuracy is a test of the model."""

import json
import pathlib
import tempfile

from vivace import Case, HY3, QWEN, SMOLLM2, main

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
            for word in ["attention", "dense mlp", "experts", "shared experts", "kept", "rms error"]:
                self.assertIn(word, run.text)
            told = self.ok("doctor", "--model", folder).text
            self.assertIn("fp8, blocks of 128", told)
            args = ["generate", "--model", folder, "--prompt-ids", "1,2,3", "--max-tokens", 4]
            self.ok(*args)
            fp8 = self.ok(*args, "--kv-dtype", "fp8")
            self.assertIn("no scales for fp8 keys and values", fp8.err)
            self.assertEqual(fp8.err.count("no scales"), 1)

    def test_refusals(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "out"
            base = ["quantize", "--model", QWEN, "--out", out]
            self.fails(1, "--calibration is needed", *base, "--scheme", "per-tensor")
            self.fails(1, "no tokenizer", "quantize", "--model", HY3, "--out", out, "--scheme", "per-tensor",
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
