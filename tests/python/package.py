"""What the tests of the Python package share. Each *_test.py ends with package.main()."""

import importlib.util
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def need(*modules):
    """Ends the test as skipped, unless these are installed."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            print(f"skipped: {name} is not installed beside {sys.executable}")
            sys.exit(77)


def main():
    unittest.main(verbosity=2)
