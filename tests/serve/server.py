"""Starts the server under test, and talks to it as clients do. Every *_test.py here uses it and ends with main()."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "cli"))

from vivace import BINARY, Case, DATA, QWEN, ROOT, SANITIZED, SMOLLM2, main  # noqa: E402,F401

SLOWER = 10 if SANITIZED else 1  # what limits on time are multiplied by


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Response:
    def __init__(self, status, headers, body):
        self.status = status
        self.headers = {name.lower(): value for name, value in headers}
        self.body = body

    @property
    def json(self):
        return json.loads(self.body.decode("utf-8"))


class Server:
    """`vivace serve` on a free port, ended when the `with` block is left. VIVACE_SERVE_OPTIONS has more options, such as
    "--device cuda". Without `wait` the caller has to wait_until_healthy()."""

    def __init__(self, *args, model=QWEN, descriptors=None, port=None, wait=True):
        self.port = port or free_port()
        self.log = tempfile.TemporaryFile("w+b")
        command = [BINARY, "serve", "--model", model, "--host", "127.0.0.1", "--port", self.port, *args,
                   *os.environ.get("VIVACE_SERVE_OPTIONS", "").split()]

        def limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

        self.process = subprocess.Popen([str(word) for word in command], stdout=self.log, stderr=self.log,
                                        preexec_fn=limit if descriptors else None)
        self.started = time.monotonic()
        try:
            if wait:
                self.wait_until_healthy()
        except BaseException:
            self.process.kill()
            raise

    def wait_until_healthy(self):
        while True:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.output()}")
            if time.monotonic() - self.started > 60 * SLOWER:
                raise AssertionError(f"the server does not become healthy:\n{self.output()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.get("/health", timeout=5).status == 200:
                    self.ready_after = time.monotonic() - self.started
                    return
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        """A server that does not end well when it is asked to is a failure, unless there is one already; so are leaks and races,
        with which a sanitizer ends it."""
        with self.log:
            was_running = self.process.poll() is None
            if was_running:
                self.process.send_signal(signal.SIGTERM)
                try:
                    self.process.wait(60 * SLOWER)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()
            expected = (0,) if was_running else (0, -signal.SIGKILL)  # the test's own
            if not failure and self.process.returncode not in expected:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.output()[-4000:]}")

    def output(self):
        self.log.seek(0)
        return self.log.read().decode("utf-8", "replace")

    def request(self, method, path, body=None, headers=None, timeout=60):
        """One request on a connection of its own; a body that is no bytes goes as JSON."""
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout * SLOWER)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            got = connection.getresponse()
            return Response(got.status, got.getheaders(), got.read())
        finally:
            connection.close()

    def get(self, path, **kwargs):
        return self.request("GET", path, **kwargs)

    def post(self, path, body, **kwargs):
        return self.request("POST", path, body, **kwargs)

    def complete(self, **body):
        return self.post("/v1/completions", {"temperature": 0, **body})

    def chat(self, content, **body):
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "temperature": 0, **body})

    def stream(self, path="/v1/completions", **body):
        return Stream(self.port, path, {"temperature": 0, **body, "stream": True})

    def metrics(self):
        """Samples by name with labels as they are written: {'vivace_sequences_running': 0.0, ...}."""
        text = self.get("/metrics").body.decode("utf-8")
        return {name: float(value) for name, value in re.findall(r"^([a-zA-Z_:][^ ]*(?:\{.*\})?) (\S+)$", text, re.M)}

    def wait_idle(self, limit_s):
        """Waits until no request runs or waits, and returns the metrics then; pages that are not held are free or cached."""
        end = time.monotonic() + limit_s * SLOWER
        while True:
            at = time.monotonic()
            got = self.metrics()
            if got["vivace_sequences_running"] == got["vivace_sequences_waiting"] == got["vivace_requests_in_flight"] == 0:
                got["pages_not_held"] = got["vivace_kv_pages_free"] + got["vivace_kv_pages_cached"]
                return got
            if at > end:
                raise AssertionError(f"still at work after {limit_s} s: {got}")
            time.sleep(0.01)

    def status_kb(self, field):
        """A number of /proc/PID/status: VmRSS, Threads."""
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"^{field}:\s+(\d+)", text, re.M)[1])

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


class Stream:
    """A streaming request on a socket of its own, read chunk by chunk."""

    def __init__(self, port, path, body, receive_buffer=None):
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(60 * SLOWER)
        self.socket.connect(("127.0.0.1", port))
        content = json.dumps(body).encode()
        self.sent = time.monotonic()
        self.socket.sendall(f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
                            f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        self.file = None
        self.status = None
        self.headers = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self, reset=False):
        """Ends the connection: with FIN, or at once with RST."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if self.file:
            self.file.close()
        self.socket.close()

    def read_head(self):
        self.file = self.socket.makefile("rb")
        self.status = int(self.file.readline().split()[1])
        while line := self.file.readline().strip():
            name, value = line.decode().split(":", 1)
            self.headers[name.lower()] = value.strip()

    def body(self):
        """The whole body of a response that is no stream."""
        if self.file is None:
            self.read_head()
        return self.file.read(int(self.headers["content-length"]))

    def chunks(self):
        """(time, bytes) of each chunk of the chunked body."""
        if self.file is None:
            self.read_head()
        if self.headers.get("transfer-encoding") != "chunked":
            raise AssertionError(f"no stream: {self.status} {self.headers} {self.body()[:2000]}")
        while True:
            line = self.file.readline()
            if not line.endswith(b"\r\n"):
                raise ConnectionError(f"the stream was cut: {line!r}")
            size = int(line, 16)
            data = self.file.read(size + 2)
            if len(data) != size + 2:
                raise ConnectionError("the stream was cut within a chunk")
            if size == 0:
                return
            yield time.monotonic(), data[:-2]

    def events(self):
        """(time, object) of each event; checks that a chunk is one event and that [DONE] is the last."""
        done = False
        for at, chunk in self.chunks():
            if done:
                raise AssertionError(f"{chunk!r} after [DONE]")
            if chunk.startswith(b":"):
                continue
            if not (chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") and chunk.count(b"\n\n") == 1):
                raise AssertionError(f"a chunk is not one event: {chunk!r}")
            payload = chunk[6:-2].decode("utf-8")
            done = payload == "[DONE]"
            if not done:
                yield at, json.loads(payload)
        if not done:
            raise AssertionError("the stream has no [DONE]")

    def collect(self):
        """What the stream comes to: text, finish reason, usage, number of events with choices."""
        return Collected([event for _, event in self.events()])


class Collected:
    def __init__(self, events):
        self.events = events
        self.tokens = [event for event in events if event.get("choices")]
        self.text = "".join(text_of(event["choices"][0]) for event in self.tokens)
        self.finish = [event["choices"][0]["finish_reason"] for event in self.tokens if event["choices"][0].get("finish_reason")]
        self.usage = [event["usage"] for event in events if event.get("usage")]
        self.errors = [event["error"] for event in events if "error" in event]


def text_of(choice):
    """The text of a choice of any of the four kinds of answers."""
    if "text" in choice:
        return choice["text"]
    return choice.get("delta", choice.get("message", {})).get("content") or ""
