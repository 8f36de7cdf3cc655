#include "vivace/rms_norm.h"

#include <cmath>

#include "src/core/checks.h"
#include "src/ops/quantize_fp8/quantize.h"
#include "src/ops/rms_norm/table.h"

namespace vivace {

Facts rms_norm_facts(const RmsNormArgs& args) {
  Facts facts;
  facts.add("hidden", args.x.shape[1])
      .add("x", args.x.dtype)
      .add("weight", args.weight.dtype)
      .add("y", args.y.dtype);
  return facts;
}

Status rms_norm(const RmsNormArgs& args, const Stream& stream) {
  constexpr int64_t kActivations = dtypes_mask(DType::f32, DType::bf16);
  Checker check("rms_norm", stream);
  check.tensor("x", args.x, {"tokens", "hidden"})
      .optional("residual", args.residual, {"tokens", "hidden"})
      .tensor("weight", args.weight, {"hidden"})
      .tensor("y", args.y, {"tokens", "hidden"})
      .optional("y_fp8", args.y_fp8, {"tokens", "hidden"})
      .dtype("x", args.x, kActivations)
      .dtype("residual", args.residual, kActivations)
      .dtype("y", args.y, args.y_fp8.present() ? kActivations : kActivations | dtypes_mask(DType::fp8_e4m3))
      .dtype("y_fp8", args.y_fp8, dtypes_mask(DType::fp8_e4m3))
      .dtype("weight", args.weight, dtypes_mask(DType::f32, DType::f16, DType::bf16))
      .written("residual", args.residual)
      .written("y", args.y)
      .written("y_fp8", args.y_fp8)
      .that(std::isfinite(args.eps) && args.eps >= 0, "eps", args.eps, "a finite number >= 0");
  VIVACE_TRY(check_scales("rms_norm", check, stream, "y_scale", args.y_fp8.present() ? args.y_fp8 : args.y,
                          args.y_scale, args.y_scaling, "hidden"));
  if (args.x.elements() == 0) return {};
  return dispatch(kRmsNorm, args, stream);
}

Cost rms_norm_cost(const RmsNormArgs& args) {
  const int64_t residual = args.residual.present() ? 2 * args.residual.bytes() : 0;  // read and written
  const int64_t scales = args.y_scale.present() ? args.y_scale.bytes() : 0;
  const int64_t quantised = args.y_fp8.present() ? args.y_fp8.bytes() : 0;
  return {args.x.bytes() + residual + args.weight.bytes() + args.y.bytes() + quantised + scales,
          6 * args.x.elements()};
}

Choice rms_norm_explain(const RmsNormArgs& args, const Stream& stream) {
  return explain(kRmsNorm, args, stream);
}

}  // namespace vivace
