#include <cmath>

#include "src/core/number.h"
#include "src/ops/quantize_fp8/quantize.h"
#include "src/ops/silu_mul/table.h"

namespace vivace {

Status silu_mul_reference(const SiluMulArgs& args, const Stream&) {
  const DType type = args.gate.dtype;
  const int64_t intermediate = args.gate.shape[1];
  for (int64_t t = 0; t < args.gate.shape[0]; ++t) {
    const Tensor gate = args.gate.at(t), up = args.up.at(t), y = args.y.at(t);
    const auto value = [&](int64_t i) {
      const double g = load(type, gate.data, i), u = load(type, up.data, i);
      // The division form is NaN at -inf, where the limit is 0.
      return (g == -INFINITY ? -0.0 : g / (1 + std::exp(-g))) * u;
    };
    if (y.dtype == DType::fp8_e4m3) {
      quantize_row(value, intermediate, args.y_scaling, scales_of(args.y_scale, args.y_scaling, t),
                   y.as<uint8_t>());
    } else {
      for (int64_t i = 0; i < intermediate; ++i) store(y.dtype, y.data, i, value(i));
    }
  }
  return {};
}

}  // namespace vivace
