#!/usr/bin/env python3
"""Writes tests/data/tokenizer_references.json: ids by Hugging Face's `tokenizers` for variants of one tokenizer.json.

    python3 -m venv /tmp/refs && /tmp/refs/bin/pip install tokenizers==0.23.3
    /tmp/refs/bin/python tools/make_tokenizer_references.py tests/data/tiny-qwen3-moe/tokenizer.json \
        tests/data/tokenizer_references.json --count 40 --seed 1

A variant is a JSON merge patch (RFC 7396) of that file. For each there are fixed and random texts with the ids that
text gives when added tokens are parsed ("ids") and when control tokens are taken as text ("ids_as_text").
"""
import argparse
import copy
import json
import random

import tokenizers

GPT2_LIKE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
NO_REGEX = dict(GPT2_LIKE, use_regex=False)


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def added(token_id, content, special, normalized):
    return {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": normalized, "special": special}


BASE_ADDED = [added(0, "<|endoftext|>", True, False), added(1, "<|im_start|>", True, False),
              added(2, "<|im_end|>", True, False)]
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
VARIANTS = {
    "plain": {},
    "nfc": {"normalizer": {"type": "NFC"},
            "added_tokens": BASE_ADDED + [added(4096, "<think>", False, False), added(4097, "</think>", False, False),
                                          added(4098, "<caf\u00e9>", False, True)]},
    "gpt2": {"pre_tokenizer": GPT2_LIKE},
    "smollm": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True}, GPT2_LIKE]}},
    "llama3": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(LLAMA3), NO_REGEX]},
               "model": {"ignore_merges": True}},
    "digits": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": False},
        {"type": "Split", "pattern": {"String": "(a)"}, "behavior": "Isolated", "invert": False}, NO_REGEX]}},
}

PIECES = ["a", "B", "the ", " and", "Hello", "'s", "'LL", "'re", "don't", " ", "  ", "   ", "\n", "\r\n", "\t", "\n\n", ".", "...",
          "!?", "(a)", "-", "--", "_", "1", "23", "4567", "\u0661\u0662", "\u00bd", "\u2167", "\u00e9", "e\u0301",
          "\u00c5", "A\u030a", "\u212b", "q\u0307\u0323", "\u1e0b\u0323", "\uac00", "\u1100\u1161\u11a8", "\u0958",
          "\u65e5\u672c", "\u8a9e", "\u4e00", "\U0001f642", "\U0001f469\u200d\U0001f4bb", "\u200b", "\u00a0", "\u3000",
          "\u0085", "\u180e", "\u2028", "\u0000", "\u001c", "\ufeff", "\ufffd", "\u05d0\u05b0", "\u0e01\u0e33", "\u0928\u093f",
          "<think>", "</think>", "<caf\u00e9>", "<cafe\u0301>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_",
          "end|>", "\u017f", "'\u017f", "\u1e9e", "\u01c5", "\u02b0", "\u0300", "x = 3.14;", "{\"k\": [1, 2]}", "https://x.y/z?a=b"]
FIXED = ["", " ", "\n", "a", "one", " one", "user", "aaaa" * 20, "\u4e00" * 50, "." * 70, " " * 33, "\n" * 21, "1" * 17,
         "\u00e9" * 40, "QUJDREVGRw==/+abcdEFGH0123" * 8, "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|><|im_start|>"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer_json")
    parser.add_argument("out")
    parser.add_argument("--count", type=int, default=40, help="random texts per variant")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    base = json.load(open(args.tokenizer_json, encoding="utf-8"))
    rng = random.Random(args.seed)
    cases = []
    for name, patch in VARIANTS.items():
        data = copy.deepcopy(base)
        for key, value in patch.items():
            if key == "model":
                data[key].update(value)
            else:
                data[key] = value
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
        texts = FIXED + ["".join(rng.choice(PIECES) for _ in range(rng.randint(1, 24))) for _ in range(args.count)]
        for text in texts:
            tokenizer.encode_special_tokens = False
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            tokenizer.encode_special_tokens = True
            as_text = tokenizer.encode(text, add_special_tokens=False).ids
            cases.append({"variant": name, "text": text, "ids": ids, "ids_as_text": as_text})
    with open(args.out, "w", encoding="utf-8") as out:
        out.write('{"made_by": "tokenizers %s",\n"variants": %s,\n"cases": [\n' %
                  (tokenizers.__version__, json.dumps(VARIANTS)))
        out.write(",\n".join(json.dumps(case) for case in cases))
        out.write("\n]}\n")


if __name__ == "__main__":
    main()
