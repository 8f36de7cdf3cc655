"""The operators through torch: direct, as custom operators, compiled, and on a GPU in CUDA graphs; always the same bits.

    python3 tests/python/torch_test.py        with a Python that has torch, NumPy and the wheel
"""

import contextlib
import pickle
import subprocess
import sys
import unittest
import unittest.mock

import package

package.need("numpy", "vivace", "torch")
import cases  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import library as torch_library  # noqa: E402
import vivace  # noqa: E402
import vivace.torch_ops  # noqa: E402
from vivace._operators import OPERATORS  # noqa: E402
from vivace.ops import _LEAVE_ROWS as LEAVE_ROWS  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
CASES = cases.cases()
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "i32": torch.int32, "i64": torch.int64,
         "u8": torch.uint8}


def maker(device):
    def make(item):
        array = cases.numpy_array(item)
        if isinstance(array, vivace.Typed):
            return torch.from_numpy(array.array.copy()).view(TYPES[item.dtype]).to(device)
        return torch.from_numpy(array.copy()).to(device)
    return make


def bits(tensors):
    return [t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if isinstance(t, torch.Tensor) else
            (t.array if isinstance(t, vivace.Typed) else t).tobytes() for t in tensors]


def runnable(device):
    """The cases that a row of this device takes."""
    for case in CASES:
        try:
            cases.call(case, maker(device))
        except NotImplementedError:
            continue
        except ValueError as error:
            if device == "cpu":
                raise AssertionError(case.name) from error
            continue
        yield case


class Torch(unittest.TestCase):
    def test_on_the_cpu_as_with_numpy(self):
        for case in CASES:
            with self.subTest(case.name):
                self.assertEqual([bits(r) for r in cases.call(case, maker("cpu"))], [bits(r) for r in cases.call(case, cases.numpy_array)])

    def quick(self, name):
        """The way in C to run an operator."""
        from vivace import _library
        if not vivace.torch_ops.EXCHANGE or _library._call is None:
            self.skipTest("this torch has no C exchange of tensors, or the wheel no vivace._call")
        _library.context()  # without one nothing runs there
        return _library.ENTRIES[name].quick

    def test_tensors_taken_apart_in_c(self):
        tried = 0
        for device in DEVICES:
            for case in runnable(device):
                if case.operator is vivace.decode_attention:
                    continue
                args, options = cases.built(case.args, maker(device)), cases.built(case.options, maker(device))
                values, result = case.operator._build(*args, **options)
                place, needed = OPERATORS[case.operator.name].workspace, case.operator.workspace_bytes(*args, **options)
                if needed:
                    self.assertEqual(self.quick(case.operator.name)(values), -1, case.name)  # it is to be allocated
                    scratch = torch.empty(needed, dtype=torch.uint8, device=device)
                    values = (*values[:place], scratch, *values[place + 1:])
                if case.operator.name in LEAVE_ROWS:
                    result.zero_()
                self.assertEqual(self.quick(case.operator.name)(values), 0, case.name)
                self.assertEqual(bits(cases.results_of(result)), bits(cases.call(case, maker(device))[0]), case.name)
                tried += 1
        self.assertGreater(tried, 20)

    def test_calls_with_an_output_go_to_c_as_they_are(self):
        self.quick("rms_norm")
        names = set()
        for device in DEVICES:
            for case in runnable(device):
                if case.operator is vivace.decode_attention or case.operator._entry._parameters is None:
                    continue
                args, options = cases.built(case.args, maker(device)), cases.built(case.options, maker(device))
                if options.get("scaling", "tensor") != "tensor" or "out_dtype" in options:
                    continue
                place, needed = OPERATORS[case.operator.name].workspace, case.operator.workspace_bytes(*args, **options)
                out = torch.zeros_like(case.operator._build(*args, **options)[1])
                scratch = {"workspace": torch.empty(needed, dtype=torch.uint8, device=device)} if place is not None else {}
                with unittest.mock.patch.object(case.operator._entry, "quick", None):  # which would be next
                    self.assertIs(case.operator(*args, **{**options, "out": out, **scratch}), out)
                self.assertEqual(bits([out]), bits(cases.call(case, maker(device))[0]), case.name)
                names.add(case.operator.name)
        self.assertGreater(len(names), 5, names)

    def test_what_is_not_taken_apart_in_c(self):
        call, x, w = self.quick("rms_norm"), torch.ones(2, 8), torch.ones(8)
        self.assertEqual(call((x, None, w, x, None, 0, 1, None)), 0)  # a whole number is one with a point too
        self.assertEqual(call((x, None, torch.ones(7), x, None, 0, 1e-6, None)), 1)
        for values in [(x.double(), None, w, x, None, 0, 1e-6, None), (x.view(1, 1, 1, 1, 2, 8), None, w, x, None, 0, 1e-6, None),
                       (x.numpy(), None, w, x, None, 0, 1e-6, None), (x, None, w, x, None, 2**64, 1e-6, None), (x, None, w, x, None, np.int64(0), 1e-6, None),
                       (x, None, w, x, None, 0, None, None), (None, None, w, x, None, 0, "1", None), (x, None, w, x.to("meta"), None, 0, 1e-6, None)]:
            self.assertEqual(call(values), -1)
        for wrong in ((x,), [x, None, w, x, None, 0, 1e-6, None]):
            with self.assertRaisesRegex(TypeError, "a tuple of 8 values"):
                call(wrong)
        with self.assertRaisesRegex(ValueError, r"^rms_norm: x is torch.float32 \(1, 1, 1, 1, 2, 8\), needs at most 5"):
            vivace.rms_norm(x.view(1, 1, 1, 1, 2, 8), w, out=x)
        self.assertTrue(torch.equal(vivace.rms_norm(x, w, eps=np.float64(1e-6)), vivace.rms_norm(x, w)))

    def test_the_first_tensor_brings_all_of_it(self):
        """Without vivace.torch_ops, calls that C does not take go the same way as with it."""
        code = ("import numpy as np, torch, vivace\n"
                "x, w = torch.ones(2, 8), torch.ones(8)\n"
                "y = vivace.rms_norm(x, w)\n"
                "assert torch.equal(vivace.rms_norm(x, w.numpy()), y) and torch.equal(vivace.rms_norm(x, w, eps=np.float32(1e-6)), y)\n"
                "assert vivace.linear(x, np.ones((4, 8), 'float32')).tolist() == [[8.0] * 4] * 2\n"
                "for said, call in (('rms_norm: weight is the list', lambda: vivace.rms_norm(x, [1.0] * 8)),\n"
                "                   ('rms_norm: eps is None', lambda: vivace.rms_norm(x, w, eps=None)),\n"
                "                   ('rms_norm: x is on meta', lambda: vivace.rms_norm(x.to('meta'), w, out=y))):\n"
                "    try:\n"
                "        call()\n"
                "    except (TypeError, ValueError) as error:\n"
                "        assert str(error).startswith(said), error\n"
                "    else:\n"
                "        raise AssertionError(said)\n")
        ended = subprocess.run([sys.executable, "-c", code], timeout=120, stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    def test_views_that_torch_negates_are_refused(self):
        ones = torch.ones(3, 1)
        gate = torch.complex(ones, torch.arange(3.0).view(3, 1)).conj().imag
        for call in (vivace.silu_mul, vivace.silu_mul.explain):
            with self.assertRaisesRegex(ValueError, "^silu_mul: gate is a view that torch negates .* resolve_neg"):
                call(gate, ones)
        torch.ops.vivace.silu_mul(gate, ones, y := torch.empty(3, 1), None, 0)  # for which torch resolves it
        self.assertTrue(torch.allclose(y, torch.nn.functional.silu(gate)))
        for parts in (gate.resolve_neg(), gate.neg(), torch.complex(ones, ones).imag):  # not such a view
            self.assertTrue(torch.allclose(vivace.silu_mul(parts, ones), torch.nn.functional.silu(parts)))

    def test_settings_count_for_the_next_call(self):
        x, weight = torch.ones(2, 8), torch.ones(8)
        self.addCleanup(vivace.configure, prefer="")
        for row in ("reference", "cpu.simd"):
            vivace.configure(prefer=f"rms_norm={row}")
            vivace.rms_norm(x, weight)
            self.assertEqual([(c["row"], c["calls"]) for c in vivace.counts()], [(row, 1)])

    def test_every_operator_runs_on_each_device(self):
        for device in DEVICES:
            ran = {case.name.split(".")[0] for case in runnable(device)}
            self.assertLessEqual(set(OPERATORS), ran, device)

    def test_results_on_a_gpu(self):
        if "cuda" not in DEVICES:
            self.skipTest("there is no GPU")
        for case in runnable("cuda"):
            if case.expected is None:
                continue
            with self.subTest(case.name):
                for result, expected in zip(cases.call(case, maker("cuda"))[0], case.expected()):
                    error = np.abs(result.double().cpu().numpy() - expected).max() / max(np.abs(expected).max(), 1e-30)
                    self.assertLessEqual(error, max(2 * case.bound, 2.0**-7))  # weights of attention have 8 bits there

    def test_compiled_without_breaks(self):
        for device in DEVICES:
            for case in runnable(device):
                if case.operator is vivace.decode_attention or case.name.startswith("attention_decode"):
                    continue  # asks the library how to cut; test_decode_compiled has it from outside
                with self.subTest(case.name, device=device):
                    torch._dynamo.reset()
                    args, options = cases.built(case.args, maker(device)), cases.built(case.options, maker(device))
                    compiled = torch.compile(lambda a, o, operator=case.operator: operator(*a, **o), fullgraph=True, backend="aot_eager")
                    given = cases.results_of([args, list(options.values())])
                    results = cases.results_of(compiled(args, options))
                    expected, after = cases.call(case, maker(device))
                    self.assertEqual(bits(results), bits(expected))
                    self.assertEqual(bits(given), bits(after))

    def test_recorders_see_a_call(self):
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.utils._python_dispatch import TorchDispatchMode

        x, weight, other = torch.randn(4, 64), torch.randn(64), torch.randn(4, 64)

        def doubled(x):
            return vivace.rms_norm(x, weight) * 2

        def doubled_there(x):
            return vivace.rms_norm(x, weight, out=torch.empty_like(x)) * 2

        for call in (doubled, doubled_there):
            for record in (make_fx, lambda f: torch.jit.trace(f, (x,), check_trace=False)):
                graph = record(call)(x) if record is make_fx else record(call)
                self.assertTrue(torch.equal(graph(other), doubled(other)))

        class Names(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append(str(function))
                return function(*args, **(kwargs or {}))

        for call in (doubled, doubled_there):
            seen = []
            with Names():
                call(x)
            self.assertIn("vivace.rms_norm.default", seen)

    def test_refusals_while_torch_traces(self):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, weight: vivace.rms_norm(x, weight), backend="aot_eager")
        with self.assertRaisesRegex(ValueError, "torch.float64"):
            compiled(torch.ones(2, 8).double(), torch.ones(8))
        with self.assertRaisesRegex(ValueError, "^rms_norm: x is torch.float64"):
            vivace.rms_norm(torch.ones(2, 8).double(), torch.ones(8))

    def test_decode_compiled(self):
        case = next(case for case in CASES if case.name == "attention_decode.bf16")
        for device in DEVICES:
            q, k, v, pages, lengths, starts = cases.built(case.args, maker(device))
            params = vivace.attention_decode_schedule_params(q, k, pages)

            @torch.compile(fullgraph=True, backend="aot_eager")
            def step(q, k, v, pages, lengths, starts):
                schedule = vivace.decode_schedule(lengths, starts, params)
                return vivace.attention_decode(q, k, v, pages, lengths, starts, schedule, params)

            self.assertEqual(bits([step(q, k, v, pages, lengths, starts)]), bits([vivace.decode_attention(q, k, v, pages, lengths, starts)]))

    def test_opcheck(self):
        """torch's own check of schema, fake version and dispatch."""
        for device in DEVICES:
            for case in runnable(device):
                if case.operator is vivace.decode_attention:
                    continue
                args, options = cases.built(case.args, maker(device)), cases.built(case.options, maker(device))
                values, _ = case.operator._build(*args, **options)
                checks = ["test_faketensor", "test_autograd_registration"]
                if not any(isinstance(v, torch.Tensor) and v.dtype == torch.float8_e4m3fn for v in values):
                    checks.append("test_schema")  # compares tensors, which torch cannot for fp8
                with self.subTest(case.name, device=device):
                    torch_library.opcheck(getattr(torch.ops.vivace, case.operator.name), values, test_utils=checks)

    def test_fake_tensors_run_nothing(self):
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            y = vivace.rms_norm(torch.empty(4, 64), torch.empty(64))
        self.assertEqual((y.shape, y.dtype), ((4, 64), torch.float32))

    def test_fake_tensors_are_refused_as_others(self):
        from torch._subclasses.fake_tensor import FakeTensorMode
        x, y, ids = torch.empty(4, 64), torch.empty(4, 64), torch.empty(4, dtype=torch.int32)
        fits = (x, None, torch.empty(64), y, None, 0, 1e-6, None)
        calls = [(torch.ops.vivace.rms_norm, (*fits[:2], torch.empty(63), *fits[3:])), (torch.ops.vivace.rms_norm, (x.double(), *fits[1:])),
                 (torch.ops.vivace.rms_norm, (x.view(1, 1, 1, 1, 4, 64), *fits[1:])), (torch.ops.vivace.rms_norm, (*fits[:6], -1.0, None)),
                 (torch.ops.vivace.silu_mul, (x.t(), y.t(), torch.empty(64, 4), None, 0)), (torch.ops.vivace.embedding, (ids.long(), x, y))]
        mode = FakeTensorMode()
        for operator, values in calls:
            said = []
            for move, where in ((torch.Tensor.detach, contextlib.nullcontext()), (mode.from_tensor, mode),
                                (lambda tensor: tensor.to("meta"), contextlib.nullcontext())):
                moved = [move(value) if isinstance(value, torch.Tensor) else value for value in values]
                with self.assertRaises(ValueError) as caught, where:
                    operator(*moved)
                said.append(str(caught.exception))
            self.assertEqual(said, said[:1] * 3)

    def test_scales_of_symbolic_sizes(self):
        """empty_scale neither binds a size that torch keeps open nor fixes it: compiled, exported and under fake tensors."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.export import Dim, export
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        def quantised(x):
            tokens = vivace.empty_scale(x, x.shape, "token")
            blocks, out = vivace.empty_scale(x, x.shape, "block"), torch.empty(x.shape, dtype=torch.float8_e4m3fn)
            vivace.quantize_fp8(x, scaling="token", scale=tokens, out=out)
            vivace.quantize_fp8(x, scaling="block", scale=blocks, out=out)
            return tokens, blocks

        class Module(torch.nn.Module):
            def forward(self, x):
                return quantised(x)

        def agrees(call, *sizes):
            for size in sizes:
                x = torch.randn(size)
                for scale, scaling in zip(call(x), ("token", "block"), strict=True):
                    self.assertTrue(torch.equal(scale, vivace.quantize_fp8(x, scaling=scaling)[1]), (size, scaling))

        torch._dynamo.reset()
        with torch._dynamo.config.patch(error_on_recompile=True):
            agrees(torch.compile(quantised, fullgraph=True, dynamic=True, backend="aot_eager"), (3, 300), (7, 129), (40, 5000))
        for strict in (False, True):
            for dims in ({0: Dim("tokens")}, {0: Dim("tokens"), 1: Dim("width", min=129)}):
                with self.subTest(strict=strict, dims=dims):
                    torch._dynamo.reset()
                    program = export(Module(), (torch.randn(3, 300),), dynamic_shapes=(dims,), strict=strict)
                    self.assertTrue(all(bounds.upper > 2**40 for bounds in program.range_constraints.values()), program.range_constraints)
                    agrees(program.module(), (7, 300), *([(40, 5000)] if 1 in dims else []))
        mode = FakeTensorMode(shape_env=ShapeEnv())
        x = mode.from_tensor(torch.empty(3, 300), symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2))
        with mode:
            tokens, blocks = vivace.empty_scale(x, x.shape, "token"), vivace.empty_scale(x, x.shape, "block")
        for size in (x.shape[0], tokens.shape[0], *blocks.shape):
            self.assertIsInstance(size, torch.SymInt)
        self.assertEqual((str(tokens.shape[0]), str(blocks.shape[0])), (str(x.shape[0]),) * 2)

    def test_in_a_cuda_graph(self):
        if "cuda" not in DEVICES:
            self.skipTest("there is no GPU")
        for case in runnable("cuda"):
            with self.subTest(case.name):
                args, options = cases.built(case.args, maker("cuda")), cases.built(case.options, maker("cuda"))
                kept = [t.clone() for t in cases.results_of([args, list(options.values())])]
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    case.operator(*args, **options)  # loads the kernels
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    results = cases.results_of(case.operator(*args, **options))
                for tensor, before in zip(cases.results_of([args, list(options.values())]), kept):
                    tensor.copy_(before)
                for tensor in results:
                    tensor.view(torch.uint8).fill_(0xFF)
                graph.replay()
                torch.cuda.synchronize()
                self.assertEqual(bits(results), bits(cases.call(case, maker("cuda"))[0]))

    def test_the_current_stream_is_used(self):
        if "cuda" not in DEVICES:
            self.skipTest("there is no GPU")
        x, weight = torch.randn(64, 4096, device="cuda"), torch.ones(4096, device="cuda")
        expected, side = vivace.rms_norm(x, weight), torch.cuda.Stream()
        late = torch.zeros_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            y = vivace.rms_norm(late, weight)
        side.synchronize()
        self.assertTrue(torch.equal(y, expected))

    def test_a_module_with_operators_is_pickled(self):
        module = torch.nn.Linear(2, 2)
        module.operators = (vivace.rms_norm, vivace.linear_parts)
        self.assertEqual(pickle.loads(pickle.dumps(module)).operators, module.operators)

    def test_tensors_without_an_address(self):
        x, weight = torch.ones(2, 8), torch.ones(8)
        for wrong, said in ((x.to_sparse(), "torch.sparse_coo"), (torch.nested.nested_tensor([weight]), "nested"), (x.to_mkldnn(), "torch._mkldnn")):
            for name, call in (("rms_norm: x", lambda: vivace.rms_norm(wrong, weight)), ("rms_norm: out", lambda: vivace.rms_norm(x, weight, out=wrong)),
                               ("linear: weight", lambda: vivace.linear.explain(x, wrong))):
                with self.assertRaisesRegex(ValueError, f"^{name} is a {said} tensor without an address, needs one with strides in memory: "):
                    call()
        with self.assertRaisesRegex(ValueError, "^rms_norm: x is a torch.strided tensor without an address"):
            torch.vmap(vivace.rms_norm, in_dims=(0, None))(torch.ones(3, 2, 8), weight)

    def test_tensors_where_none_belongs(self):
        x, weight = torch.ones(2, 8), torch.ones(8)
        experts, ids = torch.ones(2, 8, 8), torch.zeros(2, 1, dtype=torch.int32)
        for said, call in (("rms_norm: eps is tensor", lambda: vivace.rms_norm(x, weight, eps=x)),
                           ("linear: out_dtype is tensor", lambda: vivace.linear(x, x, out_dtype=x)),
                           ("linear: out_dtype is 'q8_0', needs one of f32, ", lambda: vivace.linear(x, x, out_dtype="q8_0")),
                           ("linear: exact is tensor", lambda: vivace.linear(x, x, exact=x)),
                           ("fused_moe: swiglu_alpha is tensor", lambda: vivace.fused_moe(x, experts, experts[:, :, :4], ids, x[:, :1], swiglu_alpha=x)),
                           ("sampler: logprobs is tensor", lambda: vivace.sampler(x, logprobs=x)),
                           ("router_gemm: weight.terms is None", lambda: vivace.router_gemm(x, vivace.RouterWeight(None, "exact"))),
                           (r"decode_attention: kv_lengths has the shape \(\)", lambda: vivace.decode_attention(
                               x[:, None], experts[None], experts[None], ids, torch.tensor(1), ids[:, 0]))):
            with self.assertRaisesRegex((TypeError, ValueError), f"^{said}"):
                call()
        compiled = torch.compile(lambda x: vivace.linear(x, x, out_dtype="q8_0"), backend="eager")
        with self.assertRaisesRegex(Exception, "the type of an output is 'q8_0', needs one of f32, "):
            compiled(x)

    def test_parameters_and_views(self):
        x, weight = torch.randn(3, 2, 64), torch.nn.Parameter(torch.ones(64), requires_grad=False)
        self.assertTrue(torch.equal(vivace.rms_norm(x[:, 1], weight), vivace.rms_norm(x[:, 1].contiguous(), weight)))

    def test_errors(self):
        x = torch.ones(4, 64)
        with self.assertRaisesRegex(ValueError, "weight.shape"):
            vivace.rms_norm(x, torch.ones(63))
        with self.assertRaisesRegex(ValueError, "torch.float64"):
            vivace.rms_norm(x.double(), torch.ones(64))
        with self.assertRaisesRegex(ValueError, "meta"):
            vivace.rms_norm(x, torch.ones(64, device="meta"))
        with self.assertRaisesRegex(ValueError, "weight.shape"):
            torch.ops.vivace.rms_norm(x, None, torch.ones(63), x, None, 0, 1e-6, None)


if __name__ == "__main__":
    package.main()
