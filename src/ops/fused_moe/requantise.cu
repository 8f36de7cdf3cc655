// wide in blocks of 128 to fp8 with made scales        between the products of fp8 with blocks of scales
//
// Two numbers per value
//   bytes  4 + 1     read and written, mostly in the L2
//   flops  a few     the launch is what it costs in a decode step

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/row.h"
#include "src/ops/fused_moe/gpu.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct QuantiseParams {
  const float* wide;
  fp8* hidden;
  float* scales;
  int64_t stride, intermediate, blocks, block_offset;
  const int32_t *last_start, *last_rows;  // null: `rows` rows
  int64_t rows;
  bool next_starts_early;
};

/// A warp per row and block. Rows past the last expert's are not there.
__global__ __launch_bounds__(kThreads) void quantise_kernel(const __grid_constant__ QuantiseParams p) {
  if (p.next_starts_early) let_next_kernel_start();
  wait_for_previous_kernel();
  if (!p.next_starts_early) let_next_kernel_start();
  const int64_t task = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t row = task / p.blocks, block = task % p.blocks;
  const int64_t rows = p.last_start != nullptr ? int64_t{*p.last_start} + *p.last_rows : p.rows;
  if (row >= rows) return;
  const int64_t begin = max(int64_t{0}, block * kScaleBlock - p.block_offset);
  const int64_t end = min(p.intermediate, (block + 1) * kScaleBlock - p.block_offset);
  const float* wide = p.wide + row * p.stride;
  float v[kScaleBlock / 32], largest = 0.f;
#pragma unroll
  for (int i = 0; i < kScaleBlock / 32; ++i) {
    const int64_t column = begin + lane + 32 * i;
    v[i] = column < end ? wide[column] : 0.f;
    largest = MaxMagnitude{}(largest, v[i]);
  }
  const float scale = made_scale(warp_reduce<MaxMagnitude>(largest));
  if (lane == 0) p.scales[row * p.blocks + block] = scale;
  divide(v, scale);
#pragma unroll
  for (int i = 0; i < kScaleBlock / 32; ++i) {
    const int64_t column = begin + lane + 32 * i;
    if (column < end) p.hidden[row * p.stride + column] = from_float<fp8>(v[i]);
  }
}

}  // namespace

int64_t requantise_ctas(int64_t rows, int64_t blocks) {
  return (rows * blocks + kWarps - 1) / kWarps;
}

Status requantise(const Scratch::Part& part, int64_t rows, int64_t intermediate, int64_t block_offset,
                  const LastRow& last, const Stream& stream, bool next_starts_early) {
  QuantiseParams q;
  q.wide = part.wide;
  q.hidden = static_cast<fp8*>(part.hidden);
  q.scales = part.scales;
  q.stride = part.stride;
  q.intermediate = intermediate;
  q.blocks = scale_blocks(block_offset + intermediate);
  q.block_offset = block_offset;
  q.last_start = last.start;
  q.last_rows = last.rows;
  q.rows = rows;
  q.next_starts_early = next_starts_early;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(requantise_ctas(rows, q.blocks))),
                          .block = dim3(kThreads),
                          .overlap_previous = true};
  return launch("fused_moe requantisation", quantise_kernel, shape, stream, q);
}

}  // namespace vivace
