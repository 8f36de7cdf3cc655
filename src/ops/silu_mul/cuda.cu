// y = silu(gate) · up         one pass over memory
//
// Two numbers for a row of width I in bf16
//   bytes  6 I   read gate and up, write y (5 I with fp8 y)
//   flops  4 I   an exponential and a division among them; below one flop per byte: memory is the only roof
//
// Eight values of a row per lane; sixteen lanes make the scale of 128 neighbours. An fp8 y may need the largest value of its
// row: then a block keeps the row in shared memory as fp32.

#include <algorithm>
#include <type_traits>

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
  // The product is NaN at -inf, where the limit is 0. A division checks its operands and
  // goes a long way around for zeros; the reciprocal is rounded correctly without.
  const float silu = gate == -INFINITY ? -0.f : gate * __frcp_rn(1.f + expf(-gate));
  return silu * up;
}

/// Eight values of a row, those past its end 0.
template <bool kWide, class T>
__device__ __forceinline__ void silu_mul_eight(const T* gate, const T* up, int64_t begin, const Params& p,
                                               float (&v)[kOfLane]) {
  float u[kOfLane];
  load_eight<kWide>(gate, begin, p.intermediate, v);
  load_eight<kWide>(up, begin, p.intermediate, u);
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) v[j] = silu_mul_one(v[j], u[j]);
}

template <class T, class Out, bool kWide>
__global__ __launch_bounds__(kThreads) void silu_mul_kernel(const __grid_constant__ Params p) {
  const int64_t token = blockIdx.x;
  const int64_t begin = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kOfLane;
  let_next_kernel_start();
  wait_for_previous_kernel();
  Fp8Target target;
  if constexpr (std::is_same_v<Out, fp8>) {
    target = fp8_target(static_cast<fp8*>(p.y), p.y_stride, p.scales, p.scale_stride, p.scaling, token);
  }
  float v[kOfLane];
  silu_mul_eight<kWide>(static_cast<const T*>(p.gate) + token * p.gate_stride,
                        static_cast<const T*>(p.up) + token * p.up_stride, begin, p, v);
  if constexpr (std::is_same_v<Out, fp8>) {
    store_quantised<kWide>(v, begin, p.intermediate, target);
  } else {
    store_eight<kWide>(v, static_cast<Out*>(p.y) + token * p.y_stride, begin, p.intermediate);
  }
}

/// To fp8 with a scale made of the whole row.
template <class T, bool kWide>
__global__ __launch_bounds__(kThreads) void silu_mul_row_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) float row[];
  const int64_t token = blockIdx.x, stride = kThreads * kOfLane;
  const T* gate = static_cast<const T*>(p.gate) + token * p.gate_stride;
  const T* up = static_cast<const T*>(p.up) + token * p.up_stride;
  fp8* const y = static_cast<fp8*>(p.y) + token * p.y_stride;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t first = int64_t{threadIdx.x} * kOfLane;
  float max = 0.f, v[kOfLane];
  for (int64_t begin = first; begin < p.intermediate; begin += stride) {
    silu_mul_eight<kWide>(gate, up, begin, p, v);
    store_eight<kWide>(v, row, begin, p.intermediate);
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) max = MaxMagnitude{}(max, v[j]);
  }
  const float scale = made_scale(block_reduce<MaxMagnitude>(max));
  if (threadIdx.x == 0) p.scales[token * p.scale_stride] = scale;
  for (int64_t begin = first; begin < p.intermediate; begin += stride) {
    load_eight<kWide>(row, begin, p.intermediate, v);
    divide(v, scale);
    store_eight<kWide>(v, y, begin, p.intermediate);
  }
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
  const bool wide = are_wide(intermediate, args.gate, args.up, args.y);
  const bool fp8_y = args.y.dtype == DType::fp8_e4m3, by_row = fp8_y && args.y_scaling == Fp8Scaling::token;
  // A row's threads are whole warps, so that lanes which share a scale are there together.
  const int64_t pieces = (intermediate + kOfLane - 1) / kOfLane;
  const int64_t threads = by_row ? kThreads : std::clamp<int64_t>((pieces + 31) / 32 * 32, 32, kThreads);
  const int64_t blocks = by_row ? 1 : (pieces + threads - 1) / threads;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(tokens), static_cast<unsigned>(blocks)),
                          .block = dim3(static_cast<unsigned>(threads)),
                          .smem_bytes = by_row ? intermediate * 4 : 0,
                          .overlap_previous = true};
  Status status;
  with_type<float, bf16>(args.gate.dtype, [&](auto type) {
    using T = decltype(type);
    const auto run = [&]<bool kWide>() {
      const auto kernel = by_row  ? silu_mul_row_kernel<T, kWide>
                          : fp8_y ? silu_mul_kernel<T, fp8, kWide>
                                  : silu_mul_kernel<T, T, kWide>;
      status = launch("silu_mul", kernel, shape, stream, params);
    };
    wide ? run.template operator()<true>() : run.template operator()<false>();
  });
  return status;
}

}  // namespace vivace
