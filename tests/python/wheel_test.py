"""The wheel: what is in it, that it says so, and what importing it costs."""

import ast
import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import pathlib
import pydoc
import subprocess
import sys
import sysconfig
import tempfile
import unittest
import unittest.mock
import zipfile

import package

package.need("vivace")
WHEELS = list(pathlib.Path(os.environ.get("VIVACE_WHEELS", package.ROOT / "build" / "wheel")).glob("*.whl"))


def python(code, executable=sys.executable):
    done = subprocess.run([executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return done.stdout.strip()


class Wheel(unittest.TestCase):
    def test_the_record_is_complete_and_right(self):
        self.assertEqual(len(WHEELS), 1, WHEELS)
        with zipfile.ZipFile(WHEELS[0]) as archive:
            names = set(archive.namelist())
            record = next(name for name in names if name.endswith("/RECORD"))
            rows = list(csv.reader(archive.read(record).decode().splitlines()))
            self.assertEqual({row[0] for row in rows}, names)
            for name, digest, size in rows:
                if name != record:
                    data = archive.read(name)
                    self.assertEqual(digest, "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode(), name)
                    self.assertEqual(int(size), len(data), name)
            self.assertLessEqual({"vivace/libvivace_c.so", "vivace/py.typed", "vivace/include/vivace/c_api.h"}, names)

    def test_quick_calls_are_there_where_they_can_be_built(self):
        """By the Python that made the wheel, which need not be this one."""
        maker = os.environ.get("VIVACE_WHEEL_PYTHON", sys.executable)
        if not pathlib.Path(python("import sysconfig; print(sysconfig.get_path('include'))", maker), "Python.h").exists():
            self.skipTest(f"there are no headers of {maker}")
        with zipfile.ZipFile(WHEELS[0]) as archive:
            self.assertIn("vivace/_call.abi3.so", archive.namelist())
        from vivace import _call  # noqa: F401

    def test_what_builds_the_quick_calls(self):
        spec = importlib.util.spec_from_file_location("make_wheel", package.ROOT / "tools" / "make_wheel.py")
        make_wheel = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(make_wheel)
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)

            def built(compiler, PACKAGE=make_wheel.PACKAGE, sysconfig=sysconfig):
                """Why not, or nothing."""
                with (unittest.mock.patch.dict(os.environ, CC=compiler),
                      unittest.mock.patch.multiple(make_wheel, PACKAGE=PACKAGE, sysconfig=sysconfig)):
                    why = make_wheel.build_extension(folder / "_call.so")
                self.assertEqual((folder / "_call.so").exists(), not why)
                (folder / "_call.so").unlink(missing_ok=True)
                return why

            (folder / "_call.c").write_text("#error these do not compile\n")
            free = unittest.mock.Mock(wraps=sysconfig)
            free.get_config_var.return_value = 1
            self.assertRegex(built("cc", sysconfig=free), "free-threaded")
            if not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists():
                self.assertEqual(built("no-such-cc -O1"), f"there is no no-such-cc and no {sysconfig.get_path('include')}/Python.h")
                self.skipTest("there are no headers of Python")
            self.assertEqual(built("no-such-cc -O1"), "there is no no-such-cc")
            self.assertRegex(built("cc", PACKAGE=folder), "^cc -shared .* ends with\n.*these do not compile")
            for compiler in ("", "cc", "cc -O1", "env cc"):
                self.assertEqual(built(compiler), "")

    def test_one_wheel_for_all_pythons(self):
        self.assertRegex(WHEELS[0].name, r"^vivace-\d+\.\d+\.\d+-py3-none-manylinux_2_\d+_\w+\.whl$")
        self.assertEqual(list(importlib.metadata.requires("vivace") or []), ['numpy; extra == "numpy"'])

    def test_sources_are_python_3_10(self):
        import vivace
        for path in pathlib.Path(vivace.__file__).parent.rglob("*.py"):
            ast.parse(path.read_text(), str(path), feature_version=(3, 10))

    def test_frameworks_find_their_plugins(self):
        for group in ("vllm.general_plugins", "sglang.srt.plugins"):
            points = [point for point in importlib.metadata.entry_points(group=group) if point.name == "vivace"]
            self.assertEqual(len(points), 1, group)
            self.assertTrue(callable(points[0].load()))

    def test_import_is_quick_and_brings_neither_numpy_nor_torch(self):
        code = ("import sys, time; start = time.process_time(); import vivace; print(time.process_time() - start, "
                "'numpy' in sys.modules, 'torch' in sys.modules)")
        runs = [python(code).split() for _ in range(5)]
        self.assertLess(min(float(seconds) for seconds, *_ in runs), 0.3)  # of the processor: other work on the machine does not count
        self.assertEqual({tuple(others) for _, *others in runs}, {("False", "False")})

    def test_public_functions_have_types_and_text(self):
        import vivace
        for name in vivace.__all__:
            thing = getattr(vivace, name)
            if callable(thing) and name != "Array":
                self.assertTrue(inspect.getdoc(thing), name)
            function = getattr(thing, "__wrapped__", thing)
            if inspect.isfunction(function):
                hints = function.__annotations__
                missing = [p for p in inspect.signature(function).parameters if p not in hints]
                self.assertEqual(missing, [], name)
                self.assertIn("return", hints, name)

    def test_operators_show_their_parameters(self):
        import vivace
        operators = {name: thing for name, thing in vars(vivace).items() if isinstance(thing, vivace.Operator)}
        self.assertEqual(len(operators), len(vivace.operators()) + 1)  # linear_parts is one of linear's
        for name, operator in operators.items():
            signature, text = inspect.signature(operator), pydoc.render_doc(operator, renderer=pydoc.plaintext)
            self.assertEqual(signature, inspect.signature(operator._build), name)
            self.assertGreaterEqual(len(signature.parameters), 3, name)
            self.assertIn(f"{name}({next(iter(signature.parameters))}: ", text)
            for parameter in signature.parameters:
                self.assertIn(f"{parameter}: ", text, name)
            self.assertIn(inspect.getdoc(operator).splitlines()[0], text)
            self.assertEqual((operator.__name__, operator.__module__, operator.__qualname__), (name, "vivace.ops", name))
            for question, answer in (("explain", "Choice"), ("cost", "Cost"), ("workspace_bytes", "int")):
                asked = getattr(operator, question)
                self.assertEqual(inspect.signature(asked), signature.replace(return_annotation=answer), name)
                self.assertEqual((asked.__qualname__, asked.__doc__), (f"{name}.{question}", getattr(vivace.Operator, question).__doc__))


if __name__ == "__main__":
    package.main()
