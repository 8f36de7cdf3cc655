"""install.py LIBRARY FOLDER NUMPY: FOLDER/wheel gets the wheel, FOLDER/venv it and NumPy, whose wheel ./run test put into NUMPY."""

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def call(*args):
    return subprocess.run([str(a) for a in args], check=True, capture_output=True, text=True).stdout.strip()


def main(library, folder, numpy):
    shutil.rmtree(folder, ignore_errors=True)
    wheel = call(sys.executable, ROOT / "tools" / "make_wheel.py", library, folder / "wheel")
    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    wheels = [wheel, *numpy.glob("*.whl")]
    if len(wheels) == 1:
        print("WITHOUT NUMPY: THE TESTS ON ARRAYS ARE SKIPPED")
    call(sys.executable, "-m", "pip", "--python", folder / "venv" / "bin" / "python", "install", "--quiet", "--no-index", "--no-deps",
         "--no-compile", "--disable-pip-version-check", *wheels)
    print(wheel)


if __name__ == "__main__":
    main(*(pathlib.Path(arg) for arg in sys.argv[1:4]))
