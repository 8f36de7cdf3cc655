#pragma once

#include "src/core/dispatch.h"
#include "src/ops/attention/args.h"
#include "vivace/attention_prefill.h"

namespace vivace {

Status attention_prefill_reference(const AttentionPrefillArgs& args, const Stream& stream);

Status attention_prefill_cpu(const AttentionPrefillArgs& args, const Stream& stream);

Status attention_prefill_cuda(const AttentionPrefillArgs& args, const Stream& stream);

Facts attention_prefill_facts(const AttentionPrefillArgs& args);

inline constexpr Row<AttentionPrefillArgs> kAttentionPrefillRows[] = {
#if VIVACE_CUDA
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
