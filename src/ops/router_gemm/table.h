#pragma once

#include "src/core/dispatch.h"
#include "vivace/router_gemm.h"

namespace vivace {

Status router_gemm_reference(const RouterGemmArgs& args, const Stream& stream);
Status router_gemm_cpu(const RouterGemmArgs& args, const Stream& stream);
Status router_gemm_cuda_mma(const RouterGemmArgs& args, const Stream& stream);
Status router_gemm_cuda_fma(const RouterGemmArgs& args, const Stream& stream);
Status router_gemm_sm90_pieces(const RouterGemmArgs& args, const Stream& stream);
Status router_gemm_sm90_tiles(const RouterGemmArgs& args, const Stream& stream);

Facts router_gemm_facts(const RouterGemmArgs& args);
/// Refuses what router_gemm refuses before it looks for a row; messages begin with `op`.
Status check_router_gemm(std::string_view op, const RouterGemmArgs& args, const Stream& stream);

/// What term i of a weight counts.
inline float router_term_scale(const RouterWeight& weight, int i) {
  constexpr float kScaled[RouterWeight::kMaxTerms] = {1.0f, 0x1p-8f, 0x1p-16f};
  return weight.scaled ? kScaled[i] : 1.0f;
}

/// sm90.tiles cuts k as the number of tokens asks, sm90.pieces always in the same places.
inline constexpr int64_t kRouterLeastTilesTokens = 512;
inline constexpr Need kRouterGemmPiecesNeeds[] = {
    {"compute_capability", Need::equals, 90},
    {"tokens", Need::at_most, 16 * 65535},
    {"x", Need::dtype_in, dtypes_mask(DType::bf16)},
    {"scaled", Need::equals, 0},
    {"hidden", Need::at_least, 8},
    {"hidden", Need::at_most, 65536},
    {"hidden", Need::multiple_of, 8},
    {"x_alignment", Need::multiple_of, 16},
    {"weight_alignment", Need::multiple_of, 16},
};
inline constexpr Need kRouterGemmTilesNeeds[] = {
    {"compute_capability", Need::equals, 90},
    {"batch_invariant", Need::equals, 0},
    {"tokens", Need::at_least, kRouterLeastTilesTokens},
    {"tokens", Need::at_most, 128 * 65535},
    {"x", Need::dtype_in, dtypes_mask(DType::bf16)},
    {"scaled", Need::equals, 0},
    {"hidden", Need::at_least, 8},
    {"hidden", Need::at_most, 1 << 20},
    {"hidden", Need::multiple_of, 8},
    {"x_alignment", Need::multiple_of, 16},
    {"weight_alignment", Need::multiple_of, 16},
};
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
    {"sm90.tiles", Device::cuda, kRouterGemmTilesNeeds, router_gemm_sm90_tiles,
     "tensor cores, steps of 64 added in fp32, wide tiles, k cut as the number of tokens asks"},
    {"sm90.pieces", Device::cuda, kRouterGemmPiecesNeeds, router_gemm_sm90_pieces,
     "tensor cores, steps of 64 added in fp32, k in eighths over a cluster: a token's bits in any company"},
    {"cuda.mma", Device::cuda, kRouterGemmMmaNeeds, router_gemm_cuda_mma,
     "tensor cores per term, compensated fp32 sums of 32"},
    {"cuda.fma", Device::cuda, kRouterGemmFmaNeeds, router_gemm_cuda_fma,
     "terms added first, fp32 products, compensated sums of 8"},
#endif
    {"cpu.simd", Device::cpu, {}, router_gemm_cpu, "terms added first, fp32 products, float64 sums of 16"},
    {"reference", Device::cpu, {}, router_gemm_reference, "float64, straight from the formula"},
};

inline constexpr Operator<RouterGemmArgs> kRouterGemm = {
    "router_gemm", "router logits by an fp32 weight kept in bf16 terms", router_gemm_facts, router_gemm_cost,
    kRouterGemmRows};

}  // namespace vivace
