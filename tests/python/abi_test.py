"""The package's list of arguments is that of vivace/c_api.h, which lies in the wheel."""

import pathlib
import random
import re
import struct
import unittest

import package

package.need("vivace")
import vivace  # noqa: E402
from vivace import _arrays, _library  # noqa: E402
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

    def test_questions_about_shapes_that_do_not_agree(self):
        """Any shapes, types and numbers: an answer or an error, and no memory is looked at."""
        source = random.Random(1)
        types = [*_arrays.DTYPES, *("f32", "bf16", "i32") * 8]
        numbers = {"float": (0.0, 1.0, -1.0, float("nan")), "int": (0, 1, 1, 2, 3, -1, 64, 128, 2**40, -2**63, 2**63 - 1), "pointer": (0,)}
        for name, entry in _library.ENTRIES.items():
            questions = [entry.cost, entry.explain, entry.workspace_bytes] + [entry.schedule_params] * (name == "attention_decode")
            for _ in range(400):
                device = source.choice(("cpu", "cpu", "cuda"))
                values = []
                for argument in entry.operator.arguments:
                    if argument.kind != "tensor":
                        values.append(0 if argument.name == "expert_count" else source.choice(numbers[argument.kind]))
                    elif not values or source.random() < 0.7:
                        extents = [source.choice((0, 1, 2, 3, 64, 128, 4096)) for _ in range(source.randrange(6))]
                        values.append(vivace.Shape(extents, source.choice(types), device, 90 if device == "cuda" else 0))
                    else:
                        values.append(None)
                for question in questions:
                    try:
                        question(tuple(values))
                    except (ValueError, NotImplementedError, RuntimeError):
                        pass

    def test_experts_without_memory_are_estimated(self):
        def shapes(tokens, ids_dtype="i32"):
            return (vivace.Shape((4, 64), "f32"), vivace.Shape((8, 64, 64), "f32"), vivace.Shape((8, 64, 32), "f32"),
                    vivace.Shape((tokens, 2), ids_dtype), vivace.Shape((tokens, 2), "f32"))

        whole = vivace.fused_moe.cost(*shapes(4))
        self.assertEqual(whole.flops, 4 * 2 * 3 * 2 * 32 * 64)
        self.assertGreater(whole.bytes, 8 * 3 * 32 * 64 * 4)
        for question in (shapes(3), shapes(4, "i64")):
            with self.assertRaisesRegex(ValueError, "expert_ids"):
                vivace.fused_moe.cost(*question)

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
