"""cmake --install: the tree is complete, may be moved, and a program of another project builds against it."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

from vivace import Case, QWEN, ROOT, SANITIZED, main

BUILD = pathlib.Path(os.environ.get("VIVACE_BUILD", ROOT / "build"))


def call(*args):
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{args} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


@unittest.skipIf(SANITIZED, "a build with a sanitizer installs nothing")
class Install(Case):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        call("cmake", "--install", BUILD, "--prefix", cls.folder / "first")
        cls.prefix = cls.folder / "moved"
        (cls.folder / "first").rename(cls.prefix)  # nothing may remember where it was installed
        call("cmake", "-G", "Ninja", "-S", ROOT / "examples" / "embed", "-B", cls.folder / "build",
             f"-DCMAKE_PREFIX_PATH={cls.prefix}")
        call("cmake", "--build", cls.folder / "build")

    def embed(self, *args):
        return subprocess.run([self.folder / "build" / "embed", *map(str, args)], capture_output=True, text=True,
                              timeout=60, check=False)

    def test_what_is_installed(self):
        there = {str(path.relative_to(self.prefix)) for path in self.prefix.rglob("*") if path.is_file()}
        for header in (ROOT / "include" / "vivace").glob("*.h"):
            self.assertIn(f"include/vivace/{header.name}", there)
        self.assertLessEqual({"bin/vivace", "share/doc/vivace/LICENSE"}, there)
        self.assertTrue(any(path.endswith("/libvivace_c.so") for path in there), there)
        self.assertEqual([name for name in there if name.endswith(".a")], [p for p in there if p.endswith("/libvivace.a")])
        for name in there:
            if name.endswith(".cmake"):
                text = (self.prefix / name).read_text()
                self.assertNotIn(str(self.folder), text, f"{name} names the folder of the installation")
                self.assertNotIn(str(ROOT), text, f"{name} names the folder of the sources")

    def test_operators_from_cc_and_c(self):
        folder = self.folder / "operators"
        call("cmake", "-G", "Ninja", "-S", ROOT / "examples" / "operators", "-B", folder, f"-DCMAKE_PREFIX_PATH={self.prefix}")
        call("cmake", "--build", folder)
        row, *printed = call(folder / "operator_cc").splitlines()
        self.assertRegex(row, r"^row cpu\.\w+$")
        self.assertEqual(printed, ["1 2 13", "3 4 17",
                                   "linear: parts[0].bias.shape[0] is 2, needs n0 = 3 (from parts[0].weight.shape[0])"])
        choice, *from_c = call(folder / "operator_c").splitlines()
        self.assertEqual(f"row {json.loads(choice)['row']}", row)
        self.assertEqual(from_c, printed)

    def test_a_program_in_c_needs_no_cc(self):
        folder = self.folder / "c"
        folder.mkdir()
        (folder / "main.c").write_text((ROOT / "examples" / "operators" / "main.c").read_text())
        (folder / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(c LANGUAGES C)\n"
                                               "find_package(vivace 0.1 REQUIRED)\nadd_executable(c main.c)\n"
                                               "target_link_libraries(c PRIVATE vivace::c)\n")
        call("cmake", "-G", "Ninja", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={self.prefix}")
        call("cmake", "--build", folder / "build")
        self.assertIn("\n3 4 17\n", call(folder / "build" / "c"))

    def test_the_program_alone(self):
        only = self.folder / "program"
        call("cmake", "--install", BUILD, "--strip", "--prefix", only, "--component", "program")
        there = sorted(str(path.relative_to(only)) for path in only.rglob("*") if path.is_file())
        self.assertEqual(there, ["bin/vivace", "share/doc/vivace/LICENSE"])
        self.assertLess((only / "bin" / "vivace").stat().st_size, (self.prefix / "bin" / "vivace").stat().st_size)

    def test_installed_program_runs(self):
        self.assertRegex(call(self.prefix / "bin" / "vivace", "--version"), r"\d+\.\d+\.\d+")

    def test_example_gives_the_text_of_the_program(self):
        prompts = ["1,2,3", "40,41,42,43,44,45,46", "7"]
        run = self.embed(QWEN, *prompts)
        self.assertEqual(run.returncode, 0, run.stderr)
        expected = ""
        for prompt in prompts:
            one = self.ok("generate", "--model", QWEN, "--prompt-ids", prompt, "--temperature", 0, "--max-tokens", 32, "--json")
            expected += one.json["text"] + "\n"
        self.assertEqual(run.stdout, expected)

    def test_example_says_what_is_wrong(self):
        run = self.embed(self.folder / "nowhere", "1")
        self.assertEqual((run.returncode, run.stdout), (1, ""))
        self.assertIn(str(self.folder / "nowhere"), run.stderr)
        run = self.embed(QWEN, "1", "2,99999999")
        self.assertEqual(run.returncode, 1)
        self.assertRegex(run.stderr, r"^2,99999999: .*99999999")

    def test_example_takes_token_ids_alone(self):
        for prompt in ["1,x", "x", "", "1,", ",1", "1,,2", "1x", "1;2", "1,2 3", "99999999999"]:
            run = self.embed(QWEN, "1,2", prompt)
            self.assertEqual((run.returncode, run.stdout), (2, ""), prompt)
            self.assertIn(f"{prompt}: needs token ids joined by commas", run.stderr)
        self.assertEqual(self.embed(QWEN, "1, 2 , 3").stdout, self.embed(QWEN, "1,2,3").stdout)

    def test_example_is_about_forty_lines(self):
        lines = (ROOT / "examples" / "embed" / "main.cc").read_text().splitlines()
        code = [line for line in lines if line.strip() and not re.match(r"\s*//", line)]
        self.assertLessEqual(len(code), 42)

    def test_a_version_that_does_not_fit_is_refused(self):
        other = self.folder / "other"
        other.mkdir()
        (other / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(other LANGUAGES CXX)\n"
                                              "find_package(vivace 9.0 REQUIRED)\n")
        run = subprocess.run(["cmake", "-G", "Ninja", "-S", other, "-B", other / "build", f"-DCMAKE_PREFIX_PATH={self.prefix}"],
                             capture_output=True, text=True, timeout=60, check=False)
        self.assertNotEqual(run.returncode, 0)
        self.assertIn("9.0", run.stderr)


if __name__ == "__main__":
    main()
