// scores = x · weightᵀ (+ bias)         weight as bf16 terms, tensor cores, compensated fp32 sums
//
// Two numbers for m tokens, n experts, hidden size k and T terms
//   bytes  2 T n k + 2 m k   the terms, in the L2 from the second layer on, and x once per tile of experts
//   flops  2 T m n k         a decode step is bound by the launch, a prompt by the L2 and the additions
//
// A tensor core truncates: 16 products err by at most 10 · 2^-24 of the sum of |x w| when they start from zero. So every
// 32 of k become one fp32 number per score (two fresh sums of 16 of the first term, the other terms at their scale),
// and those are added by TwoSum, whose error does not grow with k: at most 14 · 2^-24 in all.
//
// k is cut into 8 segments, a warp each, and segments are added in order. Tiles for few and for many tokens do the same
// for every score, so a row does not depend on the rows beside it.

#include <algorithm>

#include "src/device/launch.h"
#include "src/device/mma.h"
#include "src/device/ptx.h"
#include "src/device/reduce.h"
#include "src/ops/router_gemm/kernel.h"

namespace vivace {

namespace {

using namespace device;
using router::Params;
using router::params_of;
using router::store_score;

constexpr int kSegments = 8, kThreads = 32 * kSegments;
constexpr int kStep = 32;  // of k: 16 bytes of a row for each of 4 lanes

/// sum + error is a running sum with the rounding errors of its additions.
__device__ __forceinline__ void add_compensated(float& sum, float& error, float v) {
  const float next = __fadd_rn(sum, v);
  const float kept = __fsub_rn(next, sum);
  error = __fadd_rn(error, __fadd_rn(__fsub_rn(sum, __fsub_rn(next, kept)), __fsub_rn(v, kept)));
  sum = next;
}

__device__ __forceinline__ float corrected(float sum, float error) {
  const float exact = sum + error;
  return exact == exact ? exact : sum;  // an infinite sum has no error term
}

/// Eight neighbours of a row, or zeros.
__device__ __forceinline__ uint4 load_8(const bf16* row, int64_t k, bool valid) {
  return valid ? *reinterpret_cast<const uint4*>(row + k) : make_uint4(0, 0, 0, 0);
}

/// A lane's 16 bytes are columns 8 pair .. 8 pair + 7 of a step. Its first four stand for columns 2 pair, 2 pair + 1,
/// 2 pair + 8 and 2 pair + 9 of one product of 16, its last four for those of another: an order that x and the weight
/// share.
template <int kTerms, int kMBlocks, int kNBlocks>
__global__ __launch_bounds__(kThreads, 2) void router_mma_kernel(const __grid_constant__ Params p) {
  constexpr int kM = 16 * kMBlocks, kN = 8 * kNBlocks;
  extern __shared__ float partial[];  // [segments][sum, error][kM][kN]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
  const int64_t token0 = int64_t{blockIdx.x} * kM, expert0 = int64_t{blockIdx.y} * kN;
  const int64_t steps = (p.hidden + kStep - 1) / kStep, of_segment = (steps + kSegments - 1) / kSegments;
  const int64_t first = warp * of_segment, last = min(first + of_segment, steps);
  wait_for_previous_kernel();

  float sum[kMBlocks][kNBlocks][4] = {}, error[kMBlocks][kNBlocks][4] = {};
  // The loads of some steps are under way together: a warp has few steps, and each waits for memory.
#pragma unroll(kMBlocks* kNBlocks == 1 ? 4 : 1)
  for (int64_t step = first; step < last; ++step) {
    const int64_t k = step * kStep + 8 * pair;
    const bool inside = k < p.hidden;
    uint4 x[kMBlocks][2];
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t token = token0 + 16 * i + 8 * half + row;
        x[i][half] =
            load_8(static_cast<const bf16*>(p.x) + token * p.x_stride, k, inside && token < p.tokens);
      }
    }
#pragma unroll
    for (int j = 0; j < kNBlocks; ++j) {
      const int64_t expert = expert0 + 8 * j + row;
      uint4 w[kTerms];
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        w[t] = load_8(p.terms[t] + expert * p.term_stride[t], k, inside && expert < p.experts);
      }
#pragma unroll
      for (int i = 0; i < kMBlocks; ++i) {
        const uint32_t a0[4] = {x[i][0].x, x[i][1].x, x[i][0].y, x[i][1].y};
        const uint32_t a1[4] = {x[i][0].z, x[i][1].z, x[i][0].w, x[i][1].w};
        float v0[4] = {}, v1[4] = {};
        const uint32_t b0[2] = {w[0].x, w[0].y}, b1[2] = {w[0].z, w[0].w};
        mma_16x8x16<bf16>(v0, a0, b0);
        mma_16x8x16<bf16>(v1, a1, b1);
#pragma unroll
        for (int c = 0; c < 4; ++c) v0[c] += v1[c];
#pragma unroll
        for (int t = 1; t < kTerms; ++t) {
          float low[4] = {};
          const uint32_t c0[2] = {w[t].x, w[t].y}, c1[2] = {w[t].z, w[t].w};
          mma_16x8x16<bf16>(low, a0, c0);
          mma_16x8x16<bf16>(low, a1, c1);
#pragma unroll
          for (int c = 0; c < 4; ++c) v0[c] = fmaf(low[c], p.term_scale[t], v0[c]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) add_compensated(sum[i][j][c], error[i][j][c], v0[c]);
      }
    }
  }

  constexpr int kTile = kM * kN;
  float* mine = partial + warp * 2 * kTile;
#pragma unroll
  for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < kNBlocks; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int at = (16 * i + 8 * (c / 2) + row) * kN + 8 * j + 2 * pair + c % 2;
        mine[at] = sum[i][j][c];
        mine[kTile + at] = error[i][j][c];
      }
    }
  }
  let_next_kernel_start();
  __syncthreads();
  for (int at = threadIdx.x; at < kTile; at += kThreads) {
    const int64_t token = token0 + at / kN, expert = expert0 + at % kN;
    if (token >= p.tokens || expert >= p.experts) continue;
    float total = 0.f, missed = 0.f;
    for (int s = 0; s < kSegments; ++s) {
      add_compensated(total, missed, partial[s * 2 * kTile + at]);
      missed += partial[(s * 2 + 1) * kTile + at];
    }
    store_score(p, token, expert, corrected(total, missed));
  }
}

constexpr int kTokensAtOnce = 4;  // share one read of the weight
constexpr int kBlock = 8;         // products of a lane between two compensated additions

/// A warp per expert and a few tokens: any alignment, x in fp32, terms added first.
template <class X>
__global__ __launch_bounds__(kThreads) void router_fma_kernel(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32;
  const int64_t expert = int64_t{blockIdx.x} * kSegments + threadIdx.x / 32;
  const int64_t token0 = int64_t{blockIdx.y} * kTokensAtOnce;
  wait_for_previous_kernel();
  if (expert >= p.experts) return;
  float sum[kTokensAtOnce] = {}, error[kTokensAtOnce] = {};
  for (int64_t begin = 0; begin < p.hidden; begin += 32 * kBlock) {
    float part[kTokensAtOnce] = {};
#pragma unroll
    for (int b = 0; b < kBlock; ++b) {
      const int64_t k = begin + 32 * b + lane;
      if (k >= p.hidden) continue;
      float w = 0.f;
      for (int t = p.term_count - 1; t >= 0; --t) {
        w = fmaf(to_float(p.terms[t][expert * p.term_stride[t] + k]), p.term_scale[t], w);
      }
#pragma unroll
      for (int i = 0; i < kTokensAtOnce; ++i) {
        if (token0 + i >= p.tokens) continue;
        part[i] = fmaf(to_float(static_cast<const X*>(p.x)[(token0 + i) * p.x_stride + k]), w, part[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) add_compensated(sum[i], error[i], part[i]);
  }
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < kTokensAtOnce; ++i) {
    const float total = warp_reduce<Sum>(sum[i]), missed = warp_reduce<Sum>(error[i]);
    if (lane == 0 && token0 + i < p.tokens) store_score(p, token0 + i, expert, corrected(total, missed));
  }
}

template <int kTerms, int kMBlocks, int kNBlocks>
Status run_mma(const Params& p, const Stream& stream) {
  constexpr int kM = 16 * kMBlocks, kN = 8 * kNBlocks;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((p.tokens + kM - 1) / kM),
                                       static_cast<unsigned>((p.experts + kN - 1) / kN)),
                          .block = dim3(kThreads),
                          .smem_bytes = int64_t{kSegments} * 2 * kM * kN * 4,
                          .overlap_previous = true};
  return launch("router_gemm", router_mma_kernel<kTerms, kMBlocks, kNBlocks>, shape, stream, p);
}

template <int kTerms>
Status run_mma(const Params& p, const Stream& stream) {
  // Wide tiles read less from the L2, narrow ones fill more SMs.
  constexpr int64_t kEnoughBlocks = 256;
  const int64_t wide_blocks = (p.tokens + 31) / 32 * ((p.experts + 23) / 24);
  return wide_blocks < kEnoughBlocks ? run_mma<kTerms, 1, 1>(p, stream) : run_mma<kTerms, 2, 3>(p, stream);
}

}  // namespace

Status router_gemm_cuda_mma(const RouterGemmArgs& args, const Stream& stream) {
  const Params p = params_of(args);
  if (p.term_count == 1) return run_mma<1>(p, stream);
  return p.term_count == 2 ? run_mma<2>(p, stream) : run_mma<3>(p, stream);
}

Status router_gemm_cuda_fma(const RouterGemmArgs& args, const Stream& stream) {
  const Params p = params_of(args);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((p.experts + kSegments - 1) / kSegments),
                                       static_cast<unsigned>((p.tokens + kTokensAtOnce - 1) / kTokensAtOnce)),
                          .block = dim3(kThreads),
                          .overlap_previous = true};
  const auto kernel = args.x.dtype == DType::f32 ? router_fma_kernel<float> : router_fma_kernel<bf16>;
  return launch("router_gemm", kernel, shape, stream, p);
}

}  // namespace vivace
