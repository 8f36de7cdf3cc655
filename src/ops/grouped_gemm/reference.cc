#include <vector>

#include "src/core/number.h"
#include "src/ops/grouped_gemm/table.h"
#include "src/ops/linear/fp8_scales.h"

namespace vivace {

Status grouped_gemm_reference(const GroupedGemmArgs& args, const Stream&) {
  const int64_t k = args.x.shape[1];
  const Fp8Scales x_scales = activation_scales(args.x_scale);
  std::vector<double> w(static_cast<size_t>(k));
  for (int64_t g = 0; g < args.weight.shape[0]; ++g) {
    const Tensor weight = args.weight.at(g);
    const Fp8Scales scales = args.weight_scale.present() ? fp8_scales(args.weight_scale.at(g)) : Fp8Scales();
    const GroupRows rows = rows_of_group(args, g);
    for (int64_t n = 0; n < weight.shape[0]; ++n) {
      const Tensor row = weight.at(n);
      for (int64_t i = 0; i < k; ++i) w[i] = double{load(row.dtype, row.data, i)} * scales.at(n, i);
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        const Tensor x = args.x.at(r);
        double sum = 0;
        for (int64_t i = 0; i < k; ++i) sum += double{load(x.dtype, x.data, i)} * x_scales.at(r, i) * w[i];
        store(args.y.dtype, args.y.at(r).data, n, sum);
      }
    }
  }
  return {};
}

}  // namespace vivace
