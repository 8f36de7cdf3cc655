"""install.py LIBRARY FOLDER NUMPY: FOLDER/wheel gets the wheel, FOLDER/venv it and NumPy, whose wheel ./run test put into NUMPY.

Where the Python that VIVACE_TEST_PYTHON names, or else the one that runs this, has torch, the environment sees that Python's packages.
"""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def call(*args):
    """What it prints; its complaints are left to be seen."""
    return subprocess.run([str(a) for a in args], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def packages_with_torch(python):
    """The folder of this Python's packages, if torch is there."""
    found = call(python, "-c", "import importlib.util; spec = importlib.util.find_spec('torch'); print(spec.origin if spec else '')")
    return pathlib.Path(found).parents[1] if found else None


def main(library, folder, numpy):
    python = os.environ.get("VIVACE_TEST_PYTHON") or sys.executable
    beside = packages_with_torch(python)
    shutil.rmtree(folder, ignore_errors=True)
    wheel = call(sys.executable, ROOT / "tools" / "make_wheel.py", library, folder / "wheel")
    call(python, "-m", "venv", "--without-pip", folder / "venv")
    wheels = [wheel]
    if beside is not None:
        # Not --system-site-packages, which skips those of an environment that `python` is in itself.
        where = call(folder / "venv" / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        (pathlib.Path(where) / "beside.pth").write_text(f"{beside}\n")
    else:
        print("WITHOUT TORCH: torch_test, plugins_test AND router_agreement_test ARE SKIPPED; VIVACE_TEST_PYTHON may name a Python that has it")
    if beside is None or not (beside / "numpy").is_dir():
        wheels += numpy.glob("*.whl")
        if len(wheels) == 1:
            print("WITHOUT NUMPY: THE TESTS ON ARRAYS ARE SKIPPED")
    call(sys.executable, "-m", "pip", "--python", folder / "venv" / "bin" / "python", "install", "--quiet", "--no-index", "--no-deps",
         "--no-compile", "--disable-pip-version-check", *wheels)
    print(wheel)


if __name__ == "__main__":
    main(*(pathlib.Path(arg) for arg in sys.argv[1:4]))
