"""The plugins called as the engines call them, on the CPU and where there is a GPU on it, against float64."""

import types
import unittest

import package

package.need("numpy", "vivace", "torch")
import cases  # noqa: E402
import engines  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import vivace  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, HEADS_KV, DIM = 4, 2, 64


def number(tensor):
    return tensor.detach().double().cpu().numpy()


def close(case, result, expected, bound=2.0**-6):
    case.assertEqual(result.shape, expected.shape)
    case.assertLessEqual(np.abs(result - expected).max(), bound * np.abs(expected).max())


def bf16(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def i32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def init_threshold(self, threshold=1, supports_spec_as_decode=False, **_):
    self.reorder_batch_threshold = max(threshold, getattr(self.vllm_config, "spec", 1))


def init_builder(self, kv_cache_spec, layer_names, vllm_config, device):
    self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device


def split(common, decode_threshold=1, **_):
    counts = (common.query_start_loc_cpu[1:] - common.query_start_loc_cpu[:-1]).tolist()
    decodes = next((i for i, n in enumerate(counts) if n > decode_threshold), len(counts))
    tokens = int(common.query_start_loc_cpu[decodes])
    return decodes, len(counts) - decodes, tokens, common.num_actual_tokens - tokens


class Serving(unittest.TestCase):
    def test_a_plan_asks_about_its_own_gpu(self):
        from vivace.plugins import serving
        asked = []

        def shape(extents, dtype, device="cpu"):
            asked.append(device)
            return vivace.Shape(extents, dtype, "cpu")

        module = types.SimpleNamespace(**{**vivace.__dict__, "Shape": shape})
        serving.vivace, before = module, serving.vivace
        self.addCleanup(setattr, serving, "vivace", before)
        values = dict(max_requests=2, max_pages=2, heads_q=HEADS, heads_kv=HEADS_KV, head_dim=DIM, page_tokens=16, q_dtype=torch.bfloat16,
                      kv_dtype=torch.bfloat16)
        serving.DecodePlan(torch.device("cpu"), **values)
        self.assertEqual(set(asked), {"cpu"})
        with self.assertRaises((AssertionError, RuntimeError)):  # this torch, or this machine, has no such GPU
            serving.DecodePlan(torch.device("cuda:63"), **values)
        self.assertIn("cuda:63", asked)


class Vllm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        engines.stand_in("vllm", {
            "AttentionType": types.SimpleNamespace(DECODER="decoder", ENCODER="encoder"),
            "AttentionCGSupport": types.SimpleNamespace(UNIFORM_BATCH=2),
            "MultipleOf": lambda base: ("multiple of", base),
            "AttentionMetadataBuilder": {"__init__": init_builder, "_init_reorder_batch_threshold": init_threshold},
            "AttentionImplBase": {"dcp_world_size": 1, "pcp_world_size": 1},
            "split_decodes_and_prefills": split,
            "get_current_vllm_config_or_none": lambda: None,
            "envs": {"VLLM_BATCH_INVARIANT": False},
        })
        from vivace.plugins.vllm import attention
        cls.plugin = attention

    def test_registration(self):
        """With vLLM itself: what it finds under the flag is ours, and its own checks pass."""
        if not engines.installed("vllm"):
            self.skipTest("vllm is not installed")
        from vllm.platforms.interface import DeviceCapability
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        from vivace.plugins import vllm as plugin
        plugin.register()
        plugin.register()
        backend = AttentionBackendEnum.CUSTOM.get_class()
        self.assertIs(backend, self.plugin.VivaceBackend)
        asked = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="fp8_e4m3", block_size=16, use_mla=False, has_sink=True,
                     use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, device_capability=DeviceCapability(9, 0),
                     attn_type="decoder", has_sliding_window=True)
        reasons = backend.validate_configuration(**asked)
        if vivace.build()["cuda"]:
            self.assertEqual(reasons, [])
        else:  # the library was built without rows for a GPU, and says so
            self.assertRegex(str(reasons), "no row fits.*the call is on cuda")
        self.assertIn("MLA not supported", backend.validate_configuration(**{**asked, "use_mla": True}))
        self.assertTrue(backend.validate_configuration(**{**asked, "dtype": torch.float16}))
        self.assertTrue(backend.validate_configuration(**{**asked, "device_capability": DeviceCapability(7, 5)}))
        from vivace.plugins.vllm import moe
        from vllm.model_executor.layers.fused_moe.oracle import fp8
        self.assertTrue(fp8.backend_to_kernel_cls.vivace)
        self.assertFalse(getattr(moe._experts_class(), "__abstractmethods__"))

    def builder(self, block_size=16, dtype=torch.bfloat16, spec=1, windows=(0,)):
        model = types.SimpleNamespace(max_model_len=256, dtype=torch.bfloat16, get_num_attention_heads=lambda parallel: HEADS)
        speculative = types.SimpleNamespace(num_speculative_tokens=spec - 1, parallel_drafting=False) if spec > 1 else None
        config = types.SimpleNamespace(model_config=model, scheduler_config=types.SimpleNamespace(max_num_seqs=8), spec=spec,
                                       parallel_config=types.SimpleNamespace(decode_context_parallel_size=1),
                                       speculative_config=speculative, use_v2_model_runner=True,
                                       compilation_config=types.SimpleNamespace(static_forward_context={
                                           f"layer of {window}": types.SimpleNamespace(impl=types.SimpleNamespace(window=window))
                                           for window in windows}))
        spec_of_cache = types.SimpleNamespace(block_size=block_size, num_kv_heads=HEADS_KV, head_size=DIM, dtype=dtype)
        return self.plugin.VivaceMetadataBuilder(spec_of_cache, list(config.compilation_config.static_forward_context), config, torch.device(DEVICE))

    def common(self, lengths, queries, pages):
        start = np.concatenate([[0], np.cumsum(queries)])
        return types.SimpleNamespace(
            query_start_loc=i32(start), query_start_loc_cpu=torch.tensor(start), seq_lens=i32(lengths), num_reqs=len(lengths),
            num_actual_tokens=int(start[-1]), max_query_len=max(queries), block_table_tensor=i32(pages), causal=True)

    def run_step(self, lengths, queries, block_size=16, spec=1, contiguous=True, kv=torch.bfloat16, sinks=None, window=None, soft_cap=None):
        torch.manual_seed(3)
        blocks = 24
        # Logical [blocks, heads, block_size, 2 * dim]; as it lies, heads before or after the tokens of a block.
        cache = bf16(blocks, HEADS_KV, block_size, 2 * DIM) if contiguous else bf16(blocks, block_size, HEADS_KV, 2 * DIM).transpose(1, 2)
        if kv != torch.bfloat16:
            cache = cache.to(kv).view(torch.uint8)
        pages = np.random.default_rng(1).permutation(blocks)[:len(lengths) * 4].reshape(len(lengths), 4)
        common = self.common(lengths, queries, pages)
        metadata = self.builder(block_size, dtype=cache.dtype, spec=spec, windows={0, 7, window or 0}).build(0, common)
        parameter = None if sinks is None else torch.nn.Parameter(torch.zeros_like(sinks))
        impl = self.plugin.VivaceImpl(HEADS, DIM, DIM**-0.5, HEADS_KV, sliding_window=window, logits_soft_cap=soft_cap, sinks=parameter,
                                      kv_cache_dtype="auto" if kv == torch.bfloat16 else "fp8")
        if sinks is not None:  # loaded after layers were made, in the model's type
            parameter.data.copy_(sinks)
        impl.process_weights_after_loading(torch.bfloat16)
        scale = torch.full((1,), 0.5 if kv != torch.bfloat16 else 1.0, device=DEVICE)
        layer = types.SimpleNamespace(_k_scale=scale, _v_scale=scale)
        tokens = int(sum(queries))
        query, output = bf16(tokens + 3, HEADS * DIM), torch.zeros(tokens + 3, HEADS * DIM, dtype=torch.bfloat16, device=DEVICE)
        impl.forward(layer, query, None, None, cache, metadata, output)
        whole = number(cache if kv == torch.bfloat16 else cache.view(kv).float() * 0.5).transpose(0, 2, 1, 3)
        start = np.concatenate([[0], np.cumsum(queries)])
        expected = cases.attention(number(query).reshape(-1, HEADS, DIM)[:tokens], whole[..., :DIM], whole[..., DIM:], pages, lengths, start,
                                   window=window or 0, soft_cap=soft_cap or 0.0, sinks=None if sinks is None else number(sinks))
        close(self, number(output).reshape(-1, HEADS, DIM)[:tokens], expected)
        self.assertFalse(output[tokens:].any())

    def test_decode_prefill_and_both(self):
        self.run_step([5, 33, 64], [1, 1, 1])
        self.run_step([5, 33, 17], [1, 1, 9])
        self.run_step([9, 40], [9, 12])

    def test_sinks_windows_and_caps(self):
        for options in ({"sinks": bf16(HEADS)}, {"window": 16}, {"soft_cap": 5.0}, {"sinks": bf16(HEADS), "window": 20, "soft_cap": 30.0}):
            self.run_step([5, 33, 17, 60], [1, 1, 9, 12], **options)

    def test_block_sizes_and_layouts(self):
        for block_size in (16, 32, 64):
            for contiguous in (True, False):
                self.run_step([5, 16, 31], [1, 1, 5], block_size=block_size, contiguous=contiguous)

    def test_speculative_queries(self):
        self.run_step([5, 33, 20], [4, 2, 4], spec=4)

    def test_fp8_cache(self):
        self.run_step([5, 33, 17], [1, 1, 9], kv=torch.float8_e4m3fn)

    def test_padding_of_a_graph_is_nothing(self):
        self.run_step([5, 33, 0, 0], [1, 1, 0, 0])

    def test_the_run_that_measures_memory(self):
        impl = self.plugin.VivaceImpl(HEADS, DIM, DIM**-0.5, HEADS_KV)
        output = bf16(2, HEADS * DIM)
        self.assertFalse(impl.forward(None, output, output, output, None, None, output).any())

    def test_experts(self):
        """FP8 with scales of blocks and of tensors; ids of the whole model, of which this rank has some."""
        from vivace.plugins.vllm import moe
        torch.manual_seed(6)
        gate_up, down = bf16(3, 256, 256).to(torch.float8_e4m3fn), bf16(3, 256, 128).to(torch.float8_e4m3fn)
        x, weights = bf16(4, 256), torch.rand(4, 2, device=DEVICE)
        ids, mapped = torch.tensor([[0, 4], [5, 1], [2, 3], [4, 5]], device=DEVICE), torch.tensor([-1, 0, -1, -1, 1, 2], device=DEVICE)
        local = mapped[ids].cpu().numpy()

        def run(block, w1_scale, w2_scale, a1, a1_scale, a2_scale):
            class Experts(moe._experts_class()):
                block_shape = [128, 128] if block else None

                def __init__(self):
                    pass

            Experts.w1_scale, Experts.w2_scale, Experts.a1_scale, Experts.a2_scale = w1_scale, w2_scale, a1_scale, a2_scale
            out = torch.zeros(4, 256, dtype=torch.bfloat16, device=DEVICE)
            Experts().apply(out, a1, gate_up, down, weights, ids, None, 6, mapped, a1_scale, a2_scale, None, None, None, False)
            return number(out)

        w1, w2 = torch.rand(3, 2, 2, device=DEVICE) + 0.5, torch.rand(3, 2, 1, device=DEVICE) + 0.5
        x8, x_scale = vivace.quantize_fp8(x, scaling="block")
        whole = [number(w) * number(s).repeat(128, axis=1).repeat(128, axis=2) for w, s in ((gate_up, w1), (down, w2))]
        close(self, run(True, w1, w2, x8, x_scale, None), cases.moe(number(x), *whole, local, number(weights)), 0.1)
        w1, w2 = torch.rand(3, device=DEVICE) + 0.5, torch.rand(3, device=DEVICE) + 0.5
        scale = torch.tensor(0.02, device=DEVICE)  # vLLM keeps the largest of all experts, without a dimension
        x8, _ = vivace.quantize_fp8(x, scaling="tensor", scale=scale.view(1))
        whole = [number(w) * number(s)[:, None, None] for w, s in ((gate_up, w1), (down, w2))]
        for a1, a1_scale, a2_scale in ((x8, scale, torch.tensor(4.0, device=DEVICE)), (x8, scale.view(1), torch.full((3,), 4.0, device=DEVICE))):
            close(self, run(False, w1, w2, a1, a1_scale, a2_scale), cases.moe(number(x), *whole, local, number(weights)), 0.1)

    def test_experts_refuse(self):
        """Before a class is chosen, and when one is made all the same."""
        from vivace.plugins.vllm import moe
        plain = dict(swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None, has_bias=False)
        for changes, quantised in (({"swiglu_limit": 7.0}, {}), ({"has_bias": True}, {}), ({}, {"gemm1_clamp_limit": 7.0}), ({}, {"w1_bias": 1})):
            config, name = types.SimpleNamespace(**{**plain, **changes}), next(iter({**changes, **quantised}))
            if changes:
                fits, reason = moe._experts_class().is_supported_config(moe._experts_class(), config, None, None, None)
                self.assertFalse(fits)
                self.assertIn(name, reason)
            self.assertEqual(moe.problems(config, types.SimpleNamespace(**quantised)), [name])
        self.assertEqual(moe.problems(types.SimpleNamespace(**plain), types.SimpleNamespace(w1_bias=None)), [])

    def test_router(self):
        from vivace.plugins.vllm import router
        gate = types.SimpleNamespace(weight=bf16(8, 64), out_dtype=torch.float32, is_unquantized=True, bias=None, _vivace=True)
        x = bf16(3, 64)
        self.assertTrue(router._takes(gate, x))
        self.assertFalse(router._takes(gate, x.float()))
        scores = vivace.router_gemm(x, vivace.RouterWeight((gate.weight,), "exact"))
        close(self, number(scores), number(x) @ number(gate.weight).T, 1e-5)
        for asked, given in ((None, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)):
            gate.out_dtype = asked
            self.assertEqual(router.logits(gate, x).dtype, given)
        gate.out_dtype = torch.float32
        self.assertFalse(router._takes(types.SimpleNamespace(**{**gate.__dict__, "_vivace": None}), x))  # not asked for
        self.want("router")
        self.assertTrue(router._takes(types.SimpleNamespace(**{**gate.__dict__, "_vivace": None}), x))
        self.assertTrue(router._takes(types.SimpleNamespace(**{**gate.__dict__, "_vivace": None, "out_dtype": None}), x))
        for changes, words in (({"is_unquantized": False}, "quantised"), ({"bias": x}, "a bias"), ({"weight": x.float()}, "torch.float32,"),
                               ({"out_dtype": torch.float16}, "logits are torch.float16")):
            with self.assertLogs("vivace", "WARNING") as logs:
                self.assertFalse(router._takes(types.SimpleNamespace(**{**gate.__dict__, "_vivace": None, **changes}), x))
            self.assertIn(words, logs.output[0])

    def want(self, part):
        from vivace.plugins import vllm as plugin
        plugin.say.cache_clear()
        before, plugin.wanted = plugin.wanted, lambda asked: asked == part
        self.addCleanup(setattr, plugin, "wanted", before)

    def test_experts_say_when_another_backend_is_asked(self):
        from vivace.plugins.vllm import moe
        from vllm.model_executor.layers.fused_moe.oracle import fp8
        backends = types.SimpleNamespace(TRITON=types.SimpleNamespace(value="TRITON"), DEEPGEMM=types.SimpleNamespace(value="DEEPGEMM"))
        for name, value in (("Fp8MoeBackend", backends), ("backend_to_kernel_cls", lambda backend: ["theirs"])):
            self.addCleanup(setattr, fp8, name, getattr(fp8, name, None))
            setattr(fp8, name, value)
        moe.register()
        self.assertEqual(fp8.backend_to_kernel_cls(backends.TRITON), ["theirs"])  # not asked for
        self.want("moe")
        self.assertEqual(fp8.backend_to_kernel_cls(backends.TRITON), [moe._experts_class(), "theirs"])
        with self.assertLogs("vivace", "WARNING") as logs:
            for _ in range(2):
                self.assertEqual(fp8.backend_to_kernel_cls(backends.DEEPGEMM), ["theirs"])
        self.assertEqual(len(logs.output), 1)
        self.assertIn("DEEPGEMM", logs.output[0])

    def test_refusals_name_the_reason(self):
        with self.assertRaisesRegex(NotImplementedError, "ALiBi"):
            self.plugin.VivaceImpl(HEADS, DIM, 1.0, HEADS_KV, alibi_slopes=[1.0])
        with self.assertRaisesRegex(NotImplementedError, "encoder"):
            self.plugin.VivaceImpl(HEADS, DIM, 1.0, HEADS_KV, attn_type="encoder")
        common = self.common([5], [1], [[0]])
        common.causal = False
        with self.assertRaisesRegex(NotImplementedError, "later tokens"):
            self.builder().build(0, common)
        with self.assertRaisesRegex(NotImplementedError, "at most 8"):
            self.builder(spec=9)
        self.assertTrue(self.plugin.VivaceBackend.supports_head_size(128))
        self.assertFalse(self.plugin.VivaceBackend.supports_head_size(72 + 1))
        self.assertIn("16", str(self.plugin.VivaceBackend.get_supported_kernel_block_sizes()))


class Mode:
    def __init__(self, name):
        self.name = name

    def is_decode_or_idle(self):
        return self.name in ("DECODE", "IDLE")


class Pool:
    def __init__(self, slots, dtype):
        self.k = bf16(slots, HEADS_KV, DIM).to(dtype)
        self.v = bf16(slots, HEADS_KV, DIM).to(dtype)

    def get_kv_buffer(self, layer_id):
        return self.k, self.v

    def set_kv_buffer(self, layer, loc_info, k, v, k_scale, v_scale):
        where = getattr(loc_info, "loc", loc_info)
        self.k[where], self.v[where] = k, v


class Sglang(unittest.TestCase):
    PAGE = 16

    @classmethod
    def setUpClass(cls):
        engines.stand_in("sglang", {
            "AttentionBackend": {"__init__": lambda self: None},
            "KVWriteLoc": lambda loc: loc,
            "get_parallel": lambda: None,
            "DispatchMoeRunnerCore": {"__init__": lambda self, config: setattr(self, "config", config)},
            "StandardCombineInput": types.SimpleNamespace,
            "resolve_moe_runner_backend": lambda name: types.SimpleNamespace(value=name),
            "get_moe_runner_backend": lambda: types.SimpleNamespace(value="vivace"),
            "StandardTopKOutput": lambda *values: values,
            "get_exec": lambda: types.SimpleNamespace(deterministic=types.SimpleNamespace(enable_deterministic_inference=False)),
        })
        from vivace.plugins.sglang import attention, moe, router
        cls.parallel = types.SimpleNamespace(tp_size=1, attn_tp_size=1, attn_cp_size=1, attn_dcp_size=1)
        attention.get_parallel = lambda: cls.parallel  # no ranks were started here
        moe._chosen = lambda: types.SimpleNamespace(value="vivace")
        cls.plugin, cls.moe, cls.router = attention, moe, router

    def test_registration(self):
        """With SGLang itself: its registries have ours under the flags' names."""
        if not engines.installed("sglang"):
            self.skipTest("sglang is not installed")
        from vivace.plugins import sglang as plugin
        plugin.register()
        plugin.register()
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.moe.moe_runner import runner
        from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
        from sglang.srt.plugins.hook_registry import HookRegistry
        self.assertIn("vivace", ATTENTION_BACKENDS)
        self.assertEqual(resolve_moe_runner_backend("vivace").value, "vivace")
        core = runner._CUSTOM_RUNNER_CORE_FACTORIES["vivace"](self.config())
        self.assertEqual(core.runner_backend.value, "vivace")
        self.assertIn("sglang.srt.layers.moe.topk.select_experts", HookRegistry._hooks)

    def runner(self, **changes):
        requests, slots = 6, 640
        model = types.SimpleNamespace(context_len=96, num_attention_heads=HEADS, head_dim=DIM, get_num_kv_heads=lambda tp: HEADS_KV)
        pages = np.random.default_rng(2).permutation(slots // self.PAGE)[:requests * 6].reshape(requests, 6)
        table = (pages[:, :, None] * self.PAGE + np.arange(self.PAGE)).reshape(requests, 96)
        values = dict(model_config=model, page_size=self.PAGE, device=DEVICE, dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16,
                      spec_algorithm=types.SimpleNamespace(is_speculative=lambda: False), sliding_window_size=None,
                      req_to_token_pool=types.SimpleNamespace(req_to_token=i32(table), size=requests),
                      token_to_kv_pool=Pool(slots, torch.bfloat16))
        return types.SimpleNamespace(**{**values, **changes}), pages

    def layer(self, **changes):
        values = dict(layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=HEADS_KV, head_dim=DIM, v_head_dim=DIM, scaling=DIM**-0.5, logit_cap=0.0,
                      sliding_window_size=-1, k_scale=None, v_scale=None, is_cross_attention=False, attn_type=types.SimpleNamespace(value="decoder"),
                      logit_capping_method="tanh", xai_temperature_len=-1, use_irope=False, pos_encoding_mode="NONE")
        return types.SimpleNamespace(**{**values, **changes})

    def batch(self, mode, lengths, requests, queries):
        return types.SimpleNamespace(
            batch_size=len(lengths), forward_mode=Mode(mode.upper()), seq_lens=torch.tensor(lengths, device=DEVICE),
            req_pool_indices=torch.tensor(requests, device=DEVICE), extend_seq_lens=torch.tensor(queries, device=DEVICE),
            extend_seq_lens_cpu=queries, out_cache_loc=None)

    def check(self, runner, pages, q, out, lengths, requests, queries, **options):
        k, v = (number(t).reshape(-1, self.PAGE, HEADS_KV, DIM) for t in runner.token_to_kv_pool.get_kv_buffer(0))
        start = np.concatenate([[0], np.cumsum(queries)])
        close(self, number(out).reshape(-1, HEADS, DIM), cases.attention(number(q).reshape(-1, HEADS, DIM), k, v, pages[requests], lengths, start, **options))

    def test_decode_and_extend(self):
        runner, pages = self.runner()
        backend, layer = self.plugin.VivaceAttnBackend(runner), self.layer()
        for mode, lengths, requests, queries in (("decode", [5, 40, 96], [3, 0, 5], [1, 1, 1]), ("extend", [30, 17], [1, 4], [30, 5]),
                                                 ("mixed", [30, 17], [1, 4], [30, 1]), ("split_prefill", [9], [2], [9])):
            batch = self.batch(mode, lengths, requests, queries)
            backend.init_forward_metadata(batch)
            q = bf16(sum(queries), HEADS * DIM)
            step = backend.forward_decode if mode == "decode" else backend.forward_extend
            self.check(runner, pages, q, step(q, None, None, layer, batch), lengths, requests, queries)

    def test_sinks_and_caps(self):
        runner, pages = self.runner()
        backend, layer, sinks = self.plugin.VivaceAttnBackend(runner), self.layer(logit_cap=20.0), 2 * bf16(HEADS)
        for mode, lengths, requests, queries in (("decode", [5, 40, 96], [3, 0, 5], [1, 1, 1]), ("extend", [30, 17], [1, 4], [30, 5])):
            batch = self.batch(mode, lengths, requests, queries)
            backend.init_forward_metadata(batch)
            q = 4 * bf16(sum(queries), HEADS * DIM)
            step = backend.forward_decode if mode == "decode" else backend.forward_extend
            self.check(runner, pages, q, step(q, None, None, layer, batch, sinks=sinks), lengths, requests, queries, sinks=number(sinks),
                       soft_cap=20.0)
            step(q, None, None, layer, batch, k_rope=None, return_lse=False)
            with self.assertRaisesRegex(NotImplementedError, "score_mod"):
                step(q, None, None, layer, batch, score_mod=len)

    def test_heads_of_a_rank_are_those_of_attention(self):
        """With --enable-dp-attention four ranks may have all heads each."""
        self.addCleanup(setattr, self.parallel, "tp_size", 1)
        self.parallel.tp_size = 4
        self.assertEqual(self.plugin.VivaceAttnBackend(self.runner()[0]).heads_q, HEADS)

    def test_new_keys_are_saved_first(self):
        runner, pages = self.runner()
        backend, layer = self.plugin.VivaceAttnBackend(runner), self.layer()
        batch = self.batch("decode", [7], [2], [1])
        batch.out_cache_loc = runner.req_to_token_pool.req_to_token[2, 6:7].long()
        backend.init_forward_metadata(batch)
        q, k, v = bf16(1, HEADS * DIM), bf16(1, HEADS_KV, DIM), bf16(1, HEADS_KV, DIM)
        self.check(runner, pages, q, backend.forward_decode(q, k, v, layer, batch), [7], [2], [1])
        self.assertTrue(torch.equal(runner.token_to_kv_pool.k[batch.out_cache_loc], k))

    def test_the_hooks_of_graphs(self):
        """Metadata is made once outside; what is inside is made anew at each replay."""
        runner, pages = self.runner()
        backend, layer = self.plugin.VivaceAttnBackend(runner), self.layer()
        backend.init_cuda_graph_state(4, 4)
        batch, q = self.batch("decode", [1, 1, 1], [0, 0, 0], [1, 1, 1]), bf16(3, HEADS * DIM)

        def step():
            backend.init_forward_metadata_in_graph(batch)
            return backend.forward_decode(q, None, None, layer, batch)

        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()
        for lengths, requests in (([5, 40, 96], [3, 0, 5]), ([64, 1, 20], [1, 2, 4])):
            batch.seq_lens.copy_(torch.tensor(lengths))
            batch.req_pool_indices.copy_(torch.tensor(requests))
            backend.init_forward_metadata_out_graph(batch)
            if DEVICE == "cuda":
                graph.replay()
            else:
                out = step()
            self.check(runner, pages, q, out, lengths, requests, [1, 1, 1])

    def test_refusals_name_the_reason_and_the_fix(self):
        for changes, words in (({"page_size": 1}, "--page-size 64"), ({"dtype": torch.float16}, "--dtype bfloat16"),
                               ({"kv_cache_dtype": torch.float8_e5m2}, "--kv-cache-dtype"),
                               ({"spec_algorithm": types.SimpleNamespace(is_speculative=lambda: True)}, "speculative"),
                               ({"sliding_window_size": 128}, "windows")):
            with self.assertRaisesRegex(NotImplementedError, words):
                self.plugin.VivaceAttnBackend(self.runner(**changes)[0])
        runner = self.runner()[0]
        runner.token_to_kv_pool.kv_cache_layout = "hnd"
        with self.assertRaisesRegex(NotImplementedError, "layout hnd.*SGLANG_USE_HND_KVCACHE"):
            self.plugin.VivaceAttnBackend(runner)
        for name in ("attn_cp_size", "attn_dcp_size"):
            self.addCleanup(setattr, self.parallel, name, 1)
            setattr(self.parallel, name, 2)
            with self.assertRaisesRegex(NotImplementedError, "context parallelism"):
                self.plugin.VivaceAttnBackend(self.runner()[0])
            setattr(self.parallel, name, 1)
        backend = self.plugin.VivaceAttnBackend(self.runner()[0])
        batch = self.batch("decode", [5], [0], [1])
        backend.init_forward_metadata(batch)
        for changes, words in (({"sliding_window_size": 32}, "window of 32"), ({"is_cross_attention": True}, "type cross"),
                               ({"attn_type": types.SimpleNamespace(value="encoder_only")}, "type encoder_only"), ({"v_head_dim": 32}, "values of 32"),
                               ({"logit_cap": 1.0, "logit_capping_method": "erf"}, "erf"), ({"xai_temperature_len": 8}, "temperature"),
                               ({"use_irope": True}, "irope"), ({"pos_encoding_mode": "ALIBI"}, "ALIBI")):
            with self.assertRaisesRegex(NotImplementedError, words):
                backend.forward_decode(bf16(1, HEADS * DIM), None, None, self.layer(**changes), batch)
        for mode in ("target_verify", "draft_extend_v2", "dllm_extend", "prebuilt"):
            with self.assertRaisesRegex(NotImplementedError, mode.upper()):
                backend.init_forward_metadata(self.batch(mode, [5], [0], [1]))

    def config(self, **changes):
        values = dict(activation="silu", is_gated=True, gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None, swiglu_limit=None,
                      apply_router_weight_on_input=False, no_combine=False, inplace=True, routed_scaling_factor=None, layer_id=3)
        return types.SimpleNamespace(**{**values, **changes})

    def test_experts_in_bf16_and_fp8(self):
        torch.manual_seed(5)
        ids = i32([[0, 2], [1, -1], [3, 3]])
        weights = torch.rand(3, 2, device=DEVICE)
        gate_up, down, x = bf16(4, 256, 256), bf16(4, 256, 128), bf16(3, 256)
        topk = types.SimpleNamespace(topk_ids=ids, topk_weights=weights)
        plain = dict(b13=None, b2=None, w13_scale=None, w2_scale=None, a13_scale=None, a2_scale=None, block_shape=None, use_fp8_w8a8=False)
        core = self.moe._core_class()(self.config(routed_scaling_factor=2.0))
        info = types.SimpleNamespace(w13_weight=gate_up, w2_weight=down, **plain)
        out = core.run_from_dispatch(types.SimpleNamespace(hidden_states=x, topk_output=topk), info, core.config).hidden_states
        expected = 2 * cases.moe(number(x), number(gate_up), number(down), ids.cpu().numpy(), number(weights))
        close(self, number(out), expected, 2.0**-5)
        fp8 = {"w13_weight": gate_up.to(torch.float8_e4m3fn), "w2_weight": down.to(torch.float8_e4m3fn)}
        scales = {"w13_scale": torch.rand(4, 2, 2, device=DEVICE) + 0.5, "w2_scale": torch.rand(4, 2, 1, device=DEVICE) + 0.5}
        info = types.SimpleNamespace(**{**plain, **fp8, **scales, "block_shape": [128, 128], "use_fp8_w8a8": True})
        blocks = {name: number(scale).repeat(128, axis=1).repeat(128, axis=2) for name, scale in scales.items()}
        core = self.moe._core_class()(self.config())
        expected = cases.moe(number(x), number(fp8["w13_weight"]) * blocks["w13_scale"], number(fp8["w2_weight"]) * blocks["w2_scale"],
                             ids.cpu().numpy(), number(weights))
        out = core.run_from_dispatch(types.SimpleNamespace(hidden_states=x.clone(), topk_output=topk), info, core.config).hidden_states
        close(self, number(out), expected, 0.1)  # activations have three bits after the point
        info = types.SimpleNamespace(**{**plain, **fp8, "use_fp8_w8a8": True, "a13_scale": torch.full((1,), 0.02, device=DEVICE),
                                        "a2_scale": torch.full((4,), 4.0, device=DEVICE), "w13_scale": torch.rand(4, device=DEVICE) + 0.5,
                                        "w2_scale": torch.rand(4, device=DEVICE) + 0.5})
        expected = cases.moe(number(x), number(fp8["w13_weight"]) * number(info.w13_scale)[:, None, None],
                             number(fp8["w2_weight"]) * number(info.w2_scale)[:, None, None], ids.cpu().numpy(), number(weights))
        for scales in ({}, {"a13_scale": torch.tensor(0.02, device=DEVICE), "a2_scale": torch.tensor(4.0, device=DEVICE)}):  # as SGLang reduces them
            info = types.SimpleNamespace(**{**info.__dict__, **scales})
            out = core.run_from_dispatch(types.SimpleNamespace(hidden_states=x.clone(), topk_output=topk), info, core.config).hidden_states
            close(self, number(out), expected, 0.1)
        for name in ("fuse_swiglu_interleaved", "use_mxfp8"):
            with self.assertRaisesRegex(NotImplementedError, name):
                core.run_from_dispatch(types.SimpleNamespace(hidden_states=x, topk_output=topk),
                                       types.SimpleNamespace(**{**info.__dict__, name: True}), core.config)

    def test_experts_without_static_scales_refuse(self):
        core = self.moe._core_class()(self.config())
        info = types.SimpleNamespace(w13_weight=bf16(1, 256, 128).to(torch.float8_e4m3fn), w2_weight=bf16(1, 128, 128).to(torch.float8_e4m3fn),
                                     b13=None, b2=None, w13_scale=torch.ones(1), w2_scale=torch.ones(1), a13_scale=None, a2_scale=None,
                                     block_shape=None, use_fp8_w8a8=True)
        topk = types.SimpleNamespace(topk_ids=i32([[0]]), topk_weights=torch.ones(1, 1, device=DEVICE))
        with self.assertRaisesRegex(NotImplementedError, "dynamic scales are known with blocks"):
            core.run_from_dispatch(types.SimpleNamespace(hidden_states=bf16(1, 128), topk_output=topk), info, core.config)

    def test_experts_refuse(self):
        for changes, words in (({"activation": "gelu"}, "gelu"), ({"gemm1_alpha": 1.7}, "gemm1_alpha"), ({"gemm1_beta": 1.0}, "gemm1_beta"), ({"no_combine": True}, "no_combine")):
            with self.assertRaisesRegex(NotImplementedError, f"{words}.*layer 3"):
                self.moe._core_class()(self.config(**changes))

    def test_router(self):
        config = types.SimpleNamespace(
            top_k=2, scoring_func="sigmoid", custom_routing_function=None, torch_native=False, num_shared_topk_slots=0, correction_bias=None,
            use_grouped_topk=False, topk_group=None, num_expert_group=None, renormalize=True, routed_scaling_factor=2.5,
            apply_routed_scaling_factor_on_output=True)
        logits = torch.randn(3, 8, device=DEVICE)
        weights, ids, _ = self.router.select_experts(None, None, logits, config, layer_id=1, num_token_non_padded=torch.tensor(2, device=DEVICE))
        score = torch.sigmoid(logits)
        best, order = score.topk(2, dim=1)
        self.assertTrue(torch.equal(ids[:2].long(), order[:2]) and bool((ids[2] == -1).all()))
        self.assertTrue(torch.allclose(weights[:2], 2.5 * best[:2] / best[:2].sum(1, keepdim=True), atol=1e-5))
        config.use_grouped_topk, config.num_expert_group, config.topk_group = True, 4, 1
        self.assertEqual(self.router.select_experts(lambda *a, **k: "theirs", None, logits, config, layer_id=1), "theirs")  # the best of a group
        config.correction_bias = torch.randn(8, device=DEVICE)
        _, ids, _ = self.router.select_experts(None, None, logits, config, layer_id=1)
        choices = (score + config.correction_bias).view(3, 4, 2)
        group = choices.sum(-1).argmax(1)
        expected = 2 * group + choices[torch.arange(3, device=DEVICE), group].argmax(1)
        self.assertTrue(torch.equal(ids[:, 0].long(), expected))
        config.custom_routing_function = len
        self.assertEqual(self.router.select_experts(lambda *a, **k: "theirs", None, logits, config, layer_id=1), "theirs")


if __name__ == "__main__":
    package.main()
