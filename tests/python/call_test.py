"""Tensor objects taken apart in C, without torch: DLPack's C exchange of a library of a few lines."""

import ctypes
import gc
import unittest
import weakref

import package

package.need("vivace", "vivace._call")
import vivace  # noqa: E402
from vivace import _arrays, _call, _library  # noqa: E402

F32, DOUBLE = (2, 32, 1), (2, 64, 1)
TAKE_APART = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_arrays._DLTensor))
STREAM_OF = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Exchange(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p), ("unused", ctypes.c_void_p * 3),
                ("take_apart", TAKE_APART), ("stream_of", STREAM_OF)]


class Tensor:
    """Numbers of a type in rows; `first` of them are skipped."""

    def __init__(self, numbers, shape, kind=F32, device=1, first=0):
        self.memory, self.shape, self.first = (ctypes.c_float * len(numbers))(*numbers), (ctypes.c_int64 * len(shape))(*shape), first
        self.kind, self.device = kind, device


class Other(Tensor):
    pass


@TAKE_APART
def take_apart(tensor, out):
    if tensor.device == 0:
        return -1
    out[0] = _arrays._DLTensor(ctypes.addressof(tensor.memory), tensor.device, 0, len(tensor.shape), *tensor.kind, tensor.shape, None, 4 * tensor.first)
    return 0


EXCHANGE = Exchange(1, 3, None, (None, None, None), take_apart, STREAM_OF(lambda kind, ordinal, out: -1))
ENTRY = _library.ENTRIES["rms_norm"]


def site():
    kinds = "".join({"tensor": "t", "float": "f", "int": "i"}[argument.kind] for argument in ENTRY.operator.arguments)
    return _call.make(ctypes.cast(ENTRY._run, ctypes.c_void_p).value, ctypes.addressof(EXCHANGE), kinds, -1, (Tensor,))


class Calls(unittest.TestCase):
    def setUp(self):
        vivace.configure()  # there is a context
        self.x, self.weight, self.y = Tensor([9, 3, 4, 0], [1, 2], first=1), Tensor([1, 2], [2]), Tensor([0, 0], [1, 2])

    def test_a_call(self):
        self.assertEqual(site()((self.x, None, self.weight, self.y, None, 0, 0)), 0)
        self.assertAlmostEqual(self.y.memory[1], 8 / 12.5**0.5, places=6)
        self.assertEqual([(row["row"], row["calls"]) for row in vivace.counts()], [("cpu.simd", 1)])

    def test_an_error_is_the_librarys(self):
        self.assertEqual(site()((self.x, None, Tensor([1], [1]), self.y, None, 0, 0.0)), 1)
        with self.assertRaisesRegex(ValueError, "weight.shape"):
            _library.check(1)

    def test_what_is_not_plain_is_left(self):
        call = site()
        for place, value in [(0, Tensor([1, 2], [1, 2], kind=DOUBLE)), (0, Tensor([1, 2], [1] * 5 + [2])), (0, Tensor([1, 2], [1, 2], device=9)),
                             (0, Tensor([1, 2], [1, 2], device=0)), (0, Tensor([1, 2], [1, 2], device=2)), (0, Other([1, 2], [1, 2])), (0, 5),
                             (2, Tensor([1, 2], [2], kind=(2, 32, 4))), (5, 0.0), (5, True), (5, 2**63), (6, "0"), (6, 10**400), (6, None)]:
            values = [self.x, None, self.weight, self.y, None, 0, 0.0]
            values[place] = value
            self.assertEqual(call(tuple(values)), -1, (place, value))
        self.assertEqual(call((None,) * 5 + (0, 0.0)), -1)  # where would it run?
        self.assertEqual(list(self.y.memory), [0, 0])

    def test_needs_as_many_values_as_arguments(self):
        for wrong in ((), (self.x,), [self.x, None, self.weight, self.y, None, 0, 0.0], None):
            with self.assertRaisesRegex(TypeError, "a tuple of 7 values"):
                site()(wrong)
        with self.assertRaisesRegex(ValueError, "more arguments or types"):
            _call.make(1, 1, "t" * 300, -1, ())

    def test_a_workspace_that_is_to_be_found_is_left(self):
        call = _call.make(ctypes.cast(ENTRY._run, ctypes.c_void_p).value, ctypes.addressof(EXCHANGE), "tttttif", 4, (Tensor,))
        self.assertEqual(call((self.x, None, self.weight, self.y, None, 0, 0.0)), -1)

    def test_a_context_goes_with_its_last_user(self):
        first = weakref.ref(_library.context())
        vivace.configure(prefer="rms_norm=reference")
        gc.collect()
        self.assertIsNone(first())
        self.assertEqual(site()((self.x, None, self.weight, self.y, None, 0, 0.0)), 0)
        self.assertEqual([row["row"] for row in vivace.counts()], ["reference"])
        vivace.configure(prefer="")


if __name__ == "__main__":
    package.main()
