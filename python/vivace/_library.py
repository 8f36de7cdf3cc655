"""The shared library and calls into it."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import pathlib
import struct
import sys
import threading
from typing import Any, Callable, Mapping, NamedTuple

from . import _arrays
from ._operators import OPERATORS, Operator

try:
    from . import _call  # type: ignore[attr-defined]
except ImportError:  # packed without Python's headers, a Python without the stable ABI, or this process has it in another module
    _call = None

ABI_VERSION = 1


def _load() -> ctypes.CDLL:
    path = pathlib.Path(__file__).with_name("libvivace_c.so")
    if not path.exists():
        raise ImportError(f"vivace: {path} is missing; `./run wheel` builds a wheel that has it")
    library = ctypes.CDLL(str(path))
    if library.vivace_abi_version() != ABI_VERSION:
        raise ImportError(f"vivace: {path} has version {library.vivace_abi_version()} of the C ABI, this package needs "
                          f"{ABI_VERSION}: they come from different builds")
    library.vivace_version.restype = library.vivace_last_error.restype = ctypes.c_char_p
    library.vivace_context_destroy.restype, library.vivace_context_destroy.argtypes = None, [ctypes.c_void_p]
    library.vivace_decode_schedule_ints.restype = ctypes.c_int64
    library.vivace_decode_schedule_ints.argtypes = [ctypes.c_int64, ctypes.c_int64]
    return library


LIBRARY = _load()

_EXCEPTIONS = {1: ValueError, 2: NotImplementedError, 3: ValueError, 5: MemoryError}


def check(code: int, place: tuple[str, str] = ("", "")) -> None:
    """Raises what a code means, with the library's message. `place` is what it calls itself, and what Python calls it."""
    if code:
        message = LIBRARY.vivace_last_error().decode("utf-8", "replace")
        raise _EXCEPTIONS.get(code, RuntimeError)(message.replace(*place, 1))


def text_of(function: Any, *args: Any) -> Any:
    """The document that `function` gives through its last argument."""
    text = ctypes.c_char_p()
    check(function(*args, ctypes.byref(text)))
    return json.loads(text.value or b"null")


# --- the process's context: threads, preferences, counts ---------------------------------------------------------------------

class _ContextOptions(ctypes.Structure):
    _fields_ = [("struct_bytes", ctypes.c_size_t), ("threads", ctypes.c_int64), ("prefer", ctypes.c_char_p), ("threads_of", ctypes.c_void_p)]


class Context:
    """A context of the library. What runs calls with it holds it, and it goes with the last of them."""

    def __init__(self, threads: int, prefer: str, running: Context | None) -> None:
        self.threads, self._process = threads or len(os.sched_getaffinity(0)), os.getpid()
        shared = running.handle if running is not None and running.threads == self.threads else None
        options = _ContextOptions(ctypes.sizeof(_ContextOptions), 0 if shared else threads, prefer.encode() or None, shared)
        handle = ctypes.c_void_p()
        code = LIBRARY.vivace_context_create(ctypes.byref(options), ctypes.byref(handle))
        check(code, ("vivace_context_create", "vivace.configure"))
        self.handle = handle.value or 0

    def __del__(self, getpid: Any = os.getpid, ends: Any = sys.is_finalizing, destroy: Any = LIBRARY.vivace_context_destroy) -> None:
        # Not in a forked child, which has the memory without the threads; nor while Python ends, when modules are gone already.
        if not ends() and getattr(self, "handle", 0) and self._process == getpid():
            destroy(self.handle)


_lock = threading.Lock()
_options: dict[str, Any] = {"threads": 0, "prefer": ""}
_context: Context | None = None


def _use(found: Context | None) -> None:
    global _context
    _context = found
    if _call is not None:
        _call.use(found.handle if found is not None else 0, found)


_use(None)  # where this module is loaded again, the extension has the context of the former


def context() -> Context:
    """The context of this process, made when first needed."""
    found = _context
    if found is None:
        with _lock:
            found = _context
            if found is None:
                found = Context(**_options, running=None)
                _use(found)
    return found


def configure(*, threads: int | None = None, prefer: str | None = None) -> None:
    """Sets how this process runs operators; what is not given stays as it is. Counts start anew.

    threads  for calls on the CPU, 1 to 1024; until it is given, as many as the cores that the process may use then
    prefer   "OP=ROW[,OP=ROW...]": only rows of that name, or with that prefix up to a dot, are tried for OP; a call that they
             refuse is an error with their reasons. "": each table's order.
    """
    global _streams
    wanted: dict[str, Any] = {}
    if threads is not None:
        wanted["threads"] = _arrays.whole("vivace.configure: threads", threads, 1, 1024)
    if prefer is not None:
        if not isinstance(prefer, str) or not prefer.isascii() or "\0" in prefer:
            raise (ValueError if isinstance(prefer, str) else TypeError)(f"vivace.configure: prefer is {prefer!r}, needs text such as "
                                                                         "'linear=cpu.f32'")
        wanted["prefer"] = prefer
    with _lock:
        wanted = {**_options, **wanted}
        _use(Context(**wanted, running=_context))
        _options.update(wanted)
        _streams = {}  # after the context: who finds these streams finds it too


def _after_fork() -> None:
    global _lock, _streams
    _lock, _streams = threading.Lock(), {}
    _use(None)  # the parent's threads are not here


os.register_at_fork(after_in_child=_after_fork)

# --- streams -----------------------------------------------------------------------------------------------------------------

_STREAM = struct.Struct("=iiiiQQ")
_streams: dict[tuple[int, ...] | None, Stream] = {}


class Stream(bytes):
    """A vivace_stream, and the context that it points to."""

    context: Context


def stream_bytes(place: tuple[int, ...] | None) -> Stream:
    """The CPU for None, else (ordinal, handle) of a CUDA stream, in questions also its compute capability."""
    streams = _streams  # configure puts another in its place: what is added here late is then found by nobody
    found = streams.get(place)
    if found is None:
        ordinal, handle, *capability = place or (0, 0)
        owner = context()
        found = Stream(_STREAM.pack(_arrays.CPU if place is None else _arrays.CUDA, ordinal, *(capability or (0,)), 0, handle, owner.handle))
        found.context = owner
        if len(streams) > 256:  # handles of streams that are gone
            streams.clear()
        streams[place] = found
    return found


# --- calls -------------------------------------------------------------------------------------------------------------------

_NOTHING, _ABSENT_TENSOR = b"", bytes(_arrays.TENSOR_BYTES)
_ON_CPU = struct.pack("=i", _arrays.CPU)


class Choice(NamedTuple):
    """Which row of an operator's table would run, and why those before it would not."""

    row: str | None
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join([self.row or "no row fits", *(f"  not {row}: {reason}" for row, reason in self.refused)])


class Cost(NamedTuple):
    """What a call must move and compute at least."""

    bytes: int
    flops: int


class Entry:
    """One operator of the library. What runs per call here is a good part of a small call's time."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        kinds = [argument.kind for argument in operator.arguments]
        self.struct_bytes = 8 + sum(_arrays.TENSOR_BYTES if kind == "tensor" else 8 for kind in kinds)
        self._header = struct.pack("=Q", self.struct_bytes)
        self._tensors = [i for i, kind in enumerate(kinds) if kind == "tensor"]
        self._numbers = []  # neighbours that are packed together: (first, end, pack)
        for i, kind in enumerate(kinds):
            if kind == "tensor" or (i > 0 and kinds[i - 1] != "tensor"):
                continue
            end = next((j for j in range(i, len(kinds)) if kinds[j] == "tensor"), len(kinds))
            self._numbers.append((i, end, struct.Struct("=" + "".join("d" if k == "float" else "q" for k in kinds[i:end])).pack))
        self._written = tuple(i for i, argument in enumerate(operator.arguments) if argument.written)
        self._run = self._function("")
        self._explain, self._cost = self._function("_explain"), self._function("_cost")
        self._workspace_bytes = self._function("_workspace_bytes") if operator.workspace is not None else None
        # Runs the operator and returns the call's code, or -1 for values that are not plain and a workspace that is needed and not given.
        self.quick: Callable[[tuple], int] = lambda values: -1
        # The same of what the operator's Python function is given, by position, as take_parameters says.
        self.direct: Callable[..., int] = lambda *given: -1
        self._parameters: tuple | None = None

    def _function(self, suffix: str) -> Any:
        function = getattr(LIBRARY, f"vivace_{self.operator.name}{suffix}")
        function.restype = ctypes.c_int32
        function.argtypes = [ctypes.c_char_p, ctypes.c_void_p if suffix == "_cost" else ctypes.c_char_p]
        if suffix in ("_explain", "_workspace_bytes"):
            function.argtypes.append(ctypes.c_void_p)
        return function

    def _parts(self, values: tuple, framework: _arrays.Framework, other: Callable[[Any], bytes] = _arrays.describe) -> list[bytes]:
        """The arguments as the struct's bytes, one item for each value; `framework` is that of the first, `other` describes those of other types."""
        if len(values) != len(self.operator.arguments):  # a tuple among what was given is shorter or longer than it should be
            raise TypeError(f"needs {len(self.operator.arguments)} values, not {len(values)}")
        kind, describe = type(values[0]), framework.describe
        parts = [self._header] + [_NOTHING] * len(values)
        try:
            for i in self._tensors:
                value = values[i]
                if value is None:
                    parts[i + 1] = _ABSENT_TENSOR
                elif type(value) is kind:
                    parts[i + 1] = describe(value)
                else:
                    parts[i + 1] = other(value)
        except (TypeError, ValueError) as error:
            name = self.operator.arguments[i].said
            raise type(error)(str(error).replace(_arrays.AN_ARRAY, f"{self.operator.name}: {name}", 1)) from None
        try:
            for first, end, pack in self._numbers:
                parts[first + 1] = pack(*values[first:end])
        except (struct.error, OverflowError):
            raise self._unfit(values) from None
        return parts

    def _unfit(self, values: tuple) -> Exception:
        """What is wrong with the first number that does not fit its place."""
        for argument, value in zip(self.operator.arguments, values):
            if argument.kind == "tensor":
                continue
            needs = "a number" if argument.kind == "float" else "a whole number of 64 bits"
            try:
                struct.pack("=d" if argument.kind == "float" else "=q", value)
            except (struct.error, OverflowError):
                wrong = ValueError if isinstance(value, int) else TypeError
                return wrong(f"{self.operator.name}: {argument.said} is {_arrays.shown(value)}, needs {needs}")
        return RuntimeError(f"{self.operator.name}: numbers that fit were refused")

    def _call(self, values: tuple) -> tuple[list[bytes], Stream]:
        framework = _arrays.framework_of(values[0])
        return self._parts(values, framework), stream_bytes(framework.place(values[0]))

    def take_parameters(self, parameters: Mapping[str, inspect.Parameter], names: Mapping[str, str]) -> list[str]:
        """Of the operator's Python function, each argument of which is that of the library of its name, or as `names` has it; the result is
        its parameter `out`. Arguments of the library without a parameter are 0. Returns the parameters that direct() takes, all of them.
        """
        where: dict[str, list[int]] = {}
        for i, argument in enumerate(self.operator.arguments):
            where.setdefault("params" if argument.name.startswith("params_") else names.get(argument.name, argument.name), []).append(i)
        known = [name for name in parameters if name in where]
        self._parameters = tuple((parameters[name].default is inspect.Parameter.empty or name == "out", where[name][0], len(where[name]))
                                 for name in known)
        return known

    def take_apart(self, exchange: int, types: tuple[type, ...], is_lazy: Callable[[Any], bool] | None = None,
                   recorders: tuple[Callable[[], Any], ...] = ()) -> None:
        """From now on quick() takes tensor objects of these types, which DLPack's C exchange knows. `is_lazy` is asked of those with even
        strides, whether their numbers are others than those in memory: such are not taken. direct() takes nothing while one of `recorders`
        says that it records calls.
        """
        if _call is not None:
            run, workspace_bytes = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (self._run, self._workspace_bytes))
            kinds = "".join("t" if a.kind == "tensor" else "f" if a.kind == "float" else "i" for a in self.operator.arguments)
            workspace = -1 if self.operator.workspace is None else self.operator.workspace
            self.quick = _call.make(run, workspace_bytes, exchange, kinds, workspace, types, is_lazy)
            if self._parameters is not None:
                self.direct = _call.bind(self.quick, self._parameters, recorders)

    def run(self, values: tuple) -> None:
        """Runs the operator. A workspace that is needed and not given is allocated beside the first tensor."""
        parts, stream = self._call(values)
        self._check_writable(values, parts, stream[:4] == _ON_CPU)
        place, scratch = self.operator.workspace, None
        if place is not None and values[place] is None:
            needed = self._needed(b"".join(parts), stream)
            if needed:
                scratch = _arrays.empty(values[0], (needed,), "u8")
                parts[place + 1] = _arrays.describe(scratch)
        code = self._run(b"".join(parts), stream)
        if code:
            check(code)

    def _check_writable(self, values: tuple, parts: list[bytes], on_cpu: bool) -> None:
        """On a GPU only arrays that come by DLPack may be read-only."""
        for i in self._written:
            why = getattr(parts[i + 1], "unwritable", None)
            if why is None and on_cpu and values[i] is not None and not _arrays.framework_of(values[i]).writable(values[i]):
                why = "is read-only"
            if why is not None:
                raise ValueError(f"{self.operator.name}: {self.operator.arguments[i].said} is written, but the array {why}")

    def _needed(self, args: bytes, stream: bytes) -> int:
        needed = ctypes.c_int64()
        check(self._workspace_bytes(args, stream, ctypes.byref(needed)))
        return needed.value

    def workspace_bytes(self, values: tuple) -> int:
        if self._workspace_bytes is None:
            return 0
        parts, stream = self._call(values)
        return self._needed(b"".join(parts), stream)

    def explain(self, values: tuple) -> Choice:
        parts, stream = self._call(values)
        found = text_of(self._explain, b"".join(parts), stream)
        return Choice(found["row"], tuple((item["row"], item["reason"]) for item in found["refused"]))

    def cost(self, values: tuple) -> Cost:
        found = (ctypes.c_int64 * 2)()
        check(self._cost(b"".join(self._call(values)[0]), found))
        return Cost(*found)

    def check_shapes(self, values: tuple, describe: Callable[[Any], bytes]) -> None:
        """Raises what the call would for its shapes, types and numbers. `describe` is for its tensors, whose pointers may be null."""
        parts = self._parts(values, _arrays.SHAPE._replace(describe=describe), describe)
        check(self._cost(b"".join(parts), (ctypes.c_int64 * 2)()))

    def schedule_params(self, values: tuple) -> tuple[int, ...]:
        """Of attention_decode alone."""
        found = (ctypes.c_int64 * 7)()
        parts, stream = self._call(values)
        check(LIBRARY.vivace_attention_decode_schedule_params(b"".join(parts), stream, found))
        return tuple(found)


ENTRIES = {name: Entry(operator) for name, operator in OPERATORS.items()}
