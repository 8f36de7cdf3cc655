#pragma once

#include "src/core/dispatch.h"
#include "src/ops/attention/args.h"
#include "vivace/attention_decode.h"

namespace vivace {

Status attention_decode_reference(const AttentionDecodeArgs& args, const Stream& stream);

Status attention_decode_cpu(const AttentionDecodeArgs& args, const Stream& stream);
int64_t attention_decode_cpu_workspace(const AttentionDecodeArgs& args, const Stream& stream);

Status attention_decode_cuda(const AttentionDecodeArgs& args, const Stream& stream);
int64_t attention_decode_cuda_workspace(const AttentionDecodeArgs& args, const Stream& stream);

Facts attention_decode_facts(const AttentionDecodeArgs& args);

inline constexpr Row<AttentionDecodeArgs> kAttentionDecodeRows[] = {
#if VIVACE_CUDA
    {"cuda.mma", Device::cuda, kAttentionMmaNeeds, attention_decode_cuda,
     "a block per worker walks its key tiles on tensor cores; cut requests are merged by a second kernel",
     attention_decode_cuda_workspace},
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
    attention_decode_facts, kAttentionDecodeRows};

}  // namespace vivace
