#pragma once

#include "src/core/dispatch.h"
#include "src/ops/choose_experts/sm90_plan.h"
#include "vivace/choose_experts.h"

namespace vivace {

Status choose_experts_reference(const ChooseExpertsArgs& args, const Stream& stream);
Status choose_experts_two_calls(const ChooseExpertsArgs& args, const Stream& stream);
Status choose_experts_sm90_cluster(const ChooseExpertsArgs& args, const Stream& stream);

Facts choose_experts_facts(const ChooseExpertsArgs& args);
int64_t choose_experts_score_bytes(const ChooseExpertsArgs& args, const Stream& stream);
/// Whether the device holds a cluster of 16 CTAs: a part of a GPU may not. One that is not here is taken to.
bool has_large_clusters(const Stream& stream);
int64_t choose_experts_sm90_bytes(const ChooseExpertsArgs& args, const Stream& stream);

/// The two calls of a call: scores that nobody wants lie at `scores`.
struct TwoCalls {
  RouterGemmArgs logits;
  RouteTopKArgs choice;
};
TwoCalls two_calls_of(const ChooseExpertsArgs& args, void* scores);

// Where one kernel was measured to be faster than two, with 32 and 64 tokens, 128 and 192 experts of 4,096: with fewer tokens router_gemm's
// sm90_few.cu loads the weight by more SMs, with more clusters come in turns.
inline constexpr Need kChooseExpertsClusterNeeds[] = {
    {"compute_capability", Need::equals, 90},
    {"tokens", Need::at_least, 17},
    {"tokens", Need::at_most, 64},
    {"experts", Need::at_least, 128},
    {"experts", Need::at_most, 192},
    {"terms", Need::at_most, router::ClusterPlan::kMostTerms},
    {"cluster_warps", Need::at_most, router::ClusterPlan::kMostWarps},
    {"x", Need::dtype_in, dtypes_mask(DType::bf16)},
    {"scaled", Need::equals, 0},
    {"hidden", Need::at_least, 8},
    {"hidden", Need::multiple_of, 8},
    {"x_alignment", Need::multiple_of, 16},
    {"weight_alignment", Need::multiple_of, 16},
};

inline constexpr Row<ChooseExpertsArgs> kChooseExpertsRows[] = {
#if VIVACE_CUDA
    {"sm90.cluster", Device::cuda, kChooseExpertsClusterNeeds, choose_experts_sm90_cluster,
     "one kernel: a cluster of 16 has all logits of its tokens, k in eighths as in router_gemm's sm90.pieces",
     choose_experts_sm90_bytes},
    {"cuda.two_calls",
     Device::cuda,
     {},
     choose_experts_two_calls,
     "router_gemm, then route_top_k",
     choose_experts_score_bytes},
#endif
    {"cpu.two_calls",
     Device::cpu,
     {},
     choose_experts_two_calls,
     "router_gemm, then route_top_k",
     choose_experts_score_bytes},
    {"reference",
     Device::cpu,
     {},
     choose_experts_reference,
     "the references of router_gemm and route_top_k",
     choose_experts_score_bytes},
};

inline constexpr Operator<ChooseExpertsArgs> kChooseExperts = {
    "choose_experts", "router logits, the experts of each token by them and their weights, in one call",
    choose_experts_facts, choose_experts_cost, kChooseExpertsRows};

}  // namespace vivace
