// ids[t] = source[-1 - ids[t]] where negative: how the tokens that a step drew become the input of the next
// one without a way over the host. A few hundred numbers: the launch is all that it costs.

#include "src/device/launch.h"
#include "src/device/resolve_ids.h"

namespace vivace::device {

namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void resolve_ids_kernel(int32_t* ids, int64_t count,
                                                               const int32_t* source, int64_t rows) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= count) return;
  const int64_t row = -1 - int64_t{ids[t]};
  if (row >= 0 && row < rows) ids[t] = source[row];
}

}  // namespace

Status resolve_ids(const Tensor& ids, const Tensor& source, const Stream& stream) {
  const int64_t count = ids.elements();
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)),
                          .block = dim3(kThreads)};
  return launch("resolve_ids", resolve_ids_kernel, shape, stream, ids.as<int32_t>(), count,
                source.as<const int32_t>(), source.elements());
}

}  // namespace vivace::device
