#include "vivace/choose_experts.h"

#include "src/core/checks.h"
#include "src/core/workspace.h"
#include "src/ops/choose_experts/sm90_plan.h"
#include "src/ops/choose_experts/table.h"
#include "src/ops/route_top_k/table.h"
#include "src/ops/router_gemm/table.h"

namespace vivace {

namespace {

/// The first row that fits. Where a caller asks for rows of the two operators, that is the one that calls them.
const Row<ChooseExpertsArgs>* row_of(const ChooseExpertsArgs& args, const Stream& stream,
                                     std::vector<Refusal>* refused = nullptr) {
  const auto asked = [&](std::string_view op) {
    return stream.dispatch != nullptr && !stream.dispatch->preferred(op).empty();
  };
  if (asked(kChooseExperts.name) || (!asked("router_gemm") && !asked("route_top_k")))
    return choose(kChooseExperts, args, stream, refused);
  for (const Row<ChooseExpertsArgs>& row : kChooseExperts.rows) {
    if (row.device != stream.device) continue;
    if (row.run == choose_experts_two_calls) return &row;
    if (refused == nullptr) continue;
    refused->emplace_back();
    refused->back().row = row.name;
    refused->back().reason = "a row of router_gemm or route_top_k is preferred, and this calls neither";
  }
  return nullptr;
}

}  // namespace

Facts choose_experts_facts(const ChooseExpertsArgs& args) {
  const RouterGemmArgs logits = two_calls_of(args, nullptr).logits;
  return router_gemm_facts(logits)
      .add("top_k", args.choice.expert_ids.shape[1])
      .add("groups", args.choice.groups)
      .add("zero_experts", args.choice.zero_experts)
      .add("cluster_warps", router::cluster_warps(logits.scores.shape[1], logits.x.shape[1],
                                                  std::max(logits.weight.term_count, 1)));
}

Status choose_experts(const ChooseExpertsArgs& args, const Stream& stream) {
  constexpr std::string_view kName = "choose_experts";
  // Scores that nobody wants stand nowhere: while the arguments are checked, at x.
  const TwoCalls calls = two_calls_of(args, args.logits.x.data);
  VIVACE_TRY(check_router_gemm(kName, calls.logits, stream));
  VIVACE_TRY(check_route_top_k(kName, calls.choice, stream));
  Checker check(kName, stream);
  check.given("choice.scores", args.choice.scores, false, "none: the choice reads those of logits");
  VIVACE_TRY(check.status());
  if (args.logits.x.shape[0] == 0) return {};
  const Row<ChooseExpertsArgs>* row = row_of(args, stream);
  if (row == nullptr) return internal::refuse(kChooseExperts, args, stream);
  VIVACE_TRY(check_workspace(kName, args.workspace, row->workspace_bytes(args, stream), stream));
  // The two count themselves, and no call is counted inside another (but where a part of a GPU has no room for large clusters).
  if (row->run == choose_experts_two_calls) return row->run(args, stream);
  if (stream.check_only) return {};
  return run_counted(kChooseExperts, *row, args, stream, [&] { return row->run(args, stream); });
}

Cost choose_experts_cost(const ChooseExpertsArgs& args) {
  const TwoCalls calls = two_calls_of(args, nullptr);
  const Cost logits = router_gemm_cost(calls.logits), choice = route_top_k_cost(calls.choice);
  // Scores are read where they lie, and written if somebody wants them.
  const int64_t scores = calls.logits.scores.bytes();
  return {logits.bytes + choice.bytes - (args.logits.scores.present() ? 1 : 2) * scores,
          logits.flops + choice.flops};
}

Choice choose_experts_explain(const ChooseExpertsArgs& args, const Stream& stream) {
  Choice choice;
  if (const Row<ChooseExpertsArgs>* row = row_of(args, stream, &choice.refused)) choice.row = row->name;
  return choice;
}

Result<int64_t> choose_experts_workspace_bytes(const ChooseExpertsArgs& args, const Stream& stream) {
  const Row<ChooseExpertsArgs>* row = row_of(args, stream);
  if (row == nullptr) return internal::refuse(kChooseExperts, args, stream);
  return row->workspace_bytes(args, stream);
}

}  // namespace vivace
