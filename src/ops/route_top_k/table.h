#pragma once

#include "src/core/dispatch.h"
#include "vivace/route_top_k.h"

namespace vivace {

Status route_top_k_reference(const RouteTopKArgs& args, const Stream& stream);
Status route_top_k_cpu(const RouteTopKArgs& args, const Stream& stream);
Status route_top_k_cuda(const RouteTopKArgs& args, const Stream& stream);

Facts route_top_k_facts(const RouteTopKArgs& args);
/// Refuses what route_top_k refuses before it looks for a row; messages begin with `op`.
Status check_route_top_k(std::string_view op, const RouteTopKArgs& args, const Stream& stream);

/// For rows on the CPU: whether the token is padding; its outputs are then written.
bool chooses_nobody(const RouteTopKArgs& args, int64_t token);

/// Added to the sum of the chosen weights before it divides them.
inline constexpr double kRenormaliseEps = 1e-20;

/// What the CPU row keeps on the stack for one token.
inline constexpr int64_t kMaxRouteExperts = 1024;
inline constexpr Need kRouteOnStack[] = {{"experts", Need::at_most, kMaxRouteExperts}};
// A thread has at most four experts, a block 1,024 threads.
inline constexpr Need kRouteTopKCudaNeeds[] = {{"experts", Need::at_most, 4096},
                                               {"compute_capability", Need::at_least, 80}};

inline constexpr Row<RouteTopKArgs> kRouteTopKRows[] = {
#if VIVACE_CUDA
    {"cuda.block", Device::cuda, kRouteTopKCudaNeeds, route_top_k_cuda,
     "a block per token, or a warp where there are many, which ranks the few keys above a bound"},
#endif
    {"cpu.simd", Device::cpu, kRouteOnStack, route_top_k_cpu, "fp32 scores, one scan for the k best"},
    {"reference", Device::cpu, {}, route_top_k_reference, "float64, straight from the formula"},
};

inline constexpr Operator<RouteTopKArgs> kRouteTopK = {
    "route_top_k", "experts of each token and their weights from router logits", route_top_k_facts,
    route_top_k_cost, kRouteTopKRows};

}  // namespace vivace
