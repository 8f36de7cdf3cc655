#pragma once

#include "src/core/dispatch.h"
#include "vivace/router_gemm.h"

namespace vivace {

Status router_gemm_reference(const RouterGemmArgs& args, const Stream& stream);
Status router_gemm_cpu(const RouterGemmArgs& args, const Stream& stream);
Status router_gemm_cuda_mma(const RouterGemmArgs& args, const Stream& stream);
Status router_gemm_cuda_fma(const RouterGemmArgs& args, const Stream& stream);

Facts router_gemm_facts(const RouterGemmArgs& args);

/// What term i of a RouterWeight counts: 1, 2^-8, 2^-16.
inline constexpr float kRouterTermScale[RouterWeight::kMaxTerms] = {1.0f, 0x1p-8f, 0x1p-16f};

// A lane reads 8 neighbours of a row at once.
inline constexpr Need kRouterGemmMmaNeeds[] = {
    {"compute_capability", Need::at_least, 80},
    {"x", Need::dtype_in, dtypes_mask(DType::bf16)},
    {"hidden", Need::multiple_of, 8},
    {"x_alignment", Need::multiple_of, 16},
    {"weight_alignment", Need::multiple_of, 16},
};
inline constexpr Need kRouterGemmFmaNeeds[] = {
    {"compute_capability", Need::at_least, 80},
    {"tokens", Need::at_most, 4 * 65535},
};

inline constexpr Row<RouterGemmArgs> kRouterGemmRows[] = {
#if VIVACE_CUDA
    {"cuda.mma", Device::cuda, kRouterGemmMmaNeeds, router_gemm_cuda_mma,
     "tensor cores per term, compensated fp32 sums of 32"},
    {"cuda.fma", Device::cuda, kRouterGemmFmaNeeds, router_gemm_cuda_fma,
     "terms added first, fp32 products, compensated sums of 8"},
#endif
    {"cpu.simd", Device::cpu, {}, router_gemm_cpu, "terms added first, fp32 products, float64 sums of 16"},
    {"reference", Device::cpu, {}, router_gemm_reference, "float64, straight from the formula"},
};

inline constexpr Operator<RouterGemmArgs> kRouterGemm = {
    "router_gemm", "router logits by an fp32 weight kept in bf16 terms", router_gemm_facts, kRouterGemmRows};

}  // namespace vivace
