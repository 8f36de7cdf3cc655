"""score: perplexity as the reference has it, windows, separators. The full 64 windows are a test of the model."""

import tempfile

from vivace import Case, HY3, QWEN, main


class Score(Case):
    def test_counts_and_repeats(self):
        args = ["score", "--model", QWEN, "--text-file", QWEN / "sample.txt", "--window", 128, "--separator-id", 0]
        got = self.ok(*args, "--max-windows", 4, "--json").json
        self.assertEqual(got["tokens"], 4 * 127, "a window's first token is not predicted")
        self.assertGreater(got["perplexity"], 1)
        self.assertLess(got["perplexity"], 4096, "better than guessing among 4,096 tokens")
        self.assertEqual(self.ok(*args, "--max-windows", 4, "--json").json["perplexity"], got["perplexity"])
        text = self.ok(*args, "--max-windows", 4)
        self.assertIn(f"{got['perplexity']:.4g}"[:4], text.text)

    def test_text_that_is_shorter_than_a_window(self):
        with tempfile.NamedTemporaryFile("wb", suffix=".txt") as file:
            file.write("Hello, world!\0naïve".encode())
            file.flush()
            run = self.ok("score", "--model", QWEN, "--text-file", file.name, "--window", 1024, "--json")
            self.assertGreater(run.json["tokens"], 5)

    def test_failures(self):
        base = ["score", "--model", QWEN, "--window", 128]
        self.fails(1, "/nowhere/text.txt", *base, "--text-file", "/nowhere/text.txt")
        with tempfile.NamedTemporaryFile("wb") as empty:
            self.fails(1, empty.name, *base, "--text-file", empty.name)
        self.fails(2, "--window is 99999, needs 2 to", "score", "--model", QWEN, "--text-file", QWEN / "sample.txt", "--window", 99999)
        self.fails(1, "no tokenizer", "score", "--model", HY3, "--text-file", QWEN / "sample.txt", "--window", 128)
        self.fails(2, "77777", *base, "--text-file", QWEN / "sample.txt", "--separator-id", 77777)


if __name__ == "__main__":
    main()
