"""What the benchmark clients of vLLM and SGLang send and how they count, in a client that does both.

The bodies are those that the clients write (vLLM's endpoint_request_func, SGLang 0.5's serving benchmark). They differ in what
they take for a token: vLLM counts events that have choices, SGLang events that have text.
"""

import json
import socket
import tempfile
import time

from chain_model import write_chain_model
from server import Case, SLOWER, Server, main, text_of

TOKENS = 48
PROMPT = "The quick brown fox jumps over the lazy dog"


class Clients(Case):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Server("--threads", 1, "--deterministic", "--served-model-name", "tiny"))

    def run_stream(self, path, body, headers=()):
        """Events with the time since just before the request was sent."""
        content = json.dumps(body).encode()
        start = time.monotonic()
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=60 * SLOWER) as connection:
            head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Accept: */*", "Accept-Encoding: gzip, deflate",
                    f"Content-Length: {len(content)}", "Content-Type: application/json", *headers]
            connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + content)
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(65536)
            head, received = received.split(b"\r\n\r\n", 1)
            self.assertTrue(head.startswith(b"HTTP/1.1 200 "), head + received)
            self.assertRegex(head, rb"(?i)\r\ncontent-type: text/event-stream")
            self.assertRegex(head, rb"(?i)\r\ntransfer-encoding: chunked")
            self.assertNotRegex(head, rb"(?i)content-encoding")
            reads, body_bytes = 0, b""
            events = []
            while True:
                while b"\r\n" in received:
                    size = int(received.split(b"\r\n", 1)[0], 16)
                    begin = received.index(b"\r\n") + 2
                    if len(received) < begin + size + 2:
                        break
                    chunk, received = received[begin:begin + size], received[begin + size + 2:]
                    if size == 0:
                        self.assertEqual(body_bytes.count(b"data: [DONE]"), 1)
                        return events, reads
                    self.assertTrue(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n"), chunk)
                    self.assertEqual(chunk.count(b"\n\n"), 1, f"one event per chunk: {chunk}")
                    body_bytes += chunk
                    if chunk != b"data: [DONE]\n\n":
                        events.append((time.monotonic() - start, json.loads(chunk[6:].decode("utf-8"))))
                more = connection.recv(65536)
                self.assertTrue(more, "the stream ends without its last chunk")
                reads += 1
                received += more

    def check_tokens(self, events, tokens=TOKENS):
        """Exactly one event with choices per token, the reason on the last."""
        counted = [event for _, event in events if event.get("choices")]
        self.assertEqual(len(counted), tokens)
        reasons = [event["choices"][0].get("finish_reason") for event in counted]
        self.assertEqual(reasons, [None] * (tokens - 1) + ["length"])
        return "".join(text_of(event["choices"][0]) for event in counted)

    def expected(self, **body):
        return self.server.complete(prompt=PROMPT, max_tokens=TOKENS, ignore_eos=True, **body).json["choices"][0]["text"]

    def test_models_names_what_is_served(self):
        got = self.server.get("/v1/models").json
        self.assertEqual(got["object"], "list")
        self.assertEqual([(m["id"], m["object"]) for m in got["data"]], [("tiny", "model")])
        self.assertEqual(got["data"][0]["max_model_len"], 4096)

    def test_vllm_completions(self):
        body = {"model": "tiny", "prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": TOKENS, "logprobs": None,
                "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
        events, reads = self.run_stream("/v1/completions", body, ["x-request-id: bench-0", "Authorization: Bearer none"])
        self.assertEqual(self.check_tokens(events), self.expected())
        last = events[-1][1]
        self.assertEqual(last["choices"], [])
        self.assertEqual(last["usage"]["completion_tokens"], TOKENS)
        self.assertEqual(last["usage"]["total_tokens"], last["usage"]["prompt_tokens"] + TOKENS)
        self.assertTrue(all(not event.get("usage") for _, event in events[:-1]), "usage is read from the last event alone")
        self.assertGreater(reads, TOKENS // 4, "events leave as they come, not together")

    def test_vllm_chat(self):
        with tempfile.TemporaryDirectory() as folder:
            write_chain_model(folder)
            with Server("--threads", 1, model=folder) as server:
                self.server, kept = server, self.server
                try:
                    self.vllm_chat()
                    self.sglang_chat()
                finally:
                    self.server = kept

    def vllm_chat(self):
        model = self.server.get("/v1/models").json["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
                "max_completion_tokens": TOKENS, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        events, _ = self.run_stream("/v1/chat/completions", body, ["x-request-id: bench-1"])
        self.assertEqual(self.check_tokens(events), "o" * TOKENS)
        first = events[0][1]["choices"][0]["delta"]
        self.assertEqual((first["role"], first["content"]), ("assistant", "o"), "no role before there is a token")
        self.assertEqual(events[-1][1]["usage"]["completion_tokens"], TOKENS)

    def sglang_chat(self):
        body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": TOKENS,
                "stream": True, "temperature": 0.0, "ignore_eos": True}
        model = self.server.get("/v1/models").json["data"][0]["id"]
        events, _ = self.run_stream("/v1/chat/completions", {**body, "model": model})
        self.assertEqual(self.check_tokens(events), "o" * TOKENS)
        self.assertTrue(all(event["choices"] for _, event in events), "nobody asked for usage")

    def test_sglang_completions(self):
        body = {"model": "tiny", "prompt": PROMPT, "best_of": 1, "max_tokens": TOKENS, "stream": True, "temperature": 0.0,
                "ignore_eos": True}
        events, _ = self.run_stream("/v1/completions", body)
        self.assertEqual(self.check_tokens(events), self.expected())
        self.assertTrue(all(event["choices"] for _, event in events), "this client reads choices[0] of every event")

    def test_sglang_generate(self):
        common = {"sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}, "stream": True,
                  "lora_path": None, "return_logprob": False, "return_routed_experts": False, "logprob_start_len": -1}
        ids = [10, 20, 30]
        for prompt in ({"text": PROMPT}, {"input_ids": ids}):
            events, _ = self.run_stream("/generate", {**prompt, **common})
            counts = [event["meta_info"]["completion_tokens"] for _, event in events]
            self.assertEqual(counts, sorted(counts))
            self.assertEqual(counts[-1], TOKENS)
            texts = [event["text"] for _, event in events]
            for before, after in zip(texts, texts[1:]):
                self.assertTrue(after.startswith(before), "the text is all there is so far")
            self.assertEqual(sum(1 for a, b in zip([0, *counts], counts) if b > a), TOKENS, "an event per token")
            last = events[-1][1]["meta_info"]
            self.assertEqual(last["finish_reason"]["type"], "length")
            if "text" in prompt:
                self.assertEqual(texts[-1], self.expected())
            else:
                self.assertEqual(last["prompt_tokens"], 3)
        plain = self.server.post("/generate", {"text": PROMPT, **common, "stream": False}).json
        self.assertEqual((plain["text"], plain["meta_info"]["completion_tokens"]), (self.expected(), TOKENS))

    def test_what_the_clients_ask_beside(self):
        self.assertEqual(self.server.get("/health").status, 200)
        self.assertEqual(self.server.get("/health_generate").status, 200)
        for path in ("/get_server_info", "/server_info"):
            self.assertTrue(self.server.get(path).json["internal_states"])
        self.assertIn("model_path", self.server.get("/get_model_info").json)
        self.server.complete(prompt=list(range(100, 180)), max_tokens=1)
        for path in ("/flush_cache", "/flush_cache?timeout=5"):
            self.assertEqual(self.server.post(path, "").status, 200)
        again = self.server.complete(prompt=list(range(100, 180)), max_tokens=1).json
        details = again["usage"].get("prompt_tokens_details") or {"cached_tokens": 0}
        self.assertEqual(details["cached_tokens"], 0, "the cache was flushed")

    def test_the_first_event_is_the_first_token(self):
        """A long prompt's first event comes when its prompt was computed, not before."""
        prompt = [(i * 37) % 4000 + 3 for i in range(3000)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True, "temperature": 0}
        start = time.monotonic()
        self.assertEqual(self.server.complete(prompt=[5, *prompt], max_tokens=1).status, 200)
        whole = time.monotonic() - start
        events, _ = self.run_stream("/v1/completions", body)
        self.assertGreater(events[0][0], whole / 3)


if __name__ == "__main__":
    main()
