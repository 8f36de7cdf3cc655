"""The server as users of OpenAI's Python client see it. Skipped without that package: ./run test installs it under build/."""

import json
import pathlib
import tempfile

from chain_model import write_chain_model
from server import Case, Server, main

try:
    import openai
except ImportError as missing:
    print(f"skipped: {missing}; ./run test installs tests/serve/requirements.txt")
    raise SystemExit(77) from missing

KEY = "sk-of-the-test"


class Client(Case):
    @classmethod
    def setUpClass(cls):
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        write_chain_model(folder, [b"!", b"Hello", b", ", b"\xe4\xb8", b"\x96", b"\xe7\x95\x8c", b"."])
        keys = pathlib.Path(folder, "keys")
        keys.write_text(f"{KEY}\n")
        cls.chain = cls.enterClassContext(Server("--threads", 1, "--api-key-file", keys, "--served-model-name", "chain",
                                                 "--max-model-len", 256, model=folder))
        cls.tiny = cls.enterClassContext(Server("--threads", 1, "--deterministic", "--served-model-name", "tiny"))
        cls.client = cls.open(cls.chain)
        cls.sampler = cls.open(cls.tiny)

    @classmethod
    def open(cls, server, key=KEY):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0, timeout=60)
        cls.addClassCleanup(client.close)
        return client

    def chat(self, **more):
        return self.client.chat.completions.create(model="chain", messages=[{"role": "user", "content": "say !"}],
                                                   **{"temperature": 0, **more})

    def sample(self, **more):
        return self.sampler.completions.create(model="tiny", prompt="The", **{"max_tokens": 24, **more})

    def test_models(self):
        self.assertEqual([model.id for model in self.client.models.list()], ["chain"])
        self.assertEqual(self.client.models.retrieve("chain").id, "chain")
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("other")

    def test_chat(self):
        got = self.chat()
        self.assertEqual(got.object, "chat.completion")
        self.assertEqual(got.choices[0].message.role, "assistant")
        self.assertEqual(got.choices[0].message.content, "Hello, 世界.")
        self.assertEqual(got.choices[0].finish_reason, "stop")
        self.assertEqual((got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens), (5, 7, 12))

    def test_chat_streaming(self):
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        self.assertEqual("".join(delta.content or "" for delta in deltas), "Hello, 世界.")
        self.assertEqual([delta.role for delta in deltas if delta.role], ["assistant"])
        self.assertEqual([c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason], ["stop"])
        self.assertEqual(chunks[-1].usage.completion_tokens, 7)
        self.assertEqual(len({chunk.id for chunk in chunks}), 1)

    def test_completions(self):
        got = self.client.completions.create(model="chain", prompt=["!", "x"], max_tokens=2, temperature=0)
        self.assertEqual(got.object, "text_completion")
        self.assertEqual([(c.index, c.text, c.finish_reason) for c in got.choices], [(0, "Hello, ", "length"), (1, "xx", "length")])
        stream = self.client.completions.create(model="chain", prompt="!", stream=True, temperature=0)
        self.assertEqual("".join(chunk.choices[0].text for chunk in stream), "Hello, 世界.")

    def test_stop(self):
        got = self.chat(stop=["世界"])
        self.assertEqual((got.choices[0].message.content, got.choices[0].finish_reason), ("Hello, ", "stop"))
        stream = self.chat(stop="o,", stream=True)
        self.assertEqual("".join(chunk.choices[0].delta.content or "" for chunk in stream), "Hell")

    def test_seed(self):
        texts = [self.sample(seed=seed, temperature=1.5).choices[0].text for seed in (7, 7, 8)]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])
        streamed = "".join(c.choices[0].text for c in self.sample(seed=7, temperature=1.5, stream=True))
        self.assertEqual(streamed, texts[0])

    def test_n(self):
        got = self.sample(n=3, temperature=1.5, seed=5)
        self.assertEqual(sorted(choice.index for choice in got.choices), [0, 1, 2])
        self.assertGreater(len({choice.text for choice in got.choices}), 1)
        self.assertEqual(got.usage.completion_tokens, 3 * 24)
        texts = {}
        for chunk in self.sample(n=3, temperature=1.5, seed=5, stream=True):
            texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
        self.assertEqual(texts, {choice.index: choice.text for choice in got.choices})

    def test_logprobs_of_completions(self):
        got = self.sample(logprobs=3, temperature=0).choices[0]
        count = len(got.logprobs.tokens)
        self.assertEqual(count, 24)
        self.assertEqual([len(x) for x in (got.logprobs.token_logprobs, got.logprobs.top_logprobs, got.logprobs.text_offset)],
                         [count] * 3)
        for value, top in zip(got.logprobs.token_logprobs, got.logprobs.top_logprobs):
            self.assertLessEqual(value, 0)
            self.assertAlmostEqual(max(top.values()), value, places=5, msg="greedy takes the best")

    def test_logprobs_of_chat(self):
        for stream in (False, True):
            got = self.chat(logprobs=True, top_logprobs=2, stream=stream)
            content = ([part for chunk in got if chunk.choices[0].logprobs for part in chunk.choices[0].logprobs.content]
                       if stream else got.choices[0].logprobs.content)
            self.assertGreaterEqual(len(content), 6)
            self.assertEqual(content[0].token, "Hello")
            self.assertEqual(content[0].bytes, list(b"Hello"))
            self.assertEqual(bytes(content[2].bytes + content[3].bytes).decode(), "世", "halves of a character have their bytes")
            self.assertTrue(all(len(part.top_logprobs) == 2 for part in content))
            self.assertAlmostEqual(content[0].logprob, 0, places=4)

    def test_logit_bias(self):
        forced = self.client.completions.create(model="chain", prompt="!", max_tokens=4, temperature=0, logit_bias={"122": 100})
        self.assertEqual(forced.choices[0].text, "zzzz")

    def test_usage_equals_in_both_modes(self):
        plain = self.sample(temperature=0).usage
        last = list(self.sample(temperature=0, stream=True, stream_options={"include_usage": True}))[-1]
        self.assertEqual(last.choices, [])
        self.assertEqual((last.usage.prompt_tokens, last.usage.completion_tokens), (plain.prompt_tokens, plain.completion_tokens))

    def test_errors(self):
        with self.assertRaises(openai.AuthenticationError) as caught:
            self.open(self.chain, key="sk-wrong").models.list()
        self.assertNotIn("sk-wrong", str(caught.exception), "a key is never repeated")
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.completions.create(model="other", prompt="!")
        self.assertIn("other", caught.exception.message)
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(temperature=3.5, max_tokens=-2)
        self.assertIn(caught.exception.param, ("temperature", "max_tokens"))
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(max_tokens=5000)
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        self.assertIn("256", caught.exception.message)
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        for field, value in {"tools": [tool], "response_format": {"type": "json_object"}}.items():
            with self.assertRaises(openai.BadRequestError) as caught:
                self.chat(**{field: value})
            self.assertEqual(caught.exception.param, field)

    def test_a_client_that_stops_reading_ends_its_request(self):
        stream = self.sampler.completions.create(model="tiny", prompt="The", max_tokens=4000, stream=True,
                                                 extra_body={"ignore_eos": True})
        for _, _ in zip(range(3), stream):
            pass
        stream.close()
        self.tiny.wait_idle(1)

    def test_extra_body(self):
        got = self.client.completions.create(model="chain", prompt="!", max_tokens=12, temperature=0,
                                             extra_body={"ignore_eos": True, "top_k": 1, "min_tokens": 9})
        self.assertEqual(got.usage.completion_tokens, 12)

    def test_raw_body_is_json_in_utf8(self):
        raw = self.client.chat.completions.with_raw_response.create(model="chain", messages=[{"role": "user", "content": "!"}])
        self.assertEqual(json.loads(raw.content.decode("utf-8"))["choices"][0]["message"]["content"], "Hello, 世界.")


if __name__ == "__main__":
    main()
