"""The repository as a whole: layers, what the program links, and that the documents describe what exists."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

from vivace import BINARY, Case, ROOT, SANITIZED, main, vivace

# A layer may include itself and those before it. `bench` drives engines and servers.
LAYERS = ["include", "core", "device", "cpu", "comm", "ops", "model", "engine", "bench", "server", "c_api", "apps"]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]


def layer_of(path):
    parts = path.split("/")
    if parts[0] in ("include", "vivace"):
        return "include"
    if parts[0] == "apps":
        return "apps"
    return parts[1] if parts[0] == "src" else None


class Layers(Case):
    def test_includes_point_upwards_only(self):
        wrong, seen = [], 0
        for folder in ["include", "src", "apps"]:
            for path in sorted((ROOT / folder).rglob("*")):
                if path.suffix not in (".h", ".cc", ".cu", ".cuh"):
                    continue
                name = str(path.relative_to(ROOT))
                mine = LAYERS.index(layer_of(name))
                for line in path.read_text().splitlines():
                    match = re.match(r'\s*#include "((?:src|apps|vivace)/[^"]+)"', line)
                    if not match:
                        continue
                    seen += 1
                    if LAYERS.index(layer_of(match[1])) > mine:
                        wrong.append(f"{name} includes {match[1]}")
        self.assertEqual(wrong, [])
        self.assertGreater(seen, 100, "the pattern finds includes")

    def test_public_headers_are_free_of_third_parties(self):
        for path in (ROOT / "include").rglob("*.h"):
            for header in re.findall(r"#include <([^>]+)>", path.read_text()):
                self.assertNotRegex(header, r"cuda|torch|cutlass|nlohmann|fmt|hwy|spdlog", path.name)

    def test_every_layer_has_a_page(self):
        for folder in [*(ROOT / "src").iterdir(), *(ROOT / "src" / "ops").iterdir()]:
            if folder.is_dir() and any(folder.rglob("*.cc")):
                self.assertTrue((folder / "README.md").exists(), folder)


class Program(Case):
    def test_links_only_what_every_linux_has(self):
        if SANITIZED:
            self.skipTest("a sanitizer brings its own libraries")
        listing = subprocess.run(["readelf", "-d", BINARY], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"NEEDED.*\[(.+?)\]", listing))
        allowed = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2",
                   "ld-linux-aarch64.so.1"}
        self.assertLessEqual(needed, allowed)


@unittest.skipIf(SANITIZED, "a sanitizer brings its own libraries and symbols")
class SharedLibrary(Case):
    LIBRARY = pathlib.Path(os.environ.get("VIVACE_BUILD", ROOT / "build")) / "lib" / "libvivace_c.so"

    def read(self, *args):
        return subprocess.run([*args, self.LIBRARY], capture_output=True, text=True, check=True).stdout

    def test_needs_the_c_library_alone(self):
        needed = set(re.findall(r"NEEDED.*\[(.+?)\]", self.read("readelf", "-d")))
        self.assertLessEqual(needed, {"libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"})

    def test_exports_what_the_header_declares(self):
        exported = {line.split()[-1] for line in self.read("nm", "-D", "--defined-only").splitlines()}
        header = re.sub(r"/\*.*?\*/", "", (ROOT / "include" / "vivace" / "c_api.h").read_text(), flags=re.S)
        declared = set(re.findall(r"\b(vivace_\w+)\(", header))
        self.assertEqual(exported, declared)
        self.assertGreater(len(declared), 50)

    def test_every_operator_is_there(self):
        header = (ROOT / "include" / "vivace" / "c_api.h").read_text()
        for name in [row["op"] for row in self.ok("ops", "--json").json]:
            for suffix in ("", "_cost", "_explain"):
                self.assertIn(f"vivace_code vivace_{name}{suffix}(", header)


def commands(document):
    """The command lines of a document's code blocks, continuation lines joined."""
    text = (ROOT / document).read_text()
    for block in re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.strip().removeprefix("$ ")


class Documents(Case):
    def test_list_of_field_cases_is_current(self):
        made = subprocess.run([sys.executable, ROOT / "tools" / "field_cases.py"], capture_output=True, text=True, check=True)
        page = (ROOT / "docs" / "field-cases.md").read_text()
        self.assertEqual(page, made.stdout, "stale: tools/field_cases.py > docs/field-cases.md")
        self.assertGreater(page.count("https://github.com/"), 40)

    def test_commands_exist(self):
        checked = 0
        for document in DOCUMENTS:
            for line in commands(document):
                words = shlex.split(line, comments=True) if line.startswith(("./run", "vivace", "build/bin/vivace")) else []
                if not words:
                    continue
                checked += 1
                if words[0] == "./run":
                    self.assertRegex((ROOT / "run").read_text(), rf"(?m)^\s+{re.escape(words[1])}\)", f"{document}: {line}")
                    continue
                flags = [w.split("=")[0] for w in words if w.startswith("--")]
                command = []
                for word in words[1:]:
                    if word.startswith("-"):
                        break
                    command.append(word)
                help_text = vivace(*command, "--help")
                self.assertEqual(help_text.code, 0, f"{document}: {line}")
                for flag in flags:
                    self.assertIn(flag, help_text.text, f"{document}: {line}")
        self.assertGreater(checked, 8)

    def test_links_and_named_files_exist(self):
        for document in DOCUMENTS + [str(p.relative_to(ROOT)) for p in (ROOT / "src").rglob("README.md")]:
            path = ROOT / document
            prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
            for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose):
                if not re.match(r"https?:", target):
                    self.assertTrue((path.parent / target).exists(), f"{document} links to {target}")
            for target in re.findall(r"`((?:src|include|apps|tests|docs|tools|cmake|bench)/[\w./-]+\.\w+)`", path.read_text()):
                self.assertTrue((ROOT / target).exists(), f"{document} names {target}")


class TheScript(Case):
    """./run build, with a cmake that says and does what it is told."""

    def build(self, said, code):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "run").write_text((ROOT / "run").read_text())
        tools = folder / "tools"
        tools.mkdir()
        for name, does in (("dpkg-query", "echo install ok installed"), ("cmake", f"cat <<'TEXT'\n{said}\nTEXT\nexit {code}")):
            (tools / name).write_text(f"#!/bin/sh\n{does}\n")
            (tools / name).chmod(0o755)
        (folder / "build").mkdir()
        (folder / "build" / "build.ninja").touch()
        ran = subprocess.run(["bash", "run", "build"], cwd=folder, capture_output=True, text=True, timeout=60,
                             env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"})
        return ran.returncode, ran.stderr, (folder / "build" / "build.log").read_text()

    def test_what_compilers_say_stays_in_a_file(self):
        notes = "ptxas warning : Registers are spilled\nptxas info : Potential Performance Loss"
        code, shown, log = self.build(f"@1 of 2 a.o\n{notes}\n@2 of 2 b.o", 0)
        self.assertEqual((code, log), (0, f"{notes}\n"))
        self.assertIn("      building: 2 of 2\n      what the compilers said: build/build.log\n", shown)
        self.assertNotIn("ptxas", shown)
        code, shown, log = self.build("@1 of 1 a.o", 0)
        self.assertEqual((code, log, "warned" in shown), (0, "", False))

    def test_a_build_that_fails_says_why(self):
        code, shown, _ = self.build("@1 of 2 a.o\nptxas warning : spilled\nFAILED: b.o\nb.cc:1: error: no", 1)
        self.assertEqual(code, 1)
        self.assertIn("FAILED: b.o\nb.cc:1: error: no\nrun: the build failed", shown)
        self.assertNotIn("ptxas", shown)
        self.assertIn("unknown target\nrun: the build failed", self.build("ninja: error: unknown target", 1)[1])


if __name__ == "__main__":
    main()
