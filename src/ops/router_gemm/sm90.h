#pragma once

// The two kernels of the rows for compute capability 9.0.

#include "src/ops/router_gemm/kernel.h"
#include "src/ops/router_gemm/sm90_plan.h"
#include "vivace/stream.h"

namespace vivace::router {

Status run_few_tokens(const Params& p, const FewPlan& plan, const Stream& stream);
Status run_tiles(const Params& p, const TilePlan& plan, const Stream& stream);

// ---- the order of sums
//
// k is walked in steps of kStep. The products of a step are added on tensor cores, from zero and the smallest term first;
// steps are added in fp32, in order; and where k is cut in pieces, the pieces are added in pairs. sm90.tiles adds up totals too
// where a weight has three terms.

/// Where piece `piece` of `pieces` begins.
__host__ __device__ inline int first_step(int steps, int piece, int pieces) {
  return steps * piece / pieces;
}

/// Sums of neighbouring scores, loaded and stored together.
template <int kCount>
struct alignas(4 * kCount) Sums {
  float v[kCount];
  __device__ __forceinline__ void operator+=(const Sums& other) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] += other.v[i];
  }
};

/// What tensor cores drop of a step on average, as a share of it: they truncate.
inline constexpr float kDropped = 0x1p-24f;

/// v[0] becomes the sum of the parts, a power of two; some after the first half may be zeros. The last addition gives back
/// what was dropped, but for a weight of one term: its sums of small whole numbers are exact and stay so.
template <int kTerms, int kParts, int kCount>
__device__ __forceinline__ void add_in_pairs(Sums<kCount> (&v)[kParts]) {
#pragma unroll
  for (int width = 1; width < kParts; width *= 2) {
#pragma unroll
    for (int i = 0; i + width < kParts; i += 2 * width) {
      if (kTerms > 1 && 2 * width == kParts) {
#pragma unroll
        for (int c = 0; c < kCount; ++c)
          v[width].v[c] = fmaf(kDropped, v[0].v[c] + v[width].v[c], v[width].v[c]);
      }
      v[i] += v[i + width];
    }
  }
}

}  // namespace vivace::router
