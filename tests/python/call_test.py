"""Tensor objects taken apart in C, without torch: DLPack's C exchange of a library of a few lines."""

import ctypes
import gc
import importlib.util
import inspect
import signal
import struct
import subprocess
import sys
import threading
import time
import unittest
import unittest.mock
import weakref

import package

package.need("vivace", "vivace._call")
import vivace  # noqa: E402
from vivace import _arrays, _call, _library  # noqa: E402

F32, DOUBLE = (2, 32, 1), (2, 64, 1)
TYPES = {F32: "f32", (2, 16, 1): "f16", (4, 16, 1): "bf16", (10, 8, 1): "fp8_e4m3", (1, 8, 1): "u8", (6, 8, 1): "u8", (0, 32, 1): "i32", (0, 64, 1): "i64"}
RUN = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
WORKSPACE_BYTES = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64))
TAKE_APART = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_arrays._DLTensor))
STREAM_OF = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Exchange(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p), ("unused", ctypes.c_void_p * 3),
                ("take_apart", TAKE_APART), ("stream_of", STREAM_OF)]


class Tensor:
    """Numbers of a type in rows; `first` of them are skipped."""

    def __init__(self, numbers, shape, kind=F32, device=1, first=0, ordinal=0, strides=None):
        self.memory, self.shape, self.first = (ctypes.c_float * len(numbers))(*numbers), (ctypes.c_int64 * len(shape))(*shape), first
        self.kind, self.device, self.ordinal = kind, device, ordinal
        self.strides = (ctypes.c_int64 * len(shape))(*strides) if strides is not None else None


class Other(Tensor):
    pass


@TAKE_APART
def take_apart(tensor, out):
    if tensor.device == 0:
        return -1
    out[0] = _arrays._DLTensor(ctypes.addressof(tensor.memory), tensor.device, tensor.ordinal, len(tensor.shape), *tensor.kind, tensor.shape,
                               tensor.strides, 4 * tensor.first)
    return 0


def described(tensor):
    """What take_apart says of it, as a vivace_tensor."""
    strides = tensor.strides if tensor.strides is not None else [1] * len(tensor.shape)  # those of one extent
    cuda = tensor.device in (2, 13)
    return _arrays.pack(ctypes.addressof(tensor.memory) + 4 * tensor.first, _arrays.DTYPES[TYPES[tensor.kind]],
                        _arrays.CUDA if cuda else _arrays.CPU, tensor.ordinal if cuda else 0, tensor.shape, strides)


def exchange(stream_of):
    return Exchange(1, 3, None, (None, None, None), take_apart, STREAM_OF(stream_of))


EXCHANGE = exchange(lambda kind, ordinal, out: -1)
ENTRY = _library.ENTRIES["rms_norm"]


def address(function):
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def site(run=ENTRY._run, workspace_bytes=None, exchange=EXCHANGE, workspace=-1, types=(Tensor,), is_lazy=None):
    """A site of rms_norm; the caller keeps the functions and the exchange."""
    return _call.make(address(run), address(workspace_bytes), ctypes.addressof(exchange), "tttttift", workspace, types, is_lazy)


class Calls(unittest.TestCase):
    def setUp(self):
        vivace.configure()  # there is a context
        self.x, self.weight, self.y = Tensor([9, 3, 4, 0], [1, 2], first=1), Tensor([1, 2], [2]), Tensor([0, 0], [1, 2])

    def test_a_call(self):
        self.assertEqual(site()((self.x, None, self.weight, self.y, None, 0, 0, None)), 0)
        self.assertAlmostEqual(self.y.memory[1], 8 / 12.5**0.5, places=6)
        self.assertEqual([(row["row"], row["calls"]) for row in vivace.counts()], [("cpu.simd", 1)])

    def test_an_error_is_the_librarys(self):
        self.assertEqual(site()((self.x, None, Tensor([1], [1]), self.y, None, 0, 0.0, None)), 1)
        with self.assertRaisesRegex(ValueError, "weight.shape"):
            _library.check(1)

    def test_what_is_not_plain_is_left(self):
        call = site()
        for place, value in [(0, Tensor([1, 2], [1, 2], kind=DOUBLE)), (0, Tensor([1, 2], [1] * 5 + [2])), (0, Tensor([1, 2], [1, 2], device=9)),
                             (0, Tensor([1, 2], [1, 2], device=0)), (0, Tensor([1, 2], [1, 2], device=2)), (0, Other([1, 2], [1, 2])), (0, 5),
                             (2, Tensor([1, 2], [2], kind=(2, 32, 4))), (5, 0.0), (5, 2**63), (6, "0"), (6, 10**400), (6, None)]:
            values = [self.x, None, self.weight, self.y, None, 0, 0.0, None]
            values[place] = value
            self.assertEqual(call(tuple(values)), -1, (place, value))
        self.assertEqual(call((None,) * 5 + (0, 0.0, None)), -1)  # where would it run?
        self.assertEqual(list(self.y.memory), [0, 0])

    def test_a_bool_is_a_number(self):
        self.assertEqual(site()((self.x, None, self.weight, self.y, None, False, True, None)), 0)

    def test_needs_as_many_values_as_arguments(self):
        for wrong in ((), (self.x,), [self.x, None, self.weight, self.y, None, 0, 0.0, None], None):
            with self.assertRaisesRegex(TypeError, "a tuple of 8 values"):
                site()(wrong)

    def test_what_makes_no_site(self):
        with self.assertRaisesRegex(ValueError, "more arguments or types"):
            _call.make(1, 0, 1, "t" * 300, -1, (), None)
        with self.assertRaisesRegex(ValueError, "more arguments or types"):
            site(types=(Tensor,) * 5)
        with self.assertRaisesRegex(TypeError, "a tuple of types"):
            site(types=(Tensor, 5))
        for place in (4, 7):
            with self.assertRaisesRegex(ValueError, "the workspace is no argument, or"):
                site(workspace=place)

    def bound(self, operator, run):
        """The two ways into `run` of an operator of which take_parameters knows: by its values, and by what Python is given."""
        entry = operator._entry
        kinds = "".join(argument.kind[0] for argument in entry.operator.arguments)
        call = _call.make(address(run), 0, ctypes.addressof(EXCHANGE), kinds, -1, (Tensor,), None)
        return call, _call.bind(call, entry._parameters, ())

    def test_direct_calls_pack_what_python_does(self):
        packed, seen = [], set()

        @RUN
        def run(args, stream):
            packed.append(ctypes.string_at(args, entry.struct_bytes))
            return 7

        for operator in (found for found in vars(vivace).values() if isinstance(found, vivace.Operator)):
            entry = operator._entry
            if entry._parameters is None or operator.name in seen:
                continue
            seen.add(operator.name)
            call, direct = self.bound(operator, run)
            parameters = inspect.signature(operator).parameters
            known = [name for name in parameters if name not in ("scaling", "out_dtype")]  # which the library does not know
            self.assertEqual(len(known), len(entry._parameters))
            given = {}  # something else for each
            for name, (_, first, count) in zip(known, entry._parameters):
                kind = entry.operator.arguments[first].kind
                given[name] = (tuple(range(first, first + count)) if count > 1 else first + 1.5 if kind == "float" else first + 1 if kind == "int"
                               else Tensor([1, 2], [1, 2], first=first % 2, strides=[first + 2, 1]))
            needed = {name: given[name] for name, (required, *_) in zip(known, entry._parameters) if required}
            for options in (given, needed, {**needed, known[-1]: given[known[-1]]}):
                values = [options.get(name, parameters[name].default) for name in known]
                for way in (lambda: direct(*values), lambda: call(operator._build(**options)[0])):
                    self.assertEqual(way(), 7, operator)
                self.assertEqual(packed, [packed[0]] * 2, operator)
                packed.clear()
        self.assertEqual(seen, {"rms_norm", "embedding", "attention_prefill", "attention_decode", "decode_schedule", "grouped_gemm", "silu_mul"})

    def test_what_takes_the_direct_way(self):
        x, weight, y = self.x, self.weight, self.y
        entry, given = vivace.rms_norm._entry, []

        def direct(*values):
            given.append(values)
            return 0

        with unittest.mock.patch.object(entry, "direct", direct):
            for args, options in [((x, weight), {"out": y}), ((x,), {"out": y, "weight": weight}), ((), {"weight": weight, "out": y, "x": x}),
                                  ((x, weight), {"out": y, "scaling": "tensor", "residual": None, "eps": 1e-6})]:
                self.assertIs(vivace.rms_norm(*args, **options), y)
            self.assertEqual(given, [(x, weight, None, 1e-6, y, None, None)] * 4)
            for args, options in [((x, weight), {}), ((x, weight), {"out": None}), ((x, weight), {"out": y, "scaling": "token"})]:
                with self.assertRaises((TypeError, ValueError)):  # `build` asks more of x than it is
                    vivace.rms_norm(*args, **options)
            with unittest.mock.patch.object(_arrays, "compiled", lambda: True), self.assertRaises(TypeError):
                vivace.rms_norm(x, weight, out=y)
            self.assertEqual(len(given), 4)

    def test_what_a_direct_call_leaves(self):
        x, weight, y = self.x, self.weight, self.y
        _, direct = self.bound(vivace.rms_norm, ENTRY._run)
        good = [x, weight, None, 0.0, y, None, None]
        self.assertEqual(direct(*good), 0)
        self.assertAlmostEqual(y.memory[1], 8 / 12.5**0.5, places=6)
        for place, value in ((0, None), (1, None), (4, None), (3, None), (1, 5), (2, "0")):
            self.assertEqual(direct(*good[:place], value, *good[place + 1:]), -1, (place, value))
        for wrong in ((), good[:-1], [*good, None]):
            with self.assertRaisesRegex(TypeError, "needs 7 values"):
                direct(*wrong)
        params = vivace.DecodeScheduleParams()
        _, direct = self.bound(vivace.decode_schedule, _library.ENTRIES["decode_schedule"]._run)
        for wrong in (params[:6], list(params), (*params[:6], "0"), None):
            self.assertEqual(direct(x, x, wrong, y), -1, wrong)
        self.assertEqual(direct(x, x, params, y), 1)

    def test_what_cannot_be_bound(self):
        parameters = ENTRY._parameters
        for wrong in (((True, 8, 1),), ((True, 6, 3),), ((True, 0, 0),), parameters * 8):
            with self.assertRaises(ValueError):
                _call.bind(site(), wrong, ())
        with self.assertRaises(TypeError):
            _call.bind(site(), (5,), ())
        with self.assertRaises(ValueError):
            _call.bind(_call.use, parameters, ())
        call = site()
        _call.bind(call, parameters, ())
        with self.assertRaisesRegex(ValueError, "has no parameters"):
            _call.bind(call, parameters, ())

    def test_what_is_recorded_is_left(self):
        answers, asked = [], []

        def recorder(name):
            def ask():
                asked.append(name)
                if isinstance(answers[name], BaseException):
                    raise answers[name]
                return answers[name]
            return ask

        direct = _call.bind(site(ENTRY._run), ENTRY._parameters, (recorder(0), recorder(1)))
        for answers, code, names in (([False, 0], 0, [0, 1]), ([False, 1], -1, [0, 1]), ([2, False], -1, [0]), ([ValueError(), False], -1, [0])):
            self.assertEqual(direct(self.x, self.weight, None, 0.0, self.y, None, None), code)
            self.assertEqual(asked, names)
            asked.clear()
        answers = [KeyboardInterrupt(), False]
        with self.assertRaises(KeyboardInterrupt):
            direct(self.x, self.weight, None, 0.0, self.y, None, None)
        kept = recorder(0)
        count = sys.getrefcount(kept)
        for _ in range(10):
            _call.bind(site(), ENTRY._parameters, (kept,))
        self.assertEqual(sys.getrefcount(kept), count)

    def test_what_the_library_is_given(self):
        given = []

        @RUN
        def run(args, stream):
            given.append((ctypes.string_at(args, ENTRY.struct_bytes), ctypes.string_at(stream, 32)))
            return 7

        def stream_of(kind, ordinal, out):
            self.assertEqual((kind, ordinal), (2, 3))
            out[0] = 0x1234
            return 0

        streams = exchange(stream_of)
        call = site(run, exchange=streams)
        framework, handle = _arrays.NUMPY._replace(describe=described), _library.context().handle
        kinds = list(TYPES)
        for device in (1, 2, 3, 13):
            for shift in range(2):  # four of the types each
                first, *others = (Tensor([1, 2, 3, 4], [2], kind=kind, device=device, ordinal=3, first=shift) for kind in kinds[4 * shift:4 * shift + 4])
                others[0].shape, others[0].strides = (ctypes.c_int64 * 5)(2, 1, 1, 2, 1), (ctypes.c_int64 * 5)(9, 8, 7, 6, 5)
                values = (first, others[0], others[1], others[2], None, 2**62 + shift, -0.5, None)
                self.assertEqual(call(values), 7)
                args, stream = given.pop()
                self.assertEqual(args, b"".join(ENTRY._parts(values, framework)), (device, shift))
                place = (_arrays.CUDA, 3, 0, 0, 0x1234) if device in (2, 13) else (_arrays.CPU, 0, 0, 0, 0)
                self.assertEqual(struct.unpack("=iiiiQQ", stream), (*place, handle))

    def test_a_context_outlives_the_calls_that_have_it(self):
        for when in ("packing", "running"):
            seen, first = [], weakref.ref(_library.context())
            handle = first().handle

            def configure(now):
                if now == when:
                    other = threading.Thread(target=vivace.configure)
                    other.start()
                    other.join()
                    gc.collect()

            def stream_of(kind, ordinal, out):
                configure("packing")
                return 0

            @RUN
            def run(args, stream):
                configure("running")
                seen.append((first() is not None, struct.unpack("=iiiiQQ", ctypes.string_at(stream, 32))[5] == handle))
                return 0

            streams = exchange(stream_of)
            on_gpu = [Tensor([1, 2], [2], device=2) for _ in range(3)]
            self.assertEqual(site(run, exchange=streams)((on_gpu[0], None, *on_gpu[1:], None, 0, 0.0, None)), 0)
            self.assertEqual(seen, [(True, True)], when)
            gc.collect()
            self.assertIsNone(first(), when)
        vivace.configure()
        first = weakref.ref(_library.context())
        self.assertEqual(site()((self.x, None, self.weight, self.y, None, 0, "0", None)), -1)  # left after a look
        vivace.configure()
        gc.collect()
        self.assertIsNone(first())

    def test_others_run_while_a_call_does(self):
        """The library's function is libc's pause here, which a signal ends that another thread sends."""
        done, caller = threading.Event(), threading.get_ident()

        def wake():
            while not done.wait(0.01):
                signal.pthread_kill(caller, signal.SIGUSR1)

        self.addCleanup(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, lambda *_: None))
        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, lambda *_: None))
        other = threading.Thread(target=wake)
        other.start()
        signal.alarm(20)  # where no other thread gets to run
        start = time.monotonic()
        site(ctypes.CDLL(None).pause)((self.x, None, self.weight, self.y, None, 0, 0.0, None))
        took = time.monotonic() - start
        signal.alarm(0)
        done.set()
        other.join()
        self.assertLess(took, 15)

    def test_a_site_lets_go_of_what_it_has(self):
        class Local(Tensor):
            def ask(self):
                return False

        types, ask = weakref.ref(Local), weakref.ref(Local.ask)
        call = site(types=(Local,), is_lazy=Local.ask)
        self.assertEqual(call((Local([1], [1, 1]), None, Local([1], [1]), Local([0], [1, 1]), None, 0, 0.0, None)), 0)
        del Local
        gc.collect()
        self.assertTrue(types() and ask())
        del call
        gc.collect()
        self.assertEqual((types(), ask()), (None, None))

    def test_a_workspace_that_is_needed_and_not_given(self):
        asked = []

        @WORKSPACE_BYTES
        def workspace_bytes(args, stream, needed):
            asked.append(ctypes.string_at(stream, 32))
            needed[0] = self.needed
            return self.code

        @RUN
        def run(args, stream):
            return 5

        call = site(run, workspace_bytes, workspace=4)
        for self.needed, self.code, result in ((0, 0, 5), (16, 0, -1), (0, 1, -1)):
            self.assertEqual(call((self.x, None, self.weight, self.y, None, 0, 0.0, None)), result, (self.needed, self.code))
            self.assertEqual(asked.pop()[-8:], struct.pack("=Q", _library.context().handle))
        self.assertEqual(call((self.x, None, self.weight, self.y, self.x, 0, 0.0, None)), 5)
        self.assertEqual(asked, [])

    def test_numbers_that_are_not_those_in_memory(self):
        asked = []

        def is_lazy(tensor):
            asked.append(tensor)
            if isinstance(answer, type):
                raise answer
            return answer

        call = site(is_lazy=is_lazy)
        parts = Tensor([1, 2, 3, 4], [2, 1], strides=[2, 2])
        column, y = Tensor([1, 1], [2, 1]), Tensor([0, 0], [2, 1])  # which has odd strides
        for answer, result in ((False, 0), (True, -1), (ValueError, -1)):
            self.assertEqual(call((parts, None, Tensor([1], [1]), y, None, 0, 0.0, None)), result, answer)
            self.assertIs(asked[0], parts)
            asked.clear()
        for answer in (KeyboardInterrupt, MemoryError):
            with self.assertRaises(answer):
                call((parts, None, Tensor([1], [1]), y, None, 0, 0.0, None))
        asked.clear()
        self.assertEqual(call((self.x, None, self.weight, self.y, None, 0, 0.0, None)), 0)
        self.assertEqual(asked, [])
        self.assertEqual(call((column, None, self.weight, y, None, 0, 0.0, None)), 1)
        self.assertEqual(asked, [])

    def test_one_module_in_a_process(self):
        spec = importlib.util.find_spec("vivace._call")
        with self.assertRaisesRegex(ImportError, "has loaded it already"):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        code = ("import importlib, call_test as t\n"
                "x, y = t.Tensor([1, 2], [1, 2]), t.Tensor([0, 0], [1, 2])\n"
                "values = (x, None, t.Tensor([1, 2], [2]), y, None, 0, 0.0, None)\n"
                "t.vivace.configure(prefer='rms_norm=reference')\n"
                "assert t.site()(values) == 0\n"
                "importlib.reload(t._library)\n"
                "assert t.site()(values) == -1\n"  # there is no context yet
                "t._library.context()\n"
                "assert t.site()(values) == 0\n")
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=package.ROOT / "tests" / "python")

    def test_a_context_goes_with_its_last_user(self):
        first = weakref.ref(_library.context())
        self.assertEqual(site()((self.x, None, self.weight, self.y, None, 0, 0.0, None)), 0)
        vivace.configure(prefer="rms_norm=reference")
        gc.collect()
        self.assertIsNone(first())
        self.assertEqual(site()((self.x, None, self.weight, self.y, None, 0, 0.0, None)), 0)
        self.assertEqual([row["row"] for row in vivace.counts()], ["reference"])
        vivace.configure(prefer="")


if __name__ == "__main__":
    package.main()
