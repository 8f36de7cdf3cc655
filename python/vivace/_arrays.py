"""What the library needs to know of an array: where it lies, its type, shape and strides. NumPy arrays, torch tensors, and
anything that speaks DLPack; neither NumPy nor torch is imported before an array of theirs arrives.
"""

from __future__ import annotations

import ctypes
import operator
import reprlib
import struct
import sys
import threading
from contextlib import contextmanager
from typing import Any, Callable, Iterator, NamedTuple, Sequence

CPU, CUDA = 0, 1
MAX_RANK = 5
TENSOR_BYTES = 24 + 16 * MAX_RANK

DTYPES = {"f32": 1, "f16": 2, "bf16": 3, "fp8_e4m3": 4, "u8": 5, "i32": 6, "i64": 7,
          "q4_0": 16, "q4_1": 17, "q8_0": 18, "q4_k": 19, "q6_k": 20}
_BLOCKS = {"q4_0": (32, 18), "q4_1": (32, 20), "q8_0": (32, 34), "q4_k": (256, 144), "q6_k": (256, 210)}
MADE_DTYPES = tuple(name for name in DTYPES if name not in _BLOCKS)  # of arrays that are made here

AN_ARRAY = "vivace: an array"  # begins what is wrong with one, until who knows its name puts that there
NOTHING_BESIDE = "vivace: nothing is allocated beside"

# A vivace_tensor of each rank: pointer, type, rank, device, ordinal, shape, strides.
_PACK = [struct.Struct(f"=Qiiii{rank}q{8 * (MAX_RANK - rank)}x{rank}q{8 * (MAX_RANK - rank)}x").pack
         for rank in range(MAX_RANK + 1)]


def pack(address: int, dtype: int, device: int, ordinal: int, shape: Sequence[int], strides: Sequence[int]) -> bytes:
    rank = len(shape)
    if rank > MAX_RANK:
        raise ValueError(f"{AN_ARRAY} has {rank} dimensions, at most {MAX_RANK} are known")
    return _PACK[rank](address, dtype, rank, device, ordinal, *shape, *strides)


def compiled() -> bool:
    """Whether this is read by torch's compiler, which does not run it. vivace.torch_ops puts torch's own function here."""
    return False


def traced() -> bool:
    """Whether torch records this, and sizes may be symbols. vivace.torch_ops puts its own function here."""
    return False


def whole(what: str, value: Any, low: int, high: int) -> int:
    """`value`, where it is a whole number from `low` to `high`."""
    if type(value) is int and low <= value <= high:
        return value
    if type(value).__name__ == "SymInt":  # of a size that torch does not know yet
        return value
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {shown(value)}, needs a whole number") from None
    if not low <= number <= high:
        raise ValueError(f"{what} is {shown(number)}, needs {low} to {high}")
    return number


def _extents(what: str, shape: Any) -> tuple[int, ...]:
    try:
        extents = tuple(shape)
    except TypeError:
        raise TypeError(f"{what} is {shown(shape)}, needs a tuple of whole numbers") from None
    return tuple(whole(f"{what}[{i}]", extent, 0, 2**62) for i, extent in enumerate(extents))


def shown(value: Any) -> str:
    """A value in a message, shortened where it is long."""
    return reprlib.repr(value)


class Typed:
    """An array whose bytes are numbers of a type that its own library lacks: bf16 in a uint16 array, fp8 in a uint8 array, a
    GGUF block format in a contiguous uint8 array (then with its shape in weights).
    """

    __slots__ = ("array", "dtype", "shape")

    def __init__(self, array: Any, dtype: str, shape: Sequence[int] | None = None) -> None:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"vivace.Typed: dtype is {dtype!r}, needs one of {', '.join(DTYPES)}")
        try:
            numpy = framework_of(array) is NUMPY
        except TypeError as error:
            raise TypeError(str(error).replace(AN_ARRAY, "vivace.Typed: array", 1)) from None
        if not numpy:
            raise TypeError(f"vivace.Typed: array is a {type(array).__module__}.{type(array).__name__}, needs NumPy's")
        self.array, self.dtype = array, dtype
        self.shape = array.shape if shape is None else _extents("vivace.Typed: shape", shape)
        size = array.dtype.itemsize
        if dtype in _BLOCKS:
            elements, block = _BLOCKS[dtype]
            count = 1
            for extent in self.shape:
                count *= extent
            if not self.shape or self.shape[-1] % elements or count // elements * block != array.nbytes:
                raise ValueError(f"vivace.Typed: {dtype} of shape {self.shape} takes rows of whole blocks of {elements} weights and "
                                 f"{count // elements * block} bytes, the array has {array.nbytes}")
            if not array.flags.c_contiguous:
                raise ValueError(f"vivace.Typed: {dtype} needs a contiguous array")
        elif shape is not None or size != {"f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i64": 8}.get(dtype, 1):
            raise ValueError(f"vivace.Typed: {dtype} has another width than the array's {array.dtype}, or a shape was given")

    def __repr__(self) -> str:
        return f"vivace.Typed({self.array!r}, {self.dtype!r})"

    def _describe(self) -> bytes:
        if self.dtype not in _BLOCKS:
            return _describe_numpy(self.array, DTYPES[self.dtype])
        strides, step = [], 1
        for extent in reversed(self.shape):
            strides.append(step)
            step *= extent
        return pack(_address(self.array), DTYPES[self.dtype], CPU, 0, self.shape, strides[::-1])


class Shape:
    """A contiguous array that is not there: for questions about a call (explain, cost, workspace_bytes) without its memory, and about a
    GPU that this machine need not have. device is "cpu", "cuda" or "cuda:N".
    """

    __slots__ = ("shape", "dtype", "device", "compute_capability", "_ordinal")

    def __init__(self, shape: Sequence[int], dtype: str, device: str = "cpu", compute_capability: int = 0) -> None:
        kind, colon, ordinal = str(device).partition(":")
        if not isinstance(dtype, str) or dtype not in DTYPES or not (device == "cpu" or kind == "cuda" and (ordinal.isdecimal() if colon else True)):
            raise ValueError(f"vivace.Shape: dtype is {dtype!r} and device {device!r}, needs one of {', '.join(DTYPES)}, and 'cpu', 'cuda' or "
                             "'cuda:N'")
        self._ordinal = int(ordinal or 0)
        self.shape, self.dtype, self.device = _extents("vivace.Shape: shape", shape), dtype, device
        self.compute_capability = whole("vivace.Shape: compute_capability", compute_capability, 0, 1000)

    def __repr__(self) -> str:
        return f"vivace.Shape({self.shape}, {self.dtype!r}, {self.device!r})"

    def _describe(self) -> bytes:
        strides, step = [], 1
        for extent in reversed(self.shape):
            strides.append(step)
            step *= extent
        return pack(0, DTYPES[self.dtype], CPU if self.device == "cpu" else CUDA, self._ordinal, self.shape, strides[::-1])

    def _place(self) -> tuple[int, ...] | None:
        return None if self.device == "cpu" else (self._ordinal, 0, self.compute_capability)


# --- NumPy -------------------------------------------------------------------------------------------------------------------

_NUMPY_NAMES = {"float32": 1, "float16": 2, "bfloat16": 3, "float8_e4m3fn": 4, "uint8": 5, "bool": 5, "int32": 6, "uint32": 6,
                "int64": 7}
_NUMPY_TYPES = {"f32": "float32", "f16": "float16", "u8": "uint8", "i32": "int32", "i64": "int64"}
_numpy_codes: dict[Any, int] = {}


def _numpy_code(dtype: Any) -> int:
    code = _NUMPY_NAMES.get(dtype.name)
    if code is None or not dtype.isnative:
        raise ValueError(f"{AN_ARRAY} is of type {dtype}, needs one of {', '.join(_NUMPY_NAMES)}, or vivace.Typed")
    _numpy_codes[dtype] = code
    return code


def _address(array: Any) -> int:
    return array.__array_interface__["data"][0]


def _describe_numpy(array: Any, code: int = 0) -> bytes:
    dtype = array.dtype
    size = dtype.itemsize
    strides = [step // size for step in array.strides]
    if any(step % size for step in array.strides):
        raise ValueError(f"{AN_ARRAY} has strides of {array.strides} bytes, needs multiples of its {size} bytes an element")
    return pack(_address(array), code or _numpy_codes.get(dtype) or _numpy_code(dtype), CPU, 0, array.shape, strides)


def _empty_numpy(shape: Sequence[int], dtype: str) -> Any:
    numpy = sys.modules["numpy"]
    if dtype in _NUMPY_TYPES:
        return numpy.empty(shape, _NUMPY_TYPES[dtype])
    if "ml_dtypes" in sys.modules:
        return numpy.empty(shape, getattr(sys.modules["ml_dtypes"], {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}[dtype]))
    return Typed(numpy.empty(shape, "uint16" if dtype == "bf16" else "uint8"), dtype)


# --- DLPack ------------------------------------------------------------------------------------------------------------------

class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


_DL_CPU, _DL_DEVICES = 1, {1: CPU, 2: CUDA, 3: CPU, 13: CUDA}  # also pinned and managed memory
_DL_TYPES = {(2, 32): 1, (2, 16): 2, (4, 16): 3, (10, 8): 4, (1, 8): 5, (6, 8): 5, (0, 32): 6, (1, 32): 6, (0, 64): 7}
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_VERSIONED = struct.Struct("=IIQQQ")  # version, context, deleter, flags; then the tensor
_DEVICE = struct.Struct("=ii")  # kind, ordinal
_READ_ONLY, _IS_COPIED = 1, 2


class Described(bytes):
    """A described array of another library, which holds its memory: kept until the call returns."""

    capsule: Any
    unwritable: str | None  # why it may not be written


def _arguments_refused(error: TypeError) -> bool:
    """Whether __dlpack__ may have ended in `error` for what it was given: it did nothing then but to call others of its name. What does more
    is not asked twice: it might be another call of an operator, whose arrays would be asked twice for each time.
    """
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    while trace is not None and trace.tb_frame.f_code.co_name == "__dlpack__":
        trace = trace.tb_next
    return trace is None


def _capsule_of(array: Any, options: dict[str, Any]) -> tuple[Any, bytes]:
    """What __dlpack__ gives, and its name. Libraries older than DLPack 1.0 know no versions."""
    try:
        try:
            capsule = array.__dlpack__(max_version=(1, 0), copy=False, **options)
        except TypeError as error:
            if not _arguments_refused(error):
                raise
            capsule = array.__dlpack__(**options)
    except Exception as error:  # of a library of which nothing is known
        raise TypeError(f"{AN_ARRAY} does not come by DLPack: its __dlpack__ ends in {type(error).__name__}: {error}") from None
    name = _capsule_name(capsule) if type(capsule).__name__ == "PyCapsule" else b""
    if name not in (b"dltensor", b"dltensor_versioned"):
        raise TypeError(f"{AN_ARRAY} does not come by DLPack: its __dlpack__ returns {shown(capsule)}, needs a capsule 'dltensor'")
    return capsule, name


def _exported(array: Any, options: dict[str, Any]) -> tuple[Any, _DLTensor, int]:
    """A capsule, the tensor in it, which it owns, and flags, which there are from DLPack 1.0 on."""
    capsule, name = _capsule_of(array, options)
    if name != b"dltensor_versioned":
        return capsule, _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")), 0
    address = _capsule_pointer(capsule, b"dltensor_versioned")
    major, minor, _, _, flags = _VERSIONED.unpack(ctypes.string_at(address, _VERSIONED.size))
    if major != 1:
        raise ValueError(f"{AN_ARRAY} comes in version {major}.{minor} of DLPack, needs 1")
    return capsule, _DLTensor.from_address(address + _VERSIONED.size), flags


def _dlpack_device(array: Any) -> tuple[int, int]:
    """Of an array that does not say, the CPU."""
    try:
        ask = getattr(array, "__dlpack_device__", None)
        found = (_DL_CPU, 0) if ask is None else ask()
    except Exception as error:  # of a library of which nothing is known
        raise TypeError(f"{AN_ARRAY} does not come by DLPack: its __dlpack_device__ ends in {type(error).__name__}: {error}") from None
    try:
        return _DEVICE.unpack(_DEVICE.pack(*found))
    except (TypeError, struct.error):
        raise TypeError(f"{AN_ARRAY} does not come by DLPack: its __dlpack_device__ returns {shown(found)}, needs two whole numbers") from None


def _describe_dlpack(array: Any) -> Described:
    kind, ordinal = _dlpack_device(array)
    device = _DL_DEVICES.get(kind)
    if device is None:
        raise ValueError(f"{AN_ARRAY} lies on a device of DLPack's kind {kind}, needs 1 (CPU) or 2 (CUDA)")
    # The library that made the array orders its own work before this stream; the legacy default stream is 1 there.
    capsule, tensor, flags = _exported(array, {} if device == CPU else {"stream": current_stream() or 1})
    if device == CPU and _DL_DEVICES.get(tensor.device_type) != CPU:
        raise TypeError(f"{AN_ARRAY} lies on a device of DLPack's kind {tensor.device_type}, needs a __dlpack_device__ that says so before a stream "
                        "is chosen")
    code = _DL_TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if code is None:
        raise ValueError(f"{AN_ARRAY} has DLPack's type ({tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes), which is unknown here")
    shape = tensor.shape[:tensor.ndim]
    if tensor.strides:
        strides = tensor.strides[:tensor.ndim]
    else:
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        strides.reverse()
    described = Described(pack((tensor.data or 0) + tensor.byte_offset, code, device, ordinal if device == CUDA else 0, shape, strides))
    described.capsule = capsule
    described.unwritable = "is read-only" if flags & _READ_ONLY else "is a copy that its library made" if flags & _IS_COPIED else None
    return described


# --- the current stream of arrays that have none of their own ------------------------------------------------------------------

_local = threading.local()


def current_stream() -> int:
    """What use_stream set for this thread; 0: the default stream."""
    return getattr(_local, "stream", 0)


@contextmanager
def use_stream(handle: int) -> Iterator[None]:
    """Within the block, this thread's calls on arrays of other libraries than torch run on this CUDA stream (a cudaStream_t as an
    integer). torch's tensors always use torch's current stream.
    """
    before = current_stream()
    _local.stream = whole("vivace.use_stream: handle", handle, 0, 2**64 - 1)
    try:
        yield
    finally:
        _local.stream = before


# --- arrays of any kind --------------------------------------------------------------------------------------------------------

class Framework(NamedTuple):
    """How to treat the arrays of one Python library."""

    describe: Callable[[Any], bytes]
    place: Callable[[Any], "tuple[int, ...] | None"]  # None: the CPU; else (ordinal, stream)
    empty: Callable[[Any, Sequence[int], str], Any]  # beside an array
    dtype: Callable[[Any], str]
    writable: Callable[[Any], bool]
    run: Callable[[Any, tuple], None] = lambda entry, values: entry.run(values)  # an operator, whose first value is such an array


def _name_of_code(code: int) -> str:
    return next(name for name, number in DTYPES.items() if number == code)


def _dlpack_place(array: Any) -> tuple[int, int] | None:
    kind, ordinal = _dlpack_device(array)
    return None if _DL_DEVICES.get(kind, CPU) == CPU else (ordinal, current_stream())


def _dlpack_empty(array: Any, shape: Sequence[int], dtype: str) -> Any:
    raise TypeError(f"{NOTHING_BESIDE} a {type(array).__module__}.{type(array).__name__}, which has DLPack alone")


def _blamed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function`, whose errors have the array: who puts them into words does not ask its library again, which may do anything."""
    def call(array: Any) -> Any:
        try:
            return function(array)
        except (TypeError, ValueError) as error:
            error.array = array  # type: ignore[union-attr]
            raise
    return call


NUMPY = Framework(_describe_numpy, lambda array: None, lambda array, shape, dtype: _empty_numpy(shape, dtype),
                lambda array: _name_of_code(_numpy_codes.get(array.dtype) or _numpy_code(array.dtype)),
                lambda array: array.flags.writeable)
TYPED = Framework(Typed._describe, lambda array: None, lambda array, shape, dtype: _empty_numpy(shape, dtype),
                lambda array: array.dtype, lambda array: array.array.flags.writeable)
DLPACK = Framework(_blamed(_describe_dlpack), _blamed(_dlpack_place), _dlpack_empty,
                 _blamed(lambda array: _name_of_code(struct.unpack_from("=Qi", _describe_dlpack(array))[1])), lambda array: True)

SHAPE = Framework(Shape._describe, Shape._place, lambda array, shape, dtype: Shape(shape, dtype, array.device, array.compute_capability),
                lambda array: array.dtype, lambda array: False)

FRAMEWORKS: dict[type, Framework] = {Typed: TYPED, Shape: SHAPE}


def framework_of(array: Any) -> Framework:
    kind = type(array)
    found = FRAMEWORKS.get(kind)
    return found if found is not None else _find(kind, array)


def _find(kind: type, array: Any) -> Framework:
    modules = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if "torch" in modules and issubclass(kind, sys.modules["torch"].Tensor):
        from . import torch_ops
        FRAMEWORKS.setdefault(kind, torch_ops.TORCH)  # which knows some itself
    elif any(base.__name__ == "MaskedArray" for base in kind.__mro__):
        raise TypeError(f"{AN_ARRAY} has a mask, which would be ignored, needs one without: numpy.ma.filled makes it")
    elif "numpy" in modules and issubclass(kind, sys.modules["numpy"].ndarray):
        FRAMEWORKS[kind] = NUMPY
    elif hasattr(kind, "__dlpack__"):
        FRAMEWORKS[kind] = DLPACK
    else:
        what = shown(array) if array is None else f"the {kind.__name__} {shown(array)}"
        raise TypeError(f"{AN_ARRAY} is {what}, needs an array of NumPy's or torch's, or one with __dlpack__")
    return FRAMEWORKS[kind]


def describe(array: Any) -> bytes:
    return framework_of(array).describe(array)


def place_of(array: Any) -> tuple[int, ...] | None:
    return framework_of(array).place(array)


def empty(like: Any, shape: Sequence[int], dtype: str) -> Any:
    return framework_of(like).empty(like, shape, dtype)


def beside(*arrays: Any) -> Any:
    """The first of them that memory is allocated beside, or the last."""
    for array in arrays:
        if framework_of(array) is not DLPACK:
            return array
    return arrays[-1]


def clear(made: Any) -> None:
    """Zeros, for an output of which a call may leave rows alone."""
    if not isinstance(made, Shape):
        (made.array if isinstance(made, Typed) else made)[...] = 0


def shape_of(array: Any) -> tuple[int, ...]:
    """Arrays that have DLPack alone need not say it themselves."""
    try:
        return array.shape
    except AttributeError:
        described = describe(array)
        rank = struct.unpack_from("=i", described, 12)[0]
        return struct.unpack_from(f"={rank}q", described, 24)


def dtype_of(array: Any) -> str:
    return framework_of(array).dtype(array)
