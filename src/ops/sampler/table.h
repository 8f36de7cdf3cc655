#pragma once

#include "src/core/dispatch.h"
#include "src/ops/sampler/row.h"
#include "vivace/sampler.h"

namespace vivace {

Status sampler_reference(const SamplerArgs& args, const Stream& stream);
Status sampler_cpu(const SamplerArgs& args, const Stream& stream);
int64_t sampler_cpu_workspace_bytes(const SamplerArgs& args, const Stream& stream);
Status sampler_cuda(const SamplerArgs& args, const Stream& stream);
int64_t sampler_cuda_workspace_bytes(const SamplerArgs& args, const Stream& stream);

Facts sampler_facts(const SamplerArgs& args);

inline constexpr Need kSamplerCudaNeeds[] = {{"compute_capability", Need::at_least, 80}};

inline constexpr Row<SamplerArgs> kSamplerRows[] = {
#if VIVACE_CUDA
    {"cuda.select", Device::cuda, kSamplerCudaNeeds, sampler_cuda,
     "a block or a cluster per row, a short list instead of a sort", sampler_cuda_workspace_bytes},
#endif
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
    sampler_cost, kSamplerRows};

}  // namespace vivace
