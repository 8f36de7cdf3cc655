// y = e4m3(x / scale)         one pass over memory
//
// Two numbers for a row of width W in bf16
//   bytes  3 W   read x, write y; scales are 4 bytes per 128 elements or per row
//   flops  2 W   below one flop per byte: memory is the only roof
//
// A scale that is given or made from 128 neighbours: sixteen lanes per 128 neighbours, whatever the row's width, eight of
// them per lane. A scale made from a row: a block per row, which looks twice; the second look is served by the caches.

#include <algorithm>

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/row.h"
#include "src/ops/quantize_fp8/table.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kThreads = 256;

struct Params {
  const void* x;
  fp8* y;
  float* scales;
  int64_t width, x_stride, y_stride, scale_stride;
  Fp8Scaling scaling;
};

template <class X, bool kWide>
__global__ __launch_bounds__(kThreads) void quantize_blocks_kernel(const __grid_constant__ Params p) {
  const int64_t token = blockIdx.x;
  const int64_t begin = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kOfLane;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Fp8Target target = fp8_target(p.y, p.y_stride, p.scales, p.scale_stride, p.scaling, token);
  float v[kOfLane];
  load_eight<kWide>(static_cast<const X*>(p.x) + token * p.x_stride, begin, p.width, v);
  store_quantised<kWide>(v, begin, p.width, target);
}

template <class X, bool kWide>
__global__ __launch_bounds__(kThreads) void quantize_rows_kernel(const __grid_constant__ Params p) {
  const int64_t token = blockIdx.x;
  const X* x = static_cast<const X*>(p.x) + token * p.x_stride;
  fp8* y = p.y + token * p.y_stride;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t first = int64_t{threadIdx.x} * kOfLane;
  float max = 0.f, v[kOfLane];
  for (int64_t begin = first; begin < p.width; begin += kThreads * kOfLane) {
    load_eight<kWide>(x, begin, p.width, v);
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) max = MaxMagnitude{}(max, v[j]);
  }
  const float scale = made_scale(block_reduce<MaxMagnitude>(max));
  if (threadIdx.x == 0) p.scales[token * p.scale_stride] = scale;
  for (int64_t begin = first; begin < p.width; begin += kThreads * kOfLane) {
    load_eight<kWide>(x, begin, p.width, v);
    divide(v, scale);
    store_eight<kWide>(v, y, begin, p.width);
  }
}

}  // namespace

Status quantize_fp8_cuda(const QuantizeFp8Args& args, const Stream& stream) {
  const int64_t tokens = args.x.shape[0], width = args.x.shape[1];
  const bool wide = are_wide(width, args.x, args.y);
  const Params params{.x = args.x.data,
                      .y = args.y.as<fp8>(),
                      .scales = args.scale.as<float>(),
                      .width = width,
                      .x_stride = args.x.stride[0],
                      .y_stride = args.y.stride[0],
                      .scale_stride = args.scale.stride[0],
                      .scaling = args.scaling};
  const bool by_row = args.scaling == Fp8Scaling::token;
  // A row's threads are whole warps, so that lanes which share a scale are there together.
  const int64_t pieces = (width + kOfLane - 1) / kOfLane;
  const int64_t threads = by_row ? kThreads : std::clamp<int64_t>((pieces + 31) / 32 * 32, 32, kThreads);
  const int64_t blocks = by_row ? 1 : (pieces + threads - 1) / threads;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(tokens), static_cast<unsigned>(blocks)),
                          .block = dim3(static_cast<unsigned>(threads)),
                          .overlap_previous = true};
  Status status;
  with_type<float, bf16, f16>(args.x.dtype, [&](auto x) {
    using X = decltype(x);
    const auto either = [&](auto rows, auto blocks_of) { return by_row ? rows : blocks_of; };
    const auto kernel = wide ? either(quantize_rows_kernel<X, true>, quantize_blocks_kernel<X, true>)
                             : either(quantize_rows_kernel<X, false>, quantize_blocks_kernel<X, false>);
    status = launch("quantize_fp8", kernel, shape, stream, params);
  });
  return status;
}

}  // namespace vivace
