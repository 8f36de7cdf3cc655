#include <vector>

#include "src/ops/linear/block_formats.h"
#include "src/ops/linear/fp8_scales.h"
#include "src/ops/linear/table.h"

namespace vivace {

Status linear_reference(const LinearArgs& args, const Stream&) {
  const int64_t k = args.x.shape[1];
  const Fp8Scales x_scales = activation_scales(args.x_scale);
  std::vector<float> row(static_cast<size_t>(k));
  for (int p = 0; p < args.part_count; ++p) {
    const LinearPart& part = args.parts[p];
    const Fp8Scales scales = fp8_scales(part.weight_scale);
    for (int64_t n = 0; n < part.weight.shape[0]; ++n) {
      dequantize_row(part.weight.dtype, part.weight.at(n).data, k, row.data());
      for (int64_t t = 0; t < args.x.shape[0]; ++t) {
        const Tensor x = args.x.at(t);
        double sum = part.bias.present() ? load(part.bias.dtype, part.bias.data, n) : 0.0;
        for (int64_t i = 0; i < k; ++i) {
          sum += double{load(x.dtype, x.data, i)} * x_scales.at(t, i) * row[i] * scales.at(n, i);
        }
        store(part.y.dtype, part.y.at(t).data, n, sum);
      }
    }
  }
  return {};
}

}  // namespace vivace
