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
  const char* why = "a row of router_gemm or route_top_k is preferred, and this calls neither";
  if (asked(kChooseExperts.name) || (!asked("router_gemm") && !asked("route_top_k"))) {
    const Row<ChooseExpertsArgs>* row = choose(kChooseExperts, args, stream, refused);
#if VIVACE_CUDA
    if (row == nullptr || row->run != choose_experts_sm90_cluster || has_large_clusters(stream)) return row;
    why = "this device has no room for a cluster of 16 CTAs";
#else
    return row;
#endif
  }
  for (const Row<ChooseExpertsArgs>& row : kChooseExperts.rows) {
    if (row.device != stream.device) continue;
    if (row.run == choose_experts_two_calls) return &row;
    if (refused == nullptr) continue;
    refused->emplace_back();
    refused->back().row = row.name;
    refused->back().reason = why;
  }
  return nullptr;
}

/// A refusal that names the sizes of scores, where there are none: by what these are made of.
Status in_words_of(const ChooseExpertsArgs& args, Status status) {
  if (status.ok() || args.logits.scores.present()) return status;
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"(from scores.shape[0])", "(from x.shape[0])"},
      {"(from scores.shape[1])", "(from weight.terms[0].shape[0])"}};
  std::string text = status.message();
  for (const auto& [name, ours] : kNames) {
    if (const size_t at = text.find(name); at != std::string::npos) text.replace(at, name.size(), ours);
  }
  return Status(status.code(), std::move(text));
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
  VIVACE_TRY(in_words_of(args, check_route_top_k(kName, calls.choice, stream)));
  Checker check(kName, stream);
  check.given("choice.scores", args.choice.scores, false, "none: the choice reads those of logits");
  VIVACE_TRY(check.status());
  if (args.logits.x.shape[0] == 0) return {};
  const Row<ChooseExpertsArgs>* row = row_of(args, stream);
  if (row == nullptr) return internal::refuse(kChooseExperts, args, stream);
  VIVACE_TRY(check_workspace(kName, args.workspace, row->workspace_bytes(args, stream), stream));
  // The two count themselves: no call is counted inside another.
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
