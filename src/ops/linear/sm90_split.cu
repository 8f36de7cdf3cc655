// y_p = x · weight_pᵀ (+ bias_p) of tens of tokens        compute capability 9.0a
//
// Two numbers for m tokens, n outputs of all parts, inner size k
//   bytes  n k + m k + m n   elements; the weights' need not wait for the kernel before
//   flops  2 m n k           nothing up to about a hundred tokens
//
// A tile is 64 outputs of one part for all tokens, and a cluster of CTAs shares its k, so that tiles of a few hundred
// outputs still ask all SMs for bytes. A CTA has all it needs, or several stages of 128 bytes of k, under way at once;
// weights lie along M of a warp group's products, tokens along N. Each CTA then hands every other one that one's rows
// of its sums, and adds up what it was handed, in the order of k.

#include <algorithm>
#include <bit>

#include "src/core/error.h"
#include "src/device/launch.h"
#include "src/device/mma.h"
#include "src/device/ptx.h"
#include "src/device/wgmma.h"
#include "src/ops/linear/sm90_parts.h"
#include "src/ops/linear/table.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kThreads = 128;                     // a warp group
constexpr int kOutputs = 64;                      // of a tile
constexpr int kLine = 128, kChunks = kLine / 16;  // bytes of k in a stage, and its copies of 16
constexpr int kRowsAtOnce = kThreads / kChunks;   // that all threads copy a line of
constexpr int kMaxCtas = 8;                       // of a cluster

/// Of kTokens tokens.
template <int kTokens>
struct Split {
  static constexpr int kStageBytes = (kOutputs + kTokens) * kLine;
  // That leave room for a second CTA.
  static constexpr int kStages = kTokens <= 32 ? 8 : kTokens <= 64 ? 5 : 3;
  // Floats from one row of handed sums to the next: their readers' banks differ.
  static constexpr int kRow = kTokens + 4;
  static constexpr int kHandedBytes = kOutputs * kRow * static_cast<int>(sizeof(float));
};

template <class E, bool kBlockScales, int kTokens>
__global__ __launch_bounds__(kThreads, 2) void split_kernel(const __grid_constant__ PartsOnGpu p) {
  using S = Split<kTokens>;
  constexpr int kSums = kTokens / 2;  // of a thread
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Barrier handed_over;
  // Of a stage: the tokens', the weight's.
  __shared__ float scales[kBlockScales ? S::kStages : 1][kTokens + 1];
  float* const handed = reinterpret_cast<float*>(shared);
  uint8_t* const stages = shared + (S::kHandedBytes + 1023) / 1024 * 1024;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int ctas = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x),
            tile = static_cast<int>(blockIdx.y);
  const PartOnGpu& part = part_of(p, tile);
  const int output0 = (tile - part.first_tile) * kOutputs;
  const int lines = (p.k_bytes + kLine - 1) / kLine, log_ctas = __ffs(ctas) - 1;
  const int first_line = lines * rank >> log_ctas, share = (lines * (rank + 1) >> log_ctas) - first_line;
  if (threadIdx.x == 0) {
    init_barrier(&handed_over, 1);
    publish_barriers();
    arrive_and_expect_of_cluster(&handed_over, kOutputs * kTokens * sizeof(float));
  }
  if (ctas > 1) cluster_arrive();

  const int copy_row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
  const auto load_rows = [&](uint8_t* to, const uint8_t* rows, int64_t stride, int count, int valid,
                             int line) {
    const int at = (first_line + line) * kLine + chunk * 16;
    const bool inside = at < p.k_bytes;
#pragma unroll
    for (int row = 0; row < count; row += kRowsAtOnce) {
      const bool there = inside && row + copy_row < valid;
      copy_16_async(to + swizzled<kLine>(row + copy_row, chunk),
                    there ? rows + (row + copy_row) * stride + at : rows, there);
    }
  };
  const auto load_weight = [&](int line) {
    load_rows(stages + line % S::kStages * S::kStageBytes, part.weight + output0 * part.weight_stride,
              part.weight_stride, kOutputs, part.n - output0, line);
  };
  const auto load_x = [&](int line) {
    load_rows(stages + line % S::kStages * S::kStageBytes + kOutputs * kLine, p.x, p.x_stride, kTokens,
              p.tokens, line);
    if constexpr (kBlockScales) {
      float* const to = scales[line % S::kStages];
      const int block = first_line + line, token = threadIdx.x;
      if (token < kTokens) {
        const bool there = token < p.tokens;
        copy_4_async(to + token, p.x_scale + (there ? token * p.x_scale_stride + block : 0), there);
      }
      if (threadIdx.x == 0)
        copy_4_async(to + kTokens, part.scale + output0 / kScaleBlock * part.scale_stride + block);
    }
  };
  if (!p.weight_ready) wait_for_previous_kernel();
#pragma unroll 1
  for (int line = 0; line < min(share, S::kStages); ++line) load_weight(line);
  wait_for_previous_kernel();
  let_next_kernel_start();
#pragma unroll 1
  for (int line = 0; line < S::kStages; ++line) {
    if (line < share) load_x(line);
    commit_copies();  // an empty group keeps the count
  }
  float factor = 1.f;  // of all sums
  if constexpr (sizeof(E) == 1 && !kBlockScales)
    factor = *part.scale * (p.x_scale_stride == 0 ? *p.x_scale : 1.f);

  float sums[kSums] = {};
#pragma unroll 1
  for (int line = 0; line < share; ++line) {
    wait_for_copies<S::kStages - 1>();
    publish_to_async_proxy();
    __syncthreads();
    const uint8_t* const weight = stages + line % S::kStages * S::kStageBytes;
    const auto multiply = [&](float(&d)[kSums], bool fresh) {
      begin_products();
#pragma unroll
      for (int k = 0; k < kLine; k += 32) {
        Wgmma<E, kTokens>::multiply(d, swizzled_operand(weight + k),
                                    swizzled_operand(weight + kOutputs * kLine + k), k > 0 || !fresh);
      }
      commit_products();
      wait_for_products<0>();
      hold_products(d);
    };
    if constexpr (sizeof(E) == 2) {
      multiply(sums, line == 0);
    } else {  // sums of products in fp8 keep 13 bits: no more than a line of them before fp32
      float of_line[kSums];
      multiply(of_line, true);
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        if constexpr (kBlockScales) {
          const float* const scale = scales[line % S::kStages];
          sums[i] = fmaf(of_line[i], scale[i / 4 * 8 + lane % 4 * 2 + i % 2] * scale[kTokens], sums[i]);
        } else {
          sums[i] += of_line[i];
        }
      }
    }
    if (line + S::kStages < share) {
      __syncthreads();  // all have read the stage
      load_weight(line + S::kStages);
      load_x(line + S::kStages);
    }
    commit_copies();
  }

  // Row r of a tile belongs to CTA r / (64 / ctas), where it lies behind those of the CTAs before.
  const int rows = kOutputs >> log_ctas;
  if (ctas > 1) cluster_wait();  // the others' barriers are there
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + half * 8 + lane / 4, owner = row >> (6 - log_ctas);
    static_assert(kOutputs == 1 << 6);
    float* const to = handed + (rank * rows + (row & (rows - 1))) * S::kRow + lane % 4 * 2;
    const uint32_t there = address_in_cta(to, owner), barrier = address_in_cta(&handed_over, owner);
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      const float pair[2] = {sums[4 * i + 2 * half], sums[4 * i + 2 * half + 1]};
      if (ctas > 1) {
        store_async(there + i * 8 * static_cast<int>(sizeof(float)), pair, barrier);
      } else {
        *reinterpret_cast<float2*>(to + 8 * i) = make_float2(pair[0], pair[1]);
      }
    }
  }
  if (ctas > 1) {
    wait_for_cluster_writes(&handed_over, 0);
  } else {
    __syncthreads();
  }
  // A thread has an output, and some tokens at a time.
  constexpr int kAtOnce = 4;
  const int row = threadIdx.x & (rows - 1), output = output0 + rank * rows + row, apart = kThreads / rows;
  if (output >= part.n) return;
  for (int first = threadIdx.x / rows; first < p.tokens; first += kAtOnce * apart) {
    float sum[kAtOnce] = {};
    for (int cta = 0; cta < ctas; ++cta) {
      const float* const from = handed + (cta * rows + row) * S::kRow;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum[i] += from[min(first + i * apart, kTokens - 1)];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = first + i * apart;
      if (token >= p.tokens) break;
      if constexpr (sizeof(E) == 1 && !kBlockScales)
        sum[i] *= p.x_scale_stride == 0 ? factor : factor * p.x_scale[token * p.x_scale_stride];
      store_output(part, token, output, sum[i]);
    }
  }
}

/// CTAs that share k, if each has a line: a power of two. More in all than one and a half an SM of the GPUs this is for cost more by
/// handing over than they bring.
int ctas_of(const PartsOnGpu& p) {
  constexpr unsigned kMostInAll = 208;
  const auto lines = static_cast<unsigned>((p.k_bytes + kLine - 1) / kLine);
  const unsigned wanted = kMostInAll / static_cast<unsigned>(std::max(p.tiles, 1));
  return static_cast<int>(std::bit_floor(std::clamp(std::min(wanted, lines), 1u, unsigned{kMaxCtas})));
}

template <class E, bool kBlockScales, int kTokens>
Status run(const PartsOnGpu& p, const Stream& stream) {
  using S = Split<kTokens>;
  const int ctas = ctas_of(p), lines = (p.k_bytes + kLine - 1) / kLine;
  const int stages = std::min(S::kStages, (lines + ctas - 1) / ctas);
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(p.tiles)),
      .block = dim3(kThreads),
      .smem_bytes = (S::kHandedBytes + 1023) / 1024 * 1024 + int64_t{stages} * S::kStageBytes,
      .cluster = ctas,
      .overlap_previous = true};
  return launch("linear", split_kernel<E, kBlockScales, kTokens>, shape, stream, p);
}

template <class E, bool kBlockScales>
Status run(const PartsOnGpu& p, const Stream& stream) {
  if (p.tokens <= 16) return run<E, kBlockScales, 16>(p, stream);
  if (p.tokens <= 32) return run<E, kBlockScales, 32>(p, stream);
  if (p.tokens <= 64) return run<E, kBlockScales, 64>(p, stream);
  return run<E, kBlockScales, 128>(p, stream);
}

}  // namespace

Status linear_sm90_split(const LinearArgs& args, const Stream& stream) {
  const PartsOnGpu p = parts_on_gpu(args, kOutputs);
  if (args.x.dtype == DType::bf16) return run<bf16, false>(p, stream);
  return p.block_scales ? run<fp8, true>(p, stream) : run<fp8, false>(p, stream);
}

}  // namespace vivace
