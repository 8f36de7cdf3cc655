#pragma once

#include "vivace/route_top_k.h"
#include "vivace/router_gemm.h"

namespace vivace {

struct ChooseExpertsArgs {
  RouterGemmArgs logits;  ///< its scores are optional
  RouteTopKArgs choice;   ///< without scores: it reads those of `logits`
  Tensor workspace;       ///< u8 [>= choose_experts_workspace_bytes()]; absent when that is 0
};

/// router_gemm and route_top_k in one call: the logits of a router, the experts that each token chooses by them, and
/// their weights. A row for Hopper does both in one kernel for 17 to 64 tokens; the logits then need not reach memory. Every other call
/// is the two, which count themselves (`vivace/dispatch.h`); a preferred row of one of them asks for that, too.
///
/// Shapes   as router_gemm and route_top_k have them, with the same tokens and experts. logits.scores may be absent; choice.scores
///          is.
/// Types    as there; logits.scores f32.
/// Writes   what route_top_k writes, and logits.scores where present.
/// Cost     choose_experts_cost().
/// Runs     on `stream`; allocates nothing; two calls leave absent scores in the workspace.
/// Repeats  bit for bit, with the bits of the two calls.
/// Fails    as the two calls, in the order router_gemm, route_top_k; invalid_argument: choice.scores is present, or the workspace is
///          too small.
/// Source   src/ops/choose_experts/
Status choose_experts(const ChooseExpertsArgs& args, const Stream& stream);
Cost choose_experts_cost(const ChooseExpertsArgs& args);
Choice choose_experts_explain(const ChooseExpertsArgs& args, const Stream& stream);
/// Scratch bytes for a call of these shapes: 0 where scores are given. unsupported: no row fits.
Result<int64_t> choose_experts_workspace_bytes(const ChooseExpertsArgs& args, const Stream& stream);

}  // namespace vivace
