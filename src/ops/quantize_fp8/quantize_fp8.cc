#include "vivace/quantize_fp8.h"

#include "src/core/checks.h"
#include "src/ops/quantize_fp8/quantize.h"
#include "src/ops/quantize_fp8/table.h"

namespace vivace {

Facts quantize_fp8_facts(const QuantizeFp8Args& args) {
  Facts facts;
  facts.add("width", args.x.shape[1])
      .add("x", args.x.dtype)
      .add("scaling", static_cast<int64_t>(args.scaling));
  return facts;
}

Status quantize_fp8(const QuantizeFp8Args& args, const Stream& stream) {
  Checker check("quantize_fp8", stream);
  check.tensor("x", args.x, {"tokens", "width"})
      .tensor("y", args.y, {"tokens", "width"})
      .dtype("x", args.x, dtypes_mask(DType::f32, DType::bf16, DType::f16))
      .dtype("y", args.y, dtypes_mask(DType::fp8_e4m3))
      .written("y", args.y);
  VIVACE_TRY(check_scales("quantize_fp8", check, stream, "scale", args.y, args.scale, args.scaling, "width"));
  if (args.x.elements() == 0) return {};
  return dispatch(kQuantizeFp8, args, stream);
}

Cost quantize_fp8_cost(const QuantizeFp8Args& args) {
  return {args.x.bytes() + args.y.bytes() + args.scale.bytes(), 2 * args.x.elements()};
}

Choice quantize_fp8_explain(const QuantizeFp8Args& args, const Stream& stream) {
  return explain(kQuantizeFp8, args, stream);
}

}  // namespace vivace
