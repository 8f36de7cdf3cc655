#include <cmath>
#include <vector>

#include "src/core/number.h"
#include "src/ops/quantize_fp8/quantize.h"
#include "src/ops/rms_norm/table.h"

namespace vivace {

Status rms_norm_reference(const RmsNormArgs& args, const Stream&) {
  const int64_t hidden = args.x.shape[1];
  std::vector<double> v(hidden), value(hidden);
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    const Tensor x = args.x.at(t), y = args.y.at(t);
    const Tensor residual = args.residual.present() ? args.residual.at(t) : Tensor();
    double squares = 0;
    for (int64_t i = 0; i < hidden; ++i) {
      v[i] = load(x.dtype, x.data, i);
      if (residual.present()) v[i] += load(residual.dtype, residual.data, i);
      squares += v[i] * v[i];
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(hidden) + args.eps);
    for (int64_t i = 0; i < hidden; ++i) {
      value[i] = v[i] * scale * load(args.weight.dtype, args.weight.data, i);
      if (residual.present()) store(residual.dtype, residual.data, i, v[i]);
    }
    if (y.dtype == DType::fp8_e4m3) {
      quantize_row([&](int64_t i) { return value[i]; }, hidden, args.y_scaling,
                   scales_of(args.y_scale, args.y_scaling, t), y.as<uint8_t>());
    } else {
      for (int64_t i = 0; i < hidden; ++i) store(y.dtype, y.data, i, value[i]);
    }
    if (args.y_fp8.present()) {
      quantize_row([&](int64_t i) { return load(y.dtype, y.data, i); }, hidden, args.y_scaling,
                   scales_of(args.y_scale, args.y_scaling, t), args.y_fp8.at(t).as<uint8_t>());
    }
  }
  return {};
}

}  // namespace vivace
