#include "vivace/silu_mul.h"

#include "src/core/checks.h"
#include "src/ops/quantize_fp8/quantize.h"
#include "src/ops/silu_mul/table.h"

namespace vivace {

Facts silu_mul_facts(const SiluMulArgs& args) {
  Facts facts;
  facts.add("intermediate", args.gate.shape[1])
      .add("gate", args.gate.dtype)
      .add("y", args.y.dtype)
      .add("quantised_width", args.y.dtype == DType::fp8_e4m3 ? args.y.shape[1] : 0);
  return facts;
}

Status silu_mul(const SiluMulArgs& args, const Stream& stream) {
  Checker check("silu_mul", stream);
  check.tensor("gate", args.gate, {"tokens", "intermediate"})
      .tensor("up", args.up, {"tokens", "intermediate"})
      .tensor("y", args.y, {"tokens", "intermediate"})
      .dtype("gate", args.gate, dtypes_mask(DType::f32, DType::bf16))
      .dtype("up", args.up, dtypes_mask(args.gate.dtype))
      .dtype("y", args.y, dtypes_mask(args.gate.dtype, DType::fp8_e4m3))
      .written("y", args.y);
  VIVACE_TRY(check_scales("silu_mul", check, stream, "y_scale", args.y, args.y_scale, args.y_scaling,
                          "intermediate"));
  if (args.gate.elements() == 0) return {};
  return dispatch(kSiluMul, args, stream);
}

Cost silu_mul_cost(const SiluMulArgs& args) {
  // An exponential counts as one operation beside the addition, the division and the product.
  const int64_t scales = args.y_scale.present() ? args.y_scale.bytes() : 0;
  return {2 * args.gate.bytes() + args.y.bytes() + scales, 4 * args.gate.elements()};
}

Choice silu_mul_explain(const SiluMulArgs& args, const Stream& stream) {
  return explain(kSiluMul, args, stream);
}

}  // namespace vivace
