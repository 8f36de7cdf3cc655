#!/usr/bin/env python3
"""Writes docs/field-cases.md to standard output: which tests stand for faults that users reported elsewhere.

A test that does has the number of its case in its name (H and two digits) and, in the comment before it, the link to the
report and the symptom: "// https://...: symptom.", in Python "# https://...: symptom." The page is a list of these; a test
notices a stale one.

  tools/field_cases.py > docs/field-cases.md
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent

KINDS = [
    ("Pages of keys and values, and what is split at their borders", [1, 2]),
    ("Nothing to do: no rows, no keys, no tokens", [3, 4]),
    ("Slots that nobody should see", [5]),
    ("Offsets that do not fit their integer", [6, 7]),
    ("Head counts, ratios and query lengths", [8, 9]),
    ("Scratch memory", [10, 11]),
    ("Alignment", [22]),
    ("Expert ids and router scores", [16, 17, 18]),
    ("Numbers in the sampler", [23, 24]),
    ("Rules of the sampler", [25, 26, 27]),
    ("The same request in other company", [28]),
    ("Requests to refuse", [29, 30, 31, 32]),
    ("Streamed text", [33, 34]),
    ("Cancelling", [35, 36]),
    ("Prefix cache", [37]),
    ("Preemption", [38]),
    ("Counting tokens", [39]),
    ("Many and slow clients", [44]),
    ("Model files", [40, 41]),
    ("Tokenizer", [42, 43]),
]

CPP_TEST = re.compile(r"((?:^[ ]*///?[^\n]*\n)+)^TEST\w*\((\w+),\s*(\w+)\)", re.MULTILINE)
PYTHON_TEST = re.compile(r"((?:^[ ]*#[^\n]*\n)+)^[ ]+def (test_\w+)", re.MULTILINE)
PYTHON_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
LINK = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)")


def commented_tests():
    """(path, comment, suite, test) of every test with a comment before it."""
    for path in sorted((ROOT / "tests").rglob("*_test.cc")):
        for comment, suite, name in CPP_TEST.findall(path.read_text()):
            yield path, comment, suite, name
    for path in sorted((ROOT / "tests").rglob("*_test.py")):
        text = path.read_text()
        for match in PYTHON_TEST.finditer(text):
            yield path, match[1], PYTHON_CLASS.findall(text[:match.start()])[-1], match[2]


def field_cases():
    """(case number, link, short name of the link, symptom, program, test) of every test with a link."""
    found = []
    for path, comment, suite, name in commented_tests():
        lines = [line.strip().lstrip("/#").strip() for line in comment.strip().splitlines()]
        text = " ".join(lines)
        link = LINK.search(text)
        number = re.search(r"H(\d\d)", suite + "." + name)
        if not link:
            continue
        if not number:
            raise SystemExit(f"{path}: {suite}.{name} has a link and no case number (H and two digits) in its name")
        symptom = re.split(r"(?<=[a-z])\.(?: |$)", re.sub(r"^\s*[:-]\s+", "", text[link.end():]))[0].rstrip(".")
        if not symptom:
            raise SystemExit(f"{path}: {suite}.{name} has a link without a symptom")
        program = path.stem if path.suffix == ".cc" else str(path.relative_to(ROOT))
        found.append((int(number[1]), link[0], f"{link[1]}#{link[2]}", symptom, program, f"{suite}.{name}"))
    return found


def page():
    cases = field_cases()
    known = {number for _, numbers in KINDS for number in numbers}
    for number, *_, test in cases:
        if number not in known:
            raise SystemExit(f"{test}: case {number} belongs to no kind in {pathlib.Path(__file__).name}")
    lines = ["# Field cases", "",
             "Faults that users of other engines and kernel libraries reported, each as a test that would fail if this",
             "project had it. The inputs are made up; the link leads to the report. Written by",
             "`tools/field_cases.py > docs/field-cases.md` from the comments of the tests; a test notices a stale page.",
             "One test alone: `build/tests/PROGRAM --gtest_filter=TEST`, and `python3 PROGRAM TEST` for those over HTTP."]
    for kind, numbers in KINDS:
        rows = sorted(case for case in cases if case[0] in numbers)
        if not rows:
            continue
        lines += ["", f"## {kind}", "", "| report | symptom | test |", "|---|---|---|"]
        lines += [f"| [{short}]({link}) | {symptom.replace('|', chr(92) + '|')} | `{program}`: `{test}` |"
                  for _, link, short, symptom, program, test in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
