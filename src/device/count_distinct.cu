// count[0] += the distinct ids of each row, count[1] += 1 per row: how many experts the layers of a step touched. A block
// per row marks a bit for each id. A few hundred numbers a row: the launch is all that it costs.

#include "src/device/count_distinct.h"
#include "src/device/launch.h"

namespace vivace::device {

namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void count_distinct_kernel(const int32_t* ids, int64_t stride, int64_t n,
                                                                  int32_t limit, unsigned long long* count) {
  extern __shared__ uint32_t seen[];
  const int words = (limit + 31) / 32;
  for (int w = threadIdx.x; w < words; w += kThreads) seen[w] = 0;
  __syncthreads();
  const int32_t* row = ids + blockIdx.x * stride;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const int32_t id = row[i];
    if (id >= 0 && id < limit) atomicOr(&seen[id / 32], 1u << (id % 32));
  }
  __syncthreads();
  unsigned long long distinct = 0;
  for (int w = threadIdx.x; w < words; w += kThreads) distinct += __popc(seen[w]);
  if (distinct > 0) atomicAdd(&count[0], distinct);
  if (threadIdx.x == 0) atomicAdd(&count[1], 1ull);
}

}  // namespace

Status count_distinct(const Tensor& ids, int64_t limit, const Tensor& count, const Stream& stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ids.shape[0])),
                          .block = dim3(kThreads),
                          .smem_bytes = (limit + 31) / 32 * 4};
  return launch("count_distinct", count_distinct_kernel, shape, stream, ids.as<const int32_t>(), ids.stride[0],
                ids.shape[1], static_cast<int32_t>(limit), count.as<unsigned long long>());
}

}  // namespace vivace::device
