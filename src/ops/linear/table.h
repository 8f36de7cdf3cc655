#pragma once

#include "src/core/dispatch.h"
#include "vivace/linear.h"

namespace vivace {

Status linear_reference(const LinearArgs& args, const Stream& stream);
Status linear_cpu_q8(const LinearArgs& args, const Stream& stream);
int64_t linear_cpu_q8_workspace(const LinearArgs& args, const Stream& stream);
Status linear_cpu_f32(const LinearArgs& args, const Stream& stream);

/// tokens, k, n and weight of part 0, x, exact (0 or 1), and block_parts: how many parts have a block format.
Facts linear_facts(const LinearArgs& args);

inline constexpr Need kLinearQ8Needs[] = {
    {"x", Need::dtype_in, dtypes_mask(DType::f32)},
    {"exact", Need::equals, 0},
    {"block_parts", Need::at_least, 1},
};
inline constexpr Need kLinearF32Needs[] = {{"x", Need::dtype_in, dtypes_mask(DType::f32)}};

inline constexpr Row<LinearArgs> kLinearRows[] = {
    {"cpu.q8", Device::cpu, kLinearQ8Needs, linear_cpu_q8,
     "block formats times activations in int8 or int16, integer products; plain parts as cpu.f32",
     linear_cpu_q8_workspace},
    {"cpu.f32", Device::cpu, kLinearF32Needs, linear_cpu_f32,
     "fp32 products of the weights' exact values, unpacked a few rows at a time"},
    {"reference", Device::cpu, {}, linear_reference, "float64 on the weights' exact values"},
};

inline constexpr Operator<LinearArgs> kLinear = {
    "linear", "x times one to three transposed weights, plus bias", linear_facts, kLinearRows};

}  // namespace vivace
