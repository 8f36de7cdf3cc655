#pragma once

#include "src/core/dispatch.h"
#include "vivace/rms_norm.h"

namespace vivace {

Status rms_norm_reference(const RmsNormArgs& args, const Stream& stream);
Status rms_norm_cpu(const RmsNormArgs& args, const Stream& stream);
Status rms_norm_cuda(const RmsNormArgs& args, const Stream& stream);

Facts rms_norm_facts(const RmsNormArgs& args);

// A row waits in the registers of a block.
inline constexpr int64_t kRmsNormMostHidden = 40960;
inline constexpr Need kRmsNormCudaNeeds[] = {{"hidden", Need::at_most, kRmsNormMostHidden},
                                             {"compute_capability", Need::at_least, 80}};

inline constexpr Row<RmsNormArgs> kRmsNormRows[] = {
#if VIVACE_CUDA
    {"cuda.row", Device::cuda, kRmsNormCudaNeeds, rms_norm_cuda, "a block per row, one pass over memory"},
#endif
    {"cpu.simd", Device::cpu, {}, rms_norm_cpu, "one pass per row, rows over threads"},
    {"reference", Device::cpu, {}, rms_norm_reference, "float64, straight from the formula"},
};

inline constexpr Operator<RmsNormArgs> kRmsNorm = {"rms_norm", "optional residual add, then RMSNorm",
                                                   rms_norm_facts, rms_norm_cost, kRmsNormRows};

}  // namespace vivace
