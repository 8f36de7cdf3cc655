#include <cmath>

#include "src/core/number.h"
#include "src/ops/silu_mul/table.h"

namespace vivace {

Status silu_mul_reference(const SiluMulArgs& args, const Stream&) {
  const DType type = args.gate.dtype;
  for (int64_t t = 0; t < args.gate.shape[0]; ++t) {
    const Tensor gate = args.gate.at(t), up = args.up.at(t), y = args.y.at(t);
    for (int64_t i = 0; i < args.gate.shape[1]; ++i) {
      const double g = load(type, gate.data, i), u = load(type, up.data, i);
      // The division form is NaN at -inf, where the limit is 0.
      const double silu = g == -INFINITY ? -0.0 : g / (1 + std::exp(-g));
      store(type, y.data, i, silu * u);
    }
  }
  return {};
}

}  // namespace vivace
