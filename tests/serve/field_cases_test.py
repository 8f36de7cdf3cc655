"""Faults that users of other servers reported, over HTTP against the real program.

A test's name has its case's number, the comment before it the link to the report and the symptom: docs/field-cases.md is
made from them.
"""

import socket
import tempfile
import threading
import time

from chain_model import write_chain_model
from server import Case, Collected, QWEN, SANITIZED, SLOWER, Server, Stream, main, text_of

INVALID = "\N{REPLACEMENT CHARACTER}"


class ServerCase(Case):
    """One server for all tests of a class."""

    ARGS = ()
    CHAINS = None

    @classmethod
    def setUpClass(cls):
        model = QWEN
        if cls.CHAINS is not None:
            folder = tempfile.TemporaryDirectory()
            cls.addClassCleanup(folder.cleanup)
            cls.id_of = staticmethod(write_chain_model(folder.name, *cls.CHAINS))
            model = folder.name
        cls.server = cls.enterClassContext(Server(*cls.ARGS, model=model))

    def refused(self, got, status, *words):
        """An error object in OpenAI's shape, with these words in its message."""
        self.assertEqual(got.status, status, got.body[:500])
        error = got.json["error"]
        self.assertLessEqual({"message", "type", "param", "code"}, set(error), error)
        for word in words:
            self.assertIn(str(word), error["message"])
        return error

    def both_ways(self, path="/v1/completions", **body):
        """The answer without a stream and with one; checks that they are the same."""
        plain = self.server.post(path, {"temperature": 0, **body})
        self.assertEqual(plain.status, 200, plain.body[:500])
        with self.server.stream(path, **body, stream_options={"include_usage": True}) as stream:
            streamed = stream.collect()
        choice = plain.json["choices"][0]
        self.assertEqual(streamed.text, text_of(choice))
        self.assertEqual(streamed.finish, [choice["finish_reason"]])
        self.assertEqual(streamed.events[-1]["choices"], [], "the usage chunk is the last one")
        counts = ["prompt_tokens", "completion_tokens", "total_tokens"]
        self.assertEqual([[usage[c] for c in counts] for usage in streamed.usage], [[plain.json["usage"][c] for c in counts]])
        return text_of(choice), choice["finish_reason"], plain.json["usage"]


class Requests(ServerCase):
    ARGS = ("--threads", 1)
    CHAINS = [[b"!", b"a", b"b", b"c"]]

    # https://github.com/sgl-project/sglang/issues/40076: one request with an absurd field ends the server for everyone.
    def test_H29_fields_out_of_range(self):
        vocab = 320
        chat, completion = "/v1/chat/completions", "/v1/completions"
        wrong = [(chat, {"logprobs": True, "top_logprobs": value})
                 for value in (21, vocab, vocab + 1, -1, 2147483648, 1e9, 2.5, "5", True)]
        wrong += [(completion, {"logprobs": value}) for value in (21, vocab + 1, -1, 2147483648, 1e9, 2.5, "5", True)]
        for path in (chat, completion):
            wrong += [(path, {field: value}) for field, values in {
                "n": (0, -1, 2147483648, 1.5, "2", True), "top_k": (-2, 2.5, "1", 1e30), "min_p": (-0.1, 1.1, "0.5"),
                "top_p": (-0.1, 1.01, "1", []), "temperature": (-0.1, "1", {}), "presence_penalty": (-2.1, 2.1, "0"),
                "frequency_penalty": (-2.1, 2.1), "repetition_penalty": (0, -1), "seed": (1.5, "7", 1e40),
                "logit_bias": ({"320": 1}, {"-1": 1}, {"x": 1}, {"1": "y"}, [1], {"1": 101}), "stop": (7, [7], {}),
                "stream": ("yes", 1), "max_tokens": (-1, "7", 1.5, 2147483648), "min_tokens": (-1, "1"),
            }.items() for value in values]
        wrong += [(completion, {"best_of": value}) for value in (0, -1, 2147483648, "2", 1.5)]
        with self.server.stream(prompt="x", max_tokens=3000, ignore_eos=True) as running:
            events = running.events()
            next(events)
            for path, fields in wrong:
                base = {"messages": [{"role": "user", "content": "!"}]} if path == chat else {"prompt": "!"}
                with self.subTest(path=path, **fields):
                    field = [name for name in fields if name != "logprobs" or path == completion][0]
                    error = self.refused(self.server.post(path, {**base, "max_tokens": 2, **fields}), 400, field)
                    self.assertEqual(error["type"], "invalid_request_error")
            rest = Collected([event for _, event in events])
        self.assertEqual((1 + len(rest.tokens), rest.finish), (3000, ["length"]), "the request in flight finishes")
        self.assertEqual(self.server.complete(prompt="!").json["choices"][0]["text"], "abc")

    # https://github.com/vllm-project/vllm/issues/7283: an empty prompt becomes zero tokens and stops the engine's loop.
    def test_H31_empty_prompts_and_wild_ids(self):
        for prompt in ("", [""], [], [[]], [-1], [320], [4294967296], [1.5], ["ok", ""], [[33], []], None, 7, {}, [None],
                       [True], [[33], "ok"]):
            with self.subTest(prompt=prompt):
                self.refused(self.server.complete(prompt=prompt), 400, "prompt")
        for messages in ([], None, {"role": "user"}, [{"role": "user"}], [{"content": "x"}], ["x"], [[]], 7,
                         [{"role": "user", "content": 7}], [{"role": "user", "content": [{"type": "image_url"}]}]):
            with self.subTest(messages=messages):
                self.refused(self.server.post("/v1/chat/completions", {"messages": messages}), 400, "messages")
        self.assertEqual(self.server.get("/health").status, 200)
        self.assertEqual(self.server.complete(prompt=[33]).json["choices"][0]["text"], "abc")
        mixed = self.server.complete(prompt=["!", "x!"]).json["choices"]
        self.assertEqual([(c["index"], c["text"]) for c in sorted(mixed, key=lambda c: c["index"])], [(0, "abc"), (1, "abc")])

    # https://github.com/vllm-project/vllm/issues/7283: an empty prompt is one token where a text begins with one, and none elsewhere.
    def test_H31_empty_prompt_after_a_token_that_begins_texts(self):
        with tempfile.TemporaryDirectory() as folder:
            write_chain_model(folder, [b"!", b"a", b"b", b"c"], begins=True)
            with Server("--threads", 1, model=folder) as server:
                for prompt, texts, tokens in [("", ["abc"], 1), ([""], ["abc"], 1), (["", "!"], ["abc", "abc"], 3)]:
                    got = server.complete(prompt=prompt).json
                    self.assertEqual(sorted(choice["text"] for choice in got["choices"]), texts)
                    self.assertEqual(got["usage"]["prompt_tokens"], tokens)
                self.refused(server.complete(prompt=[]), 400, "prompt")
                self.refused(server.complete(prompt="", add_special_tokens=False), 400, "prompt has 0 tokens")
                self.assertEqual(server.get("/health").status, 200)

    # https://github.com/vllm-project/vllm/issues/6521: max_tokens 0 with echo, to score a prompt, takes the server down.
    def test_H32_no_tokens_at_all(self):
        for body in ({"echo": True}, {"echo": False}, {"echo": True, "logprobs": 1}, {"logprobs": 1}):
            with self.subTest(**body):
                got = self.server.complete(prompt="!", max_tokens=0, **body)
                if got.status != 200:  # documented: without what would be returned the request is refused
                    self.refused(got, 400)
                    continue
                choice = got.json["choices"][0]
                self.assertEqual((choice["text"], choice["finish_reason"]), ("!" if body.get("echo") else "", "length"))
                self.assertEqual(got.json["usage"]["completion_tokens"], 0)
        one = self.server.complete(prompt="!", max_tokens=1).json
        self.assertEqual((one["choices"][0]["text"], one["choices"][0]["finish_reason"]), ("a", "length"))
        self.assertEqual(one["usage"]["completion_tokens"], 1)
        absent = self.server.complete(prompt="x", max_tokens=None).json
        self.assertEqual(absent["usage"]["completion_tokens"], 16, "null is as if absent: 16 for completions")
        for value in (-1, 2147483648, "7"):
            self.refused(self.server.complete(prompt="!", max_tokens=value), 400, "max_tokens", value)


class Context(ServerCase):
    ARGS = ("--threads", 1, "--max-model-len", 64)
    CHAINS = []

    # https://github.com/sgl-project/sglang/issues/9599: a prompt that fills the context, or nearly, crashes the server.
    def test_H30_prompts_at_the_limit(self):
        for length in (62, 63, 64, 65, 10_000):
            for limit in (1, 2, None):
                for stream in (False, True):
                    fits = length + (limit or 1) <= 64
                    body = {"prompt": "x" * length, "stream": stream, **({"max_tokens": limit} if limit else {})}
                    with self.subTest(length=length, limit=limit, stream=stream):
                        if fits and not stream:
                            got = self.server.complete(**body)
                            self.assertEqual(got.status, 200, got.body)
                            self.assertEqual(got.json["usage"]["completion_tokens"], limit or 64 - length)
                        elif fits:
                            with self.server.stream(**body) as running:
                                self.assertEqual(len(running.collect().tokens), limit or 64 - length)
                        else:  # a plain 400 in both modes, never a stream without tokens
                            got = self.server.complete(**body)
                            error = self.refused(got, 400, 64, length)
                            self.assertEqual(error["code"], "context_length_exceeded")
                            self.assertTrue(got.headers["content-type"].startswith("application/json"))


class Text(ServerCase):
    ARGS = ("--threads", 1)
    CHAINS = [[b"!", b"\xe6\x97", b"\xa5", b"\x80", b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"A"],
              [b"?", b"ab", b"c##", b"#E", b"ND", b"x"],
              [b"/", b"ef", b"g##", b"#EN", b"Z"],
              [b";", b"pq###ENDrs", b"t"],
              [b"+", b"u\xe2\x82", b"\xac\xe2\x82\xacv", b"w"],
              [b"-", b"k", b"l##", b"#"]]

    # https://github.com/ggml-org/llama.cpp/issues/9195: bytes that are no UTF-8 end the process when JSON is written.
    def test_H33_bytes_that_are_no_text(self):
        text, finish, usage = self.both_ways(prompt="!")
        # One U+FFFD per maximal invalid sequence: 80, FF, ED A0 80 (3) and F4 90 80 80 (4).
        self.assertEqual((text, finish), ("日" + INVALID * 9 + "A", "stop"))
        self.assertEqual(usage["completion_tokens"], 8)
        with self.server.stream(prompt="!") as stream:
            texts = [text_of(event["choices"][0]) for _, event in stream.events()]
        self.assertEqual(texts[:2], ["", "日"], "an event per token, and no half of a character")
        self.assertEqual(self.both_ways("/v1/chat/completions", messages=[{"role": "user", "content": "!"}])[0], text)

    # https://github.com/vllm-project/vllm/issues/3574: the beginning of a stop string is out when its end arrives.
    def test_H34_stop_strings_across_tokens(self):
        for prompt, stop, text, finish in [
                ("?", "###END", "abc", "stop"), ("/", ["###END"], "efg###ENZ", "stop"), ("?", ["##", "###END"], "abc", "stop"),
                (";", ["###END"], "pq", "stop"), ("+", ["€€"], "u", "stop"), ("-", ["###END"], "kl###", "stop"),
                ("?", ["a"], "", "stop"), ("?", ["never"], "abc###ENDx", "stop")]:
            with self.subTest(prompt=prompt, stop=stop):
                self.assertEqual(self.both_ways(prompt=prompt, stop=stop)[:2], (text, finish))
        self.assertEqual(self.both_ways(prompt="-", stop=["###END"], max_tokens=2)[:2], ("kl##", "length"),
                         "held text comes out at the end")

    # https://github.com/sgl-project/sglang/issues/39826: tokens after the stop are in one count and not in another.
    def test_H39_counts_end_with_the_token_that_ended(self):
        for body, tokens in [({"prompt": "?", "stop": "###END"}, 4), ({"prompt": "?"}, 6), ({"prompt": "?", "max_tokens": 2}, 2),
                             ({"prompt": ";", "stop": "###END"}, 1),
                             ({"prompt": "xyz", "max_tokens": 9, "ignore_eos": True}, 9)]:
            with self.subTest(**body):
                usage = self.both_ways(**body)[2]
                self.assertEqual(usage["completion_tokens"], tokens)
                self.assertEqual(usage["prompt_tokens"], len(body["prompt"]))
                self.assertEqual(usage["total_tokens"], usage["prompt_tokens"] + tokens)


class Cancelling(ServerCase):
    ARGS = ("--threads", 1, "--max-batch", 64)

    def round(self):
        clients = [Stream(self.server.port, "/v1/completions", {"prompt": f"{i} clients", "max_tokens": 4000, "stream": i % 2 == 0,
                                                               "ignore_eos": True}) for i in range(16)]
        for i, client in enumerate(clients):
            if i % 2 == 0:
                chunks = client.chunks()
                for _ in range(3):
                    next(chunks)
        for i, client in enumerate(clients):
            client.close(reset=i % 4 < 2)

    def fewest_descriptors(self):
        """Once connections that their clients have left are closed here too, which is when their turn comes."""
        fewest, end = self.server.descriptors(), time.monotonic() + 1
        while time.monotonic() < end:
            time.sleep(0.05)
            fewest = min(fewest, self.server.descriptors())
        return fewest

    # https://github.com/vllm-project/vllm/issues/9428: the engine goes on generating for clients that have left.
    def test_H35_clients_that_leave(self):
        free = self.server.wait_idle(1)["pages_not_held"]
        before = None
        for number in range(20):
            self.round()
            self.assertEqual(self.server.wait_idle(0.5)["pages_not_held"], free)
            if number == 4:
                before = (self.fewest_descriptors(), self.server.status_kb("Threads"), self.server.status_kb("VmRSS"))
        after = (self.fewest_descriptors(), self.server.status_kb("Threads"), self.server.status_kb("VmRSS"))
        self.assertEqual(after[:2], before[:2])
        if not SANITIZED:  # which keep freed memory back
            self.assertLessEqual(after[2] - before[2], 4096, "resident kilobytes of 15 more rounds")

    # https://github.com/sgl-project/sglang/issues/34149: an abort after the last prompt chunk still yields a token.
    def test_H36_leaving_while_the_prompt_is_computed(self):
        prompt = list(range(3, 3003))  # several chunks of the token budget
        cold = self.server.complete(prompt=prompt[:40], max_tokens=8).json
        generated = self.server.metrics()["vivace_generated_tokens_total"]
        for wait_s in (0.0, 0.01, 0.03, 0.1):
            client = Stream(self.server.port, "/v1/completions", {"prompt": prompt, "max_tokens": 500, "stream": True,
                                                                 "ignore_eos": True})
            time.sleep(wait_s)
            client.close(reset=True)
            metrics = self.server.wait_idle(1)
            self.assertEqual(metrics["pages_not_held"], metrics["vivace_kv_pages"])
        self.assertLess(self.server.metrics()["vivace_generated_tokens_total"] - generated, 4 * 250)
        warm = self.server.complete(prompt=prompt[:40], max_tokens=8).json
        self.assertEqual(warm["choices"][0]["text"], cold["choices"][0]["text"])


class Cache(ServerCase):
    ARGS = ("--threads", 1, "--page-tokens", 64, "--deterministic")

    # https://github.com/vllm-project/vllm/pull/17999: a prompt of whole pages is cached entirely and nothing is left to sample.
    def test_H37_a_prompt_that_is_cached_entirely(self):
        cached = {}
        for length in (63, 64, 65, 128, 129):
            prompt = [(7 * length + i) % 4000 + 3 for i in range(length)]
            answers = [self.server.complete(prompt=prompt, max_tokens=8, logprobs=1).json for _ in range(3)]
            for again in answers[1:]:
                self.assertEqual(again["choices"], answers[0]["choices"], length)
                cached[length] = again["usage"]["prompt_tokens_details"]["cached_tokens"]
                self.assertLess(cached[length], length)
            longer = self.server.complete(prompt=[*prompt, 5], max_tokens=8)
            self.assertEqual(longer.status, 200)
        self.assertEqual(list(cached.values()), [0, 0, 64, 64, 128])


class Preemption(ServerCase):
    # 12 pages of 16 tokens: 4 layers, keys and values, one head of 128 float32
    ARGS = ("--threads", 1, "--page-tokens", 16, "--kv-memory", 12 * 16 * 4 * 2 * 128 * 4, "--max-model-len", 128,
            "--deterministic")

    # https://github.com/vllm-project/vllm/issues/16832: a request that was preempted and computed again loses text.
    def test_H38_preempted_requests_lose_nothing(self):
        prompts = [[100 * i + j + 3 for j in range(20)] for i in range(4)]
        body = {"max_tokens": 100, "ignore_eos": True, "stream_options": {"include_usage": True}}
        alone = []
        for prompt in prompts:
            with self.server.stream(prompt=prompt, **body) as stream:
                alone.append(stream.collect().text)
        streams = [self.server.stream(prompt=prompt, **body) for prompt in prompts]
        got = [None] * 4

        def read(i):
            got[i] = streams[i].collect()

        readers = [threading.Thread(target=read, args=(i,)) for i in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        for stream in streams:
            stream.close()
        for one, text in zip(got, alone):
            self.assertEqual((len(one.tokens), one.text, one.finish), (100, text, ["length"]))
            self.assertEqual((one.usage[0]["prompt_tokens"], one.usage[0]["completion_tokens"]), (20, 100))
        metrics = self.server.metrics()
        self.assertGreater(metrics["vivace_preemptions_total"], 0, "the case is what it says")
        self.assertLess(metrics["vivace_preemptions_total"], 100)


class Load(Case):
    # https://github.com/sgl-project/sglang/issues/7551: with very many connections requests begin to fail.
    def test_H44_idle_slow_and_half_requests(self):
        with tempfile.TemporaryDirectory() as folder:
            write_chain_model(folder, [b"!", b"a", b"b", b"c"])
            with Server("--threads", 1, "--header-timeout", 2, "--write-timeout", 2, "--idle-timeout", 4, model=folder,
                        descriptors=256) as server:
                self.idle_connections(server)
                self.slow_readers(server)
                self.half_requests(server)
                self.assertEqual(server.complete(prompt="!").json["choices"][0]["text"], "abc")

    def answers(self, server):
        return server.complete(prompt="!", timeout=10).status == 200

    def idle_connections(self, server):
        before = server.descriptors()
        idle = []
        for _ in range(300):
            one = socket.create_connection(("127.0.0.1", server.port), timeout=10)
            idle.append(one)
        time.sleep(0.2)
        self.assertIsNone(server.process.poll())
        self.assertLess(server.descriptors(), 256)
        end = time.monotonic() + 20 * SLOWER  # those that say nothing are closed, so that a request comes through
        while True:
            try:
                if self.answers(server):
                    break
            except OSError:
                pass
            self.assertLess(time.monotonic(), end, "no request comes through")
            time.sleep(0.1)
        for one in idle:
            one.close()
        while server.descriptors() > before + 2:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)

    def slow_readers(self, server):
        body = {"prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True, "logprobs": 20}
        slow = [Stream(server.port, "/v1/completions", body, receive_buffer=2048) for _ in range(64)]
        start = time.monotonic()
        for _ in range(8):
            with server.stream(prompt="x", max_tokens=64, ignore_eos=True) as stream:
                self.assertEqual(len(stream.collect().tokens), 64)
        self.assertLess(time.monotonic() - start, 30 * SLOWER)
        end = time.monotonic() + 30 * SLOWER
        while (left := server.metrics()["vivace_sequences_cancelled_total"]) < 64:
            self.assertLess(time.monotonic(), end, f"only {left} of 64 slow readers were cut")
            time.sleep(0.1)
        server.wait_idle(1)
        for one in slow:
            one.close()

    def half_requests(self, server):
        half = [socket.create_connection(("127.0.0.1", server.port), timeout=20 * SLOWER) for _ in range(32)]
        for one in half:
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-")
        self.assertTrue(self.answers(server))
        for one in half:  # an answer of 408, or nothing: then the end of the connection
            while one.recv(4096):
                pass
            one.close()


if __name__ == "__main__":
    main()
