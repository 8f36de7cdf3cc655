#include "vivace/route_top_k.h"

#include <algorithm>
#include <cmath>

#include "src/core/checks.h"
#include "src/ops/route_top_k/table.h"

namespace vivace {

Facts route_top_k_facts(const RouteTopKArgs& args) {
  Facts facts;
  facts.add("experts", args.scores.shape[1])
      .add("top_k", args.expert_ids.shape[1])
      .add("groups", args.groups)
      .add("zero_experts", args.zero_experts);
  return facts;
}

bool chooses_nobody(const RouteTopKArgs& args, int64_t token) {
  if (!args.live_tokens.present() || token < args.live_tokens.as<const int32_t>()[0]) return false;
  std::fill_n(args.expert_ids.at(token).as<int32_t>(), args.expert_ids.shape[1], -1);
  std::fill_n(args.expert_weights.at(token).as<float>(), args.expert_weights.shape[1], 0.0f);
  if (args.zero_weight.present()) args.zero_weight.at(token).as<float>()[0] = 0;
  return true;
}

Status check_route_top_k(std::string_view op, const RouteTopKArgs& args, const Stream& stream) {
  Checker check(op, stream);
  check.tensor("scores", args.scores, {"tokens", "experts"})
      .optional("correction_bias", args.correction_bias, {"experts"})
      .tensor("expert_ids", args.expert_ids, {"tokens", "top_k"})
      .tensor("expert_weights", args.expert_weights, {"tokens", "top_k"})
      .optional("zero_weight", args.zero_weight, {"tokens"})
      .optional("live_tokens", args.live_tokens, {"1"})
      .dtype("scores", args.scores, dtypes_mask(DType::f32))
      .dtype("correction_bias", args.correction_bias, dtypes_mask(DType::f32))
      .dtype("expert_ids", args.expert_ids, dtypes_mask(DType::i32))
      .dtype("expert_weights", args.expert_weights, dtypes_mask(DType::f32))
      .dtype("zero_weight", args.zero_weight, dtypes_mask(DType::f32))
      .dtype("live_tokens", args.live_tokens, dtypes_mask(DType::i32))
      .written("expert_ids", args.expert_ids)
      .written("expert_weights", args.expert_weights)
      .that(args.scoring <= RouteScoring::sigmoid, "scoring", static_cast<double>(args.scoring),
            "softmax (0), softmax_chosen (1) or sigmoid (2)")
      .that(std::isfinite(args.scale), "scale", args.scale, "a finite number");
  VIVACE_TRY(check.status());
  const int64_t experts = check["experts"], top_k = check["top_k"];
  if (args.groups < 1 || experts % args.groups != 0) {
    return invalid_argument("{}: groups is {}, needs a divisor of experts = {}", op, args.groups, experts);
  }
  if (args.top_groups < 1 || args.top_groups > args.groups) {
    return invalid_argument("{}: top_groups is {}, needs 1 to groups = {}", op, args.top_groups, args.groups);
  }
  const int64_t reachable = experts / args.groups * args.top_groups;
  if (top_k > reachable) {
    return invalid_argument("{}: expert_ids.shape[1] is {}, needs at most {}, the experts in {} of {} groups",
                            op, top_k, reachable, args.top_groups, args.groups);
  }
  if (args.zero_experts < 0 || args.zero_experts > experts) {
    return invalid_argument("{}: zero_experts is {}, needs 0 to experts = {}", op, args.zero_experts,
                            experts);
  }
  if (args.zero_weight.present() != (args.zero_experts > 0)) {
    return invalid_argument(
        "{}: zero_weight is {} with zero_experts = {}, needs a tensor exactly when there are zero experts",
        op, to_string(args.zero_weight), args.zero_experts);
  }
  return {};
}

Status route_top_k(const RouteTopKArgs& args, const Stream& stream) {
  VIVACE_TRY(check_route_top_k("route_top_k", args, stream));
  if (args.scores.shape[0] == 0) return {};
  return dispatch(kRouteTopK, args, stream);
}

Cost route_top_k_cost(const RouteTopKArgs& args) {
  const int64_t choices = args.expert_ids.elements();
  return {args.scores.bytes() + args.expert_ids.bytes() + args.expert_weights.bytes(),
          4 * args.scores.elements() + 2 * choices};
}

Choice route_top_k_explain(const RouteTopKArgs& args, const Stream& stream) {
  return explain(kRouteTopK, args, stream);
}

}  // namespace vivace
