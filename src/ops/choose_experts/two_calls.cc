#include "src/core/workspace.h"
#include "src/ops/choose_experts/table.h"

namespace vivace {

TwoCalls two_calls_of(const ChooseExpertsArgs& args, void* scores) {
  TwoCalls calls{args.logits, args.choice};
  if (!calls.logits.scores.present()) {
    const Tensor& x = args.logits.x;
    calls.logits.scores =
        Tensor(scores, DType::f32, {x.shape[0], args.logits.weight.terms[0].shape[0]}, x.device);
  }
  calls.choice.scores = calls.logits.scores;
  return calls;
}

int64_t choose_experts_score_bytes(const ChooseExpertsArgs& args, const Stream&) {
  return args.logits.scores.present() ? 0
                                      : two_calls_of(args, nullptr).logits.scores.bytes() + kWorkspaceSlack;
}

Status choose_experts_two_calls(const ChooseExpertsArgs& args, const Stream& stream) {
  const TwoCalls calls = two_calls_of(args, first_line(args.workspace));
  VIVACE_TRY(router_gemm(calls.logits, stream));
  return route_top_k(calls.choice, stream);
}

}  // namespace vivace
