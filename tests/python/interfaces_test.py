"""The plugins against the engines' interfaces as tests/python/interfaces/ has them, and those against an engine that is installed.

    tools/record_interfaces.py ENGINE     records anew; a difference here then shows what moved
"""

import ast
import importlib.util
import json
import sys
import unittest

import package

sys.path.insert(0, str(package.ROOT / "tools"))
import record_interfaces  # noqa: E402

PLUGINS = package.ROOT / "python" / "vivace" / "plugins"
RECORDED = {engine: json.loads((package.ROOT / "tests" / "python" / "interfaces" / f"{engine}.json").read_text())
            for engine in ("vllm", "sglang")}

# Attributes and methods that the plugins use of objects they are given.
USED = {
    "vllm": {
        "vllm.v1.attention.backend:CommonAttentionMetadata": [
            "causal", "query_start_loc", "seq_lens", "num_actual_tokens", "max_query_len", "block_table_tensor"],
        "vllm.v1.attention.backend:AttentionMetadataBuilder": ["_init_reorder_batch_threshold", "reorder_batch_threshold"],
        "vllm.v1.attention.backend:AttentionImplBase": ["dcp_world_size", "pcp_world_size"],
        "vllm.v1.attention.backend:AttentionCGSupport": ["UNIFORM_BATCH"],
        "vllm.v1.attention.backends.registry:AttentionBackendEnum": ["CUSTOM"],
        "vllm.model_executor.layers.fused_moe.oracle.fp8:Fp8MoeBackend": ["TRITON"],
        "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExperts": [
            "is_supported_config", "block_shape", "w1_scale", "w2_scale", "a1_scale", "a2_scale"],
        "vllm.model_executor.layers.fused_moe.router.gate_linear:GateLinear": ["forward", "_return", "out_dtype", "is_unquantized"],
    },
    "sglang": {
        "sglang.srt.layers.moe.moe_runner.base:MoeRunnerConfig": [
            "activation", "is_gated", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit", "apply_router_weight_on_input", "no_combine",
            "inplace", "routed_scaling_factor", "layer_id"],
        "sglang.srt.layers.moe.moe_runner.triton:TritonMoeQuantInfo": [
            "w13_weight", "w2_weight", "b13", "b2", "w13_scale", "w2_scale", "a13_scale", "a2_scale", "block_shape", "use_fp8_w8a8",
            "use_mxfp8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant", "fuse_swiglu_interleaved"],
        "sglang.srt.layers.moe.token_dispatcher.standard:StandardDispatchOutput": ["hidden_states", "topk_output"],
        "sglang.srt.layers.moe.topk:StandardTopKOutput": ["topk_weights", "topk_ids", "router_logits"],
        "sglang.srt.layers.moe.topk:TopKConfig": [
            "top_k", "use_grouped_topk", "topk_group", "num_expert_group", "renormalize", "custom_routing_function", "correction_bias",
            "torch_native", "routed_scaling_factor", "apply_routed_scaling_factor_on_output", "scoring_func", "num_shared_topk_slots"],
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool": ["get_kv_buffer", "set_kv_buffer", "kv_cache_layout"],
        "sglang.srt.layers.radix_attention:RadixAttention": [
            "layer_id", "tp_q_head_num", "tp_k_head_num", "head_dim", "v_head_dim", "scaling", "logit_cap", "sliding_window_size", "k_scale",
            "v_scale", "is_cross_attention", "attn_type", "logit_capping_method", "xai_temperature_len", "use_irope", "pos_encoding_mode"],
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch": [
            "batch_size", "seq_lens", "req_pool_indices", "forward_mode", "extend_seq_lens", "extend_seq_lens_cpu", "out_cache_loc"],
        "sglang.srt.model_executor.forward_batch_info:ForwardMode": ["is_decode_or_idle", "EXTEND", "MIXED", "SPLIT_PREFILL"],
        "sglang.srt.plugins.hook_registry:HookType": ["AROUND"],
        "sglang.srt.layers.quantization.fp8:Fp8MoEMethod": ["get_triton_quant_info", "create_moe_runner", "apply"],
    },
}

# Functions of ours that are called with the engine's arguments, after `skip` of their own.
CALLED = [
    ("sglang", "sglang/moe.py", "create_moe_runner", "sglang.srt.layers.quantization.fp8:Fp8MoEMethod.create_moe_runner", 1),
    ("sglang", "sglang/moe.py", "create_moe_runner", "sglang.srt.layers.quantization.unquant:UnquantizedFusedMoEMethod.create_moe_runner", 1),
    ("sglang", "sglang/moe.py", "apply_fp8", "sglang.srt.layers.quantization.fp8:Fp8MoEMethod.apply", 1),
    ("sglang", "sglang/router.py", "select_experts", "sglang.srt.layers.moe.topk:select_experts", 1),
]


def plain(names):
    return [name.rstrip("=") for name in names]


def accepts(ours, theirs):
    """Why a function with parameters `ours` cannot be called as one with `theirs`; None when it can."""
    keywords = any(name.startswith("**") for name in ours)
    positional = theirs[:theirs.index("*")] if "*" in theirs else [name for name in theirs if not name.startswith("*")]
    mine = plain(name for name in ours if not name.startswith("*"))
    if mine[:len(positional)] != plain(positional):
        return f"parameters are {mine}, the engine's are {plain(positional)}"
    if not keywords and "*" in theirs:
        missing = set(plain(theirs[theirs.index("*") + 1:])) - set(mine)
        if missing:
            return f"keywords {sorted(missing)} are missing"
    extra = [name for name in ours[len(positional):] if not name.endswith("=") and not name.startswith("*")]
    return f"{extra} have no default" if extra else None


def members(recording, name):
    """Fields and methods of a recorded class, and of those of its bases that are recorded too."""
    known = recording["interfaces"][name]["class"]
    found = set(known["fields"]) | set(known["methods"])
    for base in known["bases"]:
        base = base.partition("[")[0].rpartition(".")[2]
        for other, value in recording["interfaces"].items():
            if other.partition(":")[2] == base and "class" in value and other != name:
                found |= members(recording, other)
    return found


def methods(recording, base):
    """Methods of the recorded class of this name, those of its recorded bases too."""
    for name, value in recording["interfaces"].items():
        if name.partition(":")[2] == base and "class" in value:
            found = {}
            for above in value["class"]["bases"]:
                found |= methods(recording, above.partition("[")[0].rpartition(".")[2])
            return found | value["class"]["methods"]
    return {}


class Plugins(unittest.TestCase):
    def test_everything_they_touch_is_recorded(self):
        for engine, recording in RECORDED.items():
            self.assertEqual(sorted(recording["interfaces"]), record_interfaces.touched(engine), f"tools/record_interfaces.py {engine}")

    def test_methods_take_what_the_engine_gives(self):
        checked = 0
        for engine, recording in RECORDED.items():
            for path in (PLUGINS / engine).glob("*.py"):
                for node in ast.walk(ast.parse(path.read_text())):
                    if not isinstance(node, ast.ClassDef):
                        continue
                    for base in node.bases:
                        known = methods(recording, ast.unparse(base).partition("[")[0].rpartition(".")[2])
                        for item in node.body:
                            if isinstance(item, ast.FunctionDef) and item.name in known:
                                problem = accepts(record_interfaces.parameters(item), known[item.name])
                                self.assertIsNone(problem, f"{path.name}: {node.name}.{item.name}: {problem}")
                                checked += 1
        self.assertGreater(checked, 25)

    def test_hooks_take_what_the_engine_gives(self):
        for engine, file, name, target, skip in CALLED:
            ours = next(node for node in ast.parse((PLUGINS / file).read_text()).body
                        if isinstance(node, ast.FunctionDef) and node.name == name)
            place, _, method = target.partition(":")[2].partition(".")
            known = RECORDED[engine]["interfaces"][f"{target.partition(':')[0]}:{place}"]
            theirs = known["class"]["methods"][method] if method else known["function"]
            self.assertIsNone(accepts(record_interfaces.parameters(ours)[skip:], theirs), f"{file}: {name}")

    def test_what_they_use_of_objects_is_there(self):
        for engine, used in USED.items():
            for name, wanted in used.items():
                there = members(RECORDED[engine], name) if name in RECORDED[engine]["interfaces"] else set()
                inherited = {"is_unquantized"} if name.endswith(":GateLinear") else set()
                self.assertEqual(set(wanted) - there - inherited, set(), name)

    def test_abstract_methods_are_there(self):
        """What vLLM's base classes leave to their subclasses."""
        needed = {"VivaceBackend": {"get_name", "get_impl_cls", "get_builder_cls"}, "VivaceMetadataBuilder": {"__init__", "build"},
                  "VivaceImpl": {"__init__", "forward", "do_kv_cache_update"},
                  "VivaceExperts": {"activation_format", "workspace_shapes", "apply", "finalize_weight_and_reduce_impl"}}
        found = {node.name: {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                 for path in (PLUGINS / "vllm").glob("*.py") for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}
        for name, names in needed.items():
            self.assertLessEqual(names, found[name])

    def test_recordings_are_those_of_an_installed_engine(self):
        for engine, recording in RECORDED.items():
            with self.subTest(engine):
                if importlib.util.find_spec(engine) is None:
                    self.skipTest(f"{engine} is not installed")
                self.assertEqual(record_interfaces.record(engine)["interfaces"], recording["interfaces"],
                                 f"{engine} has moved: tools/record_interfaces.py {engine}, then see what else fails here")


class Versions(unittest.TestCase):
    def setUp(self):
        package.need("vivace")

    def test_the_recorded_ones_are_those_tested_against(self):
        from vivace.plugins import versions
        for engine, recording in RECORDED.items():
            self.assertEqual(versions.parsed(recording["version"])[:len(versions.KNOWN[engine][1])], versions.KNOWN[engine][1])

    def test_messages(self):
        from vivace.plugins.versions import check_version
        self.assertEqual(check_version("vllm", "0.33.0"), "")
        self.assertRegex(check_version("vllm", "0.28.1"), r"vllm 0\.28\.1 is older than 0\.33, .*update vllm")
        self.assertEqual(check_version("sglang", "0.5.23.post1"), "")
        self.assertRegex(check_version("sglang", "0.5.9"), "older than 0.5.23")
        with self.assertLogs("vivace", "WARNING") as logs:
            self.assertEqual(check_version("vllm", "0.40.0"), "")
        self.assertIn("newer than 0.33", logs.output[0])

    def test_without_the_engine_nothing_is_registered(self):
        from vivace.plugins import sglang, vllm
        for plugin in (sglang, vllm):
            if importlib.util.find_spec(plugin.__name__.rpartition(".")[2]) is None:
                with self.assertLogs("vivace", "WARNING") as logs:
                    plugin.register()
                self.assertIn("is not installed", logs.output[0])


if __name__ == "__main__":
    package.main()
