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
from ._operators import OPERATORS

_CODES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.float8_e4m3fn: 4, torch.uint8: 5, torch.bool: 5, torch.int32: 6,
          torch.int64: 7}
_NAMES = {dtype: name for dtype, code in _CODES.items() for name, number in _arrays.DTYPES.items() if number == code}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "u8": torch.uint8,
          "i32": torch.int32, "i64": torch.int64}
_pack = _arrays._PACK
_CPU, _CUDA = _arrays.CPU, _arrays.CUDA

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # absent in builds without CUDA


def _describe(tensor: torch.Tensor) -> bytes:
    shape = tensor.shape
    rank = len(shape)
    try:
        code, pack = _CODES[tensor.dtype], _pack[rank]
    except LookupError:
        raise ValueError(f"{_arrays.AN_ARRAY} is {tensor.dtype} {tuple(shape)}, needs at most {_arrays.MAX_RANK} dimensions and one of "
                         f"{', '.join(map(str, _CODES))}") from None
    if tensor.is_cuda:
        return pack(tensor.data_ptr(), code, rank, _CUDA, tensor.get_device(), *shape, *tensor.stride())
    if tensor.is_cpu:
        return pack(tensor.data_ptr(), code, rank, _CPU, 0, *shape, *tensor.stride())
    raise ValueError(f"{_arrays.AN_ARRAY} is on {tensor.device}, needs cpu or cuda")


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
    return torch.empty(shape, dtype=DTYPES[dtype], device=like.device)


TORCH = _arrays.Framework(_describe, _place, _empty, _dtype, lambda tensor: True)
_arrays.FRAMEWORKS[torch.Tensor] = _arrays.FRAMEWORKS[torch.nn.Parameter] = TORCH

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _exchange() -> int:
    """torch's C exchange of tensors, from torch 2.10 on; 0 without it."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    address = _arrays._capsule_pointer(capsule, b"dlpack_exchange_api")
    major, _, _, _, _, _, tensor = struct.unpack("=IIQQQQQ", ctypes.string_at(address, 48))
    return address if major == 1 and tensor else 0


def _stream(tensor: torch.Tensor) -> int:
    return _raw_stream(tensor.get_device()) if tensor.is_cuda else 0


EXCHANGE = _exchange()
_PLAIN_OR_NUMBER = {torch.Tensor, torch.nn.Parameter, type(None), int, float}


def quick(name: str, values: tuple) -> Any:
    """The quickest way to run an operator on these values, if they have it: plain tensors on a GPU, and no workspace to be found."""
    if not EXCHANGE or not values[0].is_cuda or not _PLAIN_OR_NUMBER.issuperset(map(type, values)):
        return None
    place = OPERATORS[name].workspace
    if place is not None and values[place] is None:
        return None
    context = _library.context()
    site = context.sites.get(name)
    if site is None:
        site = context.sites[name] = _library.ENTRIES[name].objects(EXCHANGE, _stream, context)
    return site


def run(name: str, values: tuple) -> None:
    """Through torch.ops while torch traces, and for tensors that are no memory; else straight to the library."""
    if torch.compiler.is_compiling() or type(values[0]) not in _PLAIN:
        getattr(torch.ops.vivace, name)(*values)
    else:
        (quick(name, values) or _library.ENTRIES[name].run)(values)


_LIBRARY = torch_library.Library("vivace", "DEF")


def _register() -> None:
    for operator in OPERATORS.values():
        entry = _library.ENTRIES[operator.name]
        _LIBRARY.define(operator.schema, tags=[torch.Tag.pt2_compliant_tag])

        def implementation(*values: Any, _entry: _library.Entry = entry, _name: str = operator.name) -> None:
            call = quick(_name, values)
            (call or _entry.run)(values)

        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(operator.name, implementation, key)
        torch_library.register_fake(f"vivace::{operator.name}", lambda *values: None, lib=_LIBRARY)


_register()
