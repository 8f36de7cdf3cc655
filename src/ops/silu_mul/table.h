#pragma once

#include "src/core/dispatch.h"
#include "vivace/silu_mul.h"

namespace vivace {

Status silu_mul_reference(const SiluMulArgs& args, const Stream& stream);
Status silu_mul_cpu(const SiluMulArgs& args, const Stream& stream);

Facts silu_mul_facts(const SiluMulArgs& args);

inline constexpr Row<SiluMulArgs> kSiluMulRows[] = {
    {"cpu.simd", Device::cpu, {}, silu_mul_cpu, "vector exponential, columns and rows over threads"},
    {"reference", Device::cpu, {}, silu_mul_reference, "float64, straight from the formula"},
};

inline constexpr Operator<SiluMulArgs> kSiluMul = {"silu_mul", "silu(gate) * up", silu_mul_facts,
                                                   kSiluMulRows};

}  // namespace vivace
