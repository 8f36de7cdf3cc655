// pairs of token and choice in the order of experts        one cluster of eight CTAs
//
// Two numbers for n pairs
//   bytes  4 n read and 8 n written, from and to the L2
//   steps  a latency of memory, two passes of n / 8 pairs over 32 warps, two barriers of the cluster
//
// A warp has neighbouring pairs, 32 at once: those of one expert find each other, and a table in shared memory says how many of them
// the warp had before. Sums over warps, CTAs and experts make places of these numbers, so pairs of an expert stay in the order of
// slots, whatever comes first.

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/ops/fused_moe/gpu.h"
#include "src/ops/gemm/limits.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kCtas = 8, kThreads = 1024, kWarps = kThreads / 32;
constexpr int kMostRounds = kMostSortedSlots / (kCtas * kThreads);
constexpr int kMostExperts = gemm::kMostGroups;  // a thread each
static_assert(kMostExperts <= kThreads);

/// Pairs of an expert in each of the CTA's warps, then before each; the CTA's; where the CTA's begin.
struct Tables {
  uint16_t* of_warp;        // [kWarps, experts]
  int32_t *of_cta, *begin;  // [experts]
};

__global__ __launch_bounds__(kThreads) void sort_kernel(const __grid_constant__ IndexParams p, int rounds) {
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ int all_of_warp[kWarps];
  const int experts = p.local.experts;
  const Tables t{reinterpret_cast<uint16_t*>(memory + 8 * experts), reinterpret_cast<int32_t*>(memory),
                 reinterpret_cast<int32_t*>(memory) + experts};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const auto rank = static_cast<int>(cluster_rank());
  uint16_t* const mine = t.of_warp + warp * experts;
  for (int e = lane; e < experts; e += 32) mine[e] = 0;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int first = ((rank * kWarps + warp) * rounds) * 32 + lane;
  int expert[kMostRounds], place[kMostRounds];
#pragma unroll
  for (int i = 0; i < kMostRounds; ++i) {
    const int slot = first + 32 * i;
    expert[i] = -1;
    if (i >= rounds || slot >= p.slots) continue;
    expert[i] = p.local.of(p.ids[int64_t{slot / p.top_k} * p.ids_stride + slot % p.top_k]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kMostRounds; ++i) {
    if (i >= rounds) break;
    // Who has the same expert, bit by bit; who has none counts as one more.
    const int own = expert[i] >= 0 ? expert[i] : experts;
    uint32_t alike = 0xffffffffu;
    for (int bit = 1; bit <= experts; bit *= 2) {
      const uint32_t set = __ballot_sync(0xffffffffu, (own & bit) != 0);
      alike &= (own & bit) != 0 ? set : ~set;
    }
    const int lower = __popc(alike & ((1u << lane) - 1));
    const int before = expert[i] >= 0 ? mine[expert[i]] : 0;
    place[i] = before + lower;
    __syncwarp();
    if (expert[i] >= 0 && lower == 0) mine[expert[i]] = static_cast<uint16_t>(before + __popc(alike));
    __syncwarp();
  }
  __syncthreads();
  if (thread < experts) {
    constexpr int kAtOnce = 8;
    int sum = 0;
    for (uint16_t* of = t.of_warp + thread; of < t.of_warp + kWarps * experts; of += kAtOnce * experts) {
      int count[kAtOnce];
#pragma unroll
      for (int w = 0; w < kAtOnce; ++w) count[w] = of[w * experts];
#pragma unroll
      for (int w = 0; w < kAtOnce; ++w) {
        of[w * experts] = static_cast<uint16_t>(sum);
        sum += count[w];
      }
    }
    t.of_cta[thread] = sum;
  }
  __syncwarp();
  cluster_barrier();
  int all = 0, before = 0;
  if (thread < experts) {
#pragma unroll
    for (int c = 0; c < kCtas; ++c) {
      const int count = *in_cta(t.of_cta + thread, static_cast<uint32_t>(c));
      all += count;
      before += c < rank ? count : 0;
    }
  }
  __syncwarp();
  cluster_arrive();  // what is of others has been read
  int inclusive = all;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  if (lane == 31) all_of_warp[warp] = inclusive;
  __syncthreads();
  const int start = inclusive - all + __reduce_add_sync(0xffffffffu, lane < warp ? all_of_warp[lane] : 0);
  if (thread < experts) {
    t.begin[thread] = start + before;
    if (rank == 0) p.start[thread] = start, p.rows[thread] = all;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMostRounds; ++i) {
    if (i >= rounds || expert[i] < 0) continue;
    const int slot = first + 32 * i, row = t.begin[expert[i]] + mine[expert[i]] + place[i];
    p.token_of_row[row] = slot / p.top_k;
    p.row_of_slot[slot] = row;
  }
  __syncwarp();
  cluster_wait();
}

}  // namespace

Status sort_sm90(const IndexParams& index, const Stream& stream) {
  constexpr int kAtOnce = kCtas * kThreads;
  const int rounds = (index.slots + kAtOnce - 1) / kAtOnce;
  const LaunchShape shape{.grid = dim3(kCtas),
                          .block = dim3(kThreads),
                          .smem_bytes = index.local.experts * int64_t{2 * kWarps + 8},
                          .cluster = kCtas,
                          .overlap_previous = true};
  return launch("fused_moe sort", sort_kernel, shape, stream, index, rounds);
}

}  // namespace vivace
