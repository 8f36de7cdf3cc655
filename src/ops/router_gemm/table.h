#pragma once

#include "src/core/dispatch.h"
#include "vivace/router_gemm.h"

namespace vivace {

Status router_gemm_reference(const RouterGemmArgs& args, const Stream& stream);
Status router_gemm_cpu(const RouterGemmArgs& args, const Stream& stream);

Facts router_gemm_facts(const RouterGemmArgs& args);

/// What term i of a RouterWeight counts: 1, 2^-8, 2^-16.
inline constexpr float kRouterTermScale[RouterWeight::kMaxTerms] = {1.0f, 0x1p-8f, 0x1p-16f};

inline constexpr Row<RouterGemmArgs> kRouterGemmRows[] = {
    {"cpu.simd", Device::cpu, {}, router_gemm_cpu, "terms added first, fp32 products, float64 sums of 16"},
    {"reference", Device::cpu, {}, router_gemm_reference, "float64, straight from the formula"},
};

inline constexpr Operator<RouterGemmArgs> kRouterGemm = {
    "router_gemm", "router logits by an fp32 weight kept in bf16 terms", router_gemm_facts, kRouterGemmRows};

}  // namespace vivace
