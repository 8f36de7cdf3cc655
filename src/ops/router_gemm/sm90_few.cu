// scores = x · weightᵀ (+ bias) of few tokens        compute capability 9.0
//
// Two numbers for m tokens, n experts, hidden size k and T terms
//   bytes  2 T n k + 2 m k   the terms, whose loads need not wait for the kernel before
//   flops  2 T m n k         nothing; what counts is how long one thing waits for another
//
// A CTA has 8 experts and a share of k, a cluster all of k. A warp multiplies every eighth step of 64 straight from memory:
// the order of k inside a product of 16 is free, so a lane takes 8 bytes of a row and four lanes a whole sector. What the
// steps give is added in the order that kernel.h tells, so the number of CTAs that share k changes no bit.

#include "src/device/launch.h"
#include "src/device/mma.h"
#include "src/device/ptx.h"
#include "src/ops/router_gemm/kernel.h"
#include "src/ops/router_gemm/sm90.h"

namespace vivace::router {

namespace {

constexpr int kWarps = FewPlan::kWarps, kThreads = 32 * kWarps;
constexpr int kTokens = FewPlan::kTokens, kExperts = FewPlan::kExperts;  // of a CTA
constexpr int kPairs = kTokens * kExperts / 2;
constexpr int kSlices = kStep / 16;  // products of 16 in a step

using Pair = Sums<2>;  // scores of two experts

/// Four neighbours of a row, or zeros.
__device__ __forceinline__ uint2 load_4(const bf16* p, bool valid) {
  return valid ? *reinterpret_cast<const uint2*>(p) : make_uint2(0, 0);
}

/// What a lane holds of a step: of 8 experts, and of 16 tokens.
template <int kTerms>
struct Operands {
  uint2 w[kTerms][kSlices], x[2][kSlices];
};

template <int kTerms>
__global__ __launch_bounds__(kThreads, 2) void few_tokens_kernel(const __grid_constant__ Params p) {
  extern __shared__ Pair sums[];              // [steps][kPairs]
  __shared__ Pair received[kPieces][kPairs];  // by the cluster's first CTA
  __shared__ device::Barrier all_received;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
  const int rank = blockIdx.x, ctas = gridDim.x;
  const int steps = static_cast<int>(steps_of(p.hidden)), first = first_step(steps, rank, ctas);
  const int count = first_step(steps, rank + 1, ctas) - first;
  const int64_t expert0 = int64_t{blockIdx.y} * kExperts, token0 = int64_t{blockIdx.z} * kTokens;

  // The lane's place in a row of each operand, at the warp's next step, and what is left of k from there.
  const int64_t k0 = int64_t{first + warp} * kStep + 4 * pair;
  int k_left = static_cast<int>(min(p.hidden - k0, int64_t{count - warp} * kStep - 4 * pair));
  const bf16 *w_rows[kTerms], *x_rows[2];
#pragma unroll
  for (int t = 0; t < kTerms; ++t) w_rows[t] = p.terms[t] + (expert0 + row) * p.term_stride[t] + k0;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    x_rows[half] = static_cast<const bf16*>(p.x) + (token0 + 8 * half + row) * p.x_stride + k0;
  const auto load_step = [&](uint2(&to)[kSlices], const bf16* from, int round, bool valid) {
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      const int k = round * kWarps * kStep + 16 * i;
      to[i] = load_4(from + k, valid && k < k_left);
    }
  };
  const auto load_w = [&](Operands<kTerms>& o, int round) {
#pragma unroll
    for (int t = 0; t < kTerms; ++t) load_step(o.w[t], w_rows[t], round, expert0 + row < p.experts);
  };
  const auto load_x = [&](Operands<kTerms>& o, int round) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      load_step(o.x[half], x_rows[half], round, token0 + 8 * half + row < p.tokens);
  };
  const auto multiply = [&](const Operands<kTerms>& o, int step) {
    float acc[4] = {};
#pragma unroll
    for (int t = kTerms - 1; t >= 0; --t) {
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        const uint32_t a[4] = {o.x[0][i].x, o.x[1][i].x, o.x[0][i].y, o.x[1][i].y};
        const uint32_t b[2] = {o.w[t][i].x, o.w[t][i].y};
        device::mma_16x8x16<bf16>(acc, a, b);
      }
    }
    if (step >= count) return;
    sums[step * kPairs + lane] = {acc[0], acc[1]};
    sums[step * kPairs + lane + 32] = {acc[2], acc[3]};
  };

  if (threadIdx.x == 0) {
    device::init_barrier(&all_received, 1);
    device::publish_barriers();
    if (rank == 0) device::arrive_and_expect(&all_received, sizeof(received));
  }
  __syncwarp();  // a cluster's barrier wants whole warps
  device::cluster_arrive_without_fence();
  if (!p.weight_ready) device::wait_for_previous_kernel();
  Operands<kTerms> even, odd;  // two rounds of all warps are under way
  load_w(even, 0);
  load_w(odd, 1);
  device::wait_for_previous_kernel();
  device::let_next_kernel_start();
#pragma unroll 1
  for (int step = warp;;) {
    load_x(even, 0);
    load_x(odd, 1);
    multiply(even, step);
    multiply(odd, step + kWarps);
    step += 2 * kWarps;
    if (step >= count) break;
    k_left -= 2 * kWarps * kStep;
#pragma unroll
    for (int t = 0; t < kTerms; ++t) w_rows[t] += 2 * kWarps * kStep;
#pragma unroll
    for (int half = 0; half < 2; ++half) x_rows[half] += 2 * kWarps * kStep;
    load_w(even, 0);
    load_w(odd, 1);
  }
  __syncthreads();
  device::cluster_wait();  // the first CTA can take what it is sent

  const int pieces = kPieces / ctas;
  for (int i = threadIdx.x; i < pieces * kPairs; i += kThreads) {
    const int piece = rank * pieces + i / kPairs, at = i % kPairs;
    const int end = first_step(steps, piece + 1, kPieces) - first;
    Pair sum = {};
#pragma unroll 4
    for (int step = first_step(steps, piece, kPieces) - first; step < end; ++step)
      sum += sums[step * kPairs + at];
    device::store_async(reinterpret_cast<float2*>(&received[piece][at]), sum.v, &all_received, 0);
  }
  if (rank > 0 || threadIdx.x >= kPairs) return;
  device::wait_for_cluster_writes(&all_received, 0);
  Pair part[kPieces];
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) part[piece] = received[piece][threadIdx.x];
  add_in_pairs<kTerms>(part);
  const int64_t token = token0 + threadIdx.x / 4, expert = expert0 + threadIdx.x % 4 * 2;
  if (token >= p.tokens) return;
#pragma unroll
  for (int c = 0; c < 2; ++c)
    if (expert + c < p.experts) store_score(p, token, expert + c, part[0].v[c]);
}

}  // namespace

Status run_few_tokens(const Params& p, const FewPlan& plan, const Stream& stream) {
  const auto kernel = p.term_count == 1   ? few_tokens_kernel<1>
                      : p.term_count == 2 ? few_tokens_kernel<2>
                                          : few_tokens_kernel<3>;
  const auto tiles = [](int64_t n, int64_t of) { return static_cast<unsigned>((n + of - 1) / of); };
  const int64_t most_steps = (steps_of(p.hidden) + plan.ctas - 1) / plan.ctas;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(plan.ctas), tiles(p.experts, kExperts), tiles(p.tokens, kTokens)),
      .block = dim3(kThreads),
      .smem_bytes = most_steps * kPairs * static_cast<int64_t>(sizeof(Pair)),
      .cluster = plan.ctas,
      .overlap_previous = true};
  return launch("router_gemm", kernel, shape, stream, p);
}

}  // namespace vivace::router
