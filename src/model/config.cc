#include "src/model/config.h"

#include <cmath>

#include "src/core/error.h"

namespace vivace::model {

std::string_view name_of(Architecture architecture) {
  switch (architecture) {
    case Architecture::llama:
      return "llama";
    case Architecture::qwen3_moe:
      return "qwen3_moe";
    case Architecture::hy_v3:
      return "hy_v3";
  }
  return "unknown";
}

std::string_view name_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::plain:
      return "plain";
    case WeightFormat::fp8_static:
      return "fp8, per tensor";
    case WeightFormat::fp8_dynamic:
      return "fp8, per tensor, dynamic";
    case WeightFormat::fp8_block128:
      return "fp8, blocks of 128";
  }
  return "unknown";
}

namespace {

Status check_range(std::string_view field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return {};
  return invalid_argument("model configuration: {} is {}, needs a value in [{}, {}]", field, value, min, max);
}

Status check_positive(std::string_view field, double value) {
  if (std::isfinite(value) && value > 0) return {};
  return invalid_argument("model configuration: {} is {}, needs a finite number above 0", field, value);
}

Status validate_experts(const ModelConfig& c) {
  VIVACE_TRY(check_range("top_k", c.top_k, 1, c.experts));
  VIVACE_TRY(check_range("moe_intermediate", c.moe_intermediate, 1, limits::kMaxWidth));
  VIVACE_TRY(check_range("shared_experts", c.shared_experts, 0, limits::kMaxExperts));
  VIVACE_TRY(check_range("shared_experts * moe_intermediate", c.shared_experts * c.moe_intermediate, 0,
                         limits::kMaxWidth));
  VIVACE_TRY(check_positive("router_scale", c.router_scale));
  if (static_cast<int64_t>(c.sparse_layer.size()) != c.layers)
    return invalid_argument("model configuration: sparse_layer has {} entries, needs one per layer ({})",
                            c.sparse_layer.size(), c.layers);
  return {};
}

}  // namespace

Status validate(const ModelConfig& c) {
  VIVACE_TRY(check_range("layers", c.layers, 1, limits::kMaxLayers));
  VIVACE_TRY(check_range("hidden", c.hidden, 1, limits::kMaxWidth));
  VIVACE_TRY(check_range("vocab", c.vocab, 1, limits::kMaxVocab));
  VIVACE_TRY(check_range("heads_q", c.heads_q, 1, limits::kMaxHeads));
  VIVACE_TRY(check_range("heads_kv", c.heads_kv, 1, c.heads_q));
  if (c.heads_q % c.heads_kv != 0)
    return invalid_argument("model configuration: heads_q is {}, needs a multiple of heads_kv = {}",
                            c.heads_q, c.heads_kv);
  VIVACE_TRY(check_range("head_dim", c.head_dim, 2, limits::kMaxHeadDim));
  VIVACE_TRY(check_range("layers * heads_kv * head_dim", c.layers * c.heads_kv * c.head_dim, 1,
                         limits::kMaxCacheWidth));
  VIVACE_TRY(check_range("rotary_dim", c.rotary_dim, 2, c.head_dim));
  if (c.rotary_dim % 2 != 0)
    return invalid_argument("model configuration: rotary_dim is {}, needs an even number", c.rotary_dim);
  VIVACE_TRY(check_range("max_position", c.max_position, 1, limits::kMaxPosition));
  VIVACE_TRY(check_range("sliding_window", c.sliding_window, 0, limits::kMaxPosition));
  VIVACE_TRY(check_positive("rms_eps", c.rms_eps));
  VIVACE_TRY(check_positive("rope_theta", c.rope_theta));
  VIVACE_TRY(check_positive("rope_scaling.factor", c.rope_scaling.factor));
  VIVACE_TRY(check_positive("rope_scaling.low_freq_factor", c.rope_scaling.low_freq_factor));
  if (const RopeScaling& s = c.rope_scaling; s.type == "llama3") {
    if (!std::isfinite(s.high_freq_factor) || s.high_freq_factor <= s.low_freq_factor)
      return invalid_argument(
          "model configuration: rope_scaling.high_freq_factor is {}, needs a value above low_freq_factor = "
          "{}",
          s.high_freq_factor, s.low_freq_factor);
    VIVACE_TRY(
        check_range("rope_scaling.original_max_position", s.original_max_position, 1, limits::kMaxPosition));
  }

  VIVACE_TRY(check_range("experts", c.experts, 0, limits::kMaxExperts));
  bool any_dense = !c.is_moe();
  if (c.is_moe()) {
    VIVACE_TRY(validate_experts(c));
    for (const bool sparse : c.sparse_layer) any_dense |= !sparse;
  }
  if (any_dense) VIVACE_TRY(check_range("intermediate", c.intermediate, 1, limits::kMaxWidth));

  VIVACE_TRY(check_range("bos_id", c.bos_id, -1, c.vocab - 1));
  VIVACE_TRY(check_range("pad_id", c.pad_id, -1, c.vocab - 1));
  for (const int32_t id : c.eos_ids) VIVACE_TRY(check_range("eos_id", id, 0, c.vocab - 1));
  return {};
}

}  // namespace vivace::model
