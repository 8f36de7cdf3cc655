// to = from        bf16 to f32, one pass over memory
//
// Two numbers for an element
//   bytes  6   read 2, write 4
//   flops  0   HBM is the only roof

#include "src/device/launch.h"
#include "src/device/number.h"
#include "src/device/widen.h"

namespace vivace::device {

namespace {

constexpr int kThreads = 256, kAtOnce = 8;  // 16 bytes of bf16

__global__ __launch_bounds__(kThreads) void widen_kernel(const bf16* from, float* to, int64_t count) {
  int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kAtOnce;
  if (i + kAtOnce <= count) {
    float v[kAtOnce];
    load_floats<kAtOnce>(from + i, v);
#pragma unroll
    for (int part = 0; part < kAtOnce; part += 4) {
      const float four[4] = {v[part], v[part + 1], v[part + 2], v[part + 3]};
      store_floats<4>(four, to + i + part);
    }
    return;
  }
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

}  // namespace

Status widen(const Tensor& from, const Tensor& to, const Stream& stream) {
  constexpr int64_t kPerBlock = kThreads * kAtOnce;
  const int64_t count = from.elements();
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((count + kPerBlock - 1) / kPerBlock)),
                          .block = dim3(kThreads)};
  return launch("widen", widen_kernel, shape, stream, from.as<const bf16>(), to.as<float>(), count);
}

}  // namespace vivace::device
