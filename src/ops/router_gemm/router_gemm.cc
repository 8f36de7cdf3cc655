#include "vivace/router_gemm.h"

#include <algorithm>

#include "src/core/checks.h"
#include "src/ops/router_gemm/table.h"

namespace vivace {

Facts router_gemm_facts(const RouterGemmArgs& args) {
  int64_t weight_alignment = alignment_of(args.weight.terms[0]);
  for (int i = 1; i < std::min(args.weight.term_count, RouterWeight::kMaxTerms); ++i) {
    weight_alignment = std::min(weight_alignment, alignment_of(args.weight.terms[i]));
  }
  Facts facts;
  facts.add("tokens", args.x.shape[0])
      .add("hidden", args.x.shape[1])
      .add("experts", args.scores.shape[1])
      .add("terms", args.weight.term_count)
      .add("scaled", int64_t{args.weight.scaled})
      .add("x", args.x.dtype)
      .add("x_alignment", alignment_of(args.x))
      .add("weight_alignment", weight_alignment)
      .add("scores", args.scores.dtype)
      .add("batch_invariant", int64_t{args.batch_invariant});
  return facts;
}

Status check_router_gemm(std::string_view op, const RouterGemmArgs& args, const Stream& stream) {
  constexpr int64_t kActivations = dtypes_mask(DType::f32, DType::bf16);
  static constexpr std::string_view kTerms[] = {"weight.terms[0]", "weight.terms[1]", "weight.terms[2]"};
  const int terms = args.weight.term_count;
  Checker check(op, stream);
  check.tensor("x", args.x, {"tokens", "hidden"})
      .that(terms >= 1 && terms <= RouterWeight::kMaxTerms, "weight.term_count", terms,
            "1 to 3: a weight made by prepare_router_weight");
  for (int i = 0; check.ok() && i < terms; ++i) {
    check.tensor(kTerms[i], args.weight.terms[i], {"experts", "hidden"})
        .dtype(kTerms[i], args.weight.terms[i], dtypes_mask(DType::bf16));
  }
  check.optional("bias", args.bias, {"experts"})
      .tensor("scores", args.scores, {"tokens", "experts"})
      .dtype("x", args.x, kActivations)
      .dtype("bias", args.bias, dtypes_mask(DType::f32))
      .dtype("scores", args.scores, kActivations)
      .written("scores", args.scores);
  VIVACE_TRY(check.status());
  if (args.weight.version != args.weight_version) {
    return invalid_argument(
        "{}: weight was prepared from version {}, weight_version is {}: needs prepare_router_weight again",
        op, args.weight.version, args.weight_version);
  }
  return {};
}

Status router_gemm(const RouterGemmArgs& args, const Stream& stream) {
  VIVACE_TRY(check_router_gemm("router_gemm", args, stream));
  if (args.scores.elements() == 0) return {};
  return dispatch(kRouterGemm, args, stream);
}

Cost router_gemm_cost(const RouterGemmArgs& args) {
  Cost cost{args.x.bytes() + args.scores.bytes(), 0};
  for (int i = 0; i < args.weight.term_count; ++i) {
    cost.bytes += args.weight.terms[i].bytes();
    cost.flops += 2 * args.x.shape[0] * args.weight.terms[i].elements();
  }
  if (args.bias.present()) cost.bytes += args.bias.bytes();
  return cost;
}

Choice router_gemm_explain(const RouterGemmArgs& args, const Stream& stream) {
  return explain(kRouterGemm, args, stream);
}

}  // namespace vivace
