#include "vivace/attention_prologue.h"

#include <cmath>

#include "src/core/checks.h"
#include "src/ops/attention/args.h"
#include "src/ops/attention_prologue/table.h"

namespace vivace {

namespace {

constexpr std::string_view kName = "attention_prologue";

/// Positions and slots, which only memory knows.
Status check_contents(const AttentionPrologueArgs& args) {
  const int64_t all_slots = args.k.shape[0] * args.k.shape[1];
  for (int64_t t = 0; t < args.q.shape[0]; ++t) {
    if (args.cos_sin.present()) {
      const int32_t position = args.positions.as<const int32_t>()[t];
      if (position < 0 || position >= args.cos_sin.shape[0]) {
        return invalid_argument("{}: positions[{}] is {}, needs 0 .. {} (rows of cos_sin - 1)", kName, t,
                                position, args.cos_sin.shape[0] - 1);
      }
    }
    const int64_t slot = args.slots.as<const int64_t>()[t];
    if (slot < -1 || slot >= all_slots) {
      return invalid_argument("{}: slots[{}] is {}, needs -1 .. {} (pages * page_tokens - 1)", kName, t, slot,
                              all_slots - 1);
    }
  }
  return {};
}

}  // namespace

Facts attention_prologue_facts(const AttentionPrologueArgs& args) {
  Facts facts;
  facts.add("head_dim", args.q.shape[2])
      .add("rotary_dim", args.cos_sin.shape[1])
      .add("qkv", args.qkv.dtype)
      .add("q", args.q.dtype)
      .add("kv", args.k.dtype);
  return facts;
}

Status attention_prologue(const AttentionPrologueArgs& args, const Stream& stream) {
  constexpr int64_t kActivations = dtypes_mask(DType::f32, DType::bf16);
  constexpr int64_t kPlain = dtypes_mask(DType::f32, DType::bf16, DType::f16);
  constexpr int64_t kFp8 = dtypes_mask(DType::fp8_e4m3);
  Checker check(kName, stream);
  check.tensor("q", args.q, {"tokens", "heads_q", "head_dim"})
      .tensor("qkv", args.qkv, {"tokens", "qkv width"})
      .tensor("k", args.k, {"pages", "page_tokens", "heads_kv", "head_dim"})
      .tensor("v", args.v, {"pages", "page_tokens", "heads_kv", "head_dim"})
      .tensor("slots", args.slots, {"tokens"})
      .optional("cos_sin", args.cos_sin, {"max_position", "rotary_dim"})
      .optional("q_norm_weight", args.q_norm_weight, {"head_dim"})
      .optional("k_norm_weight", args.k_norm_weight, {"head_dim"})
      .dtype("qkv", args.qkv, kActivations)
      .dtype("q", args.q, kActivations | kFp8)
      .dtype("k", args.k, kPlain | kFp8)
      .dtype("v", args.v, dtypes_mask(args.k.dtype))
      .dtype("slots", args.slots, dtypes_mask(DType::i64))
      .dtype("cos_sin", args.cos_sin, dtypes_mask(DType::f32))
      .dtype("q_norm_weight", args.q_norm_weight, kPlain)
      .dtype("k_norm_weight", args.k_norm_weight, kPlain);
  if (args.cos_sin.present()) {
    check.tensor("positions", args.positions, {"tokens"})
        .dtype("positions", args.positions, dtypes_mask(DType::i32));
  }
  check_fp8_scales(check, args.q, args.k, args.q_scale, args.k_scale, args.v_scale);
  check.written("q", args.q)
      .written("k", args.k)
      .written("v", args.v)
      .written("q_scale", args.q_scale)
      .written("k_scale", args.k_scale);
  const int64_t head_dim = check["head_dim"], rotary_dim = check["rotary_dim"];
  check
      .that(args.qkv.shape[1] == (check["heads_q"] + 2 * check["heads_kv"]) * head_dim, "qkv.shape[1]",
            static_cast<double>(args.qkv.shape[1]), "(heads_q + 2 heads_kv) * head_dim")
      .that(head_dim >= 1 && head_dim <= kMaxHeadDim, "head_dim", static_cast<double>(head_dim), "1 to 512")
      .that(check["page_tokens"] >= 1, "page_tokens", static_cast<double>(check["page_tokens"]), "at least 1")
      .that(rotary_dim % 2 == 0 && rotary_dim <= head_dim, "cos_sin.shape[1]",
            static_cast<double>(rotary_dim), "an even rotary_dim <= head_dim")
      .that(args.qk_norm <= QkNorm::rope_then_norm, "qk_norm", static_cast<double>(args.qk_norm), "0 to 2")
      .that(args.rope_style <= RopeStyle::interleaved, "rope_style", static_cast<double>(args.rope_style),
            "0 or 1")
      .that(std::isfinite(args.eps) && args.eps >= 0, "eps", args.eps, "a finite number >= 0");
  VIVACE_TRY(check.status());
  const bool norm = args.qk_norm != QkNorm::none;
  if (args.q_norm_weight.present() != norm || args.k_norm_weight.present() != norm) {
    return invalid_argument(
        "{}: q_norm_weight is {} and k_norm_weight is {}, needs both {} with qk_norm = {}", kName,
        to_string(args.q_norm_weight), to_string(args.k_norm_weight), norm ? "present" : "absent",
        static_cast<int>(args.qk_norm));
  }
  if (check["tokens"] == 0) return {};
  if (stream.readable()) VIVACE_TRY(check_contents(args));
  return dispatch(kAttentionPrologue, args, stream);
}

Cost attention_prologue_cost(const AttentionPrologueArgs& args) {
  const int64_t tokens = args.q.shape[0], head_dim = args.q.shape[2];
  const int64_t kv = 2 * tokens * args.k.shape[2] * head_dim * info_of(args.k.dtype).block_bytes;
  const int64_t scales = args.q_scale.bytes() + (args.k_scale.rank == 3 ? tokens * args.k.shape[2] * 4 : 0);
  const int64_t table = args.cos_sin.present() ? tokens * args.cos_sin.shape[1] * 4 : 0;
  const int64_t rotated = tokens * (args.q.shape[1] + args.k.shape[2]);
  return {args.qkv.bytes() + args.q.bytes() + kv + scales + table,
          rotated * (3 * args.cos_sin.shape[1] + (args.qk_norm == QkNorm::none ? 0 : 4 * head_dim))};
}

Choice attention_prologue_explain(const AttentionPrologueArgs& args, const Stream& stream) {
  return explain(kAttentionPrologue, args, stream);
}

}  // namespace vivace
