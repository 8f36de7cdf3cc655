"""ops, ops explain, doctor, and the generated page of operators."""

import pathlib

from vivace import Case, HY3, QWEN, ROOT, main


class Ops(Case):
    def test_generated_page_is_current(self):
        page = (ROOT / "docs" / "generated" / "ops.md").read_text()
        if not self.ok("doctor", "--json").json["cuda"]["compiled"]:  # the page is made by a build with CUDA
            page = "".join(line for line in page.splitlines(keepends=True) if "` | cuda | " not in line)
        self.assertEqual(page, self.ok("ops", "--markdown").text,
                         "stale: build/bin/vivace ops --markdown > docs/generated/ops.md")

    def test_json(self):
        ops = self.ok("ops", "--json").json
        names = [op["op"] for op in ops]
        for name in ["rms_norm", "linear", "attention_prologue", "attention_prefill", "attention_decode",
                     "decode_schedule", "router_gemm", "route_top_k", "fused_moe", "grouped_gemm", "silu_mul",
                     "quantize_fp8", "sampler"]:
            self.assertIn(name, names)
            self.assertTrue((ROOT / "include" / "vivace" / f"{name}.h").exists(), name)
        for op in ops:
            self.assertEqual(op["rows"][-1]["row"], "reference", op["op"])
            self.assertEqual(op["rows"][-1]["needs"], [], "the reference refuses nothing on its device")
        self.assertIn("rms_norm", self.ok("ops").text)

    def test_every_operator_has_its_folder(self):
        for op in self.ok("ops", "--json").json:
            self.assertTrue((ROOT / "src" / "ops" / op["op"] / "table.h").exists(), op["op"])


class Explain(Case):
    def test_json(self):
        for model, layers in [(QWEN, 4), (HY3, 3)]:
            uses = self.ok("ops", "explain", "--model", model, "--batch", 3, "--json").json
            for use in uses:
                self.assertEqual(set(use), {"layer", "op", "row", "phase", "batch", "note", "refused"})
                self.assertTrue(use["row"], use)
                for refusal in use["refused"]:
                    self.assertEqual(set(refusal), {"row", "reason"})
            self.assertEqual({use["layer"] for use in uses if use["layer"] >= 0}, set(range(layers)))
            for phase, batch, attention in [("decode", 3, "attention_decode"), ("prefill", 512, "attention_prefill")]:
                step = [use for use in uses if use["phase"] == phase]
                self.assertEqual({use["batch"] for use in step}, {batch})
                self.assertEqual({use["op"] for use in step if use["op"].startswith("attention_")},
                                 {"attention_prologue", attention})
                self.assertIn("fused_moe", {use["op"] for use in step})
                self.assertEqual(step[-1]["op"], "sampler")

    def test_a_call_whose_place_does_not_say_what_for_has_a_note(self):
        noted = [use for use in self.ok("ops", "explain", "--model", HY3, "--json").json if use["note"]]
        self.assertEqual({(use["layer"], use["op"], use["phase"]) for use in noted}, {(2, "embedding", "prefill")})
        self.assertRegex(self.ok("ops", "explain", "--model", HY3).text,
                         r"\n  embedding +cpu\.rows +picks the rows that go on: those whose logits are asked for")

    def test_reasons_are_in_words(self):
        self.assertIn("cpu.q8: needs parts_in_block_formats >= 1, got 0", self.ok("ops", "explain", "--model", HY3).text)

    def test_the_chunk_is_as_long_as_budget_and_context_allow(self):
        for budget, context, tokens in [(64, 128, 64), (256, 100, 100)]:
            uses = self.ok("ops", "explain", "--model", QWEN, "--token-budget", budget, "--max-model-len", context,
                           "--json").json
            self.assertEqual({use["batch"] for use in uses if use["phase"] == "prefill"}, {tokens})

    def test_table_folds_layers(self):
        text = self.ok("ops", "explain", "--model", QWEN).text
        self.assertIn("one decode step of 1 request\n", text)
        self.assertIn("one prompt chunk of 512 tokens\n", text)
        self.assertEqual(text.count("layers 0-3"), 1, "the decode step: all layers agree")
        self.assertEqual(text.count("layers 0-2"), 1, "the chunk: after the last layer's attention one row goes on")

    def test_a_gpu_that_is_not_here(self):
        cuda = self.ok("doctor", "--json").json["cuda"]
        if not cuda["compiled"] or cuda["devices"]:
            self.skipTest("needs a build with CUDA on a machine without a GPU")
        for model, layers in [(QWEN, 4), (HY3, 3), ("synthetic:hy3@tp8", 80), ("synthetic:qwen3-30b-a3b,layers=2", 2)]:
            run = self.ok("ops", "explain", "--model", model, "--device", "cuda", "--json")
            self.assertIn("rows are those of an H200 (compute capability 9.0)", run.err)
            self.assertEqual({use["layer"] for use in run.json}, set(range(-1, layers)))
            for use in run.json:
                self.assertRegex(use["row"] or "none", r"^(cuda|sm90)\.", use)

    def test_prefer(self):
        uses = self.ok("ops", "explain", "--model", QWEN, "--prefer", "rms_norm=reference", "--json").json
        self.assertEqual({use["row"] for use in uses if use["op"] == "rms_norm"}, {"reference"})


class Doctor(Case):
    def test_json(self):
        got = self.ok("doctor", "--model", QWEN, "--json").json
        self.assertGreaterEqual(got["cores"], 1)
        self.assertGreater(got["memory_bytes"], 0)
        self.assertGreater(got["cpu_rows"], 0)
        self.assertIn("qwen3_moe", got["model"]["summary"])

    def test_vectors_that_are_not_used_are_named(self):
        wide = " avx512f " in pathlib.Path("/proc/cpuinfo").read_text()
        got, text = self.ok("doctor", "--json").json, self.ok("doctor").text
        more = ", the widest in this build; the processor's AVX-512 is not used" if wide and got["isa"] == "avx2" else ""
        self.assertIn(f"\nvectors     {got['isa']}{more}\n", text)

    def test_text_says_whether_there_are_cuda_rows(self):
        rows = self.ok("doctor", "--json").json["cuda_rows"]
        self.assertIn("none for cuda in this build" if rows == 0 else f"{rows} for cuda", self.ok("doctor").text)

    def test_says_what_of_cuda_is_there(self):
        got = self.ok("doctor", "--json").json
        cuda, text = got["cuda"], self.ok("doctor").text
        self.assertEqual(cuda["compiled"], got["cuda_rows"] > 0)
        self.assertEqual(cuda["portable_rows"] + cuda["sm90_rows"], got["cuda_rows"])
        if cuda["compiled"]:
            self.assertEqual(cuda["problem"], "")
            self.assertRegex(cuda["runtime"], r"^[0-9]+\.[0-9]+$")
            self.assertRegex(cuda["code"], r"\bsm_[0-9]+")
            self.assertIn(f"runtime {cuda['runtime']} in this build, kernels for {cuda['code']}", text)
        else:
            self.assertIn(f"not in this build: {cuda['problem']}\n", text)
            self.assertRegex(cuda["problem"], "VIVACE_CUDA=OFF|sanitizers|nvcc was not there")
            self.assertIn(cuda["problem"], self.fails(1, "no CUDA support", "generate", "--model", HY3, "--prompt-ids", "1",
                                                      "--device", "cuda").err)
        for gpu in cuda["devices"]:
            self.assertIn(f"{gpu['name']}, compute capability {gpu['compute_capability']}", text)
        if cuda["compiled"] and not cuda["devices"]:
            self.assertRegex(text, "advice +(no NVIDIA driver|the NVIDIA driver is here)")
        for library in ("cublaslt", "nccl"):
            self.assertIn(cuda[library]["found"] or "not found", text)


if __name__ == "__main__":
    main()
