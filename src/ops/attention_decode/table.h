#pragma once

#include "src/core/dispatch.h"
#include "src/ops/attention/args.h"
#include "src/ops/attention_decode/sm90_plan.h"
#include "vivace/attention_decode.h"

namespace vivace {

/// Query rows that share a KV head in one request: at most max_query_tokens of each head of its group.
inline int64_t unit_rows(const AttentionDecodeArgs& args) {
  const int64_t heads_kv = args.attention.k.shape[2];
  return heads_kv > 0 ? args.max_query_tokens * (args.attention.q.shape[1] / heads_kv) : 0;
}

Status attention_decode_reference(const AttentionDecodeArgs& args, const Stream& stream);

Status attention_decode_cpu(const AttentionDecodeArgs& args, const Stream& stream);
int64_t attention_decode_cpu_workspace(const AttentionDecodeArgs& args, const Stream& stream);

Status attention_decode_cuda(const AttentionDecodeArgs& args, const Stream& stream);
/// Of cuda.mma, and the most that the sm90.* rows need for any call whose shapes are at most these. A smaller shape may take
/// another row than the one that was asked about: all ask for what covers all.
int64_t attention_decode_cuda_workspace(const AttentionDecodeArgs& args);
int64_t attention_decode_gpu_workspace(const AttentionDecodeArgs& args, const Stream& stream);

Status attention_decode_sm90(const AttentionDecodeArgs& args, const Stream& stream);
Status attention_decode_sm90_few(const AttentionDecodeArgs& args, const Stream& stream);
int64_t attention_decode_sm90_workspace(const AttentionDecodeArgs& args);

Facts attention_decode_facts(const AttentionDecodeArgs& args);

/// A box of keys is what the sm90.* rows take at a time: it is whole in a tile, and a page is whole in it or it in a page. Its cuts are not
/// those of attention_prefill, so pieces, which promise its bits, are left to cuda.mma.
///
/// Of few units each is cut for many workers, and a second kernel adds up their pieces sooner than clusters do it in rounds.
inline constexpr Need kSm90FewNeeds[] = {{"units", Need::at_most, attention_sm90::kFewUnits},
                                         {"unit_rows", Need::at_most, attention_sm90::kFewRows},
                                         {"head_dim", Need::at_most, 128},
                                         {"head_dim", Need::power_of_two, 0},
                                         {"head_dim", Need::at_least, 64},
                                         {"head_dim", Need::at_most, 256},
                                         {"unit_rows", Need::at_most, attention_sm90::kMostRows},
                                         {"unit_values", Need::at_most, attention_sm90::kMostRows * 128},
                                         {"q", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
                                         {"kv", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
                                         {"page_tokens", Need::power_of_two, 0},
                                         {"page_tokens", Need::at_least, 16},
                                         {"page_tokens", Need::at_most, 256},
                                         {"pages", Need::at_least, 1},
                                         {"tile_remainder", Need::equals, 0},
                                         {"piece_tiles", Need::equals, 0},
                                         {"ctas", Need::at_most, attention_sm90::kMaxCtas},
                                         {"k_alignment", Need::multiple_of, 16},
                                         {"v_alignment", Need::multiple_of, 16},
                                         {"q_alignment", Need::multiple_of, 4},
                                         {"output_alignment", Need::multiple_of, 4},
                                         {"schedule_alignment", Need::multiple_of, 16},
                                         {"compute_capability", Need::equals, 90}};

inline constexpr std::span kSm90DecodeNeeds = std::span(kSm90FewNeeds).subspan(3);

inline constexpr Row<AttentionDecodeArgs> kAttentionDecodeRows[] = {
#if VIVACE_CUDA
    {"sm90.few", Device::cuda, kSm90FewNeeds, attention_decode_sm90_few,
     "each warp streams its run of keys; a second kernel beside it adds up requests that were cut",
     attention_decode_gpu_workspace},
    {"sm90.warps", Device::cuda, kSm90DecodeNeeds, attention_decode_sm90,
     "each warp streams its run of keys through a ring of its own; cut requests are merged in clusters",
     attention_decode_gpu_workspace},
    {"cuda.mma", Device::cuda, kAttentionMmaNeeds, attention_decode_cuda,
     "a block per worker walks its key tiles on tensor cores; cut requests are merged by a second kernel",
     attention_decode_gpu_workspace},
#endif
    {"cpu.schedule", Device::cpu, kHeadOnStack, attention_decode_cpu,
     "each thread takes an equal run of key tiles; cut requests are merged by log-sum-exp",
     attention_decode_cpu_workspace},
    {"reference",
     Device::cpu,
     {},
     attention_decode_reference,
     "float64, straight from the formula; needs no schedule"},
};

inline constexpr Operator<AttentionDecodeArgs> kAttentionDecode = {
    "attention_decode", "attention of a decode step over the paged cache, by a balanced schedule",
    attention_decode_facts, attention_decode_cost, kAttentionDecodeRows};

}  // namespace vivace
