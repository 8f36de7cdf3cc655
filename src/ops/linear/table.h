#pragma once

#include "src/core/dispatch.h"
#include "vivace/linear.h"

namespace vivace {

Status linear_reference(const LinearArgs& args, const Stream& stream);

/// tokens, k, n and weight of part 0, x, exact (0 or 1), and block_parts: how many parts have a block format.
Facts linear_facts(const LinearArgs& args);

inline constexpr Row<LinearArgs> kLinearRows[] = {
    {"reference", Device::cpu, {}, linear_reference, "float64 on the weights' exact values"},
};

inline constexpr Operator<LinearArgs> kLinear = {
    "linear", "x times one to three transposed weights, plus bias", linear_facts, kLinearRows};

}  // namespace vivace
