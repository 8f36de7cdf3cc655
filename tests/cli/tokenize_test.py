"""tokenize: reference ids, control tokens, JSON."""

import json
import pathlib
import shutil
import tempfile

from vivace import Case, QWEN, main


class Tokenize(Case):
    def test_references(self):
        for case in json.loads((QWEN / "tokenizer_references.json").read_text()):
            with self.subTest(text=case["text"]):
                got = self.ok("tokenize", "--model", QWEN, "--text", case["text"], "--parse-special", "--json").json
                self.assertEqual(set(got), {"ids", "text"})
                self.assertEqual(got["ids"], case["ids"])
                self.assertEqual(got["text"], case["back"])

    def test_control_tokens_are_text_by_default(self):
        text = "<|im_start|>user"
        plain = self.ok("tokenize", "--model", QWEN, "--text", text, "--json").json
        self.assertNotIn(1, plain["ids"])
        self.assertEqual(plain["text"], text)

    def test_table(self):
        run = self.ok("tokenize", "--model", QWEN, "--text", "a\nb")
        self.assertIn("\\n", run.text)
        self.assertIn("tokens", run.err)

    def test_errors_name_the_folder(self):
        with tempfile.TemporaryDirectory() as folder:
            model = pathlib.Path(folder) / "model"
            shutil.copytree(QWEN, model)
            (model / "tokenizer.json").write_text("{")
            for command in [["tokenize", "--text", "x"], ["generate", "--prompt-ids", "1"], ["bench", "serve"]]:
                self.fails(1, f"{model}: tokenizer.json: ", *command, "--model", model)

    def test_empty_text(self):
        self.assertEqual(self.ok("tokenize", "--model", QWEN, "--text", "", "--json").json, {"ids": [], "text": ""})


if __name__ == "__main__":
    main()
