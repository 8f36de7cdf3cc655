#pragma once

#include "src/core/dispatch.h"
#include "vivace/route_top_k.h"

namespace vivace {

Status route_top_k_reference(const RouteTopKArgs& args, const Stream& stream);

Facts route_top_k_facts(const RouteTopKArgs& args);

/// Added to the sum of the chosen weights before it divides them.
inline constexpr double kRenormaliseEps = 1e-20;

inline constexpr Row<RouteTopKArgs> kRouteTopKRows[] = {
    {"reference", Device::cpu, {}, route_top_k_reference, "float64, straight from the formula"},
};

inline constexpr Operator<RouteTopKArgs> kRouteTopK = {
    "route_top_k", "experts of each token and their weights from router logits", route_top_k_facts,
    kRouteTopKRows};

}  // namespace vivace
