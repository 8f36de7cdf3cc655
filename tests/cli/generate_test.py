"""generate: JSON, greedy references, streaming, sampling options."""

import json
import os
import subprocess
import time

from vivace import BINARY, Case, HY3, QWEN, main


def references(model):
    return json.loads((model / "references.json").read_text())["cases"]


def agreed(case):
    """How many greedy ids must be equal: up to the first position whose two best candidates are too close."""
    for i, gap in enumerate(case["greedy_gap"]):
        if gap < 0.02:
            return i
    return len(case["greedy_gap"])


class Json(Case):
    def generate(self, model, *args):
        return self.ok("generate", "--model", model, "--json", *args).json

    def test_shape(self):
        got = self.generate(QWEN, "--prompt", "The", "--max-tokens", 4, "--logprobs", 2, "--ignore-eos")
        self.assertEqual(set(got), {"prompt_ids", "ids", "text", "logprobs", "finish_reason", "usage", "ttft_ms", "tpot_ms"})
        self.assertEqual(len(got["ids"]), 4)
        self.assertEqual(got["finish_reason"], "length")
        self.assertEqual(got["usage"]["prompt_tokens"], len(got["prompt_ids"]))
        self.assertEqual(got["usage"]["completion_tokens"], 4)
        self.assertGreater(got["ttft_ms"], 0)
        self.assertGreater(got["tpot_ms"], 0)
        for id_, entry in zip(got["ids"], got["logprobs"], strict=True):
            self.assertEqual(entry["id"], id_)
            self.assertEqual(len(entry["top"]), 2)
            self.assertEqual(entry["top"][0]["id"], id_, "greedy takes the most likely token")
            self.assertAlmostEqual(entry["top"][0]["logprob"], entry["logprob"], places=5)
            self.assertGreaterEqual(entry["top"][0]["logprob"], entry["top"][1]["logprob"])

    def test_one_token_has_no_time_per_token(self):
        got = self.generate(HY3, "--prompt-ids", "1,2", "--max-tokens", 1, "--ignore-eos")
        self.assertIsNone(got["tpot_ms"])
        self.assertIsNone(got["logprobs"])

    def test_greedy_references(self):
        for model in [QWEN, HY3]:
            for case in references(model):
                ids = ",".join(map(str, case["prompt_ids"]))
                got = self.generate(model, "--prompt-ids", ids, "--max-tokens", len(case["greedy_ids"]), "--ignore-eos",
                                    "--temperature", 0, "--logprobs", 8)
                with self.subTest(model=model.name, prompt=case["prompt_len"]):
                    upto = agreed(case)
                    self.assertEqual(got["ids"][:upto], case["greedy_ids"][:upto])
                    first = {t["id"]: t["logprob"] for t in got["logprobs"][0]["top"]}
                    for id_, logprob in zip(case["top_ids"], case["top_logprobs"]):
                        if id_ in first:
                            self.assertAlmostEqual(first[id_], logprob, delta=0.01)
                    worst = min(first.values())
                    for id_, logprob in zip(case["top_ids"], case["top_logprobs"]):
                        self.assertTrue(id_ in first or logprob <= worst + 0.02)

    def test_seed_repeats(self):
        args = ["--prompt", "The", "--max-tokens", 12, "--seed", 5, "--ignore-eos"]
        first, second = self.generate(QWEN, *args), self.generate(QWEN, *args)
        self.assertEqual(first["ids"], second["ids"])
        others = [self.generate(QWEN, "--prompt", "The", "--max-tokens", 12, "--seed", s, "--ignore-eos")["ids"] for s in (6, 7)]
        self.assertTrue(any(ids != first["ids"] for ids in others), "--seed implies drawing")

    def test_stop(self):
        whole = self.generate(QWEN, "--prompt", "The", "--max-tokens", 24, "--ignore-eos")["text"]
        stop = whole[len(whole) // 2:][:3]
        got = self.generate(QWEN, "--prompt", "The", "--max-tokens", 24, "--ignore-eos", "--stop", "{}", "--stop", stop)
        self.assertEqual(got["text"], whole[:whole.index(stop)])
        self.assertEqual(got["finish_reason"], "stop")

    def test_logit_bias_forces_a_token(self):
        got = self.generate(HY3, "--prompt-ids", "1,2,3", "--max-tokens", 3, "--logit-bias", "77=1000", "--ignore-eos")
        self.assertEqual(got["ids"], [77, 77, 77])

    def test_special_tokens_are_parsed_in_a_prompt(self):
        got = self.generate(QWEN, "--prompt", "<|im_start|>user", "--max-tokens", 1)
        self.assertEqual(got["prompt_ids"][0], 1)

    def test_invalid_utf8_cannot_break_the_document(self):
        for i in range(3):
            got = self.ok("generate", "--model", QWEN, "--prompt-ids", "165,248,101", "--max-tokens", 16, "--seed", i,
                          "--temperature", 3, "--ignore-eos", "--json")
            json.loads(got.out.decode("utf-8"))
            self.assertEqual(got.out.count(b"\n"), 1, "one document on one line")
        prompt = subprocess.run([BINARY, "tokenize", "--model", str(QWEN), "--json", "--text", b"a\xff\xfeb"],
                                capture_output=True, check=True)
        self.assertEqual(json.loads(prompt.stdout.decode("utf-8"))["text"], "a\ufffd\ufffdb")

    def test_prefer_a_row(self):
        args = ["--prompt-ids", "1,2,3", "--max-tokens", 4, "--ignore-eos"]
        reference = self.generate(HY3, *args, "--prefer", "rms_norm=reference")
        self.assertEqual(reference["ids"], self.generate(HY3, *args)["ids"])


class Text(Case):
    def test_text_is_the_only_thing_on_standard_output(self):
        args = ["generate", "--model", QWEN, "--prompt", "The", "--max-tokens", 12, "--ignore-eos"]
        text = self.ok(*args).text
        self.assertEqual(text, self.ok(*args, "--json").json["text"] + "\n")

    def test_ids_without_a_tokenizer(self):
        text = self.ok("generate", "--model", HY3, "--prompt-ids", "1,2", "--max-tokens", 3, "--ignore-eos").text
        self.assertRegex(text, r"^\d+,\d+,\d+\n$")

    def test_streams_into_a_pipe(self):
        begun = time.monotonic()
        process = subprocess.Popen([BINARY, "generate", "--model", str(QWEN), "--prompt", "The", "--max-tokens", "1500",
                                    "--ignore-eos", "--seed", "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        first = os.read(process.stdout.fileno(), 65536)
        first_after = time.monotonic() - begun
        while os.read(process.stdout.fileno(), 65536):
            pass
        whole = time.monotonic() - begun
        process.stdout.close()
        self.assertEqual(process.wait(), 0)
        self.assertTrue(first)
        self.assertLess(first_after, whole / 2, "the first piece comes long before the end")


if __name__ == "__main__":
    main()
