#include <cmath>

#include "src/core/number.h"
#include "src/ops/rms_norm/table.h"

namespace vivace {

Status rms_norm_reference(const RmsNormArgs& args, const Stream&) {
  const DType type = args.x.dtype;
  const int64_t hidden = args.x.shape[1];
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    const Tensor x = args.x.at(t), y = args.y.at(t);
    const Tensor residual = args.residual.present() ? args.residual.at(t) : Tensor();
    const auto value = [&](int64_t i) {
      return double{load(type, x.data, i)} +
             (residual.present() ? double{load(type, residual.data, i)} : 0.0);
    };
    double squares = 0;
    for (int64_t i = 0; i < hidden; ++i) squares += value(i) * value(i);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(hidden) + args.eps);
    for (int64_t i = 0; i < hidden; ++i) {
      const double v = value(i);
      if (residual.present()) store(type, residual.data, i, v);
      store(type, y.data, i, v * scale * load(args.weight.dtype, args.weight.data, i));
    }
  }
  return {};
}

}  // namespace vivace
