#!/usr/bin/env python3
"""Packs python/vivace and libvivace_c.so into one wheel for every Python from 3.10 on and any torch or none.

    tools/make_wheel.py LIBRARY FOLDER      prints the wheel's path

Python's standard library and a C compiler ($CC, or cc) alone: a wheel is a zip archive with a list of what is in it. The same sources give
the same bytes. Where the compiler or Python's headers are missing or do not fit, the wheel lacks vivace/_call.abi3.so, and calls on torch's
tensors are slower: it says so, and why.
"""

import base64
import hashlib
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "vivace"

METADATA = """\
Metadata-Version: 2.1
Name: vivace
Version: {version}
Summary: Operators that make decoding with large language models fast on NVIDIA Hopper GPUs
License: Apache-2.0
Requires-Python: >=3.10
Classifier: Programming Language :: Python :: 3
Classifier: Operating System :: POSIX :: Linux
Classifier: Typing :: Typed
Provides-Extra: numpy
Requires-Dist: numpy; extra == "numpy"
Description-Content-Type: text/markdown

"""
WHEEL = "Wheel-Version: 1.0\nGenerator: vivace tools/make_wheel.py\nRoot-Is-Purelib: false\nTag: py3-none-{platform}\n"
ENTRY_POINTS = """\
[vllm.general_plugins]
vivace = vivace.plugins.vllm:register

[sglang.srt.plugins]
vivace = vivace.plugins.sglang:register
"""


def version():
    return re.search(r"project\(vivace VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def platform_tag(*libraries):
    """manylinux of the newest glibc whose symbols they take."""
    symbols = subprocess.run(["readelf", "--version-info", *libraries], capture_output=True, text=True, check=True).stdout
    newest = max(tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", symbols))
    return f"manylinux_{newest[0]}_{newest[1]}_{platform.machine()}"


def build_extension(target):
    """The quick calls, on Python's stable ABI: nothing, or why they are not there."""
    compiler, headers = shlex.split(os.environ.get("CC") or "cc"), pathlib.Path(sysconfig.get_path("include"))
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this Python is free-threaded, and has no stable ABI"
    missing = [compiler[0]] if shutil.which(compiler[0]) is None else []
    missing += [f"{headers}/Python.h"] if not (headers / "Python.h").exists() else []
    if missing:
        return f"there is no {' and no '.join(missing)}"
    command = [*compiler, "-shared", "-fPIC", "-O2", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", "-isystem", headers,
               PACKAGE / "_call.c", "-o", target]
    built = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    return f"{shlex.join(map(str, command))} ends with\n{built.stderr}" if built.returncode != 0 else ""


def make(library, folder):
    folder.mkdir(parents=True, exist_ok=True)
    info = f"vivace-{version()}.dist-info"
    with tempfile.TemporaryDirectory() as scratch:
        libraries = [pathlib.Path(scratch) / "libvivace_c.so"]
        shutil.copyfile(library, libraries[0])
        extension = pathlib.Path(scratch) / "_call.abi3.so"
        if reason := build_extension(extension):
            print(f"WITHOUT vivace/{extension.name}, calls on torch's tensors take about four times as long: {reason}", file=sys.stderr)
        else:
            libraries.append(extension)
        subprocess.run(["strip", "--strip-unneeded", *libraries], check=True)
        tag = platform_tag(*libraries)
        files = {f"vivace/{path.relative_to(PACKAGE)}": path.read_bytes() for path in sorted(PACKAGE.rglob("*"))
                 if path.is_file() and path.suffix in (".py", ".typed", ".json")}
        files.update({f"vivace/{path.name}": path.read_bytes() for path in libraries})
    files["vivace/include/vivace/c_api.h"] = (ROOT / "include" / "vivace" / "c_api.h").read_bytes()
    files[f"{info}/METADATA"] = (METADATA.format(version=version()) + (ROOT / "docs" / "python.md").read_text()).encode()
    files[f"{info}/WHEEL"] = WHEEL.format(platform=tag).encode()
    files[f"{info}/entry_points.txt"] = ENTRY_POINTS.encode()
    files[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = "".join(f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
                     for name, data in files.items())
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()

    wheel = folder / f"vivace-{version()}-py3-none-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return wheel


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(make(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
