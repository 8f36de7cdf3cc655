"""The package's list of arguments is that of vivace/c_api.h, which lies in the wheel."""

import pathlib
import re
import struct
import unittest

import package

package.need("vivace")
import vivace  # noqa: E402
from vivace import _library  # noqa: E402
from vivace._operators import OPERATORS  # noqa: E402

HEADER = re.sub(r"/\*.*?\*/", "", (pathlib.Path(vivace.__file__).parent / "include" / "vivace" / "c_api.h").read_text(), flags=re.S)
CONSTANTS = {name: int(value) for name, value in re.findall(r"\b(VIVACE_\w+) = (\d+)", HEADER)}
STRUCTS = {name: re.findall(r"(?:const )?(\w+)( \*|\* | )(\w+)(?:\[(\w+)\])?;", body)
           for body, name in re.findall(r"typedef struct vivace_\w+ \{(.*?)\} (vivace_\w+);", HEADER, re.S)}
KINDS = {"vivace_tensor": "tensor", "int64_t": "int", "uint64_t": "int", "double": "float"}


def flat(struct_name, prefix=""):
    """The fields of a struct, those of structs inside it in their place, as (name, kind)."""
    for kind, pointer, name, count in STRUCTS[struct_name]:
        if "*" in pointer:
            yield prefix + name, "pointer"
        elif kind in KINDS or kind == "size_t":
            names = [name] if not count else [f"{name}_{i}" for i in range(CONSTANTS.get(count) or int(count))]
            for each in names:
                yield prefix + each, KINDS.get(kind, "size")
        else:
            names = [name] if not count else [f"{name}_{i}" for i in range(CONSTANTS[count])]
            for each in names:
                yield from flat(kind, prefix + ("" if kind == "vivace_attention" else each + "_"))


class Abi(unittest.TestCase):
    def test_arguments_are_those_of_the_header(self):
        for name, operator in OPERATORS.items():
            fields = list(flat(f"vivace_{name}_args"))
            self.assertEqual(fields[0], ("struct_bytes", "size"))
            self.assertEqual([(a.name, a.kind) for a in operator.arguments], fields[1:], name)

    def test_every_operator_of_the_library_is_there(self):
        self.assertEqual({row["op"] for row in vivace.operators()}, set(OPERATORS))

    def test_structs_have_the_librarys_size(self):
        for name, entry in _library.ENTRIES.items():
            code = entry._run(struct.pack("=Q", 0), None)
            self.assertEqual(code, 1)
            self.assertIn(f"which is {entry.struct_bytes} here", _library.LIBRARY.vivace_last_error().decode())

    def test_words_of_the_header_for_what_is_written(self):
        """"out" and "optional" in the header's comments are the marks of the list here."""
        text = (pathlib.Path(vivace.__file__).parent / "include" / "vivace" / "c_api.h").read_text()
        for name, operator in OPERATORS.items():
            body = re.search(rf"typedef struct vivace_{name}_args \{{(.*?)\}} ", text, re.S)[1]
            for argument in operator.arguments:
                comment = re.search(rf"vivace_tensor {argument.name};\s*/\*(.*?)\*/", body, re.S)
                if comment and re.match(r"\s*(optional )?out,", comment[1]):
                    self.assertTrue(argument.written, f"{name}.{argument.name} is out in the header")
                if comment and comment[1].lstrip().startswith("optional"):
                    self.assertTrue(argument.optional, f"{name}.{argument.name} is optional in the header")

    def test_length_of_a_schedule(self):
        for requests, workers in ((0, 1), (1, 8), (7, 132), (512, 133)):
            self.assertEqual(vivace.decode_schedule_ints(requests, workers),
                             _library.LIBRARY.vivace_decode_schedule_ints(requests, workers))

    def test_the_versions_agree(self):
        self.assertEqual(_library.ABI_VERSION, int(re.search(r"#define VIVACE_ABI_VERSION (\d+)", HEADER)[1]))
        self.assertRegex(vivace.__version__, r"^\d+\.\d+\.\d+$")


if __name__ == "__main__":
    package.main()
