#pragma once

// Sums and maxima over a warp or a block. Every lane, or every thread, gets the result. The order is fixed, so sums
// repeat bit for bit.

#include <cuda_runtime.h>

#include <cstdint>

namespace vivace::device {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
  static constexpr float kIdentity = 0.f;
};
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  static constexpr float kIdentity = -INFINITY;
};

/// Over groups of `kLanes` neighbouring lanes (a power of two).
template <class Op, int kLanes = 32>
__device__ __forceinline__ float warp_reduce(float v) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) v = Op{}(v, __shfl_xor_sync(kAllLanes, v, step));
  return v;
}
__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
  return v;
}

/// Over a block of whole warps. Contains two block barriers: the shared slots may be reused at once.
template <class Op>
__device__ __forceinline__ float block_reduce(float v) {
  __shared__ float partial[32];
  const unsigned warps = blockDim.x / 32, lane = threadIdx.x % 32;
  v = warp_reduce<Op>(v);
  if (lane == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  v = warp_reduce<Op>(lane < warps ? partial[lane] : Op::kIdentity);
  __syncthreads();
  return v;
}

}  // namespace vivace::device
