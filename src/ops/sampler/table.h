#pragma once

#include "src/core/dispatch.h"
#include "vivace/sampler.h"

namespace vivace {

Status sampler_reference(const SamplerArgs& args, const Stream& stream);
Status sampler_cpu(const SamplerArgs& args, const Stream& stream);
int64_t sampler_cpu_workspace_bytes(const SamplerArgs& args, const Stream& stream);

Facts sampler_facts(const SamplerArgs& args);

inline bool changes_logits(const SampleRow& row) {
  return row.repetition_penalty != 1 || row.presence_penalty != 0 || row.frequency_penalty != 0 ||
         !row.logit_bias.empty() || !row.banned_ids.empty() || !row.allowed_bits.empty();
}

inline bool is_allowed(const SampleRow& row, int64_t id) {
  return row.allowed_bits.empty() || (row.allowed_bits[id / 32] >> (id % 32) & 1) != 0;
}

inline constexpr Row<SamplerArgs> kSamplerRows[] = {
    {"cpu.simd",
     Device::cpu,
     {},
     sampler_cpu,
     "thresholds instead of a sort, rows over threads",
     sampler_cpu_workspace_bytes},
    {"reference",
     Device::cpu,
     {},
     sampler_reference,
     "float64, straight from the definition; sorts every row"},
};

inline constexpr Operator<SamplerArgs> kSampler = {
    "sampler", "penalties, temperature, top-k, top-p, min-p, draw, log-probabilities", sampler_facts,
    kSamplerRows};

}  // namespace vivace
