// y = silu(gate) · up         one pass over memory
//
// Two numbers for a row of width I in bf16
//   bytes  6 I   read gate and up, write y (5 I with fp8 y)
//   flops  4 I   an exponential and a division among them; below one flop per byte: memory is the only roof
//
// Element by element, 16 bytes of gate and up per thread. An fp8 y may need the largest value of its row: then a block
// keeps the row in shared memory as fp32.

#include <algorithm>

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/row.h"
#include "src/ops/silu_mul/table.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kThreads = 256;

struct Params {
  const void *gate, *up;
  void* y;
  float* scales;
  int64_t intermediate, gate_stride, up_stride, y_stride, scale_stride;
  Fp8Scaling scaling;
};

__device__ __forceinline__ float silu_mul_one(float gate, float up) {
  // The quotient is NaN at -inf, where the limit is 0.
  const float silu = gate == -INFINITY ? -0.f : __fdiv_rn(gate, 1.f + expf(-gate));
  return silu * up;
}

template <class T, int kVec>
__device__ __forceinline__ void silu_mul_some(const T* gate, const T* up, float (&v)[kVec]) {
  float u[kVec];
  load_floats(gate, v);
  load_floats(up, u);
#pragma unroll
  for (int j = 0; j < kVec; ++j) v[j] = silu_mul_one(v[j], u[j]);
}

template <class T, int kVec>
__global__ __launch_bounds__(kThreads) void silu_mul_kernel(const __grid_constant__ Params p) {
  const int64_t token = blockIdx.x;
  const int64_t i = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kVec;
  if (i >= p.intermediate) return;
  wait_for_previous_kernel();
  float v[kVec];
  silu_mul_some(static_cast<const T*>(p.gate) + token * p.gate_stride + i,
                static_cast<const T*>(p.up) + token * p.up_stride + i, v);
  let_next_kernel_start();
  store_floats(v, static_cast<T*>(p.y) + token * p.y_stride + i);
}

template <class T, int kVec>
__global__ __launch_bounds__(kThreads) void silu_mul_quantise_kernel(const __grid_constant__ Params p) {
  extern __shared__ float row[];
  const int64_t token = blockIdx.x;
  const T* gate = static_cast<const T*>(p.gate) + token * p.gate_stride;
  const T* up = static_cast<const T*>(p.up) + token * p.up_stride;
  wait_for_previous_kernel();
  for (int64_t i = int64_t{threadIdx.x} * kVec; i < p.intermediate; i += kThreads * kVec) {
    float v[kVec];
    silu_mul_some(gate + i, up + i, v);
#pragma unroll
    for (int j = 0; j < kVec; ++j) row[i + j] = v[j];
  }
  let_next_kernel_start();
  __syncthreads();
  store_row<kThreads, kVec>(row, p.intermediate,
                            RowTarget<fp8>{static_cast<fp8*>(p.y) + token * p.y_stride,
                                           scales_of(p.scales, p.scaling, p.scale_stride, token), p.scaling});
}

}  // namespace

Status silu_mul_cuda(const SiluMulArgs& args, const Stream& stream) {
  const int64_t tokens = args.gate.shape[0], intermediate = args.gate.shape[1];
  const Params params{.gate = args.gate.data,
                      .up = args.up.data,
                      .y = args.y.data,
                      .scales = args.y_scale.as<float>(),
                      .intermediate = intermediate,
                      .gate_stride = args.gate.stride[0],
                      .up_stride = args.up.stride[0],
                      .y_stride = args.y.stride[0],
                      .scale_stride = args.y_scale.stride[0],
                      .scaling = args.y_scaling};
  Status status;
  with_type<float, bf16>(args.gate.dtype, [&](auto type) {
    using T = decltype(type);
    const bool inputs_wide =
        alignment_of(args.gate) % 16 == 0 && alignment_of(args.up) % 16 == 0 && intermediate % kVec<T> == 0;
    if (args.y.dtype == DType::fp8_e4m3) {
      const bool wide = inputs_wide && alignment_of(args.y) % 4 == 0;
      const auto kernel = wide ? silu_mul_quantise_kernel<T, kVec<T>> : silu_mul_quantise_kernel<T, 1>;
      const LaunchShape shape{.grid = dim3(static_cast<unsigned>(tokens)),
                              .block = dim3(kThreads),
                              .smem_bytes = intermediate * 4,
                              .overlap_previous = true};
      status = launch("silu_mul", kernel, shape, stream, params);
      return;
    }
    const bool wide = inputs_wide && alignment_of(args.y) % 16 == 0;
    const auto kernel = wide ? silu_mul_kernel<T, kVec<T>> : silu_mul_kernel<T, 1>;
    const int64_t pieces = wide ? intermediate / kVec<T> : intermediate;
    const int64_t threads = std::min<int64_t>(kThreads, (pieces + 31) / 32 * 32);
    const LaunchShape shape{
        .grid = dim3(static_cast<unsigned>(tokens), static_cast<unsigned>((pieces + threads - 1) / threads)),
        .block = dim3(static_cast<unsigned>(threads)),
        .overlap_previous = true};
    status = launch("silu_mul", kernel, shape, stream, params);
  });
  return status;
}

}  // namespace vivace
