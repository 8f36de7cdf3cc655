"""The operators on NumPy's arrays: results, refusals, threads and forks."""

import copy
import ctypes
import os
import pickle
import re
import struct
import subprocess
import sys
import threading
import unittest
import unittest.mock
import warnings

import package

package.need("numpy", "vivace")
import cases  # noqa: E402
import numpy as np  # noqa: E402
import vivace  # noqa: E402
from vivace import _arrays, _library, _words  # noqa: E402

CASES = cases.cases()

# Of the programs below: how many threads a process has, once those that have ended are no longer listed. The system
# lists one for a moment after it was joined, so a number above `most` is looked at again, for ten seconds.
THREADS = """
import os, time
def threads(most):
    end = time.monotonic() + 10
    while len(os.listdir('/proc/self/task')) > most and time.monotonic() < end: time.sleep(0.01)
    return len(os.listdir('/proc/self/task'))
"""


def number(array):
    return np.asarray(vivace.numbers.f32(array) if isinstance(array, vivace.Typed) else array, "float64")


def bits(array):
    return (array.array if isinstance(array, vivace.Typed) else array).tobytes()


class Results(unittest.TestCase):
    def test_each_case_agrees_with_float64(self):
        checked = 0
        for case in CASES:
            with self.subTest(case.name):
                results, _ = cases.call(case, cases.numpy_array)
                if case.expected is None:
                    continue
                for result, expected in zip(results, case.expected()):
                    self.assertEqual(tuple(result.shape), expected.shape)
                    error = np.abs(number(result) - expected).max() / max(np.abs(expected).max(), 1e-30)
                    self.assertLessEqual(error, case.bound)
                    checked += 1
        self.assertGreater(checked, 20)

    def test_every_operator_has_a_case(self):
        tried = {case.name.split(".")[0] for case in CASES}
        self.assertLessEqual({row["op"] for row in vivace.operators()}, tried)

    def test_one_thread_and_many_give_the_same_bits(self):
        first = [[bits(r) for r in cases.call(case, cases.numpy_array)[0]] for case in CASES]
        vivace.configure(threads=1)
        try:
            for case, before in zip(CASES, first):
                if case.name != "attention_decode.f32" and case.name != "attention_decode.bf16":  # cut by the number of workers
                    self.assertEqual([bits(r) for r in cases.call(case, cases.numpy_array)[0]], before, case.name)
        finally:
            vivace.configure(threads=len(os.sched_getaffinity(0)))

    def test_questions(self):
        x, weight = np.ones((4, 64), "float32"), np.ones((8, 64), "float32")
        choice = vivace.linear.explain(x, weight)
        self.assertTrue(choice.row.startswith("cpu."))
        self.assertTrue(all(reason for _, reason in choice.refused))
        self.assertIn(choice.row, str(choice))
        self.assertEqual(vivace.linear.cost(x, weight).flops, 2 * 4 * 64 * 8)
        self.assertEqual(vivace.rms_norm.workspace_bytes(x, np.ones(64, "float32")), 0)
        for device, ordinal in (("cuda", 0), ("cuda:3", 3)):
            self.assertEqual(_arrays.place_of(vivace.Shape((1,), "f32", device, 90)), (ordinal, 0, 90))
            self.assertEqual(struct.unpack_from("=Qiiii", _arrays.describe(vivace.Shape((1,), "f32", device)))[4], ordinal)
        for device in ("cuda:", "cuda:x", "cpu:1", "tpu"):
            with self.assertRaisesRegex(ValueError, "'cuda:N'"):
                vivace.Shape((1,), "f32", device)
        for case in CASES:
            if case.operator in (vivace.decode_attention,):
                continue
            args, options = cases.built(case.args, cases.numpy_array), cases.built(case.options, cases.numpy_array)
            self.assertIsNotNone(case.operator.explain(*args, **options).row, case.name)
            self.assertGreater(case.operator.cost(*args, **options).bytes, 0, case.name)
            self.assertGreaterEqual(case.operator.workspace_bytes(*args, **options), 0, case.name)


class Arrays(unittest.TestCase):
    def test_views_are_used_in_place(self):
        whole = np.random.default_rng(0).standard_normal((6, 3, 64)).astype("float32")
        view, weight = whole[::2, 1], np.ones(64, "float32")
        self.assertTrue(np.array_equal(vivace.rms_norm(view, weight), vivace.rms_norm(view.copy(), weight)))
        out = np.zeros((3, 128), "float32")
        vivace.rms_norm(view, weight, out=out[:, 64:])
        self.assertTrue(out[:, 64:].any() and not out[:, :64].any())

    def test_the_last_dimension_is_contiguous(self):
        with self.assertRaisesRegex(ValueError, "rms_norm: x"):
            vivace.rms_norm(np.ones((64, 4), "float32").T, np.ones(64, "float32"), out=np.ones((4, 64), "float32"))
        with self.assertRaisesRegex(ValueError, r"x.stride\[0\] is -"):
            vivace.rms_norm(np.ones((4, 64), "float32")[::-1], np.ones(64, "float32"))

    def test_nothing_is_empty_too_early(self):
        self.assertEqual(vivace.rms_norm(np.ones((0, 64), "float32"), np.ones(64, "float32")).shape, (0, 64))
        self.assertEqual(vivace.linear(np.ones((0, 64), "float32"), np.ones((3, 64), "float32")).shape, (0, 3))

    def test_types(self):
        with self.assertRaisesRegex(ValueError, "float64"):
            vivace.rms_norm(np.ones((1, 8)), np.ones(8, "float32"))
        with self.assertRaisesRegex(ValueError, ">f4"):
            vivace.rms_norm(np.ones((1, 8), ">f4"), np.ones(8, "float32"))
        for call in (vivace.rms_norm, vivace.rms_norm.explain, vivace.rms_norm.cost):
            with self.assertRaisesRegex(TypeError, r"^rms_norm: x is the list \[\[1.0\]\], needs an array"):
                call(x=[[1.0]], weight=[1.0])
        with self.assertRaisesRegex(ValueError, "^decode_schedule: params.window is 9223372036854775808, needs a whole number of 64 bits$"):
            vivace.decode_schedule(np.ones(1, "int32"), np.array([0, 1], "int32"), vivace.DecodeScheduleParams(window=2**63),
                                   out=np.zeros(64, "int32"))
        with self.assertRaisesRegex(ValueError, "6 dimensions"):
            vivace.rms_norm(np.ones((1,) * 6, "float32"), np.ones(8, "float32"), out=np.ones(1, "float32"))

    def test_numbers_that_do_not_fit_are_named(self):
        x, weight, out = np.ones((1, 8), "float32"), np.ones(8, "float32"), np.ones((1, 8), "float32")
        with self.assertRaisesRegex(TypeError, "^rms_norm: eps is 'small', needs a number$"):
            vivace.rms_norm(x, weight, eps="small", out=out)
        with self.assertRaisesRegex(TypeError, "^attention_prefill: window is 1.5, needs a whole number"):
            pages = np.zeros((1, 1), "int32")
            vivace.attention_prefill(x.reshape(1, 1, 8), x.reshape(1, 1, 1, 8), x.reshape(1, 1, 1, 8), pages, pages[0], np.array([0, 1], "int32"), window=1.5)
        with self.assertRaisesRegex(ValueError, "^route_top_k: zero_experts is -9223372036854775809, needs a whole number"):
            vivace.route_top_k(x, 2, zero_experts=-2**63 - 1)

    def test_outputs_have_memory_of_their_own(self):
        x, weight = np.random.default_rng(6).standard_normal((4, 64)).astype("float32"), np.ones(64, "float32")
        expected = vivace.rms_norm(x, weight)
        whole = np.zeros((4, 192), "float32")
        parts = vivace.linear_parts(x, [np.eye(64, dtype="float32")] * 3, outs=[whole[:, :64], whole[:, 64:128], whole[:, 128:]])
        self.assertTrue(all(np.array_equal(part, x) for part in parts))
        cases = ((vivace.rms_norm, (x, weight), x[1:], "out overlaps x"), (vivace.rms_norm, (x, x[2]), x, "out overlaps weight"),
                 (vivace.linear, (x, np.eye(64, dtype="float32")), x, "out overlaps x"), (vivace.quantize_fp8, (x,), None, "out overlaps x"))
        with self.assertRaisesRegex(ValueError, r"^linear: outs\[0\] overlaps outs\[1\] in memory"):
            vivace.linear_parts(x, [np.eye(64, dtype="float32")] * 2, outs=[whole[:, :64], whole[:, 32:96]])
        for operator, args, out, words in cases:
            out = vivace.Typed(x.view("uint8")[:, :64], "fp8_e4m3") if out is None else out
            args = (args[0][:3], *args[1:]) if len(out.shape) == 2 and out.shape[0] == 3 else args
            with self.assertRaisesRegex(ValueError, words):
                operator(*args, out=out)
        self.assertTrue(np.array_equal(vivace.rms_norm(x, weight, out=x), expected))  # in place, which its header allows

    def test_elements_of_outputs_have_memory_of_their_own(self):
        """Of every operator, in calls and in questions; inputs may repeat themselves."""
        def view(array, strides):
            inner = array.array if isinstance(array, vivace.Typed) else array
            inner = np.lib.stride_tricks.as_strided(inner, inner.shape, strides)
            return vivace.Typed(inner, array.dtype) if isinstance(array, vivace.Typed) else inner

        calls, tried = [], set()
        run = _library.Entry.run
        with unittest.mock.patch.object(_library.Entry, "run", lambda entry, values: calls.append((entry, values)) or run(entry, values)):
            for case in CASES:
                cases.call(case, cases.numpy_array)
        for entry, values in calls:
            for place, argument in enumerate(entry.operator.arguments):
                array = values[place]
                if not argument.written or array is None or len(array.shape) < 2 or min(array.shape[-2:]) < 2:
                    continue
                dense = (array.array if isinstance(array, vivace.Typed) else array).strides
                width = array.shape[-1]
                for step in (0, width - 1):
                    wrong = view(array, (*dense[:-2], step * dense[-1], dense[-1]))
                    axis, least = len(array.shape) - 2, width if step else r"\d+"
                    message = rf"{entry.operator.name}: {re.escape(argument.said)} is .* strides \[.*{step}, 1\], needs stride\[{axis}\] >= {least}:"
                    for ask in (entry.run, entry.explain, entry.cost):
                        with self.subTest(entry.operator.name, argument=argument.said), self.assertRaisesRegex(ValueError, message):
                            ask((*values[:place], wrong, *values[place + 1:]))
                tried.add(entry.operator.name)
        self.assertEqual(tried, set(_library.ENTRIES) - {"decode_schedule"})  # whose map has one dimension

        x, weight, wide = np.ones((3, 256), "float32"), np.ones(256, "float32"), np.zeros((3, 256), "float32")
        shared = view(wide, (0, 4))
        expected = vivace.rms_norm(x, weight)
        self.assertTrue(np.array_equal(vivace.rms_norm(view(x, (0, 4)), weight), expected))
        fp8 = vivace.Typed(np.zeros((3, 256), "uint8"), "fp8_e4m3")
        q, cache, i32 = np.ones((2, 2, 64), "float32"), np.ones((2, 16, 1, 64), "float32"), np.array([0, 2], "int32")
        cache8 = vivace.Typed(np.zeros(cache.shape, "uint8"), "fp8_e4m3")
        qkv = np.ones((2, 4 * 64), "float32")
        for message, call, args, options in (
                ("rms_norm: residual is", vivace.rms_norm, (x, weight), {"residual": shared}),
                (r"rms_norm: out is f32\[3, 256\] strides \[0, 1\], needs stride\[0\] >= 256", vivace.rms_norm, (x, weight), {"out": shared}),
                ("rms_norm: out_scale is", vivace.rms_norm, (x, weight), {"out": fp8, "out_scale": shared[:, :2], "scaling": "block"}),
                ("silu_mul: out_scale is", vivace.silu_mul, (x, x), {"out": fp8, "out_scale": shared[:, :2], "scaling": "block"}),
                ("quantize_fp8: scale is", vivace.quantize_fp8, (x,), {"scale": shared[:, :2], "scaling": "block"}),
                (r"linear: outs\[1\] is", vivace.linear_parts, (x, [x, x]), {"outs": [wide[:, :3], shared[:, :3]]}),
                ("attention_prefill: lse is", vivace.attention_prefill, (q, cache, cache, i32[None], i32[1:], i32), {"lse": shared[:2, :2]}),
                ("attention_prologue: k_scale is", vivace.attention_prologue, (qkv, np.zeros(2, "int64"), cache8, vivace.Typed(cache8.array.copy(), "fp8_e4m3")),
                 {"v_scale": weight[:1], "k_scale": view(np.zeros((2, 16, 1), "float32"), (0, 4, 4))}),
                ("sampler: output_counts is", vivace.sampler, (x,), {"output_counts": view(np.zeros((3, 256), "int32"), (0, 4)), "count_ids": True})):
            with self.subTest(message), self.assertRaisesRegex(ValueError, f"^{message}"):
                call(*args, **options)
        vivace.sampler(x, output_counts=view(np.zeros((3, 256), "int32"), (0, 4)))  # is only read

    def test_rows_that_nobody_writes_are_zero(self):
        rng = np.random.default_rng(7)
        for _ in range(3):
            junk = np.full((6, 32), np.nan, "float32")  # what the allocator is likely to give out again
            del junk
            y = vivace.grouped_gemm(rng.standard_normal((6, 64)).astype("float32"), rng.standard_normal((2, 32, 64)).astype("float32"),
                                    np.array([0, 4], "int32"), np.array([2, 1], "int32"))
            self.assertTrue(y[:2].any() and not y[2:4].any() and not y[5].any())
            q, cache = rng.standard_normal((3, 1, 64)).astype("float32"), rng.standard_normal((1, 16, 1, 64)).astype("float32")
            junk = np.full(q.shape, np.nan, "float32")
            del junk
            call = (q, cache, cache, np.zeros((1, 1), "int32"), np.array([4], "int32"), np.array([1, 2], "int32"))
            for y in (vivace.attention_prefill(*call), vivace.decode_attention(*call)):
                self.assertTrue(y[1].any() and not y[0].any() and not y[2].any())

    def test_a_norm_gives_fp8_beside_its_output(self):
        x, weight = np.random.default_rng(3).standard_normal((3, 300)).astype("float32"), np.ones(300, "float32")
        both, alone = (vivace.Typed(np.zeros((3, 300), "uint8"), "fp8_e4m3") for _ in range(2))
        made, expected = (vivace.empty_scale(x, x.shape, "block") for _ in range(2))
        y = vivace.rms_norm(x, weight, out_fp8=both, out_scale=made, scaling="block")
        vivace.quantize_fp8(y, out=alone, scale=expected, scaling="block")
        self.assertTrue(np.array_equal(y, vivace.rms_norm(x, weight)))
        self.assertTrue(np.array_equal(both.array, alone.array) and np.array_equal(made, expected))
        with self.assertRaisesRegex(ValueError, "rms_norm: out_scale is absent"):
            vivace.rms_norm(x, weight, out_fp8=both)
        for call in (lambda: vivace.rms_norm(x, weight, out_fp8=both, scaling="token"), lambda: vivace.silu_mul(x, x, out=both, scaling="token")):
            with self.assertRaisesRegex(ValueError, r"out_scale is absent, needs where the scales go: vivace.empty_scale\(x, out.shape, 'token'\)"):
                call()
        with self.assertRaisesRegex(ValueError, "which is for fp8, needs 'tensor', or out_fp8, which is f32, in fp8: .*vivace.Typed"):
            vivace.rms_norm(x, weight, out_fp8=y, out_scale=made, scaling="block")

    def test_what_is_read_only_is_not_written(self):
        out = np.zeros((1, 8), "float32")
        out.flags.writeable = False
        with self.assertRaisesRegex(ValueError, "rms_norm: out is written"):
            vivace.rms_norm(np.ones((1, 8), "float32"), np.ones(8, "float32"), out=out)
        fixed = np.ones((1, 8), "float32")
        fixed.flags.writeable = False
        vivace.rms_norm(fixed, np.ones(8, "float32"))  # is only read

    def test_typed(self):
        with self.assertRaisesRegex(ValueError, "another width"):
            vivace.Typed(np.zeros(4, "uint8"), "bf16")
        with self.assertRaisesRegex(ValueError, "dtype is 'f8'"):
            vivace.Typed(np.zeros(4, "uint8"), "f8")
        with self.assertRaisesRegex(ValueError, "whole blocks of 32"):
            vivace.Typed(np.zeros(20, "uint8"), "q4_1", (1, 33))
        values = np.random.default_rng(3).standard_normal((2, 64)).astype("float32")
        blocks = np.zeros((4, 18), "uint8")  # q4_0: f16 d = 0.5, all nibbles 9: w = 0.5 (9 - 8)
        blocks[:, 1], blocks[:, 2:] = 0x38, 0x99
        y = vivace.linear(values, vivace.Typed(blocks.reshape(2, 36), "q4_0", (2, 64)), exact=True)
        self.assertLess(np.abs(y - 0.5 * values.sum(axis=1, keepdims=True)).max(), 1e-5)

    def test_dlpack_alone_is_enough(self):
        x, weight = np.random.default_rng(4).standard_normal((3, 2, 64)).astype("float32")[:, 1], np.ones(64, "float32")
        out = np.zeros((3, 64), "float32")
        vivace.rms_norm(Dlpack(x), Dlpack(weight), out=Dlpack(out))
        self.assertTrue(np.array_equal(out, vivace.rms_norm(x, weight)))
        with self.assertRaisesRegex(TypeError, "^rms_norm: out is not given, and nothing is allocated beside a __main__.Dlpack"):
            vivace.rms_norm(Dlpack(x), Dlpack(weight))

    def test_dlpack_without_anything_else(self):
        """Arrays with __dlpack__ and no shape, type or device: taken where an output can be made, else refused by name."""
        def bare(value, keep_first):
            if isinstance(value, np.ndarray):
                return value if keep_first else Bare(value)
            if isinstance(value, dict):
                return {key: bare(item, False) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                items = [bare(item, keep_first and i == 0) for i, item in enumerate(value)]
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            return value

        taken = set()
        for case in CASES:
            args, options = cases.built(case.args, cases.numpy_array), cases.built(case.options, cases.numpy_array)
            if isinstance(args[0], vivace.Typed):
                continue
            with self.subTest(case.name):
                expected = cases.call(case, cases.numpy_array)[0]
                found = cases.results_of(case.operator(*bare(args, True), **bare(options, False)))
                self.assertEqual([bits(r) for r in found], [bits(r) for r in expected])
                taken.add(case.name.split(".")[0])
                calls = [case.operator] if case.operator is vivace.decode_attention else [case.operator, case.operator.explain, case.operator.cost]
                for call in calls:
                    with self.assertRaisesRegex(TypeError, r"^\w+: \w+ is (not given, and|of another library:) nothing is allocated beside a __main__.Bare, which has DLPack alone$"):
                        call(*bare(args, False), **bare(options, False))
        self.assertLessEqual(set(_library.ENTRIES), taken)  # attention_decode by decode_attention

        x, weight, out = np.random.default_rng(4).standard_normal((3, 64)).astype("float32"), np.ones(64, "float32"), np.zeros((3, 64), "float32")
        vivace.rms_norm(Bare(x), Bare(weight), out=Bare(out))
        self.assertTrue(np.array_equal(out, vivace.rms_norm(x, weight)))

        class Silent:
            def __init__(self, given):
                self.given = given

            def __dlpack__(self):
                if isinstance(self.given, Exception):
                    raise self.given
                return self.given

        class Far(Bare):
            def __dlpack__(self, **options):
                capsule = super().__dlpack__(**options)
                self.device = ctypes.c_int32.from_address(_arrays._capsule_pointer(capsule, b"dltensor_versioned") + 40)
                self.device.value = 2  # CUDA
                return capsule

        for message, call, args in (
                ("rms_norm: weight does not come by DLPack: its __dlpack__ ends in BufferError: busy", vivace.rms_norm, (x, Silent(BufferError("busy")))),
                ("rms_norm: x does not come by DLPack: its __dlpack__ returns 5, needs a capsule", vivace.rms_norm, (Silent(5), weight)),
                ("linear: weight does not come by DLPack: its __dlpack__ ends in RuntimeError", vivace.linear, (x, Silent(RuntimeError("no")))),
                ("rms_norm: weight lies on a device of DLPack's kind 2, needs a __dlpack_device__", vivace.rms_norm, (x, Far(weight))),
                ("prepare_router_weight: weight is a Bare, which has DLPack alone, needs", vivace.prepare_router_weight, (Bare(x),)),
                ("vivace.empty_scale: like is of another library: nothing is allocated beside", vivace.empty_scale, (Bare(x), (3, 64), "token"))):
            with self.subTest(message), self.assertRaisesRegex(TypeError, f"^{message}"):
                call(*args)

    def test_dlpack_of_calls_in_calls(self):
        """An array whose __dlpack__ calls operators on such an array is asked once a call, however deep they are."""
        weight, y, asked = np.ones(2, "float32"), np.ones((1, 2), "float32"), []

        class Nested:
            def __init__(self, inner):
                self.inner = inner

            def __dlpack__(self, **options):
                asked.append(self)
                if self.inner is None:
                    raise TypeError("no")
                return vivace.rms_norm(self.inner, weight, out=y)

        array = None
        for depth in range(1, 13):
            array = Nested(array)
            asked.clear()
            with self.assertRaisesRegex(TypeError, "^rms_norm: x does not come by DLPack: its __dlpack__ ends in TypeError: "):
                vivace.rms_norm(array, weight, out=y)
            self.assertEqual(len(asked), depth + 1)

        class Old:  # knows no versions, behind one that passes on what it is given
            def __dlpack__(self, stream=None):
                return y.__dlpack__()

        class Around:
            def __dlpack__(self, **options):
                return Old().__dlpack__(**options)

        self.assertTrue(np.array_equal(vivace.rms_norm(Around(), weight, out=np.empty((1, 2), "float32")), vivace.rms_norm(y, weight)))

    def test_a_device_of_dlpack_that_is_none(self):
        x, weight = np.ones((3, 64), "float32"), np.ones(64, "float32")

        class Placed(Bare):
            def __init__(self, array, given):
                super().__init__(array)
                self.given = given

            def __dlpack_device__(self):
                if isinstance(self.given, Exception):
                    raise self.given
                return self.given

        out = np.zeros_like(x)
        vivace.rms_norm(x, Placed(weight, (np.int64(1), 0)), out=out)
        self.assertTrue(np.array_equal(out, vivace.rms_norm(x, weight)))
        for given, message in ((RuntimeError("no"), "ends in RuntimeError: no"), (BufferError("busy"), "ends in BufferError: busy"),
                               (None, "returns None, needs two whole numbers"), (1, "returns 1, needs"), ((1,), r"returns \(1,\), needs"),
                               ((1, 0, 0), r"returns \(1, 0, 0\), needs"), (("cpu", 0), r"returns \('cpu', 0\), needs"),
                               ((2, 2**40), r"returns \(2, 1099511627776\), needs")):
            for name, args in (("x", (Placed(x, given), weight)), ("weight", (x, Placed(weight, given)))):
                for call in (vivace.rms_norm, vivace.rms_norm.explain):
                    with self.subTest(given=given, name=name), self.assertRaisesRegex(
                            TypeError, f"^rms_norm: {name} does not come by DLPack: its __dlpack_device__ {message}"):
                        call(*args, out=out)
            with self.subTest(given=given), self.assertRaisesRegex(TypeError, f"^prepare_router_weight: weight .*__dlpack_device__ {message}"):
                vivace.prepare_router_weight(Placed(x, given))

    def test_a_schedule_lies_beside_whoever_has_room(self):
        q, k, v = (np.random.default_rng(4).standard_normal(shape).astype("float32") for shape in ((2, 8, 64), (8, 16, 1, 64), (8, 16, 1, 64)))
        pages, lengths, start = np.array([[1, 0], [4, 7]], "int32"), np.array([3, 20], "int32"), np.array([0, 1, 2], "int32")
        expected, out, workspace = vivace.decode_attention(q, k, v, pages, lengths, start), np.zeros_like(q), np.zeros(1 << 20, "uint8")
        for query, many in ((Bare(q), lengths), (q, Bare(lengths))):
            out[:] = 0
            vivace.decode_attention(query, k, v, pages, many, start, out=out, workspace=workspace)
            self.assertTrue(np.array_equal(out, expected))
        with self.assertRaisesRegex(TypeError, "^decode_attention: q is of another library: nothing is allocated beside a __main__.Bare"):
            vivace.decode_attention(Bare(q), k, v, pages, Dlpack(lengths), start, out=out)

    def test_who_has_no_room_beside_it(self):
        x = np.ones(4, "float32")

        @_words.worded("f")
        def f(first, second):
            return _arrays.empty(second[0] if isinstance(second, list) else second, (1,), "f32")

        for second, message in ((Bare(x), "second is of another library: nothing"), ([Bare(x)], "nothing")):
            with self.subTest(message), self.assertRaisesRegex(TypeError, f"^f: {message} is allocated beside a __main__.Bare, which has DLPack alone$"):
                f(x, second)

    def test_dlpack_with_versions(self):
        """Flags of version 1 are honoured, and what a capsule holds lives until the call returns."""
        class Other:
            def __init__(self, array, made=None):
                self.array, self.shape, self.made = array, array.shape, made

            def __dlpack__(self, *, max_version=None, copy=None, **options):
                if self.made is None:
                    return self.array.__dlpack__(max_version=max_version, copy=copy)
                return self.made().__dlpack__(max_version=max_version)

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        x, weight, out = np.random.default_rng(4).standard_normal((64, 4096)).astype("float32"), np.ones(4096, "float32"), np.zeros((64, 4096), "float32")
        fixed = x.copy()
        fixed.flags.writeable = False
        vivace.rms_norm(Other(fixed), Other(weight), out=Other(out))
        self.assertTrue(np.array_equal(out, vivace.rms_norm(x, weight)))
        with self.assertRaisesRegex(ValueError, "out is written, but the array is read-only"):
            vivace.rms_norm(Other(x), Other(weight), out=Other(fixed))
        copied = Other(out)
        copied.__class__ = type("Copied", (Other,), {"__dlpack__": lambda self, **options: marked(Other.__dlpack__(self, **options))})

        def marked(capsule):
            ctypes.c_uint64.from_address(_arrays._capsule_pointer(capsule, b"dltensor_versioned") + 24).value |= 2
            return capsule

        with self.assertRaisesRegex(ValueError, "out is written, but the array is a copy"):
            vivace.rms_norm(Other(x), Other(weight), out=copied)
        out[:] = 0  # memory that nothing but the capsule holds
        vivace.rms_norm(Other(x, made=x.copy), Other(weight, made=weight.copy), out=Other(out))
        self.assertTrue(np.array_equal(out, vivace.rms_norm(x, weight)))

    def test_numbers(self):
        values = np.array([0, -0.0, 1, 448, 1e9, 2.0**-9, 3.14159, -0.3], "float32")
        self.assertTrue(np.array_equal(vivace.numbers.f32(vivace.numbers.fp8(values)),
                                       np.array([0, -0.0, 1, 448, 448, 2.0**-9, 3.25, -0.3125], "float32")))
        self.assertTrue(np.array_equal(vivace.numbers.f32(vivace.numbers.bf16([1.00390625, 1.01171875, np.inf])),
                                       np.array([1.0, 1.015625, np.inf], "float32")))
        self.assertTrue(np.isnan(vivace.numbers.f32(vivace.numbers.bf16([np.nan]))).all())
        for half in (values.clip(-448, 448).astype("float16"), values.clip(-448, 448).astype("float16").view("uint16")):
            self.assertTrue(np.array_equal(vivace.numbers.f32(vivace.Typed(half, "f16")), half.view("float16").astype("float32")))

    def test_versions_of_64_bits(self):
        x, last = np.ones((1, 64), "float32"), 2**64 - 1
        weight = vivace.prepare_router_weight(np.ones((4, 64), "float32"), version=last)
        self.assertTrue((vivace.router_gemm(x, weight, weight_version=last) == 64).all())
        with self.assertRaisesRegex(ValueError, "version"):
            vivace.router_gemm(x, weight, weight_version=last - 1)


class Dlpack:
    """An array that has DLPack alone."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __dlpack__(self, **options):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Bare:
    """An array that has __dlpack__ and does not even say where it lies."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)


class Errors(unittest.TestCase):
    def refused(self, kind, message, call, *args, **kwargs):
        with self.subTest(message), self.assertRaisesRegex(kind, f"^{message}"):
            call(*args, **kwargs)

    def test_what_is_wrong_is_blamed_not_what_could_be_neater(self):
        x, experts = np.ones((4, 64), "float32"), np.ones((4, 64, 64), "float32")
        ids, few = np.zeros((4, 2), "int32"), np.zeros((2, 2), "int32")
        one = (x[:3].copy(), x[:3].copy(), np.ones((64, 3), "float32"), None, None, None, None)  # as ExpertWeights, but plain
        call = (x, experts, experts[:, :, :32].copy())
        whole = vivace.fused_moe(*call, ids, x[:, :2].copy(), shared=one)
        self.assertTrue(np.array_equal(vivace.fused_moe(*call, ids, x[:, :2].copy(), shared=one[:3]), whole))
        with self.assertRaisesRegex(ValueError, r"^fused_moe: expert_ids.shape\[0\] is 2"):
            vivace.fused_moe(*call, few, x[:, :2].copy(), shared=one)

    def test_a_shared_expert_is_no_place_for_outputs(self):
        x, experts = np.ones((4, 64), "float32"), np.ones((4, 64, 64), "float32")
        gate = np.ones((4, 64), "float32")
        with self.assertRaisesRegex(ValueError, r"^fused_moe: out overlaps shared.gate"):
            vivace.fused_moe(x, experts, experts[:, :, :32].copy(), np.zeros((4, 2), "int32"), x[:, :2].copy(), out=gate,
                             shared=vivace.ExpertWeights(gate, x.copy(), np.ones((64, 4), "float32")))

    def test_counts_that_are_written_are_a_memory_of_their_own(self):
        logits = np.zeros((1, 8), "float32")
        with self.assertRaisesRegex(ValueError, "^sampler: (output_counts overlaps logits|logits overlaps output_counts)"):
            vivace.sampler(logits, output_counts=logits.view("int32"), state=np.zeros(1, "int32"), count_ids=True)

    def test_a_question_touches_no_output(self):
        def touched(_):
            raise AssertionError("an output was cleared")

        cleared, ops = vivace.ops.clear, vivace.ops
        ops.clear = touched
        try:
            x, g = np.ones((4, 64), "float32"), np.ones((1, 8, 64), "float32")
            starts, rows = np.zeros(1, "int32"), np.ones(1, "int32")
            self.assertTrue(vivace.grouped_gemm.explain(x, g, starts, rows).row)
            self.assertGreater(vivace.grouped_gemm.cost(x, g, starts, rows).bytes, 0)
            with self.assertRaisesRegex(AssertionError, "cleared"):
                vivace.grouped_gemm(x, g, starts, rows)
        finally:
            ops.clear = cleared

    def test_the_argument_is_named(self):
        x, weight, experts = np.ones((4, 64), "float32"), np.ones((8, 64), "float32"), np.ones((4, 64, 64), "float32")
        ids, double, i32 = np.zeros((4, 2), "int32"), np.ones(64), np.array([0, 1], "int32")
        cache = np.ones((1, 16, 1, 64), "float32")
        shape, moe = vivace.Shape((4, 64), "f32"), (x, experts, experts[:, :, :32].copy(), ids, x[:, :2].copy())
        masked, router = np.ma.array(x, mask=x > 0), vivace.prepare_router_weight(weight)
        for kind, message, call, args, options in (
                (TypeError, "router_gemm: weight is of type ndarray, needs what vivace.prepare_router_weight", vivace.router_gemm, (x, weight), {}),
                (ValueError, "router_gemm: weight.scaled is inf, needs True or False", vivace.router_gemm, (x, router._replace(scaled=np.inf)), {}),
                (TypeError, "router_gemm: weight.version is 'a', needs a whole number", vivace.router_gemm, (x, router._replace(version="a")), {}),
                (ValueError, "linear: x is a vivace.Shape, which has no memory", vivace.linear, (shape, weight), {}),
                (ValueError, "linear: weight is a vivace.Shape, which has no memory", vivace.linear, (x, shape), {}),
                (ValueError, r"linear: weight is f32\[64\], needs 2 dim", vivace.linear, (x, weight[0]), {}),
                (ValueError, "linear: x has the shape .., needs 2 dim", vivace.linear, (np.array(1, "float32"), weight), {}),
                (ValueError, "linear: out_dtype is 'f64', needs one of f32,", vivace.linear, (x, weight), {"out_dtype": "f64"}),
                (ValueError, "linear: out_dtype is 'q8_0', needs one of f32, f16, bf16, fp8_e4m3, u8, i32, i64$", vivace.linear, (x, weight),
                 {"out_dtype": "q8_0"}),
                (TypeError, "linear: exact is 'a', needs True or False", vivace.linear, (x, weight), {"exact": "a"}),
                (ValueError, "linear: exact is inf, needs True or False", vivace.linear, (x, weight), {"exact": np.inf}),
                (ValueError, r"linear: weights\[1\] is of type float64, needs", vivace.linear_parts, (x, [weight, weight.astype(float)]), {}),
                (ValueError, r"linear: weights\[1\].shape\[1\] is 32, needs k", vivace.linear_parts, (x, [weight, weight[:, :32]]), {}),
                (ValueError, "linear: weights, .* have 2, 2, 2, 1 items", vivace.linear_parts, (x, [weight, weight]), {"outs": [x]}),
                (TypeError, "route_top_k: expert_ids is not given, and nothing is allocated", vivace.route_top_k, (Dlpack(x), 2), {}),
                (TypeError, "fused_moe: shared is of type int, needs vivace.ExpertWeights", vivace.fused_moe, moe, {"shared": 5}),
                (TypeError, r"fused_moe: shared\.gate is the int 5, needs an array", vivace.fused_moe, moe, {"shared": vivace.ExpertWeights(5, x, x)}),
                (TypeError, r"fused_moe: shared\.up is the int 5, needs an array", vivace.fused_moe, moe, {"shared": (x, 5, x)}),
                (TypeError, r"fused_moe: shared is a tuple of 0, needs vivace.ExpertWeights\(gate, up, down\)", vivace.fused_moe, moe, {"shared": ()}),
                (TypeError, "fused_moe: shared is a tuple of 2, needs vivace.ExpertWeights", vivace.fused_moe, moe, {"shared": (x, x)}),
                (ValueError, "fused_moe: out_dtype is 'f64', needs one of", vivace.fused_moe, moe, {"shared": (x, x, x), "out_dtype": "f64"}),
                (ValueError, "fused_moe: swiglu_alpha is -1, needs 1e-30 to 1e30$", vivace.fused_moe, moe, {"swiglu_alpha": -1}),
                (ValueError, "fused_moe: swiglu_limit is nan, needs 1e-30 to 1e30, or infinity$", vivace.fused_moe, moe, {"swiglu_limit": np.nan}),
                (ValueError, "fused_moe: swiglu_limit is 0, needs 1e-30 to 1e30, or infinity$", vivace.fused_moe, moe, {"swiglu_limit": 0}),
                (ValueError, "fused_moe: swiglu_beta is inf, needs -1e30 to 1e30$", vivace.fused_moe, moe, {"swiglu_beta": np.inf}),
                (TypeError, "fused_moe: swiglu_beta is '1', needs a number$", vivace.fused_moe, moe, {"swiglu_beta": "1"}),
                (ValueError, "fused_moe: total_experts is 4611686018427387904, needs 0, or 4 to 2147483647", vivace.fused_moe, moe, {"total_experts": 2**62}),
                (ValueError, "fused_moe: block_offset is 5, needs 0 without", vivace.fused_moe, moe, {"block_offset": 5}),
                (TypeError, "rms_norm: eps is 'a', needs a number$", vivace.rms_norm, (x, weight[0]), {"eps": "a"}),
                (TypeError, "rms_norm: eps is None, needs a number$", vivace.rms_norm, (x, weight[0]), {"eps": None}),
                (ValueError, r"rms_norm: eps is 10*\.\.\.0*, needs a number$", vivace.rms_norm, (x, weight[0]), {"eps": 10**400}),
                (TypeError, r"rms_norm: scaling is \['token'\], needs text", vivace.rms_norm, (x, weight[0]), {"scaling": ["token"]}),
                (ValueError, "rms_norm: weight is of type float64, needs one of float32,", vivace.rms_norm, (x, double), {}),
                (TypeError, "rms_norm: weight is None, needs an array", vivace.rms_norm, (x, None), {}),
                (ValueError, "rms_norm: out_scale is f32.4., needs none: out is", vivace.rms_norm, (x, weight[0]), {"out_scale": x[:, 0].copy()}),
                (TypeError, "rms_norm: x has a mask", vivace.rms_norm, (masked, weight[0]), {}),
                (TypeError, "rms_norm: weight has a mask", vivace.rms_norm, (x, masked[0]), {}),
                (ValueError, r"rms_norm: x.stride\[1\] is 4, needs 1 .*numpy.ascontiguousarray", vivace.rms_norm, (np.ones((64, 4), "float32").T, weight[0]), {}),
                (TypeError, "sampler: temperature is the float 0.8, needs an array", vivace.sampler, (x,), {"temperature": 0.8}),
                (ValueError, r"embedding: ids\[1\] is 4294967295, needs 0 <= id", vivace.embedding, (np.array([1, 2**32 - 1], "uint32"), x), {}),
                (TypeError, "decode_schedule: params is a tuple of 2, needs", vivace.decode_schedule, (i32[:1], i32, (1, 64)), {}),
                *((TypeError, f"attention_decode: params is a tuple of {n}, needs what vivace.attention_decode_schedule_params returns",
                   vivace.attention_decode, (x[:, None], cache, cache, ids, i32[:1], i32, ids[0], (1,) * n), {}) for n in (0, 6, 8)),
                (ValueError, "attention_decode: k has the shape .4, 64., needs 4", vivace.attention_decode_schedule_params, (x, x, ids), {}),
                (ValueError, "prepare_router_weight: weight is of type float64", vivace.prepare_router_weight, (weight.astype(float),), {}),
                (ValueError, "prepare_router_weight: weight has the shape .64,., needs 2", vivace.prepare_router_weight, (weight[0],), {}),
                (ValueError, "prepare_router_weight: weight is a vivace.Shape", vivace.prepare_router_weight, (shape,), {}),
                (TypeError, "vivace.empty_scale: like is the list", vivace.empty_scale, ([1], (4, 5), "token"), {}),
                (TypeError, "vivace.Typed: array is the list", vivace.Typed, ([1], "bf16"), {}),
                (TypeError, "vivace.Typed: array has a mask", vivace.Typed, (np.ma.zeros(4, "uint16"), "bf16"), {}),
                (TypeError, "vivace.use_stream: handle is 'a', needs a whole", vivace.use_stream("a").__enter__, (), {})):
            self.refused(kind, message, call, *args, **options)
            if isinstance(call, vivace.Operator) and "vivace.Shape" not in message and call is not vivace.embedding:  # its ids are not read
                self.refused(kind, message, call.explain, *args, **options)

    def test_sizes_are_refused_before_memory_is_asked_for(self):
        x, i32 = np.ones((4, 16), "float32"), np.array([0, 1], "int32")
        cache = np.ones((8, 16, 8, 64), "float32")
        for message, call, *args in (
                ("route_top_k: top_k is -1, needs 0 to 16", vivace.route_top_k, x, -1),
                ("route_top_k: top_k is 1099511627776, needs 0 to 16", vivace.route_top_k, x, 2**40),
                ("sampler: top_logprobs is -1, needs 0 to 16", lambda n: vivace.sampler(x, top_logprobs=n), -1),
                ("sampler: top_logprobs is 1099511627776, needs 0 to 16", lambda n: vivace.sampler(x, top_logprobs=n), 2**40),
                (r"vivace.empty_scale: shape\[0\] is -1, needs", vivace.empty_scale, x, (-1, 5), "token"),
                (r"vivace.empty_scale: shape\[1\] is 1152921504606846976, needs", vivace.empty_scale, x, (1, 2**60), "block"),
                ("vivace.empty_scale: shape is .., needs two", vivace.empty_scale, x, (), "block"),
                ("decode_schedule: params.workers is 35184372088832, needs", vivace.decode_schedule, i32[:1], i32,
                 vivace.DecodeScheduleParams(workers=2**45)),
                (r"attention_prologue: qkv.shape\[1\] is 16, needs at least 1024, ", vivace.attention_prologue, x, np.zeros(4, "int64"), cache, cache),
                (r"vivace.Typed: shape\[0\] is -32, needs 0", vivace.Typed, np.zeros(1152, "uint8"), "q4_0", (-32, -64)),
                (r"vivace.Shape: shape\[0\] is -3, needs 0", vivace.Shape, (-3, 64), "f32"),
                ("prepare_router_weight: version is -1, needs 0", lambda n: vivace.prepare_router_weight(x, version=n), -1),
                ("vivace.use_stream: handle is -1, needs 0", vivace.use_stream(-1).__enter__)):
            self.refused(ValueError, message, call, *args)

    def test_scaling_is_for_fp8(self):
        x, weight = np.ones((4, 64), "float32"), np.ones(64, "float32")
        for message, call, args in (("rms_norm: scaling is 'token', .* or out, which is f32, in fp8", vivace.rms_norm, (x, weight)),
                                    ("silu_mul: scaling is 'token', .* or out, which is f32, in fp8", vivace.silu_mul, (x, x)),
                                    ("linear: scaling is 'token', .* or x, which is f32, in fp8", vivace.linear, (x, x))):
            self.refused(ValueError, message, call, *args, scaling="token")

    def test_scores_without_a_number(self):
        route = vivace.route_top_k(np.full((1, 8), np.nan, "float32"), 2)
        self.assertEqual((route.expert_ids.tolist(), route.expert_weights.tolist()), ([[0, 1]], [[0.5, 0.5]]))
        route = vivace.route_top_k(np.full((1, 8), np.nan, "float32"), 2, scoring="sigmoid")
        self.assertEqual((route.expert_ids.tolist(), route.expert_weights.tolist()), ([[0, 1]], [[0.0, 0.0]]))

    def test_a_sampler_without_options(self):
        logits = np.random.default_rng(8).standard_normal((3, 100)).astype("float32")
        zero = np.zeros(3, "int64")
        drawn = vivace.sampler(logits, temperature=np.ones(3, "float32"), seed=zero, position=zero)
        self.assertTrue(np.array_equal(vivace.sampler(logits).ids, drawn.ids))

    def test_questions_about_refused_calls(self):
        x, i32 = np.ones((4, 64), "float32"), np.zeros(1, "int32")
        cache = np.ones((1, 16, 1, 64), "float32")
        refused = ((vivace.rms_norm, (x, np.ones(63, "float32"))), (vivace.linear, (x, np.ones((8, 63), "float32"))),
                   (vivace.embedding, (i32, np.ones((4, 4), "int32"))), (vivace.silu_mul, (x, x[:2])),
                   (vivace.attention_prefill, (x[:1, None], cache, cache[..., :32], np.zeros((1, 1), "int32"), i32 + 1, np.array([0, 1], "int32"))),
                   (vivace.decode_schedule, (i32, i32, vivace.DecodeScheduleParams())), (vivace.route_top_k, (x, 65)),
                   (vivace.router_gemm, (x, vivace.RouterWeight((np.ones((8, 63), "float32"),), "exact"))),
                   (vivace.fused_moe, (x, np.ones((2, 8, 63), "float32"), np.ones((2, 64, 4), "float32"), np.zeros((4, 1), "int32"), x[:, :1].copy())),
                   (vivace.grouped_gemm, (x, np.ones((2, 8, 63), "float32"), i32, i32)), (vivace.quantize_fp8, (x[None],)),
                   (vivace.sampler, (x[0],)), (vivace.attention_prologue, (x, np.zeros(3, "int64"), cache, cache.copy())))
        for operator, args in refused:
            with self.subTest(operator.name):
                with self.assertRaises(ValueError) as run:
                    operator(*args)
                for question in (operator.explain, operator.cost):
                    with self.assertRaises(ValueError) as asked:
                        question(*args)
                    self.assertEqual(str(asked.exception), str(run.exception))

    def test_given_scales_that_are_none(self):
        x, weight, out = np.ones((2, 8), "float32"), np.ones(8, "float32"), vivace.Typed(np.full((2, 8), 7, "uint8"), "fp8_e4m3")
        for wrong in (0, -1, np.nan, np.inf):
            scale = np.array([wrong], "float32")
            for said, call in ((f"quantize_fp8: scale[0] is {wrong}", lambda: vivace.quantize_fp8(x, scaling="tensor", scale=scale, out=out)),
                               (f"rms_norm: out_scale[0] is {wrong}", lambda: vivace.rms_norm(x, weight, out=out, out_scale=scale)),
                               (f"silu_mul: out_scale[0] is {wrong}", lambda: vivace.silu_mul(x, x, out=out, out_scale=scale))):
                with self.assertRaises(ValueError) as caught:
                    call()
                self.assertEqual(str(caught.exception), f"{said}, needs a finite number > 0")
        self.assertTrue((out.array == 7).all())

    def test_scales_without_a_scaling(self):
        x, weight = np.ones((4, 256), "float32"), vivace.numbers.fp8(np.ones((8, 256), "float32"))
        one = np.ones(1, "float32")
        for scaling in ("token", "block"):
            x8, scale = vivace.quantize_fp8(x, scaling=scaling)
            said = f"linear: x_scale .*; scaling is 'tensor', '{scaling}' has scales of that shape$"
            with self.assertRaisesRegex(ValueError, said.replace("x_scale .*", r"x_scale(\.shape\[0\])? is .*")):
                vivace.linear(x8, weight, x_scale=scale, weight_scale=one)
            with self.assertRaisesRegex(ValueError, f"^linear: x_scale.*; scaling is 'tensor', '{scaling}' has"):
                vivace.linear_parts(x8, [weight], x_scale=scale, weight_scales=[one], scaling="tensor")
        with self.assertRaisesRegex(ValueError, r"^rms_norm: out_scale.shape\[0\] is 4, needs 1; scaling is 'tensor', 'token'"):
            vivace.rms_norm(x, np.ones(256, "float32"), out=vivace.Typed(np.empty((4, 256), "uint8"), "fp8_e4m3"), out_scale=np.ones(4, "float32"))

    def test_numbers_that_are_none(self):
        for wrong in (None, "x", ["a"], [[1], [2, 3]], np.zeros(2, "complex64"), np.zeros(2, "datetime64[s]"), object()):
            for name in ("bf16", "fp8", "f32"):
                with self.subTest(wrong=wrong), self.assertRaisesRegex(TypeError, rf"^vivace.numbers.{name}: values is .*, needs an array of real numbers$"):
                    getattr(vivace.numbers, name)(wrong)
        for scale in (0, -1.0, float("nan"), float("inf"), "x", None, [1.0]):
            with self.assertRaisesRegex(ValueError, r"^vivace.numbers.fp8: scale is .*, needs a finite number above 0$"):
                vivace.numbers.fp8(np.ones(2), scale)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(vivace.numbers.f32(vivace.numbers.bf16([1e300, -1e300, 2])).tolist(), [np.inf, -np.inf, 2])
        self.assertEqual([vivace.numbers.bf16(3.0).shape, vivace.numbers.fp8(3.0).shape, vivace.numbers.f32(3.0).shape], [(), (), ()])
        columns = np.arange(6.0).reshape(2, 3).T
        self.assertEqual(vivace.numbers.f32(vivace.numbers.bf16(columns)).tolist(), columns.tolist())

    def test_sizes_that_are_none(self):
        x = np.ones((2, 2), "float32")
        for wrong, call, args in ((r"decode_schedule_ints: max_requests is -5, needs 0 to", vivace.decode_schedule_ints, (-5, 1)),
                                  (r"decode_schedule_ints: workers is 'a', needs a whole", vivace.decode_schedule_ints, (1, "a")),
                                  (r"empty_scale: shape is 5, needs two extents", vivace.empty_scale, (x, 5, "token")),
                                  (r"configure: prefer is '.ud800', needs text", lambda text: vivace.configure(prefer=text), ("\ud800",))):
            with self.assertRaisesRegex((TypeError, ValueError), f"^vivace.{wrong}"):
                call(*args)

    def test_pickled(self):
        for name in vivace.__all__:
            value = getattr(vivace, name)
            if isinstance(value, vivace.Operator):
                self.assertIs(pickle.loads(pickle.dumps(value)), value)
                self.assertIs(copy.deepcopy(value), value)
        typed, shape = vivace.numbers.bf16(np.ones((2, 8), "float32")), vivace.Shape((2, 8), "bf16", "cuda:1", compute_capability=90)
        again = pickle.loads(pickle.dumps((typed, shape, vivace.DecodeScheduleParams(2))))
        self.assertTrue(np.array_equal(again[0].array, typed.array))
        self.assertEqual((again[0].dtype, again[1]._describe(), again[1]._place(), again[2]),
                         ("bf16", shape._describe(), shape._place(), vivace.DecodeScheduleParams(2)))

    def test_each_kind(self):
        x, weight = np.ones((1, 8), "float32"), np.ones(8, "float32")
        with self.assertRaisesRegex(ValueError, r"^rms_norm: weight.shape\[0\] is 7, needs hidden = 8 \(from x.shape\[1\]\)$"):
            vivace.rms_norm(x, np.ones(7, "float32"))
        with self.assertRaisesRegex(ValueError, "scaling is 'rows', needs one of 'tensor', 'token', 'block'"):
            vivace.rms_norm(x, weight, scaling="rows")
        with self.assertRaisesRegex(ValueError, "there is no operator 'nonsense'"):
            vivace.configure(prefer="nonsense=cpu")
        wide = np.ones((1, 1, 600), "float32")
        try:
            vivace.configure(prefer="attention_prefill=cpu")
            with self.assertRaisesRegex(NotImplementedError, "attention_prefill: .*needs head_dim <= 512, got 600"):
                vivace.attention_prefill(wide, wide[None], wide[None], np.zeros((1, 1), "int32"), np.ones(1, "int32"), np.array([0, 1], "int32"))
        finally:
            vivace.configure(prefer="")

    def test_a_refused_setting_changes_nothing(self):
        before = vivace.counts()
        for kind, message, options in (
                (ValueError, "vivace.configure: threads is -3, needs 1 to 1024", {"threads": -3}),
                (ValueError, "vivace.configure: threads is 1180591620717411303424, needs 1 to 1024", {"threads": 2**70}),
                (ValueError, "vivace.configure: threads is 0, needs 1 to 1024", {"threads": 0}),
                (TypeError, "vivace.configure: threads is 'a', needs a whole number", {"threads": "a"}),
                (ValueError, "vivace.configure: prefer: 'foo' is not OP=ROW", {"prefer": "foo"}),
                (ValueError, "vivace.configure: prefer: linear has no row 'zzz'", {"prefer": "linear=zzz"}),
                (TypeError, "vivace.configure: prefer is 5, needs text", {"prefer": 5}),
                (ValueError, "vivace.configure: prefer is 'linear=cpu.x00', needs text", {"prefer": "linear=cpu\0"})):
            self.refused(kind, message, vivace.configure, **options)
        self.assertEqual(vivace.counts(), before)

    def test_preferences_and_counts(self):
        x, weight = np.ones((1, 8), "float32"), np.ones(8, "float32")
        try:
            vivace.configure(prefer="rms_norm=reference")
            vivace.rms_norm(x, weight)
            self.assertEqual(vivace.counts(), [{"op": "rms_norm", "row": "reference", "calls": 1}])
        finally:
            vivace.configure(prefer="")


class Processes(unittest.TestCase):
    def test_threads_share_the_library(self):
        x, weight = np.random.default_rng(5).standard_normal((8, 512)).astype("float32"), np.ones(512, "float32")
        expected, wrong = vivace.rms_norm(x, weight), []

        def work():
            for _ in range(200):
                if not np.array_equal(vivace.rms_norm(x, weight), expected):
                    wrong.append(1)
            try:
                vivace.rms_norm(x, np.ones(3, "float32"))
            except ValueError as error:
                if "is 3" not in str(error):
                    wrong.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_settings_start_no_threads_that_run_already(self):
        code = (f"{THREADS}import numpy, vivace\n"
                "own = threads(1000)\n"  # this one and NumPy's
                "vivace.configure(threads=3)\n"
                "for i in range(20):\n"
                "    vivace.configure(prefer=('', 'rms_norm=reference')[i % 2])\n"
                "    vivace.configure(threads=(3, 2)[i % 2])\n"
                "assert threads(own + 1) == own + 1, (own, threads(own + 1))\n")
        self.runs(code)

    def runs(self, code):
        """In a Python of its own, without a word."""
        ended = subprocess.run([sys.executable, "-c", code], timeout=60, stderr=subprocess.PIPE, text=True)
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    def test_no_threads_means_those_of_now(self):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            self.skipTest("one core")
        code = (f"{THREADS}import numpy as np, vivace\n"
                f"os.sched_setaffinity(0, {cores[:1]})\n"
                "vivace.rms_norm(np.ones((2, 8), 'float32'), np.ones(8, 'float32'))\n"
                "one = threads(1000)\n"
                f"os.sched_setaffinity(0, {cores[:2]})\n"
                "vivace.configure(prefer='')\n"
                "vivace.rms_norm(np.ones((2, 8), 'float32'), np.ones(8, 'float32'))\n"
                "assert threads(one + 1) == one + 1, one\n")
        self.runs(code)

    def test_settings_leave_nothing_behind(self):
        code = (f"{THREADS}import threading, numpy as np, vivace\n"
                "own = threads(1000)\n"  # this one and NumPy's
                "def kib(): return int(open('/proc/self/statm').read().split()[1]) * 4\n"
                "x, w, done = np.ones((2, 8), 'float32'), np.ones(8, 'float32'), []\n"
                "def work():\n"
                "    while not done: vivace.rms_norm(x, w)\n"
                "worker = threading.Thread(target=work)\n"
                "worker.start()\n"  # calls under way while settings change
                "for i in range(20): vivace.configure(threads=64, prefer=('linear=reference', 'rms_norm=cpu')[i % 2])\n"
                "before = kib()\n"
                "for i in range(2000): vivace.configure(threads=64)\n"
                "for i in range(2000): vivace.configure(prefer=('linear=reference', 'rms_norm=cpu')[i % 2])\n"
                "for i in range(1, 41): vivace.configure(threads=i)\n"
                "vivace.configure(threads=64)\n"
                "done.append(1)\n"
                "worker.join()\n"
                "assert threads(own + 63) == own + 63, (own, threads(own + 63))\n"
                "assert kib() < before + 4096, (before, kib())\n"  # a context each: 16 MB
                "child = os.fork()\n"  # which has none of the threads
                "if child == 0:\n"
                "    vivace.configure(threads=2)\n"
                "    vivace.rms_norm(x, w)\n"
                "    os._exit(0)\n"
                "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
                "import sys\n"
                "sys.kept = vivace._library.context()\n")  # until Python's modules are gone
        self.runs(code)

    def test_threads_that_the_system_does_not_start(self):
        code = ("import resource, vivace\n"
                "vivace.configure(threads=2)\n"
                "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
                "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))\n"  # far less than 1,024 stacks
                "try:\n"
                "    vivace.configure(threads=1024)\n"
                "except RuntimeError as error:\n"
                "    assert str(error).startswith('vivace.configure: threads is 1024, more than the system starts now'), error\n"
                "else:\n"
                "    raise AssertionError('1024 threads run')\n"
                "vivace.configure(threads=3)\n")
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    def test_settings_hold_from_their_return_on(self):
        x, weight, done = np.ones((1, 8), "float32"), np.ones(8, "float32"), threading.Event()

        def work():
            while not done.is_set():
                vivace.rms_norm(x, weight)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for i in range(40):
                row = ("reference", "cpu")[i % 2]
                vivace.configure(prefer=f"rms_norm={row}")
                vivace.rms_norm(x, weight)
                self.assertTrue(all(count["row"].startswith(row) for count in vivace.counts()), vivace.counts())
        finally:
            done.set()
            for thread in threads:
                thread.join()
            vivace.configure(prefer="")

    def test_a_forked_child_works(self):
        code = ("import os, numpy as np, vivace\n"
                "x, w = np.ones((64, 512), 'float32'), np.ones(512, 'float32')\n"
                "vivace.rms_norm(x, w)\n"  # the parent's threads are running
                "child = os.fork()\n"
                "if child == 0:\n"
                "    vivace.rms_norm(x, w)\n"
                "    os._exit(0 if vivace.counts()[0]['calls'] == 1 else 1)\n"
                "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
                "vivace.rms_norm(x, w)\n")
        subprocess.run([sys.executable, "-c", code], check=True, timeout=30, env={**os.environ})

    def test_without_numpy_the_rest_works(self):
        code = ("import sys\nsys.modules['numpy'] = None\nimport vivace\n"
                "assert len(vivace.operators()) == 15 and vivace.build()['version'] == vivace.__version__\n")
        subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


if __name__ == "__main__":
    package.main()
