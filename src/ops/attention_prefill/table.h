#pragma once

#include <algorithm>
#include <array>

#include "src/core/dispatch.h"
#include "src/ops/attention/args.h"
#include "vivace/attention_prefill.h"

namespace vivace {

Status attention_prefill_reference(const AttentionPrefillArgs& args, const Stream& stream);

Status attention_prefill_cpu(const AttentionPrefillArgs& args, const Stream& stream);

Status attention_prefill_cuda(const AttentionPrefillArgs& args, const Stream& stream);

Status attention_prefill_sm90(const AttentionPrefillArgs& args, const Stream& stream);

Facts attention_prefill_facts(const AttentionPrefillArgs& args);

/// What a Hopper row needs of its own, and what all of them do. Keys come in blocks that are not those of attention_decode, so groups of
/// keys, which promise its bits, are left to cuda.mma.
template <size_t kCount>
constexpr auto sm90_prefill_needs(const Need (&own)[kCount]) {
  constexpr Need kCommon[] = {{"head_dim", Need::power_of_two, 0},
                              {"head_dim", Need::at_least, 64},
                              {"group", Need::at_most, 128},
                              {"page_tokens", Need::power_of_two, 0},
                              {"page_tokens", Need::at_least, 16},
                              {"page_tokens", Need::at_most, 256},
                              {"pages", Need::at_least, 1},
                              {"split_tokens", Need::equals, 0},
                              {"q_alignment", Need::multiple_of, 16},
                              {"k_alignment", Need::multiple_of, 16},
                              {"v_alignment", Need::multiple_of, 16},
                              {"output_alignment", Need::multiple_of, 16},
                              {"compute_capability", Need::equals, 90}};
  std::array<Need, kCount + std::size(kCommon)> all{};
  std::ranges::copy(kCommon, std::ranges::copy(own, all.begin()).out);
  return all;
}
inline constexpr auto kSm90Bf16PrefillNeeds =
    sm90_prefill_needs({{"q", Need::dtype_in, dtypes_mask(DType::bf16)},
                        {"kv", Need::dtype_in, dtypes_mask(DType::bf16)},
                        {"head_dim", Need::at_most, 256}});
inline constexpr auto kSm90Fp8PrefillNeeds =
    sm90_prefill_needs({{"q", Need::dtype_in, dtypes_mask(DType::fp8_e4m3)},
                        {"kv", Need::dtype_in, dtypes_mask(DType::fp8_e4m3)},
                        {"output", Need::dtype_in, dtypes_mask(DType::bf16)},
                        {"key_scales", Need::equals, 0},
                        {"head_dim", Need::at_most, 128}});

inline constexpr Row<AttentionPrefillArgs> kAttentionPrefillRows[] = {
#if VIVACE_CUDA
    {"sm90.tiles", Device::cuda, kSm90Bf16PrefillNeeds, attention_prefill_sm90,
     "tiles of 128 query rows against blocks of 128 keys by warp-group products, fed by a warp group of its "
     "own"},
    {"sm90.fp8", Device::cuda, kSm90Fp8PrefillNeeds, attention_prefill_sm90,
     "the same, fp8 widened to f16 on its way to the products"},
    {"cuda.mma", Device::cuda, kAttentionMmaNeeds, attention_prefill_cuda,
     "tiles of 128 query rows against blocks of 64 keys on tensor cores"},
#endif
    {"cpu.tiles", Device::cpu, kHeadOnStack, attention_prefill_cpu,
     "blocks of query rows against blocks of 64 keys"},
    {"reference", Device::cpu, {}, attention_prefill_reference, "float64, straight from the formula"},
};

inline constexpr Operator<AttentionPrefillArgs> kAttentionPrefill = {
    "attention_prefill", "causal attention of prompts and chunks over the paged cache",
    attention_prefill_facts, attention_prefill_cost, kAttentionPrefillRows};

}  // namespace vivace
