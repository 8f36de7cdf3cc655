"""The operators. Arrays are NumPy's, torch's, or any that speak DLPack, all of one call on one device; what is computed, and what is
refused, is stated in the C++ header of the same name (include/vivace/). Outputs that are not given are allocated; a workspace
too, unless it is given. On the CPU a call runs to its end, on a GPU it is enqueued on the current stream and may be captured in a
CUDA graph (call it once before: kernels are loaded when they are first used).

Each operator also says what a call of it would do, without doing it:

    vivace.linear.explain(x, weight)          -> Choice: the row that would run, and why those before it would not
    vivace.linear.cost(x, weight)             -> Cost: bytes and operations that it needs at least
    vivace.linear.workspace_bytes(x, weight)  -> int: the scratch that it needs
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
import sys
from typing import Any, Callable, NamedTuple, ParamSpec, Protocol, Sequence, TypeVar, runtime_checkable

from . import _arrays, _library
from ._arrays import clear, dtype_of, empty, framework_of, shape_of, shown, whole
from ._library import Choice, Cost
from ._words import REFUSALS, no_tuple, refusal, worded

Array = Any  # NumPy's, torch's, vivace.Typed, or anything with __dlpack__

_SCALING = {"tensor": 0, "token": 1, "block": 2}
_BLOCK = 128

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


def _choice_of(place: str, value: str, names: dict[str, int]) -> int:
    if value not in names:
        raise ValueError(f"{place} is {shown(value)}, needs one of {', '.join(map(repr, names))}")
    return names[value]


_LEAVE_ROWS = {"attention_prefill", "attention_decode", "grouped_gemm"}  # of an output may not be written


@runtime_checkable
class Operator(Protocol[P, R_co]):
    """An operator: a function that can also be asked about a call."""

    name: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Runs it."""
        ...

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Choice:
        """Which row would run this call, and why those before it would not."""
        ...

    def cost(self, *args: P.args, **kwargs: P.kwargs) -> Cost:
        """What this call must move and compute at least."""
        ...

    def workspace_bytes(self, *args: P.args, **kwargs: P.kwargs) -> int:
        """The scratch that this call needs."""
        ...


class _Calls:
    """What the function of an operator does with what it is given.

    `build` checks and allocates: it returns the arguments in the order of the library's struct, and beside them what its annotation
    says, which is what the call returns. `dims` has how many dimensions the arrays have that it takes apart, `names` what it calls an
    argument that the library calls otherwise.
    """

    def __init__(self, name: str, build: Callable, dims: dict[str, int], names: dict[str, str]) -> None:
        self.name, self.build = name, build
        self.entry = _library.ENTRIES[name]
        self._leaves_rows = name in _LEAVE_ROWS
        self._dims, self._names = dims, names
        self._written_out = False  # the function passes on what was not given too

    def run(self, code: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The call, where a way without `build` gave this code: what is wrong with the call, or that it is for others (-1)."""
        try:
            if code > 0:
                _library.check(code)
            values, result = self.build(*args, **kwargs)
            if self._leaves_rows and kwargs.get("out") is None:
                clear(result)
            code = -1 if _arrays.traced() else self.entry.quick(values)
            if code < 0:
                framework_of(values[0]).run(self.entry, values)
            elif code:
                _library.check(code)
        except REFUSALS as error:
            raise self._refusal(error, args, kwargs, True) from None
        return result

    def _refusal(self, error: Exception, args: tuple, kwargs: dict[str, Any], running: bool) -> Exception:
        if self._written_out:
            defaults = self.build.__kwdefaults__ or {}
            kwargs = {name: value for name, value in kwargs.items() if value is not defaults.get(name, self)}
        return refusal(error, self.name, self.build, args, kwargs, self._dims, self._names, running)

    def question(self, ask: Callable[[tuple], Any], like: Callable) -> Callable:
        """A function that asks this of a call, named and described `like` the Operator's."""
        def asked(*args: Any, **kwargs: Any) -> Any:
            try:
                return ask(self.build(*args, **kwargs)[0])
            except REFUSALS as error:
                raise self._refusal(error, args, kwargs, False) from None
        asked.__name__, asked.__qualname__, asked.__doc__ = like.__name__, f"{self.build.__qualname__}.{like.__name__}", like.__doc__
        asked.__signature__ = inspect.signature(self.build).replace(return_annotation=like.__annotations__["return"])  # type: ignore[attr-defined]
        return asked

    def function(self) -> Callable:
        return lambda *args, **kwargs: self.run(-1, args, kwargs)

    def plain_function(self) -> Callable:
        """Of an operator whose `build` does no more than Entry.take_parameters says: it first tries the way past `build`, which starts with
        a call of C that gets all arguments by position. So the function is written out, with the parameters of `build`.
        """
        parameters = inspect.signature(self.build).parameters
        known = self.entry.take_parameters(parameters, self._names)
        positional = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        named = [name for name in parameters if name not in positional]
        others = "".join(f" or {name} is not _{name}" for name in named if name not in known)
        source = (f"def {self.name}({', '.join(positional)}, *, {', '.join(named)}):\n"
                  f"    code = -1 if out is None{others} or _arrays.compiled() else _entry.direct({', '.join(known)})\n"
                  f"    if code == 0:\n"
                  f"        return out\n"
                  f"    return _run(code, ({', '.join(positional)},), {{{', '.join(f'{name!r}: {name}' for name in named)}}})\n")
        space: dict[str, Any] = {f"_{name}": parameters[name].default for name in named}
        space.update(_arrays=_arrays, _entry=self.entry, _run=self.run)
        exec(compile(source, f"<vivace.{self.name}>", "exec"), space)
        function = space[self.name]
        function.__defaults__, function.__kwdefaults__ = self.build.__defaults__, self.build.__kwdefaults__
        self._written_out = True
        return function


def _operator(dims: dict[str, int], plain: bool = False, of: str = "", **names: str) -> Callable[[Callable[P, R]], Operator[P, R]]:
    def make(build: Callable[P, R]) -> Operator[P, R]:
        calls = _Calls(of or build.__name__, build, dims, names)
        made: Any = functools.update_wrapper(calls.plain_function() if plain else calls.function(), build)
        made.name, made._build, made._entry = calls.name, build, calls.entry
        for question in (Operator.explain, Operator.cost, Operator.workspace_bytes):
            setattr(made, question.__name__, calls.question(getattr(calls.entry, question.__name__), question))
        return made
    return make


def _scaling(place: str, scaling: str, name: str, array: Array) -> int:
    code = _SCALING.get(scaling)
    if code == 0:
        return 0
    code = _choice_of(f"{place}: scaling", scaling, _SCALING)
    if dtype_of(array) != "fp8_e4m3":
        raise ValueError(f"{place}: scaling is {scaling!r}, which is for fp8, needs 'tensor', or {name}, which is {dtype_of(array)}, in fp8: "
                         "torch.float8_e4m3fn, or vivace.Typed(array, 'fp8_e4m3')")
    return code


def _needs_scales(place: str, scaling: str, code: int, scale: Array | None) -> None:
    """Where an operator makes scales of an output, the caller has to have them: they are given, not returned."""
    if code and scale is None:
        raise ValueError(f"{place}: out_scale is absent, needs where the scales go: vivace.empty_scale(x, out.shape, {scaling!r})")


def _blocks(width: int) -> int:
    return (width + _BLOCK - 1) // _BLOCK


@worded("vivace.empty_scale")
def empty_scale(like: Array, shape: Sequence[int], scaling: str) -> Array:
    """Where the scales of an fp8 array of this shape go that an operator makes: "token" or "block"."""
    if scaling not in ("token", "block"):
        raise ValueError(f"vivace.empty_scale: scaling is {shown(scaling)}, needs 'token' or 'block'")
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise (ValueError if isinstance(shape, (tuple, list)) else TypeError)(f"vivace.empty_scale: shape is {shown(shape)}, needs two extents")
    tokens, width = shape
    if not _arrays.traced():  # a symbolic size would be bound by a comparison
        tokens, width = (whole(f"vivace.empty_scale: shape[{i}]", extent, 0, 2**31 - 1) for i, extent in enumerate(shape))
    return empty(like, (tokens,) if scaling == "token" else (tokens, _blocks(width)), "f32")


@_operator({}, plain=True, y="out", y_scale="out_scale", y_fp8="out_fp8")
def rms_norm(x: Array, weight: Array, *, residual: Array | None = None, eps: float = 1e-6, out: Array | None = None,
             out_scale: Array | None = None, scaling: str = "tensor", out_fp8: Array | None = None) -> Array:
    """residual += x and v = residual, or v = x; then out = v / sqrt(mean(v * v) + eps) * weight.

    x, residual, out  [tokens, hidden], f32 or bf16; out also fp8, then with out_scale; residual is updated in place
    weight            [hidden], f32, f16 or bf16
    out_fp8           [tokens, hidden], fp8: what quantize_fp8 makes of out, beside it
    scaling           of fp8 out, or of out_fp8
    out_scale         f32: [1], given, for scaling "tensor"; [tokens], made, for "token"; [tokens, ceil(hidden / 128)], made, for "block";
                      a given one as in quantize_fp8
    """
    if out is None:
        out = empty(x, shape_of(x), dtype_of(x))
    code = _scaling("rms_norm", scaling, "out", out) if out_fp8 is None else _scaling("rms_norm", scaling, "out_fp8", out_fp8)
    _needs_scales("rms_norm", scaling, code, out_scale)
    return (x, residual, weight, out, out_scale, code, eps, out_fp8), out


def _linear_values(x: Array, x_scale: Array | None, parts: Sequence[tuple], scaling: str, exact: bool, batch_invariant: bool,
                   weight_ready: bool, workspace: Array | None) -> tuple:
    absent = ((None, None, None, None),) * (3 - len(parts))
    flat = [value for part in (*parts, *absent) for value in part]
    return (x, x_scale, *flat, workspace, len(parts), _scaling("linear", scaling, "x", x), int(exact),
            int(batch_invariant), int(weight_ready))


def _product_dtype(x: Array, out_dtype: str | None) -> str:
    return out_dtype or ("bf16" if dtype_of(x) in ("bf16", "fp8_e4m3") else "f32")


_PART = r"parts\[0\]\."  # which the library calls those of a single weight too


@_operator({"x": 2, "weight": 2}, **{_PART + "y": "out", _PART: ""})
def linear(x: Array, weight: Array, bias: Array | None = None, *, x_scale: Array | None = None, weight_scale: Array | None = None,
           scaling: str = "tensor", exact: bool = False, batch_invariant: bool = False, weight_ready: bool = False,
           out: Array | None = None, out_dtype: str | None = None, workspace: Array | None = None) -> Array:
    """out = x . weight^T + bias.

    x        [tokens, k], f32, bf16 or fp8        weight  [n, k], any type, GGUF's block formats among them
    bias     [n]                                  out     [tokens, n], f32 or bf16
    x_scale, weight_scale, scaling                with fp8: vivace.quantize_fp8, and f32 [1] or one per 128 x 128 block of weight
    exact                                         no quantisation of activations
    batch_invariant                               a token's bits do not depend on how many there are
    weight_ready                                  the caller's word that no kernel still under way writes the weight, which may then load
                                                  before it ends
    """
    if out is None:
        out = empty(x, (shape_of(x)[0], shape_of(weight)[0]), _product_dtype(x, out_dtype))
    return _linear_values(x, x_scale, [(weight, weight_scale, bias, out)], scaling, exact, batch_invariant, weight_ready,
                          workspace), out


@_operator({"x": 2}, of="linear", **{r"parts\[(\d)\]\.y": r"outs[\1]", r"parts\[(\d)\]\.bias": r"biases[\1]",
                                    r"parts\[(\d)\]\.(\w+)": r"\2s[\1]"})
def linear_parts(x: Array, weights: Sequence[Array], biases: Sequence[Array | None] | None = None, *, x_scale: Array | None = None,
                 weight_scales: Sequence[Array | None] | None = None, scaling: str = "tensor", exact: bool = False,
                 batch_invariant: bool = False, weight_ready: bool = False, outs: Sequence[Array] | None = None,
                 out_dtype: str | None = None, workspace: Array | None = None) -> tuple[Array, ...]:
    """vivace.linear for one to three weights that share x: x is converted once, and one loop covers them all."""
    count = len(weights)
    if not 1 <= count <= 3:
        raise ValueError(f"linear: there are {count} weights, needs 1 to 3")
    if outs is None:
        outs = [empty(x, (shape_of(x)[0], shape_of(weight)[0]), _product_dtype(x, out_dtype)) for weight in weights]
    lists = (weights, weight_scales or [None] * count, biases or [None] * count, outs)
    try:
        parts = list(zip(*lists, strict=True))
    except ValueError:
        raise ValueError(f"linear: weights, weight_scales, biases and outs have {', '.join(str(len(given)) for given in lists)} items, need "
                         f"as many as there are weights") from None
    return _linear_values(x, x_scale, parts, scaling, exact, batch_invariant, weight_ready, workspace), tuple(outs)


@_operator({"ids": 1, "table": 2}, plain=True, y="out")
def embedding(ids: Array, table: Array, *, out: Array | None = None, out_dtype: str | None = None) -> Array:
    """out[t] = table[ids[t]].

    ids  i32 [tokens]        table  [vocab, hidden], f32, bf16, f16 or a block format        out  [tokens, hidden], f32 or bf16
    """
    if out is None:
        out = empty(ids, (shape_of(ids)[0], shape_of(table)[1]), out_dtype or ("bf16" if dtype_of(table) == "bf16" else "f32"))
    return (ids, table, out), out


_QK_NORM = {"none": 0, "norm_then_rope": 1, "rope_then_norm": 2}
_ROPE = {"neox": 0, "interleaved": 1}


@_operator({"qkv": 2, "k": 4})
def attention_prologue(qkv: Array, slots: Array, k: Array, v: Array, *, q_norm_weight: Array | None = None,
                       k_norm_weight: Array | None = None, cos_sin: Array | None = None, positions: Array | None = None,
                       qk_norm: str | None = None, rope_style: str = "neox", eps: float = 1e-6, q: Array | None = None,
                       q_dtype: str | None = None, q_scale: Array | None = None, k_scale: Array | None = None,
                       v_scale: Array | None = None) -> Array:
    """Between the QKV projection and attention: splits qkv, normalises and rotates Q and K, writes q, and K and V into their slots.

    qkv        [tokens, (heads_q + 2 heads_kv) * head_dim], f32 or bf16
    slots      i64 [tokens]: page * page_tokens + offset; -1: nowhere
    k, v       [pages, page_tokens, heads_kv, head_dim], written; f32, bf16, f16 or fp8, each with strides of its own
    q          [tokens, heads_q, head_dim], written and returned; f32, bf16 or fp8
    cos_sin    f32 [max_position, rotary_dim]: cosines, then sines; absent: no RoPE        positions  i32 [tokens]
    qk_norm    "none", "norm_then_rope" (when weights are given) or "rope_then_norm"
    q_scale    with fp8 q: f32 [tokens, heads_q], written
    k_scale    with fp8 k: f32 [1], given, or [pages, page_tokens, heads_kv], written        v_scale  f32 [1] or [heads_kv]
    """
    heads_kv, head_dim = shape_of(k)[2:4]
    if q is None:
        tokens, width = shape_of(qkv)
        heads_q = width // max(head_dim, 1) - 2 * heads_kv
        if heads_q < 0:
            raise ValueError(f"attention_prologue: qkv.shape[1] is {width}, needs at least {2 * heads_kv * head_dim}, the keys and values "
                             f"of {heads_kv} heads of {head_dim} (from k.shape)")
        q = empty(qkv, (tokens, heads_q, head_dim), q_dtype or dtype_of(qkv))
    if qk_norm is None:
        qk_norm = "none" if q_norm_weight is None else "norm_then_rope"
    return (qkv, q_norm_weight, k_norm_weight, cos_sin, positions, slots, q, k, v, q_scale, k_scale, v_scale,
            _choice_of("attention_prologue: qk_norm", qk_norm, _QK_NORM),
            _choice_of("attention_prologue: rope_style", rope_style, _ROPE), eps), q


def _attention_output(q: Array, out: Array | None) -> Array:
    if out is not None:
        return out
    return empty(q, shape_of(q), "bf16" if dtype_of(q) == "fp8_e4m3" else dtype_of(q))


@_operator({}, plain=True, output="out")
def attention_prefill(q: Array, k: Array, v: Array, page_table: Array, kv_lengths: Array, query_start: Array, *,
                      q_scale: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None,
                      sinks: Array | None = None, softmax_scale: float = 0.0, window: int = 0, soft_cap: float = 0.0,
                      max_query_tokens: int = 0, split_tokens: int = 0, out: Array | None = None, lse: Array | None = None) -> Array:
    """Causal attention of prompts or chunks of prompts over the paged cache, which already holds their keys and values.

    q            [tokens, heads_q, head_dim]; request b owns the rows query_start[b] .. query_start[b + 1], its last tokens; rows of no
                 request are not written, and zero where out is not given
    k, v         [pages, page_tokens, heads_kv, head_dim]
    page_table   i32 [requests, max_pages]        kv_lengths  i32 [requests]        query_start  i32 [requests + 1]
    q_scale, k_scale, v_scale                     with fp8, as vivace.attention_prologue writes and takes them
    sinks        f32 [heads_q]                    lse  f32 [tokens, heads_q], written
    softmax_scale 0: 1 / sqrt(head_dim)           window, soft_cap 0: none
    max_query_tokens                              no request has more query rows; 0: tokens
    split_tokens                                  keys are added up in groups of so many; 0: in one run
    """
    out = _attention_output(q, out)
    return (q, k, v, page_table, kv_lengths, query_start, out, q_scale, k_scale, v_scale, sinks, lse, softmax_scale, window, soft_cap,
            max_query_tokens, split_tokens), out


class DecodeScheduleParams(NamedTuple):
    """How the work of a decode step is cut; the same for decode_schedule and the attention_decode calls that use its map."""

    heads_kv: int = 1
    tile_tokens: int = 64
    workers: int = 1
    min_tiles: int = 1
    request_cost: int = 0
    window: int = 0
    piece_tiles: int = 0


def decode_schedule_ints(max_requests: int, workers: int) -> int:
    """int32 values of a map for at most this many requests."""
    if not _arrays.traced():  # a symbolic size would be bound by a comparison
        max_requests = whole("vivace.decode_schedule_ints: max_requests", max_requests, 0, 2**31 - 1)
        workers = whole("vivace.decode_schedule_ints: workers", workers, 0, 2**30)
    return 16 + 4 * (workers + 1) + (workers + 7) // 8 * 8 + 4 * (max_requests + 1)  # in Python, so that torch can trace it


@_operator({"kv_lengths": 1}, plain=True, schedule="out")
def decode_schedule(kv_lengths: Array, query_start: Array, params: DecodeScheduleParams, *, out: Array | None = None) -> Array:
    """Cuts the key tiles of all requests and KV heads into one run per worker: once per step and distinct window.

    kv_lengths  i32 [requests]        query_start  i32 [requests + 1]        out  i32, at least decode_schedule_ints() long
    """
    if out is None:
        workers = whole("decode_schedule: params.workers", params.workers, 0, 2**30)
        out = empty(kv_lengths, (decode_schedule_ints(shape_of(kv_lengths)[0], workers),), "i32")
    return (kv_lengths, query_start, out, *params), out


@_operator({}, plain=True, output="out")
def attention_decode(q: Array, k: Array, v: Array, page_table: Array, kv_lengths: Array, query_start: Array, schedule: Array,
                     params: DecodeScheduleParams, *, q_scale: Array | None = None, k_scale: Array | None = None,
                     v_scale: Array | None = None, sinks: Array | None = None, softmax_scale: float = 0.0, window: int = 0,
                     soft_cap: float = 0.0, max_query_tokens: int = 1, old_keys_ready: bool = False, out: Array | None = None,
                     lse: Array | None = None, workspace: Array | None = None) -> Array:
    """Attention of one decode step: 1 to 8 query tokens per request over the paged cache. Arrays as in attention_prefill.

    schedule, params  what decode_schedule wrote for these lengths and row ranges, and was given
    old_keys_ready    the caller's word that all but this step's keys was written early enough: include/vivace/attention_decode.h says when
    """
    out = _attention_output(q, out)
    return (q, k, v, page_table, kv_lengths, query_start, out, q_scale, k_scale, v_scale, sinks, lse, softmax_scale, window, soft_cap,
            schedule, workspace, *params, max_query_tokens, int(old_keys_ready)), out


@worded("attention_decode", k=4)
def attention_decode_schedule_params(q: Array, k: Array, page_table: Array, *, q_scale: Array | None = None,
                                     k_scale: Array | None = None, v_scale: Array | None = None, max_query_tokens: int = 1,
                                     window: int = 0, piece_tiles: int = 0, tile_tokens: int = 64) -> DecodeScheduleParams:
    """How to cut the schedule of attention_decode calls of these shapes and types, for the row that will run them.

    piece_tiles and window are kept; with piece_tiles a request's bits do not depend on its company. tile_tokens counts on the CPU.
    """
    given = DecodeScheduleParams(shape_of(k)[2], tile_tokens, 1, 1, 0, window, piece_tiles)
    values = (q, k, k, page_table, None, None, q if dtype_of(q) != "fp8_e4m3" else None, q_scale, k_scale, v_scale, None, None, 0.0,
              window, 0.0, None, None, *given, max_query_tokens, 0)
    return DecodeScheduleParams(*_library.ENTRIES["attention_decode"].schedule_params(values))


_ROUTER_MODES = {"two_term": 0, "exact": 1}


class RouterWeight(NamedTuple):
    """A router weight as a sum of bf16 terms, terms[0] + terms[1] + terms[2], or terms[0] + terms[1] / 256 + terms[2] / 65536 where
    some are too small for that (scaled). Made by prepare_router_weight."""

    terms: tuple[Array, ...]
    mode: str
    version: int = 0
    scaled: bool = False


def _signed(version: int) -> int:
    """A version, which C has as uint64, in the bits of the int64 that numbers are packed as."""
    return version - 2**64 if version >= 2**63 else version


class _RouterWeightSource(ctypes.Structure):
    _fields_ = [("struct_bytes", ctypes.c_size_t), ("weight", ctypes.c_char * _arrays.TENSOR_BYTES),
                ("storage", ctypes.c_char * _arrays.TENSOR_BYTES), ("mode", ctypes.c_int64), ("version", ctypes.c_uint64)]


class _RouterWeight(ctypes.Structure):
    _fields_ = [("terms", (ctypes.c_char * _arrays.TENSOR_BYTES) * 3), ("term_count", ctypes.c_int64), ("scaled", ctypes.c_int64), ("mode", ctypes.c_int64),
                ("version", ctypes.c_uint64)]


@worded("prepare_router_weight", running=True, weight=2)
def prepare_router_weight(weight: Array, *, mode: str = "exact", version: int = 0) -> RouterWeight:
    """Splits a router weight [experts, hidden], f32, f16 or bf16, into its terms; at load time, once.

    mode     "exact": equal to the fp32 weight; "two_term": every weight within 2^-16 of its magnitude
    version  a number of the caller's for these contents, which router_gemm compares
    """
    version = whole("prepare_router_weight: version", version, 0, 2**64 - 1)
    source = _RouterWeightSource(ctypes.sizeof(_RouterWeightSource), mode=_choice_of("prepare_router_weight: mode", mode, _ROUTER_MODES),
                                 version=version)
    alone = _arrays.framework_of(weight) is _arrays.DLPACK
    if alone and (_arrays.place_of(weight) is not None or dtype_of(weight) != "bf16"):
        raise TypeError(f"prepare_router_weight: weight is a {type(weight).__name__}, which has DLPack alone, needs an array of NumPy's or torch's to "
                        "have its terms in: numpy.from_dlpack and torch.from_dlpack make one")
    if _arrays.place_of(weight) is not None:  # the split runs on the CPU; its terms go back to where the weight is
        made = prepare_router_weight(weight.cpu(), mode=mode, version=version)
        return made._replace(terms=tuple(term.to(weight.device) for term in made.terms))
    experts, hidden = shape_of(weight)
    described = _arrays.describe(weight)  # may hold the memory
    ctypes.memmove(ctypes.byref(source, _RouterWeightSource.weight.offset), described, _arrays.TENSOR_BYTES)
    needed = ctypes.c_int64()
    _library.check(_library.LIBRARY.vivace_router_weight_bytes(ctypes.byref(source), ctypes.byref(needed)))
    storage = None
    if needed.value:
        storage = empty(weight, (needed.value // (2 * experts * hidden) if experts * hidden else 0, experts, hidden), "bf16")
        plane = _arrays.pack(int.from_bytes(_arrays.describe(storage)[:8], sys.byteorder), _arrays.DTYPES["u8"], _arrays.CPU, 0,
                             (needed.value,), (1,))
        ctypes.memmove(ctypes.byref(source, _RouterWeightSource.storage.offset), plane, _arrays.TENSOR_BYTES)
    made = _RouterWeight()
    _library.check(_library.LIBRARY.vivace_prepare_router_weight(ctypes.byref(source), ctypes.byref(made)))
    if storage is None:
        return RouterWeight((weight,), mode, version)
    planes = ([_arrays.Typed(plane, "bf16") for plane in storage.array] if isinstance(storage, _arrays.Typed)
              else [storage[i] for i in range(storage.shape[0])])
    return RouterWeight(tuple(planes[:made.term_count]), mode, version, bool(made.scaled))


def _router_values(name: str, weight: RouterWeight, weight_version: int | None) -> tuple[tuple, int]:
    """A weight as the library takes it, and its version as it is now."""
    terms = weight.terms
    if not 1 <= len(terms) <= 3:
        raise ValueError(f"{name}: weight has {len(terms)} terms, needs 1 to 3: one made by prepare_router_weight")
    version = weight.version if weight_version is None else whole(f"{name}: weight_version", weight_version, 0, 2**64 - 1)
    return (*terms, *((None,) * (3 - len(terms))), len(terms), int(weight.scaled),
            _choice_of(f"{name}: weight.mode", weight.mode, _ROUTER_MODES), _signed(weight.version)), _signed(version)


@_operator({"x": 2}, scores="out")
def router_gemm(x: Array, weight: RouterWeight, *, bias: Array | None = None, weight_version: int | None = None,
                batch_invariant: bool = False, weight_ready: bool = False, out: Array | None = None, out_dtype: str = "f32") -> Array:
    """out = x . weight^T + bias: the logits of a mixture-of-experts router, at fp32 accuracy on bf16 tensor cores.

    x  [tokens, hidden], f32 or bf16        weight  prepare_router_weight        bias  f32 [experts]        out  [tokens, experts]
    weight_version  of the weight as it is now: another than it was prepared from is refused
    batch_invariant  a token's bits must not depend on how many tokens there are
    weight_ready     the caller's word that no kernel still under way writes the terms, which may then load before it ends
    """
    parts, version = _router_values("router_gemm", weight, weight_version)
    if out is None:
        out = empty(x, (shape_of(x)[0], shape_of(weight.terms[0])[0]), out_dtype)
    return (x, *parts, bias, out, version, int(batch_invariant), int(weight_ready)), out


_SCORING = {"softmax": 0, "softmax_chosen": 1, "sigmoid": 2}


class Route(NamedTuple):
    """The experts of each token, and their weights."""

    expert_ids: Array
    expert_weights: Array
    zero_weight: Array | None = None


def _route(place: str, like: Array, tokens: int, experts: int, top_k: int, zero_experts: int, expert_ids: Array | None,
           expert_weights: Array | None, zero_weight: Array | None) -> Route:
    """What a choice of experts is written to: the arrays that were given, and new ones for the others."""
    if expert_ids is None or expert_weights is None:
        top_k = whole(place, top_k, 0, experts)
    if zero_experts > 0 and zero_weight is None:
        zero_weight = empty(like, (tokens,), "f32")
    return Route(empty(like, (tokens, top_k), "i32") if expert_ids is None else expert_ids,
                 empty(like, (tokens, top_k), "f32") if expert_weights is None else expert_weights, zero_weight)


@_operator({"scores": 2})
def route_top_k(scores: Array, top_k: int, *, correction_bias: Array | None = None, live_tokens: Array | None = None,
                scoring: str = "softmax", renormalise: bool = True, scale: float = 1.0, groups: int = 1, top_groups: int = 1,
                zero_experts: int = 0, expert_ids: Array | None = None, expert_weights: Array | None = None,
                zero_weight: Array | None = None) -> Route:
    """Chooses top_k experts for each token from its router logits, and their weights.

    scores           f32 [tokens, experts]        correction_bias  f32 [experts]: for the choice, not in the weights
    scoring          "softmax" over all, "softmax_chosen" over the chosen, "sigmoid"
    renormalise, scale                            divide the chosen weights by their sum; then a factor
    groups, top_groups                            experts form groups of neighbours, of which the best may be chosen from
    zero_experts     the last so many are identities: id -1, and their weights add up in zero_weight, f32 [tokens]
    live_tokens      i32 [1]: tokens from this number on are padding and choose nobody

    NaN is below every number and is chosen only where nothing else is left, lowest ids first. A row of NaN alone has finite weights too:
    equal ones under softmax, zero under "sigmoid".
    """
    tokens, experts = shape_of(scores)
    route = _route("route_top_k: top_k", scores, tokens, experts, top_k, zero_experts, expert_ids, expert_weights, zero_weight)
    return (scores, correction_bias, *route, live_tokens, _choice_of("route_top_k: scoring", scoring, _SCORING),
            int(renormalise), scale, groups, top_groups, zero_experts), route


@_operator({"x": 2})
def choose_experts(x: Array, weight: RouterWeight, top_k: int, *, bias: Array | None = None, correction_bias: Array | None = None,
                   live_tokens: Array | None = None, scoring: str = "softmax", renormalise: bool = True, scale: float = 1.0,
                   groups: int = 1, top_groups: int = 1, zero_experts: int = 0, weight_version: int | None = None,
                   batch_invariant: bool = False, weight_ready: bool = False, scores: Array | None = None,
                   expert_ids: Array | None = None, expert_weights: Array | None = None, zero_weight: Array | None = None,
                   workspace: Array | None = None) -> Route:
    """router_gemm and route_top_k in one call, which is one kernel where that is faster.

    x, weight, bias, weight_version, batch_invariant, weight_ready        as in router_gemm
    scores           f32 [tokens, experts]: the logits, written where it is given
    top_k and all else                                                    as in route_top_k
    """
    parts, version = _router_values("choose_experts", weight, weight_version)
    tokens, experts = shape_of(x)[0], shape_of(weight.terms[0])[0]
    route = _route("choose_experts: top_k", x, tokens, experts, top_k, zero_experts, expert_ids, expert_weights, zero_weight)
    return (x, *parts, bias, scores, correction_bias, *route, live_tokens, workspace, version,
            _choice_of("choose_experts: scoring", scoring, _SCORING), int(renormalise), scale, groups, top_groups, zero_experts,
            int(batch_invariant), int(weight_ready)), route


class ExpertWeights(NamedTuple):
    """The three matrices of one expert: gate and up [intermediate, hidden], down [hidden, intermediate]; with fp8 their scales."""

    gate: Array
    up: Array
    down: Array
    gate_scale: Array | None = None
    up_scale: Array | None = None
    down_scale: Array | None = None
    act_scale: Array | None = None


def _parts_of(expert: ExpertWeights | None) -> Sequence[Array | None]:
    """All seven; a plain tuple may leave out the scales together."""
    if expert is None:
        return (None,) * 7
    if not isinstance(expert, (list, tuple)) or len(expert) not in (3, 7):
        raise no_tuple("fused_moe: shared", "ExpertWeights", expert)
    return (*expert, *(None,) * (7 - len(expert)))


@_operator({}, y="out", **{r"swiglu\.": "swiglu_"})
def fused_moe(x: Array, gate_up: Array, down: Array, expert_ids: Array, expert_weights: Array, *, x_scale: Array | None = None,
              gate_up_scale: Array | None = None, down_scale: Array | None = None, act_scale: Array | None = None,
              block_offset: int = 0, shared: ExpertWeights | None = None, first_expert: int = 0, total_experts: int = 0,
              expert_map: Array | None = None,
              swiglu_alpha: float = 1, swiglu_limit: float = math.inf, swiglu_beta: float = 0, batch_invariant: bool = False,
              out: Array | None = None, out_dtype: str | None = None, workspace: Array | None = None) -> Array:
    """out[t] = sum over j of expert_weights[t, j] * down_e . swiglu(gate_e . x_t, up_e . x_t), plus the shared expert.

    x               [tokens, hidden], f32, bf16 or fp8        out  [tokens, hidden]
    gate_up         [experts, 2 * intermediate, hidden], gate rows first        down  [experts, hidden, intermediate]
    expert_ids      i32 [tokens, top_k], -1: not here         expert_weights  f32 [tokens, top_k]
    x_scale         with fp8 x: f32 [1], or [tokens, ceil(hidden / 128)]; with another x and fp8 weights of one scale an expert f32
                    [1], which x is quantised by; with blocks none: then x gets made scales
    gate_up_scale   with fp8 weights: f32 [experts, 2], or [experts, 2, block rows of I, of H]
    down_scale      with fp8 weights: f32 [experts], or [experts, block rows of H, of I]
    act_scale       with fp8 weights of one scale an expert: f32 [1] or [experts]
    block_offset    with blocks: where this slice of the intermediate starts in a block of 128
    first_expert    the id of expert 0 here, where a rank has neighbours; total_experts then says how many all ranks have
    expert_map      i32 [ids]: which expert here an id is, negative for those elsewhere
    swiglu_alpha, _limit, _beta   g * sigmoid(alpha * g) * (u + beta), g = min(gate, limit), u = up within -limit and limit:
                    silu(gate) * up as they stand, and gpt-oss's gate with 1.702, 7, 1
    batch_invariant a token's bits must not depend on how many tokens there are
    """
    for name, value, more in (("swiglu_alpha", swiglu_alpha, ""), ("swiglu_limit", swiglu_limit, ", or infinity")):
        if value == 0:  # which stands for what is not given in C
            raise ValueError(f"fused_moe: {name} is 0, needs 1e-30 to 1e30{more}")
    if out is None:
        out = empty(x, shape_of(x), out_dtype or ("bf16" if dtype_of(x) == "fp8_e4m3" else dtype_of(x)))
    return (x, x_scale, gate_up, down, gate_up_scale, down_scale, act_scale, *_parts_of(shared), expert_ids, expert_weights,
            expert_map, out, workspace, 0, 0, block_offset, first_expert, total_experts, swiglu_alpha, swiglu_limit, swiglu_beta,
            int(batch_invariant)), out


@_operator({"x": 2, "weight": 3}, plain=True, y="out")
def grouped_gemm(x: Array, weight: Array, group_start: Array, group_rows: Array, *, x_scale: Array | None = None,
                 weight_scale: Array | None = None, batch_invariant: bool = False, out: Array | None = None,
                 out_dtype: str | None = None) -> Array:
    """out[r] = x[r] . weight[g]^T for each row r of each group g; rows of no group are not written, and zero where out is not given.

    x            [rows, k]              weight      [groups, n, k]        out  [rows, n], f32 or bf16
    group_start  i32 [groups]           group_rows  i32 [groups]
    x_scale      with fp8 x: f32 [1], or [rows, ceil(k / 128)]
    weight_scale with fp8 weight: f32 [groups], or [groups, ceil(n / 128), ceil(k / 128)]
    batch_invariant  a row's bits must not depend on how many rows there are
    """
    if out is None:
        out = empty(x, (shape_of(x)[0], shape_of(weight)[1]), _product_dtype(x, out_dtype))
    return (x, weight, group_start, group_rows, x_scale, weight_scale, out, int(batch_invariant)), out


@_operator({}, plain=True, y="out", y_scale="out_scale")
def silu_mul(gate: Array, up: Array, *, out: Array | None = None, out_scale: Array | None = None, scaling: str = "tensor") -> Array:
    """out = silu(gate) * up.

    gate, up, out  [tokens, intermediate], f32 or bf16; out also fp8, then with out_scale as in rms_norm
    """
    if out is None:
        out = empty(gate, shape_of(gate), dtype_of(gate))
    code = _scaling("silu_mul", scaling, "out", out)
    _needs_scales("silu_mul", scaling, code, out_scale)
    return (gate, up, out, out_scale, code), out


@_operator({"x": 2}, y="out")
def quantize_fp8(x: Array, *, scaling: str = "token", scale: Array | None = None, out: Array | None = None) -> tuple[Array, Array]:
    """out = e4m3(x / scale); value = stored * scale. Returns (out, scale).

    x, out   [tokens, width]; x f32, bf16 or f16
    scaling  "tensor": scale f32 [1] is given; "token": f32 [tokens], made; "block": f32 [tokens, ceil(width / 128)], made
    scale    a given one is finite and above 0: another is refused on the CPU, and on a GPU nobody looks at it
    """
    code = _choice_of("quantize_fp8: scaling", scaling, _SCALING)
    if out is None:
        out = empty(x, shape_of(x), "fp8_e4m3")
    if scale is None and code != 0:
        tokens, width = shape_of(x)
        scale = empty(x, (tokens,) if scaling == "token" else (tokens, _blocks(width)), "f32")
    return (x, out, scale, code), (out, scale)


class Sampled(NamedTuple):
    """One token per row. valid is 0 where a row had none: its id is 0."""

    ids: Array
    valid: Array
    logprobs: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None


@_operator({"logits": 2})
def sampler(logits: Array, *, temperature: Array | None = None, top_p: Array | None = None, min_p: Array | None = None,
            top_k: Array | None = None, repetition_penalty: Array | None = None, presence_penalty: Array | None = None,
            frequency_penalty: Array | None = None, seed: Array | None = None, position: Array | None = None,
            prompt_bits: Array | None = None, output_counts: Array | None = None, state: Array | None = None,
            bias_start: Array | None = None, bias_ids: Array | None = None, bias_values: Array | None = None,
            allowed_bits: Array | None = None, count_ids: bool = False, logprobs: bool = False, top_logprobs: int = 0,
            ids: Array | None = None, valid: Array | None = None, workspace: Array | None = None) -> Sampled:
    """Draws one token per row of logits, f32 or bf16 [rows, vocab].

    temperature (0: greedy), top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty  f32 [rows]; absent: 1, 1, 0, 1, 0, 0
    top_k                i32 [rows]; 0: all
    seed, position       i64 [rows], both or neither: of the request, and of the token to be drawn in it; absent: 0. So a call without
                         options draws at temperature 1, the same tokens each time
    prompt_bits          i32 [states, ceil(vocab / 32)]        output_counts  i32 [states, vocab]        state  i32 [rows], -1: none
    bias_start, bias_ids, bias_values                          i32 [rows + 1], i32 [entries], f32 [entries]
    allowed_bits         i32 [rows, ceil(vocab / 32)]
    count_ids            the drawn id is counted into output_counts
    logprobs             also the log-probability of each drawn token; top_logprobs: and of the so many most likely ones, at most vocab
    """
    rows, vocab = shape_of(logits)
    if top_logprobs:
        top_logprobs = whole("sampler: top_logprobs", top_logprobs, 0, vocab)
    ids = empty(logits, (rows,), "i32") if ids is None else ids
    valid = empty(logits, (rows,), "u8") if valid is None else valid
    chosen = empty(logits, (rows,), "f32") if logprobs or top_logprobs else None
    top_ids = empty(logits, (rows, top_logprobs), "i32") if top_logprobs else None
    top = empty(logits, (rows, top_logprobs), "f32") if top_logprobs else None
    return (logits, temperature, top_p, min_p, top_k, repetition_penalty, presence_penalty, frequency_penalty, seed, position, prompt_bits,
            output_counts, state, bias_start, bias_ids, bias_values, allowed_bits, ids, valid, chosen, top_ids, top, workspace,
            int(count_ids)), Sampled(ids, valid, chosen, top_ids, top)


@worded("decode_attention", kv_lengths=1)
def decode_attention(q: Array, k: Array, v: Array, page_table: Array, kv_lengths: Array, query_start: Array, *,
                     max_query_tokens: int = 1, window: int = 0, piece_tiles: int = 0, **options: Any) -> Array:
    """attention_decode with a schedule of its own: for a single layer. A model makes one schedule per step and shares it."""
    scales = {name: options.get(name) for name in ("q_scale", "k_scale", "v_scale")}
    params = attention_decode_schedule_params(q, k, page_table, max_query_tokens=max_query_tokens, window=window, piece_tiles=piece_tiles,
                                              **scales)
    schedule = empty(_arrays.beside(kv_lengths, q), (decode_schedule_ints(shape_of(kv_lengths)[0], params.workers),), "i32")
    decode_schedule(kv_lengths, query_start, params, out=schedule)
    return attention_decode(q, k, v, page_table, kv_lengths, query_start, schedule, params, max_query_tokens=max_query_tokens,
                            window=window, **options)
