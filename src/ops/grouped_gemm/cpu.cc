// y[r] = x[r] · weight[g]ᵀ         fp32 arithmetic of linear's kernels, groups and columns over threads
//
// Two numbers for a group of m rows
//   bytes  n k times the weight's size   once per 64 rows
//   flops  2 m n k

#include <algorithm>

#include "src/cpu/thread_pool.h"
#include "src/ops/grouped_gemm/table.h"
#include "src/ops/linear/cpu_gemm.h"

namespace vivace {

Status grouped_gemm_cpu(const GroupedGemmArgs& args, const Stream& stream) {
  constexpr int64_t kColumns = 64;  // of a task
  const int64_t n = args.weight.shape[1], pieces = (n + kColumns - 1) / kColumns;
  const int64_t x_stride = args.x.stride[0], y_stride = args.y.stride[0];
  cpu::parallel_for(stream.threads, args.weight.shape[0] * pieces, [&](int64_t task, int) {
    const int64_t g = task / pieces, n0 = task % pieces * kColumns, n1 = std::min(n, n0 + kColumns);
    const GroupRows rows = rows_of_group(args, g);
    if (rows.end <= rows.begin) return;
    cpu::gemm_f32({args.x.as<const float>() + rows.begin * x_stride, x_stride}, rows.end - rows.begin,
                  args.weight.at(g), n0, n1, {}, {args.y.as<float>() + rows.begin * y_stride + n0, y_stride});
  });
  return {};
}

}  // namespace vivace
