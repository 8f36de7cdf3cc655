#pragma once

#include "src/core/dispatch.h"
#include "vivace/quantize_fp8.h"

namespace vivace {

Status quantize_fp8_reference(const QuantizeFp8Args& args, const Stream& stream);
Status quantize_fp8_cpu(const QuantizeFp8Args& args, const Stream& stream);
Status quantize_fp8_cuda(const QuantizeFp8Args& args, const Stream& stream);

/// width, x, scaling.
Facts quantize_fp8_facts(const QuantizeFp8Args& args);

inline constexpr Need kQuantizeFp8CudaNeeds[] = {{"compute_capability", Need::at_least, 80}};

inline constexpr Row<QuantizeFp8Args> kQuantizeFp8Rows[] = {
#if VIVACE_CUDA
    {"cuda.row", Device::cuda, kQuantizeFp8CudaNeeds, quantize_fp8_cuda,
     "a warp per 128 neighbours; a block per row when the row makes its scale"},
#endif
    {"cpu.simd", Device::cpu, {}, quantize_fp8_cpu, "rows over threads"},
    {"reference", Device::cpu, {}, quantize_fp8_reference, "straight from the formula"},
};

inline constexpr Operator<QuantizeFp8Args> kQuantizeFp8 = {
    "quantize_fp8", "x / scale in e4m3, with a given scale or made ones", quantize_fp8_facts,
    quantize_fp8_cost, kQuantizeFp8Rows};

}  // namespace vivace
