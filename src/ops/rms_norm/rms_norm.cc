#include "vivace/rms_norm.h"

#include <cmath>

#include "src/core/checks.h"
#include "src/ops/rms_norm/table.h"

namespace vivace {

Facts rms_norm_facts(const RmsNormArgs& args) {
  return Facts().add("hidden", args.x.shape[1]).add("x", args.x.dtype).add("weight", args.weight.dtype);
}

Status rms_norm(const RmsNormArgs& args, const Stream& stream) {
  constexpr int64_t kActivations = dtypes_mask(DType::f32, DType::bf16);
  Checker check("rms_norm", stream.device);
  check.tensor("x", args.x, {"tokens", "hidden"})
      .optional("residual", args.residual, {"tokens", "hidden"})
      .tensor("weight", args.weight, {"hidden"})
      .tensor("y", args.y, {"tokens", "hidden"})
      .dtype("x", args.x, kActivations)
      .dtype("residual", args.residual, dtypes_mask(args.x.dtype))
      .dtype("y", args.y, dtypes_mask(args.x.dtype))
      .dtype("weight", args.weight, dtypes_mask(DType::f32, DType::f16, DType::bf16))
      .that(std::isfinite(args.eps) && args.eps >= 0, "eps", args.eps, "a finite number >= 0");
  VIVACE_TRY(check.status());
  if (args.x.elements() == 0) return {};
  return dispatch(kRmsNorm, args, stream);
}

Cost rms_norm_cost(const RmsNormArgs& args) {
  const int64_t passes = args.residual.present() ? 4 : 2;  // x, y, and residual read and written
  return {passes * args.x.bytes() + args.weight.bytes(), 6 * args.x.elements()};
}

Choice rms_norm_explain(const RmsNormArgs& args, const Stream& stream) {
  return explain(kRmsNorm, args, stream);
}

}  // namespace vivace
