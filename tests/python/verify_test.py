"""vivace.verify and vivace.explain: with an engine of a few lines in place of vLLM and SGLang."""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

import package

package.need("vivace")
import vivace  # noqa: E402
from vivace import verify  # noqa: E402

SERVER = textwrap.dedent("""
    import json, os, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer
    if "--break" in sys.argv:
        sys.exit("no such model")
    if "--slow-end" in sys.argv:
        import signal, time
        def end(*unused):
            time.sleep(0.3)
            open("ended", "w").close()
            os._exit(0)
        if os.fork() == 0:  # a worker, which ends in order after its parent
            signal.signal(signal.SIGTERM, end)
            signal.pause()
    plugin = "--plugin" in sys.argv
    assert plugin != (os.environ.get("NO_PLUGIN") == "1")
    class Handler(BaseHTTPRequestHandler):
        def answer(self, body):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def do_GET(self):
            self.answer(b"")
        def do_POST(self):
            if "--die" in sys.argv:
                print("out of memory", flush=True)
                os._exit(9)
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["temperature"] == 0 and asked["ignore_eos"] and asked["model"] == "tiny"
            text = "".join(chr(97 + i % 26) for i in asked["prompt"][:asked["max_tokens"]])
            if plugin and asked["prompt"][0] % 2 == 0:
                text = text[:2] + "?" + text[3:]
            self.answer(json.dumps({"choices": [{"text": text}]}).encode())
        def log_message(self, *args):
            pass
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
""")
CLIENT = textwrap.dedent("""
    import json, os, sys
    fast = os.environ.get("NO_PLUGIN") != "1"
    open(sys.argv[1], "w").write(json.dumps({"mean_tpot_ms": 9, "median_tpot_ms": 6 if fast else 8, "p99_tpot_ms": 20}) + "\\n")
""")


class Verify(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "server.py").write_text(SERVER)
        (self.folder / "client.py").write_text(CLIENT)
        engine = verify.Engine(serve=(sys.executable, str(self.folder / "server.py"), "{port}"), plugin=("--plugin",),
                               without={"NO_PLUGIN": "1"}, client=(sys.executable, str(self.folder / "client.py"), "{path}"),
                               tpot_ms=verify._named)
        verify.ENGINES["vllm"], before = engine, verify.ENGINES["vllm"]
        self.addCleanup(verify.ENGINES.__setitem__, "vllm", before)

    def run_it(self, *args):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = verify.main(["--engine", "vllm", "--model", "tiny", "--out", str(self.folder / "verify.json"), "--prompts", "8", "--input-len",
                                "12", "--output-len", "10", "--patience", "20", *args])
        return code, out.getvalue(), err.getvalue()

    def test_a_report(self):
        code, out, err = self.run_it()
        self.assertEqual((code, err), (0, ""))
        report = json.loads((self.folder / "verify.json").read_text())
        self.assertEqual(report["tpot_ms"]["default"]["median"], 8)
        self.assertEqual(report["tpot_ratio"], 0.75)
        self.assertEqual(report["agreement"]["compared"], 8)
        self.assertLess(report["agreement"]["equal"], 8)
        self.assertIn("plugin / default  0.750", out)
        self.assertIn("greedy texts", out)

    def test_too_little_agreement_fails(self):
        self.assertEqual(self.run_it("--least-agreement", "0.99")[0], 1)

    def test_a_server_that_ends_says_why(self):
        code, _, err = self.run_it("--", "--break")
        self.assertEqual(code, 2)
        self.assertIn("no such model", err)

    def test_a_server_that_dies_under_way_says_why(self):
        code, _, err = self.run_it("--", "--die")
        self.assertEqual(code, 2)
        self.assertIn("out of memory", err)

    def test_what_is_seen_before_an_engine_runs(self):
        for said, *args in (("--port=5 after --: this program sets --port itself", "--", "--port=5"),
                            ("--plugin after --: this program sets --plugin itself", "--", "--break", "--plugin"),
                            ("--served_model_name=x after --: this program sets --served-model-name itself", "--", "--served_model_name=x"),
                            ("--decode-attention-backend=fa3 after --: this program sets --decode-attention-backend itself", "--",
                             "--decode-attention-backend=fa3"),
                            ("--vivace: ./no-such-program: there is no such program that can be run", "--vivace", "./no-such-program")):
            code, out, err = self.run_it(*args)
            self.assertEqual((code, out, err), (2, "", f"vivace.verify: {said}\n"))
        self.assertFalse(list(self.folder.glob("*.log")))

    def test_nothing_in_common_fails(self):
        before, verify.agreement = verify.agreement, lambda a, b: {"compared": 8, "equal": 0, "common_share": 0.01}
        self.addCleanup(setattr, verify, "agreement", before)
        self.assertEqual(self.run_it()[0], 1)

    def test_workers_have_time_to_end(self):
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)
        self.assertEqual(self.run_it("--", "--slow-end")[0], 0)
        self.assertTrue((self.folder / "ended").exists())

    def test_agreement(self):
        self.assertEqual(verify.agreement(["abcd", "xy"], ["abcd", "xz"]), {"compared": 2, "equal": 1, "common_share": 0.75})
        self.assertEqual(verify.agreement([], [])["common_share"], 1.0)


class CommandLine(unittest.TestCase):
    def ended(self, *args):
        given = ["--engine", "vllm", "--model", "x", *args]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                code = verify.main(given)
            except SystemExit as error:
                code = error.code
        return code, said.getvalue().splitlines()[-1]

    def test_numbers_that_do_not_fit(self):
        for flag, *values in (("--prompts", "-1", "0", "x", "9" * 100), ("--vocab", "0"), ("--input-len", "0"), ("--output-len", "1.5"), ("--requests", ""),
                              ("--concurrency", "0"), ("--seed", "-1"), ("--least-agreement", "2", "nan"), ("--patience", "nan", "-1", "soon")):
            for value in values:
                code, said = self.ended(f"{flag}={value}")
                self.assertEqual(code, 2)
                self.assertRegex(said, f"argument {flag}: '.*', needs ")

    def test_a_report_that_cannot_be_written(self):
        with tempfile.TemporaryDirectory() as folder:
            for out in (folder, "/proc/nowhere/verify.json"):
                code, said = self.ended("--out", out)
                self.assertEqual(code, 2)
                self.assertRegex(said, "^vivace.verify: --out: /")


QWEN = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


class Explain(unittest.TestCase):
    def test_every_part_is_named(self):
        answer = vivace.explain(QWEN)
        self.assertEqual({part.operator for part in answer.parts},
                         {"attention_decode", "attention_prefill", "fused_moe", "router_gemm", "route_top_k"})
        if vivace.build()["cuda"]:
            self.assertTrue(all(part.taken for part in answer.parts), str(answer))
            self.assertIn("sm90.warps", str(answer))
        else:
            self.assertIn("no rows for a GPU", str(answer))
            self.assertIn("left to the engine", str(answer))

    def test_what_is_not_taken_has_a_reason(self):
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        self.assertIn("share a block of scales", str(vivace.explain({**QWEN, "quantization_config": fp8}, tp=4)))
        self.assertIn("quantisation awq is not known", str(vivace.explain({**QWEN, "quantization_config": {"quant_method": "awq"}})))
        self.assertIn("latent attention (MLA)", str(vivace.explain({**QWEN, "kv_lora_rank": 512})))
        self.assertIn("not in SGLang: layers with a window of 4096", str(vivace.explain({**QWEN, "sliding_window": 4096})))

    def test_what_the_plugins_refuse_is_not_called_taken(self):
        fp8 = {"quant_method": "fp8"}
        for changes, operator, words in (
                ({"quantization_config": fp8}, "fused_moe", "dynamic scales are known with blocks"),
                ({"quantization_config": {**fp8, "weight_block_size": [64, 64]}}, "fused_moe", "blocks of"),
                ({"hidden_act": "gelu"}, "fused_moe", "activation gelu"), ({"mlp_bias": True}, "fused_moe", "bias"),
                ({"swiglu_limit": 7.0}, "fused_moe", "SwiGLU"), ({"scoring_func": "sqrtsoftplus"}, "route_top_k", "sqrtsoftplus"),
                ({"scoring_func": "sigmoid", "n_group": 8}, "route_top_k", "best expert")):
            parts = [part for part in vivace.explain({**QWEN, **changes}).parts if part.operator == operator]
            self.assertTrue(parts and not any(part.taken for part in parts), changes)
            self.assertIn(words, parts[0].reason)
        for changes, operator, engine in (({}, "fused_moe", "vLLM"), ({}, "router_gemm", "SGLang"), ({}, "route_top_k", "vLLM")):
            self.assertEqual({name for part in vivace.explain({**QWEN, **changes}).parts if part.operator == operator for name in part.refused},
                             {engine})
        static = {**QWEN, "quantization_config": {**fp8, "activation_scheme": "static"}}
        self.assertFalse(any(part.refused for part in vivace.explain(static).parts if part.operator == "fused_moe"))

    def test_configurations_that_are_none(self):
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        whole = {**QWEN, "quantization_config": fp8, "n_group": 1, "num_shared_expert": 1, "scoring_func": "sigmoid", "sliding_window": 8,
                 "text_config": None, "kv_lora_rank": None, "hidden_act": "silu", "swiglu_limit": None, "mlp_bias": False, "topk_method": "noaux_tc"}
        refused = 0
        for name in whole:
            for value in ("x", "8", 0, -1, 2.5, 2**70, True, [], [1], ["x"], [None], {}, {"x": 1}, float("nan"), object()):
                for changes in ({name: value}, {"quantization_config": {**fp8, name: value}}, {"text_config": {**whole, name: value}}):
                    try:
                        str(vivace.explain({**whole, **changes}))
                    except (TypeError, ValueError) as error:
                        self.assertRegex(str(error), r"^\w+(\.\w+)?: \w", (name, value))
                        refused += 1
        self.assertGreater(refused, 100)
        for wrong, said in ((5, "model_config is 5, needs an object"), ([], "model_config is \\[\\], needs"), ({}, "no num_attention_heads"),
                            ({**QWEN, "num_attention_heads": "32"}, "num_attention_heads is '32', needs a whole number"),
                            ({**QWEN, "num_key_value_heads": 5}, "num_attention_heads is 32, needs a multiple of 5"),
                            ({**QWEN, "moe_intermediate_size": None}, "128 experts and no moe_intermediate_size"),
                            ({**QWEN, "num_experts_per_tok": 129}, "129 experts a token are more than"),
                            ({**QWEN, "num_experts_per_tok": None, "top_k": 0}, "top_k is 0, needs at least 1 expert a token")):
            with self.assertRaisesRegex((TypeError, ValueError), f"^vivace.explain: .*{said}"):
                vivace.explain(wrong)
        dense = {name: value for name, value in QWEN.items() if name in ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")}
        self.assertEqual(str(vivace.explain({**dense, "top_k": 0})), str(vivace.explain(dense)))  # its sampler's
        for options, said in (({"tp": 0}, "tp is 0, needs 1"), ({"tp": 3}, "tp is 3, which does not divide 32"), ({"page_tokens": 0}, "page_tokens is 0"),
                              ({"kv_dtype": "f8"}, "kv_dtype is 'f8'"), ({"compute_capability": -1}, "compute_capability is -1")):
            with self.assertRaisesRegex(ValueError, f"^vivace.explain: {said}"):
                vivace.explain(QWEN, **options)

    def test_the_program(self):
        def ended(*arguments):
            done = subprocess.run([sys.executable, "-m", "vivace.explanation", *arguments], capture_output=True, text=True, timeout=60)
            return done.returncode, done.stdout, done.stderr

        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "config.json"
            self.assertEqual(ended(str(path)), (1, "", f"vivace.explanation: {path}: No such file or directory\n"))
            self.assertEqual(ended(folder)[0], 1)
            for text, said in (("{", "is no JSON: Expecting property name"), ("[" * 100000, "is no JSON: "), ("[1]", "model_config is [1], needs an object"),
                               ("{}", "the configuration has no num_attention_heads"), ('{"num_attention_heads": 0, "hidden_size": 8}', "is 0, needs 1 to"),
                               ("\xff", "is no JSON: 'utf-8' codec")):
                path.write_text(text, encoding="latin-1")
                code, out, err = ended(folder)
                self.assertEqual((code, out, err.count("\n")), (1, "", 1), err)
                self.assertIn(said, err)
            path.write_text(json.dumps(QWEN))
            reader, writer = os.pipe()
            os.close(reader)  # who read the answer has gone
            done = subprocess.run([sys.executable, "-m", "vivace.explanation", str(path)], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
            os.close(writer)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(ended(str(path)), (0, f"{vivace.explain(QWEN)}\n", ""))
            for wrong in (["--tp", "0"], ["--tp", "x"], ["--page-tokens", "-1"], ["--kv-dtype", "f8"], ["--compute-capability", "5000"]):
                code, out, err = ended(str(path), *wrong)
                self.assertEqual((code, out), (2, ""))
                self.assertIn(wrong[0], err.splitlines()[-1])
                self.assertLess(len(err), 600)

    def test_where_the_configuration_comes_from(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "config.json"
            path.write_text(json.dumps(QWEN))
            expected = str(vivace.explain(QWEN))
            self.assertEqual(str(vivace.explain(path)), expected)
            self.assertEqual(str(vivace.explain(folder)), expected)
        configuration = type("Config", (), {"to_dict": lambda self: QWEN})()
        self.assertEqual(str(vivace.explain(configuration)), expected)
        for name in ("tiny-qwen3-moe", "tiny-hy3"):
            self.assertIn("decode attention", str(vivace.explain(package.ROOT / "tests" / "data" / name)))

    def test_nonsense(self):
        with self.assertRaisesRegex(ValueError, "num_attention_heads"):
            vivace.explain({"hidden_size": 8})
        with self.assertRaisesRegex(ValueError, "tp is 5"):
            vivace.explain(QWEN, tp=5)


if __name__ == "__main__":
    package.main()
