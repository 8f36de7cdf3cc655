#include "src/ops/quantize_fp8/quantize.h"

#include "src/core/error.h"

namespace vivace {

Status check_scales(std::string_view op, Checker& check, const Stream& stream, std::string_view name,
                    const Tensor& y, const Tensor& scale, Fp8Scaling scaling, std::string_view width) {
  VIVACE_TRY(check.status());
  if (y.dtype != DType::fp8_e4m3) {
    if (!scale.present()) return {};
    return invalid_argument("{}: {} is {}, needs none: y is {}, and scales belong to fp8", op, name,
                            to_string(scale), name_of(y.dtype));
  }
  switch (scaling) {
    case Fp8Scaling::tensor:
      check.tensor(name, scale, {"1"});
      break;
    case Fp8Scaling::token:
      check.tensor(name, scale, {"tokens"});
      break;
    case Fp8Scaling::block:
      check.define("blocks", scale_blocks(check[width]), "ceil(width / 128)")
          .tensor(name, scale, {"tokens", "blocks"})
          .written(name, scale);
      break;
    default:
      return invalid_argument("{}: scaling is {}, needs tensor (0), token (1) or block (2)", op,
                              static_cast<int>(scaling));
  }
  VIVACE_TRY(check.dtype(name, scale, dtypes_mask(DType::f32)).status());
  if (scaling != Fp8Scaling::tensor || !stream.readable()) return {};
  const float given = *scale.as<const float>();
  if (std::isfinite(given) && given > 0) return {};
  return invalid_argument("{}: {}[0] is {}, needs a finite number > 0", op, name, given);
}

}  // namespace vivace
