"""Every example of docs/python.md runs, and every operator has one."""

import contextlib
import io
import re
import unittest

import package

package.need("numpy", "vivace")
import vivace  # noqa: E402

PAGE = (package.ROOT / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


class Examples(unittest.TestCase):
    def test_they_run(self):
        self.assertGreater(len(BLOCKS), 12)
        start = {}
        exec(compile(BLOCKS[0], "docs/python.md", "exec"), start)
        for i, block in enumerate(BLOCKS[1:], 1):
            with self.subTest(block=i), contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block, f"docs/python.md, example {i}", "exec"), dict(start))

    def test_every_operator_has_one(self):
        for operator in vivace.operators():
            self.assertRegex("\n".join(BLOCKS), rf"vivace\.{operator['op']}\(")


if __name__ == "__main__":
    package.main()
