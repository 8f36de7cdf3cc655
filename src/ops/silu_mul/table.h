#pragma once

#include "src/core/dispatch.h"
#include "vivace/silu_mul.h"

namespace vivace {

Status silu_mul_reference(const SiluMulArgs& args, const Stream& stream);
Status silu_mul_cpu(const SiluMulArgs& args, const Stream& stream);
Status silu_mul_cuda(const SiluMulArgs& args, const Stream& stream);

/// intermediate, gate, y, and quantised_width: intermediate with fp8 y, else 0.
Facts silu_mul_facts(const SiluMulArgs& args);

// A row that is quantised waits in shared memory as fp32.
inline constexpr Need kSiluMulCudaNeeds[] = {{"quantised_width", Need::at_most, 40960},
                                             {"compute_capability", Need::at_least, 80}};

inline constexpr Row<SiluMulArgs> kSiluMulRows[] = {
#if VIVACE_CUDA
    {"cuda.row", Device::cuda, kSiluMulCudaNeeds, silu_mul_cuda,
     "element by element; with fp8 y a block per row"},
#endif
    {"cpu.simd", Device::cpu, {}, silu_mul_cpu, "vector exponential, columns and rows over threads"},
    {"reference", Device::cpu, {}, silu_mul_reference, "float64, straight from the formula"},
};

inline constexpr Operator<SiluMulArgs> kSiluMul = {"silu_mul", "silu(gate) * up", silu_mul_facts,
                                                   silu_mul_cost, kSiluMulRows};

}  // namespace vivace
