"""bench serve and bench step: JSON, report, both loops. bench ops: the list of cases."""

import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile

from vivace import BINARY, Case, HY3, QWEN, ROOT, SANITIZED, main


class BenchServe(Case):
    def bench(self, *args):
        return self.ok("bench", "serve", *args, "--json", "-").json

    def test_closed_loop_json(self):
        got = self.bench("--model", HY3, "--workload", "mixed", "--requests", 12, "--concurrency", 4, "--seed", 2,
                         "--max-model-len", 512)
        self.assertEqual(got["requests"], 12)
        self.assertEqual(got["failures"], 0)
        for key in ["duration_s", "throughput_tok_s", "peak_memory_bytes"]:
            self.assertGreater(got[key], 0, key)
        for key in ["ttft_ms", "tpot_ms", "itl_ms"]:
            self.assertLessEqual(got[key]["median"], got[key]["p90"], key)
            self.assertLessEqual(got[key]["p90"], got[key]["p99"], key)
        ops = {row["op"] for row in got["rows"]}
        self.assertLessEqual({"rms_norm", "linear", "attention_decode", "fused_moe", "sampler"}, ops)
        for row in got["rows"]:
            self.assertGreater(row["calls"], 0)
            self.assertTrue(row["row"])
            for refusal in row["refused"]:
                self.assertTrue(refusal["row"] and refusal["reason"], row)
        self.assertEqual(got["experts"], 12)
        self.assertTrue(4 <= got["engine"]["touched_experts"] <= 12, got["engine"])  # each token has 4
        self.assertEqual(sum(r["completion_tokens"] for r in got["per_request"]), got["output_tokens"])
        self.assertLessEqual(max(r["prompt_tokens"] + r["completion_tokens"] for r in got["per_request"]), 512)
        again = self.bench("--model", HY3, "--requests", 12, "--concurrency", 2, "--seed", 2, "--max-model-len", 512)
        lengths = [[(r["prompt_tokens"], r["completion_tokens"]) for r in run["per_request"]] for run in (got, again)]
        self.assertEqual(lengths[0], lengths[1], "the seed decides the lengths")

    def test_uniform_open_loop(self):
        got = self.bench("--model", HY3, "--workload", "uniform", "--requests", 4, "--rate", 50)
        self.assertEqual(got["prompt_tokens"], 4 * 128)
        self.assertEqual(got["output_tokens"], 4 * 64)
        self.assertEqual(got["rate"], 50)
        self.assertEqual(got["cached_tokens"], 0, "what runs before the timed requests must not help them")
        self.assertIsNone(got["concurrency"])

    def test_report_and_text(self):
        with tempfile.TemporaryDirectory() as folder:
            report, results = pathlib.Path(folder, "r.html"), pathlib.Path(folder, "r.json")
            run = self.ok("bench", "serve", "--model", QWEN, "--requests", 6, "--concurrency", 3, "--max-model-len", 256,
                          "--report", report, "--json", results, "--watch")
            self.assertIn("TPOT", run.text)
            self.assertRegex(run.text, r"experts +[0-9.]+ of 12, touched")
            self.assertIn("rms_norm", run.text)
            self.assertIn("> ", run.err, "--watch shows text on standard error")
            self.assertEqual(json.loads(results.read_text())["requests"], 6)
            html = report.read_text()
        self.assertGreaterEqual(html.count("<svg"), 7)
        self.assertEqual(html.count("<svg"), html.count("</svg>"))
        self.assertNotIn("<script", html)
        self.assertIsNone(re.search(r"(src|href)=|url\(|@import|https?:", html), "the page stands alone")
        self.assertIn("prefers-color-scheme:dark", html)
        self.assertNotIn("nan", re.sub(r"<title>.*?</title>", "", html).lower().replace("financ", ""))

    def test_memory_is_the_file_the_keys_and_little_else(self):
        model = ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
        if not model.exists() or SANITIZED:
            self.skipTest(f"needs {model} (./run demo fetches it) and a plain build")
        got = self.bench("--model", model, "--requests", 3, "--concurrency", 3, "--max-model-len", 512)
        per_token = 30 * 2 * 3 * 64 * 4  # layers, keys and values, KV heads, head size, f32
        keys = (got["prompt_tokens"] + got["output_tokens"]) * per_token
        self.assertGreaterEqual(got["mapped_bytes"], 98_000_000)
        self.assertLessEqual(got["peak_memory_bytes"], got["mapped_bytes"] + keys + 200_000_000)

    def test_outputs_are_checked_before_the_run(self):
        for flag in ("--json", "--report"):
            run = self.fails(1, flag, "bench", "serve", "--model", HY3, flag, "/nowhere/out")
            self.assertNotIn("ready after", run.err)
        bench = ("bench", "serve", "--model", HY3)
        self.fails(2, "--report is '-'", *bench, "--report", "-")
        self.fails(2, "--report is '', needs a FILE", *bench, "--report", "")
        self.fails(2, "needs another file than --json", *bench, "--report", "/tmp/x", "--json", "/tmp/../tmp/x")

    def test_a_run_that_does_not_end_leaves_no_files(self):
        with tempfile.TemporaryDirectory() as folder:
            outputs = ["--report", f"{folder}/r.html", "--json", f"{folder}/r.json"]
            self.fails(2, "--max-model-len is 5000", "bench", "serve", "--model", HY3, "--max-model-len", 5000, *outputs)
            self.assertEqual(os.listdir(folder), [])
            command = [BINARY, "bench", "serve", "--model", str(HY3), "--requests", "100000", *outputs]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
                for line in run.stderr:
                    if "ready after" in line:
                        break
                run.send_signal(signal.SIGINT)
                _, err = run.communicate(timeout=60)
            self.assertEqual(run.returncode, -signal.SIGINT)
            self.assertIn("vivace: interrupted", err)
            self.assertEqual(os.listdir(folder), [])

    def test_what_both_loads_would_say_is_said_once(self):
        run = self.ok("bench", "serve", "--model", HY3, "--requests", 1, "--kv-dtype", "fp8")
        self.assertEqual(run.err.count("have no scales"), 1)

    def test_lengths_that_do_not_fit_are_said(self):
        bench = ("bench", "serve", "--model", HY3, "--requests", 4, "--seed", 2, "--max-model-len")
        self.assertIn("4 of 4 requests cut short: drawn longer than the 10 tokens of --max-model-len",
                      self.ok(*bench, 10).err)
        self.assertNotIn("cut short", self.ok(*bench, 4096).err)

    def test_a_preference_of_two_rows_has_one_reason_each(self):
        for command in (["serve", "--requests", 2], ["step", "--context", 16, "--steps", 5]):
            rows = self.bench_rows(*command)
            for row in rows:
                names = [refusal["row"] for refusal in row["refused"]]
                self.assertEqual(len(names), len(set(names)), row)
                for refusal in row["refused"]:
                    named = row["op"] == "linear" and refusal["row"].startswith("cpu.")
                    self.assertFalse(named and "--prefer" in refusal["reason"], row)
            self.assertIn("cpu.f32", {row["row"] for row in rows if row["op"] == "linear"})

    def bench_rows(self, command, *args):
        return self.ok("bench", command, "--model", QWEN, "--prefer", "linear=cpu", *args, "--json", "-").json["rows"]

    def test_failures_are_counted(self):
        self.fails(2, "--max-model-len is 100, needs at least 192: ", "bench", "serve", "--model", HY3, "--workload",
                   "uniform", "--max-model-len", 100)
        self.assertEqual(self.fails(1, "/nowhere", "bench", "serve", "--model", "/nowhere").out, b"")


class BenchStep(Case):
    def test_json(self):
        got = self.ok("bench", "step", "--model", HY3, "--batch", "1,3", "--context", 100, "--steps", 8, "--json", "-").json
        self.assertEqual([point["batch"] for point in got["points"]], [1, 3])
        self.assertEqual((got["context"], got["steps"], got["benchmark"]), (100, 8, "step"))
        self.assertEqual(got["settings"]["kv-dtype"], "f32", "what runs where nothing is asked for")
        self.assertGreater(got["read_bytes_per_s"], 1e8)
        for point in got["points"]:
            self.assertTrue(0 < point["p10_us"] <= point["us"] <= point["p90_us"], point)
            total = point["dense_bytes"] + point["expert_bytes"] + point["kv_bytes"]
            self.assertAlmostEqual(point["floor_us"], 1e6 * total / got["read_bytes_per_s"], delta=1e-6 * point["floor_us"])
            self.assertTrue(got["top_k"] <= point["touched_experts"] <= got["top_k"] * point["batch"], point)
            # 3 layers of keys and values of 128 numbers in f32.
            self.assertEqual(point["kv_bytes"], point["batch"] * 100 * 3 * 2 * 128 * 4)
        one, three = got["points"]
        self.assertEqual(one["dense_bytes"], three["dense_bytes"])
        self.assertGreater(three["touched_experts"], one["touched_experts"])
        steps = {row["op"]: row["calls"] for row in got["rows"]}
        self.assertEqual(steps["sampler"], 2 * (1 + 3 + 3 + 8), "one call per step, untimed ones included")

    def test_operators(self):
        bench = ("bench", "step", "--model", HY3, "--batch", "1,3", "--context", 100, "--steps", 8)
        got = self.ok(*bench, "--operators", "--json", "-").json
        # 3 layers, the first dense: QKV and output, gate-up and down of the dense one, the head.
        calls = {"linear": 3 * 2 + 2 + 1, "rms_norm": 3 * 2 + 1, "attention_prologue": 3, "attention_decode": 3,
                 "silu_mul": 1, "router_gemm": 2, "route_top_k": 2, "fused_moe": 2, "embedding": 1,
                 "decode_schedule": 1, "sampler": 1}
        for point in got["points"]:
            operators = point["operators"]
            seen = dict.fromkeys(calls, 0)
            for line in operators:
                seen[line["op"]] += line["calls"]
                self.assertTrue(line["us"] > 0 and line["bytes"] > 0, line)
                self.assertAlmostEqual(line["us_per_call"] * line["calls"], line["us"])
                self.assertAlmostEqual(line["floor_us"], 1e6 * line["bytes"] / got["read_bytes_per_s"])
                self.assertAlmostEqual(line["share_of_floor"], line["floor_us"] / line["us"])
            self.assertEqual(seen, calls)
            self.assertEqual({(line["op"], line["row"]) for line in operators},
                             {(row["op"], row["row"]) for row in got["rows"]})
            self.assertEqual([line["us"] for line in operators], sorted((line["us"] for line in operators), reverse=True))
            self.assertAlmostEqual(sum(line["share"] for line in operators), 1)
            self.assertAlmostEqual(sum(line["us"] for line in operators), point["operators_us"])
            # Other steps than those of p10 and p90, perhaps on a machine with other work: by wide margins.
            self.assertTrue(0.05 * point["p10_us"] < point["operators_us"] < 20 * point["p90_us"], point)
            # What the step counts, and activations.
            total = point["dense_bytes"] + point["expert_bytes"] + point["kv_bytes"]
            self.assertTrue(0.9 * total < sum(line["bytes"] for line in operators) < 1.3 * total, point)
            [attention] = [line for line in operators if line["op"] == "attention_decode"]
            self.assertTrue(point["kv_bytes"] < attention["bytes"] < 1.1 * point["kv_bytes"], attention)
            matrices = [line["flops"] // line["calls"] for line in operators if line["op"] == "linear"]
            self.assertGreaterEqual(len(set(matrices)), 4, "a line for each shape")
            self.assertEqual(len(set(matrices)), len(matrices))

    def test_operators_are_shown_when_asked_for(self):
        bench = ("bench", "step", "--model", QWEN, "--context", 33, "--steps", 5)
        self.assertNotIn("operators", self.ok(*bench, "--json", "-").json["points"][0])
        self.assertNotIn("us/call", self.ok(*bench).text)
        text = self.ok(*bench, "--operators").text
        for pattern in [r"(?m)^attention_decode +cpu\.\w+ +\d+ ", r"(?m)^sum +[0-9.]+$",
                        r"(?m)^the step, its calls not timed +[0-9.]+$", r"(?m)^difference: see below +-?[0-9.]+$"]:
            self.assertRegex(text, pattern)
        self.assertIn("the rest passes between calls", text)
        self.assertRegex(text, r"(?m)^operator +row +calls +MB/call +MFLOP/call +us/call ")
        flops = re.findall(r"(?m)^linear +cpu\.\w+ +\d+ +[0-9.]+ +([0-9.]+) ", text)
        self.assertGreater(len(flops), 1)
        self.assertEqual(len(flops), len(set(flops)), "each shape has its operations")

    def test_text(self):
        run = self.ok("bench", "step", "--model", QWEN, "--batch", 2, "--context", 33, "--steps", 5)
        for word in ["floor us", "experts", "memory read at", "rms_norm", "not counted"]:
            self.assertIn(word, run.text)

    def test_refuses(self):
        self.fails(2, "--batch is 'x', needs an integer", "bench", "step", "--model", HY3, "--batch", "1,x")
        self.fails(2, "--steps is '4', needs an integer from 5", "bench", "step", "--model", HY3, "--steps", 4)
        self.fails(2, "--context is 9999999, needs at most 4096", "bench", "step", "--model", HY3, "--context", 9999999)

    def test_pages_that_do_not_fit_into_memory(self):
        pages = 4096 * 4096 // 16
        bytes_per_page = 16 * 3 * 2 * 128 * 4  # layers, keys and values, numbers of a token
        if self.ok("doctor", "--json").json["memory_bytes"] > pages * bytes_per_page:
            self.skipTest("this machine has room for them")
        run = self.fails(1, "--batch 4096 with --context 4096: ", "bench", "step", "--model", HY3, "--batch", "1,4096",
                         "--context", 4096)
        self.assertIn(f"{pages} KV pages of {bytes_per_page} bytes are asked for, ", run.err)


class BenchOps(Case):
    def cases(self, *args):
        """The listed cases as (suite, name, fields)."""
        listed = []
        for line in self.ok("bench", "ops", *args, "--list").text.splitlines():
            suite, case = line.split(maxsplit=1)
            name, *fields = case.split(",")
            listed.append((suite, name, dict(field.split("=", 1) for field in fields)))
        return listed

    def test_every_operator_is_timed(self):
        cases = self.cases()
        timed = {suite for suite, _, _ in cases} | {fields.get("op") for _, _, fields in cases}
        self.assertLessEqual({op["op"] for op in self.ok("ops", "--json").json}, timed)
        self.assertEqual(len(cases), len({str(case) for case in cases}), "no case twice")
        text = self.ok("bench", "ops", "--help").text
        for suite in {suite for suite, _, _ in cases}:
            self.assertRegex(text, rf"(?m)^ +{suite} ", suite)

    def test_libraries_are_explained_and_add_no_cases(self):
        text = self.ok("bench", "ops", "--help").text
        for row in ["cublas_fp32_with_cast", "cublas_fp32", "cublas_tf32", "cublas_bf16", "cublaslt_loop",
                    "--no-baselines"]:
            self.assertIn(row, text)
        self.assertEqual(self.cases("--suite", "router_gemm"), self.cases("--suite", "router_gemm", "--no-baselines"))

    def test_layer_is_quick(self):
        cases = self.cases("--suite", "layer")
        self.assertLessEqual(len(cases), 45)
        for suite, _, fields in cases:
            self.assertEqual(suite, "layer")
            self.assertGreater(int(fields["tokens"]), 0, fields)

    def test_a_new_case_starts_from_the_nearest(self):
        layer = ("--suite", "layer", "--case")
        [(_, _, fields)] = self.cases(*layer, "op=linear,tokens=3,quant=blockwise")
        self.assertEqual(fields, {"op": "linear", "tokens": "3", "n": "1280", "k": "4096", "quant": "blockwise",
                                  "y": "bf16"})
        [(_, _, fields)] = self.cases(*layer, "hy3,op=embedding,tokens=5")
        self.assertEqual(fields, {"op": "embedding", "tokens": "5", "hidden": "4096", "vocab": "15104"})
        [(_, name, fields)] = self.cases("--suite", "attention_decode", "--case", "5x3000,heads_q=40,kv=fp8")
        self.assertEqual((name, fields["heads_q"], fields["kv"]), ("5x3000", "40", "fp8"))
        [(_, _, fields)] = self.cases("--suite", "fused_moe", "--case", "hy3,tokens=64,tp=4,quant=bf16")
        self.assertEqual((fields["intermediate"], fields["experts"]), ("384", "192"), "the shares follow the ranks")
        [(_, _, fields)] = self.cases("--suite", "fused_moe", "--case", "hy3,tokens=64,ep=4,tp=1,quant=bf16")
        self.assertEqual((fields["intermediate"], fields["experts"]), ("1536", "48"))
        [(_, _, fields)] = self.cases("--suite", "fused_moe", "--case", "tp=4,intermediate=96")
        self.assertEqual((fields["tp"], fields["intermediate"]), ("4", "96"), "what is named is taken")

    def test_routings_of_experts(self):
        """Listed for hy3 apart from the cases of the targets, and to be had for any case."""
        moe = ("--suite", "fused_moe")
        routings = [fields["routing"] for _, _, fields in self.cases(*moe)]
        self.assertEqual({r: routings.count(r) for r in routings}, {"uniform": 216, "zipf": 6, "one": 6, "half": 6})
        for routing in ("zipf", "one", "half"):
            cases = self.cases(*moe, "--case", f"routing={routing}")
            self.assertEqual([(name, f["quant"], f["tp"], f["ep"], f["tokens"]) for _, name, f in cases],
                             [("hy3", "per_tensor", *ranks, tokens) for ranks in [("8", "1"), ("1", "8")]
                              for tokens in ("16", "256", "4096")])
        [(_, name, fields)] = self.cases(*moe, "--case", "deepseek-v3,ep=8,tokens=64,quant=bf16,routing=one_local")
        self.assertEqual((name, fields["experts"], fields["routing"]), ("deepseek-v3", "32", "one_local"))
        text = self.ok("bench", "ops", "--help").text
        for word in ("uniform", "zipf", "half", "one,", "one_local"):
            self.assertIn(word, text)

    def test_cases_that_do_not_fit(self):
        """Said at the command line, without a GPU, with the field, its value and what fits."""
        huge = "99999999999999999999"
        for suite, case, says in [
                ("layer", "op=linear,hidden=7", "no field hidden in layer, needs op, tokens, n, k, quant, y"),
                ("layer", "op=conv", "op is 'conv', needs rms_norm, silu_mul"),
                ("layer", "op=linear,tokens=0", "tokens is 0, needs 1 to 131072"),
                ("layer", "op=linear,tokens=x", "tokens is 'x', needs a whole number"),
                ("layer", "op=linear,quant=int4", "quant is 'int4', needs bf16, per_tensor or blockwise"),
                ("layer", "op=linear,tokens=131072,n=1048576,k=131072", "GB, needs at most 128"),
                ("layer", "op=route_top_k,experts=4,top_k=5", "top_k is 5, needs 1 to 4"),
                ("layer", "op=attention_prologue,heads_q=1,heads_kv=2", "heads_q is 1, needs a multiple of heads_kv = 2"),
                ("layer", "op=attention_prologue,head_dim=100", "head_dim is 100, needs a multiple of 8"),
                ("layer", "op=attention_prologue,head_dim=512", "head_dim is 512, needs 8 to 256"),
                ("layer", "op=rms_norm,hidden=50000", "hidden is 50000, needs 1 to 40960"),
                ("layer", "op=silu_mul,intermediate=50000,y=fp8_block", "intermediate is 50000, needs 1 to 40960"),
                ("attention_decode", "64x4K,page=3", "page is 3, needs a power of two from 1 to 256"),
                ("attention_decode", "64x4K,heads_q=40,heads_kv=7", "heads_q is 40, needs a multiple of heads_kv = 7"),
                ("attention_decode", "64x4K,head_dim=100", "head_dim is 100, needs a multiple of 8"),
                ("attention_decode", "64x4K,kv=8", "kv is 8, needs bf16, fp8"),
                ("attention_decode", "64x4K,kv=f16", "kv is 'f16', needs bf16 or fp8"),
                ("attention_decode", "64x0", "case is '64x0', needs 1 to 4096 requests of 1 to"),
                ("attention_decode", "4096x16384K", "tokens in all, needs at most 2147483647"),
                ("attention_decode", "64x64K,heads_kv=1024,heads_q=1024", "GB, needs at most 128"),
                ("attention_decode", "random:x", "case is 'random:x', needs a seed from 0 to 2^64 - 1, such as random:7"),
                ("attention_prefill", "long", "case is 'long', needs REQUESTSxTOKENS"),
                ("fused_moe", "hy3,tokens=-64", "tokens is -64, needs 1 to 1048576"),
                ("fused_moe", "hy3,tp=5", "tp is 5, needs a divisor of 1536"),
                ("fused_moe", "hy3,top_k=200", "top_k is 200, needs 1 to 128"),
                ("fused_moe", "hy3,routing=skewed", "routing is 'skewed', needs uniform, zipf, half, one or one_local"),
                ("fused_moe", "hy3,ep=8,top_k=13,routing=half", "top_k is 13, needs 1 to 12"),
                ("fused_moe", "hy4", "no case called 'hy4', needs one of qwen3-235b, hy3, deepseek-v3"),
                ("fused_moe", "hidden=65536,experts=4096", "GB, needs at most 128"),
                ("grouped_gemm", "groups=4096,rows=1048576", "rows is 1048576, needs 1 to 524287"),
                ("router_gemm", f"hy3,m={huge}", f"m is {huge}, more than 64 bits hold"),
                ("router_gemm", "hy3,m=1048576,n=65536", "GB, needs at most 128"),
                ("sampler", "full,batch=65536,vocab=4194304", "GB, needs at most 128"),
                ("sampler", "full,batch=1,batch=2", "batch is given twice"),
                ("sampler", "full,batch", "'batch' is not FIELD=VALUE"),
                ("sampler", "full,", "'' is not FIELD=VALUE"),
                ("sampler", "", "'' is not NAME or FIELD=VALUE"),
                ("roof", "read,size=1", "no field size in roof, whose cases have none")]:
            with self.subTest(suite=suite, case=case):
                run = self.fails(2, says, "bench", "ops", "--suite", suite, "--case", case, "--list")
                self.assertIn(f"--case '{case}': ", run.err)
        self.fails(2, "--suite is 'moe', needs one of roof, attention_decode", "bench", "ops", "--suite", "moe", "--list")
        run = self.fails(2, "no case called 'hy4'", "bench", "ops", "--case", "hy4", "--list")
        self.assertIn("needs one of roof: read, copy, bf16, fp8; attention_decode: 64x0.5K, ", run.err)
        self.assertIn("; layer: hy3\n", run.err)
        run = self.fails(2, "there is no field a, needs roof: none; ", "bench", "ops", "--case", "a=1", "--list")
        self.assertIn("needs roof: none; attention_decode: kv, heads_q, heads_kv, head_dim, page, queries, window, early; attention_prefill: kv, ",
                      run.err)
        self.assertIn("; sampler: batch, vocab; layer: op, tokens, ", run.err)

    def test_a_case_of_several_suites(self):
        self.fails(2, "--case 'tokens=7': cases of fused_moe, layer can be changed to it, needs --suite", "bench", "ops",
                   "--case", "tokens=7", "--list")
        suites = {suite for suite, _, _ in self.cases("--case", "tokens=64")}
        self.assertEqual(suites, {"fused_moe", "layer"}, "listed cases are taken from all")

    def test_a_name_is_true(self):
        for suite, case, name in [("grouped_gemm", "8x16,groups=9", "own"), ("grouped_gemm", "8x16,n=512", "8x16"),
                                  ("router_gemm", "m=5,n=7,k=3,mode=exact", "own"), ("router_gemm", "hy3,m=5", "hy3"),
                                  ("fused_moe", "hy3,tp=4,tokens=3", "hy3"), ("fused_moe", "hidden=512,tokens=3", "own"),
                                  ("attention_decode", "random:7,kv=fp8", "random:7"), ("layer", "op=linear,n=7", "own"), ("layer", "op=linear,tokens=7", "hy3"),
                                  ("sampler", "full,vocab=7", "full")]:
            with self.subTest(suite=suite, case=case):
                self.assertEqual([got for _, got, _ in self.cases("--suite", suite, "--case", case)], [name])

    def test_other_values(self):
        self.fails(2, "--device is 'cpu', needs cuda", "bench", "ops", "--device", "cpu")
        self.fails(2, "--device is 'cuda:-1', needs cuda or cuda:N\n", "bench", "ops", "--device", "cuda:-1")
        for flag in ("--json", "--targets"):
            run = self.fails(2, " excludes ", "bench", "ops", "--list", flag, "x")
            self.assertIn("--list", run.err)
            self.assertIn(flag, run.err)
        self.fails(2, "--prefer", "bench", "ops", "--prefer", "linear")
        self.fails(2, "--json is '', needs a FILE", "bench", "ops", "--json", "")
        self.fails(1, "--targets: /nowhere", "bench", "ops", "--targets", "/nowhere")


if __name__ == "__main__":
    main()
