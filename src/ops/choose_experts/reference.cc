#include "src/core/workspace.h"
#include "src/ops/choose_experts/table.h"
#include "src/ops/route_top_k/table.h"
#include "src/ops/router_gemm/table.h"

namespace vivace {

Status choose_experts_reference(const ChooseExpertsArgs& args, const Stream& stream) {
  const TwoCalls calls = two_calls_of(args, first_line(args.workspace));
  VIVACE_TRY(router_gemm_reference(calls.logits, stream));
  return route_top_k_reference(calls.choice, stream);
}

}  // namespace vivace
