"""bench serve against servers (small ones of this file), comparisons and data sets."""

import http.server
import json
import pathlib
import re
import tempfile
import threading
import time

from vivace import Case, HY3, QWEN, main, vivace


class Server:
    """Answers with as many tokens as are asked for, one per `delay` seconds; keeps what it was sent."""

    def __init__(self, delay=0.0, word="w", fail=None, usage=True, log=None):
        server = self
        self.calls, self.log = [], log if log is not None else []

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args):
                pass

            def answer(self, code, body):
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                if self.path == "/v1/models":
                    self.answer(200, {"data": [{"id": "tiny", "max_model_len": 1024}]})
                else:
                    self.answer(404, {"error": {"message": "no such page"}})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.calls.append((self.path, dict(self.headers), body))
                server.log.append(word)
                if fail and len(server.calls) in fail:
                    self.answer(429, {"error": {"message": "the queue is full"}})
                    return
                chat = self.path == "/v1/chat/completions"
                tokens = body["max_completion_tokens" if chat else "max_tokens"]
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for i in range(tokens):
                    time.sleep(delay)
                    choice = {"delta": {"content": word}} if chat else {"text": word}
                    self.event({"choices": [choice | {"finish_reason": "length" if i + 1 == tokens else None}]})
                if usage:
                    text = body["messages"][0]["content"] if chat else body["prompt"]
                    prompt = len(text) // 5 + 7 if isinstance(text, str) else len(text)
                    self.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}})
                self.part(b"data: [DONE]\n\n")
                self.part(b"")

            def event(self, body):
                self.part(b"data: " + json.dumps(body).encode() + b"\n\n")

            def part(self, data):
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *args):
                pass

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.http.shutdown()
        self.http.server_close()


class BenchUrl(Case):
    def bench(self, *args):
        return self.ok("bench", "serve", *args, "--json", "-").json

    def test_closed_loop(self):
        with Server(delay=0.004) as server:
            got = self.bench("--url", server.url, "--requests", 12, "--concurrency", 4, "--seed", 3, "--slo",
                             "ttft=10s,tpot=5s")
        self.assertEqual((got["requests"], got["failures"], got["failures_by_kind"]), (12, 0, {}))
        self.assertEqual((got["url"], got["model"], got["peak_memory_bytes"]), (server.url, "tiny", None))
        self.assertEqual(got["good"], 12)
        self.assertGreaterEqual(got["tpot_ms"]["median"], 4)
        self.assertGreaterEqual(got["ttft_ms"]["median"], 4)
        self.assertEqual(got["output_tokens"], sum(r["completion_tokens"] for r in got["per_request"]))
        for request in got["per_request"]:
            self.assertEqual(request["text"], "w" * request["completion_tokens"])
        sent = [body for _, _, body in server.calls]
        self.assertEqual({type(body["prompt"]) for body in sent}, {str}, "no tokenizer, so text")
        self.assertEqual(len({body["prompt"] for body in sent[3:]}), 12)
        lengths = sorted(r["prompt_tokens"] + r["completion_tokens"] for r in got["per_request"])
        self.assertLessEqual(lengths[-1], 1024)

    def test_a_model_gives_exact_prompts(self):
        with Server() as server:
            got = self.bench("--url", server.url, "--model", QWEN, "--workload", "uniform", "--requests", 4)
        self.assertEqual(got["prompt_tokens"], 4 * 128)
        self.assertEqual([len(body["prompt"]) for _, _, body in server.calls], [16] + [128] * 4)

    def test_a_server_without_a_tokenizer_gets_ids(self):
        with Server() as server:
            got = self.bench("--url", server.url, "--vocab", 50, "--workload", "uniform", "--requests", 3)
        self.assertEqual(got["prompt_tokens"], 3 * 128)
        ids = [i for _, _, body in server.calls[1:] for i in body["prompt"]]
        self.assertEqual((min(ids), max(ids), len(ids)), (0, 49, 3 * 128))

    def test_text_is_as_long_as_its_tokens(self):
        """The server counts a token for five bytes, and seven more for what is around."""
        with Server() as server:
            got = self.bench("--url", server.url, "--workload", "uniform", "--requests", 3, "--chat")
        self.assertEqual({path for path, _, _ in server.calls}, {"/v1/chat/completions"})
        for request in got["per_request"]:
            self.assertAlmostEqual(request["prompt_tokens"], 128 + 7, delta=6)

    def test_open_loop_key_and_name(self):
        with Server() as server, tempfile.TemporaryDirectory() as folder:
            key = pathlib.Path(folder, "key")
            key.write_text("sesame\nsecond line\n")
            got = self.bench("--url", server.url, "--requests", 5, "--rate", 100, "--api-key-file", key,
                             "--served-model-name", "tiny", "--workload", "multi-turn")
            self.assertNotIn("sesame", json.dumps(got))
            self.fails(1, "there is no model 'huge', only tiny", "bench", "serve", "--url", server.url,
                       "--served-model-name", "huge")
            key.write_text("\n")
            self.fails(1, "its first line is empty", "bench", "serve", "--url", server.url, "--api-key-file", key)
        self.assertEqual(got["rate"], 100)
        for _, headers, body in server.calls:
            self.assertEqual(headers["Authorization"], "Bearer sesame")
            self.assertEqual(body["model"], "tiny")

    def test_failures_are_counted_by_kind(self):
        with Server(fail={5, 7}) as server:  # calls 1 to 3 come before the timed run
            run = vivace("bench", "serve", "--url", server.url, "--requests", 8)
            self.assertEqual(run.code, 1)
            self.assertIn("8 of which 2 failed (HTTP 429: 2)", run.text)
        with Server(fail={1}) as server:
            self.fails(1, "the request before the timed run failed: HTTP 429: the queue is full", "bench", "serve",
                       "--url", server.url)
        self.fails(1, "/v1/models: cannot connect: Connection refused", "bench", "serve", "--url", server.url)

    def test_without_usage_chunks_are_tokens(self):
        with Server(usage=False) as server:
            run = self.ok("bench", "serve", "--url", server.url, "--requests", 3)
        self.assertIn("3 of 3 streams had no usage", run.text)
        self.assertIn("no usage in its answers", run.err)

    def test_dataset(self):
        with Server() as server, tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "d.jsonl")
            path.write_text('{"prompt": "one", "max_tokens": 3}\n{"prompt": [4, 5]}\n'
                            '{"messages": [{"role": "user", "content": "two"}], "max_tokens": 2}\n')
            got = self.bench("--url", server.url, "--dataset", path, "--max-tokens", 5, "--concurrency", 1)
            self.assertEqual([r["completion_tokens"] for r in got["per_request"]], [3, 5, 2])
            self.assertEqual([body.get("prompt") for _, _, body in server.calls[1:]], ["one", [4, 5], None])
            # The same lines into an engine of this process, whose model has no chat template.
            run = vivace("bench", "serve", "--model", QWEN, "--dataset", path, "--requests", 6, "--json", "-")
            self.assertEqual(run.code, 1)
            self.assertEqual([r["completion_tokens"] for r in run.json["per_request"]], [3, 128, 0, 3, 128, 0])
            self.assertEqual(run.json["failures_by_kind"], {"unsupported": 2})
            self.assertIn("2 of 6 requests failed, the first: messages need a model with a chat template", run.err)
            path.write_text('{"prompt": "one"}\n{"prompt": "x", "max_tokens": -1}\n')
            self.fails(1, f"--dataset: {path}:2: max_tokens", "bench", "serve", "--model", QWEN, "--dataset", path)


class Compare(Case):
    def test_two_servers_take_turns(self):
        log = []
        with Server(delay=0.002, log=log, word="a") as a, Server(delay=0.006, log=log, word="b") as b, \
                tempfile.TemporaryDirectory() as folder:
            page, results = pathlib.Path(folder, "c.html"), pathlib.Path(folder, "c.json")
            run = self.ok("bench", "serve", "--url", a.url, "--url", b.url, "--requests", 3, "--workload", "uniform",
                          "--concurrency", 3, "--rounds", 2, "--report", page, "--json", results)
            got = json.loads(results.read_text())
            html = page.read_text()
        self.assertEqual("".join(log[-12:]), "aaabbbbbbaaa", "who is first alternates")
        prompts = [[body["prompt"] for _, _, body in server.calls[-6:]] for server in (a, b)]
        self.assertEqual(sorted(prompts[0]), sorted(prompts[1]))
        self.assertEqual(len(set(prompts[0])), 6, "each round has new requests")
        values = {value["name"]: value for value in got["comparison"]["values"]}
        tpot = values["TPOT median"]
        self.assertAlmostEqual(tpot["ratio"], got["b"]["tpot_ms"]["median"] / got["a"]["tpot_ms"]["median"], places=6)
        self.assertGreater(tpot["ratio"], 1.5)
        rounds = tpot["ratio_of_rounds"]
        self.assertLessEqual(rounds["least"], rounds["median"])
        self.assertLessEqual(rounds["median"], rounds["largest"])
        self.assertEqual(got["comparison"]["outputs"], {"compared": 6, "equal": 0, "common_share": 0.0})
        self.assertIn("0 of 6 are equal", run.text)
        self.assertGreaterEqual(html.count("<svg"), 3)
        self.assertIsNone(re.search(r"(src|href)=|url\(|@import|<script", html))
        self.assertIn("TPOT median, B / A", html)

    def test_two_configurations(self):
        run = self.ok("bench", "serve", "--model", HY3, "--requests", 2, "--rounds", 1, "--max-model-len", 64, "--against",
                      "--exact --prefer linear=reference", "--json", "-")
        rows = [{row["row"] for row in run.json[side]["rows"] if row["op"] == "linear"} for side in "ab"]
        self.assertNotIn("reference", rows[0])
        self.assertEqual(rows[1], {"reference"})
        self.assertEqual(run.json["comparison"]["outputs"]["compared"], 2)
        self.assertIn("--exact --prefer linear=reference", run.json["comparison"]["b"])

    def test_finished_runs(self):
        with tempfile.TemporaryDirectory() as folder:
            files = [pathlib.Path(folder, name) for name in ("a.json", "b.json", "other.json", "bad.json")]
            for path, seed in zip(files, (1, 1, 2)):
                self.ok("bench", "serve", "--model", HY3, "--requests", 3, "--max-model-len", 64, "--seed", seed, "--json",
                        path)
            run = self.ok("bench", "serve", "--compare", files[0], files[1], "--report", pathlib.Path(folder, "c.html"))
            self.assertIn("3 of 3 are equal; 100.0 %", run.text)
            self.assertTrue(pathlib.Path(folder, "c.html").read_text().startswith("<!doctype html>"))
            run = self.ok("bench", "serve", "--compare", files[0], files[2])
            self.assertIn("not compared: the runs had different requests", run.text)
            files[3].write_text("{}")
            self.fails(1, f"--compare: {files[3]}: requests is no number", "bench", "serve", "--compare", files[0], files[3])
            files[3].write_text("{")
            self.fails(1, f"--compare: {files[3]}: is not JSON", "bench", "serve", "--compare", files[3], files[0])
            files[3].write_text("")
            self.fails(1, f"--compare: {files[3]}: is not JSON", "bench", "serve", "--compare", files[3], files[0])
            self.fails(1, f"--compare: {folder}: cannot be read", "bench", "serve", "--compare", folder, files[0])
            self.fails(1, "--compare: /nowhere: cannot be read", "bench", "serve", "--compare", files[0], "/nowhere")


class Usage(Case):
    def test_values(self):
        bench, url = ("bench", "serve"), ("--url", "http://127.0.0.1:9")
        self.fails(2, "one of --model, --url and --compare is needed", *bench)
        self.fails(2, "--url is 'localhost:8000', needs http://HOST", *bench, "--url", "localhost:8000")
        self.fails(2, "--url is 'https://a', needs http://: there is no TLS here", *bench, "--url", "https://a")
        self.fails(2, "--url is given 3 times, needs at most two", *bench, *url, *url, *url)
        self.fails(2, "--max-batch is for an engine of this process", *bench, *url, "--max-batch", 4)
        self.fails(2, "--api-key-file needs --url", *bench, "--model", HY3, "--api-key-file", "x")
        self.fails(2, "--vocab needs --url", *bench, "--model", HY3, "--vocab", 5)
        self.fails(2, "excludes", *bench, *url, "--vocab", 5, "--chat")
        self.fails(2, "--dataset excludes --vocab", *bench, *url, "--vocab", 5, "--dataset", "x")
        self.fails(2, "--rounds needs two sides", *bench, "--model", HY3, "--rounds", 2)
        self.fails(2, "--max-tokens needs --dataset", *bench, "--model", HY3, "--max-tokens", 2)
        self.fails(2, "--slo is 'ttft', needs bounds of ttft, tpot and e2e", *bench, *url, "--slo", "ttft")
        self.fails(2, "--slo is 'ttft=5': ttft is '5', needs a time above 0 in ms or s, such as", *bench, *url, "--slo", "ttft=5")
        self.fails(2, "--workload is 'bursty', needs uniform, mixed or multi-turn", *bench, *url, "--workload", "bursty")
        self.fails(2, "excludes", *bench, *url, "--workload", "mixed", "--dataset", "x")
        self.fails(2, "--compare excludes --url", *bench, *url, "--compare", "a", "b")
        self.fails(2, "--compare", *bench, "--compare", "a")
        self.fails(2, "--against '--max-batch 0': --max-batch is '0'", *bench, "--model", HY3, "--against", "--max-batch 0")
        self.fails(2, "--against '--seed 3': a side has no '--seed' of its own\n", *bench, "--model", HY3, "--against", "--seed 3")
        self.fails(2, "needs --url or --model in it", *bench, *url, "--against", "--exact")
        self.fails(2, "--read-timeout is '0', needs a number above 0", *bench, *url, "--read-timeout", 0)
        self.fails(2, "--api-key-env is 'NO_SUCH_VARIABLE'", *bench, *url, "--api-key-env", "NO_SUCH_VARIABLE")
        self.fails(1, "--api-key-file: /nowhere: cannot be read", *bench, *url, "--api-key-file", "/nowhere")


if __name__ == "__main__":
    main()
