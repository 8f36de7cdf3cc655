"""Each refusal once: status, code, headers, and that docs/serving.md lists exactly these; what is open without a key."""

import json
import pathlib
import re
import socket
import tempfile
import time

from chain_model import write_chain_model
from server import Case, ROOT, SLOWER, Server, main

KEY = "sk-right"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
PAGE = (ROOT / "docs" / "serving.md").read_text()


class Errors(Case):
    @classmethod
    def setUpClass(cls):
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        write_chain_model(folder)
        keys = pathlib.Path(folder, "keys")
        keys.write_text(f"# operators\n{KEY}\nsk-other\n")
        cls.server = cls.enterClassContext(Server(
            "--threads", 1, "--api-key-file", keys, "--served-model-name", "chain", "--max-body", "64K", "--max-header", "4K",
            "--header-timeout", 1, "--body-timeout", 1, "--max-queue", 1, "--max-batch", 1, "--max-connections", 24,
            "--max-model-len", 4000, model=folder))

    def raw(self, text, wait_s=20):
        """What comes back for these bytes until the connection ends."""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=wait_s * SLOWER) as connection:
            connection.sendall(text)
            got = b""
            while part := connection.recv(65536):
                got += part
        head, body = got.split(b"\r\n\r\n", 1)
        return int(head.split()[1]), head.decode("latin-1").lower(), json.loads(body)["error"]

    def expect(self, status, code, got=None, **body):
        """Checks the shape of a refusal."""
        got = got or self.server.post("/v1/completions", {"prompt": "x", **body}, headers=AUTHORIZED)
        self.assertEqual(got.status, status, got.body)
        self.assertTrue(got.headers["content-type"].startswith("application/json"))
        self.assertTrue(got.headers["x-request-id"])
        error = got.json["error"]
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        self.assertEqual(error["code"], code, error)
        return got, error

    def test_every_refusal(self):
        seen = {(400, "invalid_value"), (400, "context_length_exceeded"), (400, "unsupported_parameter"), (400, "invalid_json"),
                (401, "invalid_api_key"), (404, "not_found"), (404, "model_not_found"), (405, "method_not_allowed"),
                (408, "request_timeout"), (413, "body_too_large"), (415, "unsupported_encoding"), (429, "queue_full"), (431, "headers_too_large"),
                (400, "invalid_http"), (501, "unsupported_encoding"), (503, "overloaded"), (503, "shutting_down"), (500, "engine_error"),
                (400, "no_chat_template"), (400, "no_tokenizer")}
        listed = {(int(status), code) for status, code in re.findall(r"^\| (\d{3}) \| `(\w+)` \|", PAGE, re.M)}
        self.assertEqual(listed, seen, "docs/serving.md lists what there is")

    def test_400(self):
        self.assertIn("-1", self.expect(400, "invalid_value", temperature=-1)[1]["message"])
        error = self.expect(400, "context_length_exceeded", max_tokens=5000)[1]
        self.assertIn("5000", error["message"])
        self.assertIn("4000", error["message"])
        error = self.expect(400, "unsupported_parameter", response_format={"type": "json_object"})[1]
        self.assertEqual(error["param"], "response_format")
        for body in (b"", b"{", b"[]", b'{"prompt": "\xff"}', b"nul", b'{"prompt": "x"} x', b"[" * 30_000):
            got = self.server.post("/v1/completions", body, headers=AUTHORIZED)
            self.assertEqual((got.status, got.json["error"]["code"]), (400, "invalid_json"), body[:40])
        for path, needs in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages"), ("/generate", "text or input_ids")):
            error = self.expect(400, "invalid_json", self.server.post(path, b"", headers=AUTHORIZED))[1]
            self.assertEqual(error["message"], f"the body is empty, needs a JSON object with {needs}")
        error = self.expect(400, "invalid_value", self.server.post("/v1/completions", b'{"prompt": "x", "top_p": 1e400}', headers=AUTHORIZED))[1]
        self.assertEqual((error["param"], error["message"][:23]), ("top_p", "top_p is 1e400, needs a"))
        status, _, error = self.raw(b"BREW / HTCPCP/1.0\r\n\r\n")
        self.assertEqual((status, error["code"]), (400, "invalid_http"))

    def test_401_and_what_is_open(self):
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": KEY}, {"Authorization": "Bearer "},
                        {"Authorization": f"Bearer {KEY}x"}, {"Authorization": f"Bearer {KEY[:-1]}"}, {"Authorization": "Bearer # operators"}):
            for path in ("/v1/models", "/v1/nothing", "/get_server_info"):
                got, error = self.expect(401, "invalid_api_key", self.server.get(path, headers=headers))
                self.assertEqual(got.headers["www-authenticate"], "Bearer")
                self.assertNotIn("sk-", error["message"])
        for path in ("/health", "/metrics", "/version"):
            self.assertEqual(self.server.get(path).status, 200)
        for key in (KEY, "sk-other"):
            self.assertEqual(self.server.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status, 200)
        self.assertNotIn(KEY, self.server.output(), "keys stay out of the log")
        self.assertNotIn("sk-wrong", self.server.output())

    def test_404_and_405(self):
        self.expect(404, "not_found", self.server.get("/v2", headers=AUTHORIZED))
        error = self.expect(404, "model_not_found", model="gpt")[1]
        self.assertIn("gpt", error["message"])
        self.assertIn("chain", error["message"])
        got, _ = self.expect(405, "method_not_allowed", self.server.get("/v1/completions", headers=AUTHORIZED))
        self.assertEqual(got.headers["allow"], "POST")

    def test_408(self):
        start = time.monotonic()
        status, _, error = self.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        self.assertEqual((status, error["code"]), (408, "request_timeout"))
        status, head, error = self.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        self.assertEqual((status, error["code"]), (408, "request_timeout"))
        self.assertIn("connection: close", head)
        self.assertLess(time.monotonic() - start, 8 * SLOWER)

    def test_413_and_431(self):
        self.expect(413, "body_too_large", prompt="x" * 70_000)
        status, _, error = self.raw(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                                    + b"8000\r\n" + b"x" * 0x8000 + b"\r\n8001\r\n" + b"x" * 0x8001 + b"\r\n")
        self.assertEqual((status, error["code"]), (413, "body_too_large"))
        status, _, error = self.raw(b"GET /health HTTP/1.1\r\nX: " + b"y" * 5000 + b"\r\n\r\n")
        self.assertEqual((status, error["code"]), (431, "headers_too_large"))
        status, _, error = self.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}")
        self.assertEqual((status, error["code"]), (415, "unsupported_encoding"))

    def test_429_when_the_queue_is_full(self):
        body = {"prompt": "x", "max_tokens": 3900, "ignore_eos": True, "stream": True}
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        content = json.dumps(body)
        request = f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode()
        busy = []
        for _ in range(2):  # one runs, one waits
            busy.append(socket.create_connection(("127.0.0.1", self.server.port), timeout=20 * SLOWER))
            busy[-1].sendall(request)
            self.assertIn(b" 200 OK", busy[-1].recv(100))
            time.sleep(0.1)
        got, _ = self.expect(429, "queue_full")
        self.assertGreater(int(got.headers["retry-after"]), 0)
        for one in busy:
            one.close()
        self.server.wait_idle(2)
        self.assertEqual(self.server.post("/v1/completions", {"prompt": "x"}, headers=AUTHORIZED).status, 200)

    def test_503_beyond_the_connections(self):
        end = time.monotonic() + 10 * SLOWER
        while self.server.metrics()["vivace_connections"] != 1:  # that which asks
            self.assertLess(time.monotonic(), end, "connections of other tests stay")
        held = []
        try:
            for _ in range(24):
                held.append(socket.create_connection(("127.0.0.1", self.server.port), timeout=20 * SLOWER))
                held[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")  # after it a connection may wait for long
                self.assertIn(b" 200 OK", held[-1].recv(1000))
            status, head, error = self.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            self.assertEqual((status, error["code"]), (503, "overloaded"))
            self.assertIn("retry-after: ", head)
        finally:
            for one in held:
                one.close()

    def test_request_ids(self):
        got = self.server.post("/v1/completions", {"prompt": "x"}, headers={**AUTHORIZED, "x-request-id": "mine-17"})
        self.assertEqual(got.headers["x-request-id"], "mine-17")
        ids = {self.server.get("/health").headers["x-request-id"] for _ in range(3)}
        self.assertEqual(len(ids), 3)
        end = time.monotonic() + 5 * SLOWER
        while not (lines := [json.loads(line) for line in self.server.output().splitlines() if '"mine-17"' in line]):
            self.assertLess(time.monotonic(), end, "the request is not in the log")
        self.assertEqual((lines[0]["status"], lines[0]["completion_tokens"]), (200, 16))

    def test_the_log_has_what_was_refused_and_whose_it_was(self):
        head = b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: x\r\n"
        for text, status, method, path in ((b"BREW / HTCPCP/1.0\r\n\r\n", 400, "", ""), (b"GET /health HTTP/1.1\r\n\r\n", 400, "GET", "/health"),
                                           (head + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 415, "POST", "/v1/completions"),
                                           (head + b"Content-Length: 99999999\r\n\r\n", 413, "POST", "/v1/completions"),
                                           (head + b"X: " + b"y" * 5000 + b"\r\n\r\n", 431, "POST", "/v1/completions"),
                                           (head + b"Content-Length: 9\r\n\r\n{", 408, "POST", "/v1/completions")):
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=20 * SLOWER) as connection:
                peer = "{}:{}".format(*connection.getsockname())
                connection.sendall(text)
                got = connection.recv(65536).decode("latin-1")
            self.assertEqual(int(got.split()[1]), status)
            end = time.monotonic() + 5 * SLOWER
            while not (lines := [json.loads(line) for line in self.server.output().splitlines() if f'"{peer}"' in line]):
                self.assertLess(time.monotonic(), end, "the refusal is not in the log")
                time.sleep(0.01)
            line = lines[-1]
            self.assertEqual([line[name] for name in ("event", "peer", "method", "path", "status")], ["refused", peer, method, path, status])
            self.assertIn(line["request_id"], got)

    def test_metrics_are_those_of_the_page(self):
        self.server.post("/v1/completions", {"prompt": "x"}, headers=AUTHORIZED)
        text = self.server.get("/metrics").body.decode()
        kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
        self.assertEqual(set(re.findall(r"^# HELP (\S+) .+$", text, re.M)), set(kinds))
        self.assertEqual(set(re.findall(r"`(vivace_\w+)`", PAGE)), set(kinds), "docs/serving.md lists what there is")
        for name, value in self.server.metrics().items():
            base = name.split("{")[0]
            self.assertTrue(base in kinds or re.sub("_(bucket|sum|count)$", "", base) in kinds, name)
            self.assertGreaterEqual(value, 0, name)


if __name__ == "__main__":
    main()
