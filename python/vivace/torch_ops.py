"""torch: its tensors as arrays, and every operator as torch.ops.vivace.NAME.

Loaded when the first torch tensor arrives, or by `import vivace.torch_ops`; do the latter before torch.compile or a look at
torch.ops.vivace. The custom operators write their outputs into arguments and return nothing, so that they need no rule for
shapes, allocate nothing but a workspace that was not given, and are safe in CUDA graphs; vivace.NAME allocates outputs around
them. In eager mode vivace.NAME calls the library directly, in a compiled graph and under fake tensors through torch.ops.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Sequence

import torch
from torch import library as torch_library

from . import _arrays, _library

_CODES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.float8_e4m3fn: 4, torch.uint8: 5, torch.bool: 5, torch.int32: 6,
          torch.int64: 7}
_NAMES = {dtype: name for dtype, code in _CODES.items() for name, number in _arrays.DTYPES.items() if number == code}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "u8": torch.uint8,
          "i32": torch.int32, "i64": torch.int64}
_pack = _arrays._PACK
_CPU, _CUDA = _arrays.CPU, _arrays.CUDA

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # absent in builds without CUDA


def _kind_of(tensor: torch.Tensor) -> tuple[int, Any]:
    """Its type's number, and what packs a tensor of its rank."""
    try:
        return _CODES[tensor.dtype], _pack[len(tensor.shape)]
    except LookupError:
        raise ValueError(f"{_arrays.AN_ARRAY} is {tensor.dtype} {tuple(tensor.shape)}, needs at most {_arrays.MAX_RANK} dimensions and one of "
                         f"{', '.join(map(str, _CODES))}") from None


def _describe(tensor: torch.Tensor) -> bytes:
    try:
        return _described(tensor)
    except RuntimeError as error:  # sparse, nested, within torch.vmap: torch itself says that there is no pointer, or no shape
        said = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{_arrays.AN_ARRAY} is a {'nested' if tensor.is_nested else tensor.layout} tensor without an address, needs one with "
                         f"strides in memory: {said}") from None


def _described(tensor: torch.Tensor) -> bytes:
    shape = tensor.shape
    rank = len(shape)
    code, pack = _kind_of(tensor)
    if tensor.is_neg():
        raise ValueError(f"{_arrays.AN_ARRAY} is a view that torch negates when it reads it, needs its numbers in memory: resolve_neg() makes a "
                         "copy that has them")
    if tensor.is_cuda:
        return pack(tensor.data_ptr(), code, rank, _CUDA, tensor.get_device(), *shape, *tensor.stride())
    if tensor.is_cpu:
        return pack(tensor.data_ptr(), code, rank, _CPU, 0, *shape, *tensor.stride())
    raise ValueError(f"{_arrays.AN_ARRAY} is on {tensor.device}, needs cpu or cuda")


def _describe_fake(tensor: torch.Tensor) -> bytes:
    """Of one that has no memory; on meta it counts as on the CPU."""
    code, pack = _kind_of(tensor)
    cuda = tensor.device.type == "cuda"
    return pack(0, code, tensor.dim(), _CUDA if cuda else _CPU, tensor.device.index or 0 if cuda else 0, *tensor.shape, *tensor.stride())


def _known(value: Any) -> bool:
    """Whether torch knows the sizes of a tensor, or the number."""
    if isinstance(value, torch.Tensor):
        return all(type(extent) is int for extent in (*value.shape, *value.stride()))
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _place(tensor: torch.Tensor) -> tuple[int, int] | None:
    if not tensor.is_cuda:
        return None
    ordinal = tensor.get_device()
    return ordinal, _raw_stream(ordinal)


def _dtype(tensor: torch.Tensor) -> str:
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise ValueError(f"{_arrays.AN_ARRAY} is {tensor.dtype}, needs one of {', '.join(map(str, _CODES))}")
    return name


def _empty(like: torch.Tensor, shape: Sequence[int], dtype: str) -> torch.Tensor:
    if dtype not in DTYPES:  # who compiles a call gets this as it is
        raise ValueError(f"vivace: the type of an output is {dtype!r}, needs one of {', '.join(DTYPES)}")
    return torch.empty(shape, dtype=DTYPES[dtype], device=like.device)


def _exchange() -> int:
    """torch's C exchange of tensors, from torch 2.10 on; 0 without it."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    address = _arrays._capsule_pointer(capsule, b"dlpack_exchange_api")
    major, _, _, _, _, _, tensor, stream = struct.unpack("=IIQQQQQQ", ctypes.string_at(address, 56))
    return address if major == 1 and tensor and stream else 0


def _through_torch(entry: _library.Entry, values: tuple) -> None:
    getattr(torch.ops.vivace, entry.operator.name)(*values)


# torch.jit.trace, and dispatch modes (make_fx, a FLOP counter). Of torch's own modules; without them none is seen.
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_tracing = getattr(torch._C, "_is_tracing", lambda: False)
_compiling = torch.compiler.is_compiling


def _recorded() -> bool:
    """Whether somebody records what torch is asked for: a compiler or one of those."""
    return _compiling() or _modes() > 0 or _tracing()


def _run(entry: _library.Entry, values: tuple) -> None:
    (_through_torch if _arrays.traced() else _library.Entry.run)(entry, values)


# Other tensors may be no memory: torch knows, and what it traces with is among them.
TORCH = _arrays.Framework(_describe, _place, _empty, _dtype, lambda tensor: True, _through_torch)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_arrays.FRAMEWORKS.update({kind: TORCH._replace(run=_run) for kind in _PLAIN})
_arrays.compiled, _arrays.traced = getattr(torch.compiler, "is_dynamo_compiling", _compiling), _recorded
EXCHANGE = _exchange()
if EXCHANGE:
    for _entry in _library.ENTRIES.values():
        _entry.take_apart(EXCHANGE, _PLAIN, torch.Tensor.is_neg, (_modes, _tracing))

_LIBRARY = torch_library.Library("vivace", "DEF")


def _register() -> None:
    for entry in _library.ENTRIES.values():
        operator = entry.operator
        _LIBRARY.define(operator.schema, tags=[torch.Tag.pt2_compliant_tag])

        def implementation(*values: Any, _entry: _library.Entry = entry) -> None:
            code = _entry.quick(values)
            if code < 0:
                _entry.run(values)
            elif code:
                _library.check(code)

        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(operator.name, implementation, key)

        def fake(*values: Any, _entry: _library.Entry = entry) -> None:
            if all(map(_known, values)):
                _entry.check_shapes(values, _describe_fake)

        torch_library.register_fake(f"vivace::{operator.name}", fake, lib=_LIBRARY)


_register()
