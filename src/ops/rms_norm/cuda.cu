// residual += x;  y = v / sqrt(mean(v²) + eps) · weight        one pass over memory
//
// Two numbers for a row of width H in bf16
//   bytes  8 H   read x, read residual, write residual, write y; the weight stays in the L2
//   flops  6 H   below one flop per byte: memory is the only roof
//
// A block per row. The row waits in shared memory as fp32 between the sum and the scaling, so it is read once, whatever
// its width, and what enters the norm is the unrounded sum. The order of the sum is fixed by the width.

#include <algorithm>

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/row.h"
#include "src/ops/rms_norm/huge.h"
#include "src/ops/rms_norm/table.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kThreads = 256;

template <class Out>
struct Params {
  const void *x, *weight;
  void* residual;
  Out* y;
  float* scales;
  int64_t hidden, x_stride, residual_stride, y_stride, scale_stride;
  DType weight_type;
  Fp8Scaling scaling;
  float eps;
};

template <class X, class Residual, class Out, int kVec>
__global__ __launch_bounds__(kThreads) void rms_norm_kernel(const __grid_constant__ Params<Out> p) {
  extern __shared__ float row[];
  wait_for_previous_kernel();
  const int64_t token = blockIdx.x;
  const X* x = static_cast<const X*>(p.x) + token * p.x_stride;
  Residual* residual = static_cast<Residual*>(p.residual) + token * p.residual_stride;
  float squares = 0.f;
  for (int64_t i = threadIdx.x * kVec; i < p.hidden; i += kThreads * kVec) {
    float v[kVec];
    load_floats(x + i, v);
    if (p.residual != nullptr) {
      float r[kVec];
      load_floats(residual + i, r);
#pragma unroll
      for (int j = 0; j < kVec; ++j) v[j] += r[j];
      store_floats(v, residual + i);
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      row[i + j] = v[j];
      squares += v[j] * v[j];
    }
  }
  const float mean = block_reduce<Sum, kThreads>(squares) / static_cast<float>(p.hidden);
  float scale = 1.f / sqrtf(mean + p.eps);
  if (isinf(mean)) {  // the whole block's answer
    squares = 0.f;
    for (int64_t i = threadIdx.x * kVec; i < p.hidden; i += kThreads * kVec) {
      for (int j = 0; j < kVec; ++j) squares += (row[i + j] * kTinyFactor) * (row[i + j] * kTinyFactor);
    }
    scale = kTinyFactor / sqrtf(block_reduce<Sum, kThreads>(squares) / static_cast<float>(p.hidden));
  }
  for (int64_t i = threadIdx.x * kVec; i < p.hidden; i += kThreads * kVec) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) row[i + j] *= scale * load_any(p.weight_type, p.weight, i + j);
  }
  let_next_kernel_start();
  __syncthreads();
  store_row<kThreads, kVec>(
      row, p.hidden, RowTarget<Out>{p.y + token * p.y_stride, scales_of(p.scales, p.scaling, p.scale_stride, token), p.scaling});
}

}  // namespace

Status rms_norm_cuda(const RmsNormArgs& args, const Stream& stream) {
  Status status;
  const auto run = [&](auto x, auto residual, auto out) {
    using X = decltype(x);
    using Residual = decltype(residual);
    using Out = decltype(out);
    const Params<Out> params{.x = args.x.data,
                             .weight = args.weight.data,
                             .residual = args.residual.data,
                             .y = args.y.as<Out>(),
                             .scales = args.y_scale.as<float>(),
                             .hidden = args.x.shape[1],
                             .x_stride = args.x.stride[0],
                             .residual_stride = args.residual.stride[0],
                             .y_stride = args.y.stride[0],
                             .scale_stride = args.y_scale.stride[0],
                             .weight_type = args.weight.dtype,
                             .scaling = args.y_scaling,
                             .eps = static_cast<float>(args.eps)};
    const LaunchShape shape{.grid = dim3(static_cast<unsigned>(args.x.shape[0])),
                            .block = dim3(kThreads),
                            .smem_bytes = args.x.shape[1] * 4,
                            .overlap_previous = true};
    // 16 bytes of the widest type, so that one count fits all.
    constexpr int kWidest = std::min({kVec<X>, kVec<Residual>, kVec<Out>});
    const int64_t alignment = std::min({alignment_of(args.x), alignment_of(args.y), alignment_of(args.residual)});
    const bool wide = alignment % 16 == 0 && args.x.shape[1] % kWidest == 0;
    const auto kernel = wide ? rms_norm_kernel<X, Residual, Out, kWidest> : rms_norm_kernel<X, Residual, Out, 1>;
    status = launch("rms_norm", kernel, shape, stream, params);
  };
  with_type<float, bf16>(args.x.dtype, [&](auto x) {
    with_type<float, bf16>(args.residual.present() ? args.residual.dtype : args.x.dtype, [&](auto residual) {
      with_type<float, bf16, fp8>(args.y.dtype, [&](auto out) { run(x, residual, out); });
    });
  });
  return status;
}

}  // namespace vivace
