#include "vivace/silu_mul.h"

#include "src/core/checks.h"
#include "src/ops/silu_mul/table.h"

namespace vivace {

Facts silu_mul_facts(const SiluMulArgs& args) {
  return Facts().add("intermediate", args.gate.shape[1]).add("gate", args.gate.dtype);
}

Status silu_mul(const SiluMulArgs& args, const Stream& stream) {
  Checker check("silu_mul", stream.device);
  check.tensor("gate", args.gate, {"tokens", "intermediate"})
      .tensor("up", args.up, {"tokens", "intermediate"})
      .tensor("y", args.y, {"tokens", "intermediate"})
      .dtype("gate", args.gate, dtypes_mask(DType::f32, DType::bf16))
      .dtype("up", args.up, dtypes_mask(args.gate.dtype))
      .dtype("y", args.y, dtypes_mask(args.gate.dtype));
  VIVACE_TRY(check.status());
  if (args.gate.elements() == 0) return {};
  return dispatch(kSiluMul, args, stream);
}

Cost silu_mul_cost(const SiluMulArgs& args) {
  // An exponential counts as one operation beside the addition, the division and the product.
  return {3 * args.gate.bytes(), 4 * args.gate.elements()};
}

Choice silu_mul_explain(const SiluMulArgs& args, const Stream& stream) {
  return explain(kSiluMul, args, stream);
}

}  // namespace vivace
