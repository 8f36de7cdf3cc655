// residual += x;  y = v / sqrt(mean(v²) + eps) · weight        one pass over memory
//
// Two numbers for a row of width H in bf16
//   bytes  8 H   read x, read residual, write residual, write y; the weight stays in the L2. 9 H with y_fp8
//   flops  6 H   below one flop per byte: memory is the only roof
//
// A block per row, eight neighbours a thread, five times in wide rows. A thread asks for all of its values at once and keeps them in
// registers, so the row is read once, and what enters the norm is the unrounded sum. The order of the sum is fixed by the width.

#include <algorithm>
#include <type_traits>

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/row.h"
#include "src/ops/rms_norm/huge.h"
#include "src/ops/rms_norm/table.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kMostThreads = 1024, kMostPieces = kRmsNormMostHidden / (kMostThreads * kOfLane);

template <class Out>
struct Params {
  const void *x, *weight;
  void* residual;
  Out* y;
  fp8* quantised;  // null: none but y
  float* scales;
  int64_t hidden, x_stride, residual_stride, y_stride, quantised_stride, scale_stride;
  DType weight_type;
  Fp8Scaling scaling;
  float eps;
};

template <bool kWide>
__device__ __forceinline__ void load_weights(DType type, const void* weight, int64_t begin, int64_t hidden,
                                             float (&w)[kOfLane]) {
  if (type == DType::f32) {
    load_eight<kWide>(static_cast<const float*>(weight), begin, hidden, w);
  } else if (type == DType::bf16) {
    load_eight<kWide>(static_cast<const bf16*>(weight), begin, hidden, w);
  } else {
    load_eight<kWide>(static_cast<const f16*>(weight), begin, hidden, w);
  }
}

/// Of kPieces times eight values a thread.
template <class X, class Residual, class Out, int kPieces, bool kWide>
__global__ __launch_bounds__(kMostThreads) void rms_norm_kernel(const __grid_constant__ Params<Out> p) {
  constexpr bool kFp8 = std::is_same_v<Out, fp8>, kWeightsFirst = kPieces == 1;  // a matter of registers
  const bool quantises = kFp8 || p.quantised != nullptr;
  const int64_t token = blockIdx.x;
  const X* x = static_cast<const X*>(p.x) + token * p.x_stride;
  Residual* residual = static_cast<Residual*>(p.residual) + token * p.residual_stride;
  const auto begin = [](int piece) { return int64_t{threadIdx.x + piece * blockDim.x} * kOfLane; };
  let_next_kernel_start();  // it has weights to load meanwhile
  wait_for_previous_kernel();
  Fp8Target target;
  if (quantises)
    target = fp8_target(p.quantised, p.quantised_stride, p.scales, p.scale_stride, p.scaling, token);
  float v[kPieces][kOfLane], weights[kPieces][kOfLane];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    load_eight<kWide>(x, begin(i), p.hidden, v[i]);
    if (p.residual == nullptr) continue;
    float other[kOfLane];
    load_eight<kWide>(residual, begin(i), p.hidden, other);
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) v[i][j] += other[j];
  }
  if constexpr (kWeightsFirst) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      load_weights<kWide>(p.weight_type, p.weight, begin(i), p.hidden, weights[i]);
  }
  if (p.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) store_eight<kWide>(v[i], residual, begin(i), p.hidden);
  }
  const auto mean_square = [&](float factor) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) squares += (v[i][j] * factor) * (v[i][j] * factor);
    }
    return block_reduce<Sum>(squares) / static_cast<float>(p.hidden);
  };
  const float mean = mean_square(1.f);
  // The whole block has the same answer.
  const float scale = isinf(mean) ? kTinyFactor / sqrtf(mean_square(kTinyFactor)) : 1.f / sqrtf(mean + p.eps);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if constexpr (!kWeightsFirst)
      load_weights<kWide>(p.weight_type, p.weight, begin(i), p.hidden, weights[i]);
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) v[i][j] = v[i][j] * scale * weights[i][j];
    if constexpr (!kFp8) store_eight<kWide>(v[i], p.y + token * p.y_stride, begin(i), p.hidden);
  }
  if (!quantises) return;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      // What lies past the row has no part in a made scale, even where it is 0 times infinity.
      const bool inside = begin(i) + (kWide ? 0 : j) < p.hidden;
      v[i][j] = !inside ? 0.f : kFp8 ? v[i][j] : to_float(from_float<Out>(v[i][j]));
    }
  }
  if (p.scaling == Fp8Scaling::token) {
    float max = 0.f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) max = MaxMagnitude{}(max, v[i][j]);
    }
    const float made = made_scale(block_reduce<MaxMagnitude>(max));
    if (threadIdx.x == 0) *target.scales = made;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      divide(v[i], made);
      store_eight<kWide>(v[i], target.y, begin(i), p.hidden);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) store_quantised<kWide>(v[i], begin(i), p.hidden, target);
  }
}

}  // namespace

Status rms_norm_cuda(const RmsNormArgs& args, const Stream& stream) {
  Status status;
  const Tensor& quantised = args.y.dtype == DType::fp8_e4m3 ? args.y : args.y_fp8;
  const auto run = [&](auto x, auto residual, auto out) {
    using X = decltype(x);
    using Residual = decltype(residual);
    using Out = decltype(out);
    const Params<Out> params{.x = args.x.data,
                             .weight = args.weight.data,
                             .residual = args.residual.data,
                             .y = args.y.as<Out>(),
                             .quantised = quantised.as<fp8>(),
                             .scales = args.y_scale.as<float>(),
                             .hidden = args.x.shape[1],
                             .x_stride = args.x.stride[0],
                             .residual_stride = args.residual.stride[0],
                             .y_stride = args.y.stride[0],
                             .quantised_stride = quantised.stride[0],
                             .scale_stride = args.y_scale.stride[0],
                             .weight_type = args.weight.dtype,
                             .scaling = args.y_scaling,
                             .eps = static_cast<float>(args.eps)};
    const bool wide = are_wide(args.x.shape[1], args.x, args.residual, args.weight, args.y, args.y_fp8);
    const auto with_pieces = [&]<int kPieces, bool kWide>() {
      const int64_t of_warp = int64_t{32} * kOfLane * kPieces;
      const int64_t warps = (args.x.shape[1] + of_warp - 1) / of_warp;
      const LaunchShape shape{.grid = dim3(static_cast<unsigned>(args.x.shape[0])),
                              .block = dim3(static_cast<unsigned>(32 * warps)),
                              .overlap_previous = true};
      status = launch("rms_norm", rms_norm_kernel<X, Residual, Out, kPieces, kWide>, shape, stream, params);
    };
    const int64_t pieces = (args.x.shape[1] + kMostThreads * kOfLane - 1) / (kMostThreads * kOfLane);
    if (pieces == 1) {
      wide ? with_pieces.template operator()<1, true>() : with_pieces.template operator()<1, false>();
    } else {
      wide ? with_pieces.template operator()<kMostPieces, true>()
           : with_pieces.template operator()<kMostPieces, false>();
    }
  };
  with_type<float, bf16>(args.x.dtype, [&](auto x) {
    with_type<float, bf16>(args.residual.present() ? args.residual.dtype : args.x.dtype, [&](auto residual) {
      with_type<float, bf16, fp8>(args.y.dtype, [&](auto out) { run(x, residual, out); });
    });
  });
  return status;
}

}  // namespace vivace
