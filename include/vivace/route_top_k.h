#pragma once

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

/// What turns router logits into expert weights.
enum class RouteScoring : uint8_t {
  softmax,         ///< over all experts (Qwen3, LongCat)
  softmax_chosen,  ///< over the chosen experts alone (Mixtral, gpt-oss, Granite)
  sigmoid,         ///< each by itself (Hy3, DeepSeek-V3)
};

struct RouteTopKArgs {
  Tensor scores;
  Tensor correction_bias;  ///< optional: added for the choice, not in the weights
  Tensor expert_ids;
  Tensor expert_weights;
  Tensor zero_weight;  ///< present exactly when zero_experts > 0
  Tensor live_tokens;  ///< optional i32 [1]: the tokens from this number on are padding and choose nobody
  RouteScoring scoring = RouteScoring::softmax;
  bool renormalise = true;   ///< divide the chosen weights by (their sum + 1e-20)
  double scale = 1;          ///< factor on the weights, after renormalisation
  int64_t groups = 1;        ///< experts form this many groups of neighbours ...
  int64_t top_groups = 1;    ///< ... of which the best so many may be chosen from
  int64_t zero_experts = 0;  ///< the last so many experts are identities
};

/// Chooses top_k experts for each token from its router logits, and their weights.
///
///   score  = softmax or sigmoid of the logits, in fp32
///   choice = score + correction_bias; the logits themselves when there is neither a bias nor groups
///   group  : its value is the sum of its two largest choices; experts outside the top_groups best are out
///   chosen = the top_k largest choices, in falling order
///   weight = score of the chosen, renormalised if asked, times scale
///
/// Ties     go to the lower id, for groups too.
/// Odd      NaN is below every number, so it is chosen only when nothing else is left, and then lowest ids
///          first; its score is that of -inf. In any row the ids are distinct and the weights finite: an
///          infinite maximum shares the softmax with its equals, and a row of NaN or -inf is uniform under
///          softmax and zero under sigmoid.
/// Zero     a chosen identity expert is written as id -1 with weight 0, and zero_weight gets the sum of these
///          weights: the layer adds zero_weight · x.
/// Padding  a token from live_tokens on has the id -1 and the weight 0 in all places, and zero_weight 0; its logits do not
///          matter. So a graph captured for many tokens serves fewer, and no expert is read for the rest.
///
/// Shapes   scores [tokens, experts]; correction_bias [experts]; expert_ids, expert_weights [tokens, top_k];
///          zero_weight [tokens]; live_tokens [1]. Rows may be strided.
/// Types    expert_ids and live_tokens i32; all others f32.
/// Cost     route_top_k_cost().
/// Runs     on `stream`; allocates nothing.
/// Repeats  bit for bit; a row does not depend on the rows beside it.
/// Fails    invalid_argument: a shape, stride or type disagrees; top_k > experts in the groups that may be
///          chosen; groups do not divide experts. unsupported: no row fits.
/// Source   src/ops/route_top_k/
Status route_top_k(const RouteTopKArgs& args, const Stream& stream);
Cost route_top_k_cost(const RouteTopKArgs& args);
Choice route_top_k_explain(const RouteTopKArgs& args, const Stream& stream);

}  // namespace vivace
