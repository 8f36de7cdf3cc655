#pragma once

// One look at a row: of each segment its maximum and the sum of its weights below that, and notes of what its pieces hold.

#include "src/device/reduce.h"
#include "src/ops/sampler/logits.h"

namespace vivace::device::select {

constexpr int kPieceLanes = 4;             // lanes that share a note
constexpr int kPieces = 32 / kPieceLanes;  // notes of a segment

/// What one look leaves of each segment of a row.
struct SegmentStats {
  float max[kMostSegments];                 // NaN when one was seen
  float sum[kMostSegments];                 // of weights below `max`
  uint32_t notes[kMostSegments * kPieces];  // keys of the largest logits of its pieces
};

/// The larger; a NaN wins.
struct MaxOrNan {
  __device__ __forceinline__ float operator()(float a, float b) const {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
  }
};

__device__ __forceinline__ float max_of(const float (&v)[kBatch][kGroup]) {
  float max[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    max[b] = v[b][0];
#pragma unroll
    for (int j = 1; j < kGroup; ++j) max[b] = MaxOrNan{}(max[b], v[b][j]);
  }
  return MaxOrNan{}(MaxOrNan{}(max[0], max[1]), MaxOrNan{}(max[2], max[3]));
}

/// A segment while its warp looks at it.
struct Running {
  float max = -INFINITY;  // of the warp
  float own = -INFINITY;  // of this lane
  float sum = 0.f;        // of this lane

  /// The next chunk; no sum is kept when `scale` is 0.
  __device__ __forceinline__ void add(const float (&v)[kBatch][kGroup], float scale) {
    const float before = max;
    own = MaxOrNan{}(own, max_of(v));
    max = value_of(__reduce_max_sync(kAllLanes, key_of(own)));  // the key of NaN is above all others
    if (!(scale > 0.f) || max == -INFINITY) return;
    if (max == INFINITY) {
      if (before != INFINITY) sum = 0.f;
#pragma unroll
      for (int i = 0; i < kBatch * kGroup; ++i) sum += v[i / kGroup][i % kGroup] == INFINITY ? 1.f : 0.f;
      return;
    }
    if (before > -INFINITY) sum *= exp2_of((before - max) * scale);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float group = 0.f;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) group += exp2_of((v[b][j] - max) * scale);
      sum += group;
    }
  }

  __device__ __forceinline__ void store(SegmentStats& stats, int segment) const {
    const float all = warp_reduce<Sum>(sum), piece = warp_reduce<MaxOrNan, kPieceLanes>(own);
    if (lane_id() % kPieceLanes == 0) {
      stats.notes[segment * kPieces + lane_id() / kPieceLanes] = key_of(piece);
    }
    if (lane_id() == 0) stats.max[segment] = max, stats.sum[segment] = all;
  }
};

/// Looks at the segments of one of `blocks` blocks; their sums are of weights at `scale`, none when it is 0.
template <bool kChanged, class T>
__device__ __forceinline__ void look(const RowOfLogits<T>& row, float scale, int block, int blocks,
                                     SegmentStats& stats) {
  for (int i = block * kWarps + warp_id(); i < row.segments.count; i += blocks * kWarps) {
    const uint32_t end = row.end_of(i);
    if constexpr (kChanged) row.prefetch(i);  // while it waits for bits of its tokens
    Running seen;
    for (uint32_t begin = i * row.segments.length; begin < end; begin += kChunk) {
      const uint32_t first = begin + lane_id() * kGroup;
      float v[kBatch][kGroup];
      if constexpr (kChanged) {
        const Touched touched = row.changes->template touched<kBatch>(first, end);
        row.load_unchanged(first, end, v);
        row.change(first, touched, v);
      } else {
        row.load_unchanged(first, end, v);
      }
      seen.add(v, scale);
    }
    seen.store(stats, i);
  }
}

struct RowBounds {
  float max, least;  // of the row; of the maxima of its segments
  bool nan;
};

/// By each warp for itself.
__device__ __forceinline__ RowBounds bounds_of(const SegmentStats& stats, int segments) {
  uint32_t most = 0, least = ~0u;
  for (int i = lane_id(); i < segments; i += 32) {
    const uint32_t key = key_of(stats.max[i]);
    most = max(most, key), least = min(least, key);
  }
  const float max = value_of(__reduce_max_sync(kAllLanes, most));
  return {max, value_of(__reduce_min_sync(kAllLanes, least)), max != max};
}

/// The weight of all segments against the maximum; by each warp for itself.
__device__ __forceinline__ double total_of(const SegmentStats& stats, int segments, Softmax softmax) {
  double total = 0;
  for (int i = lane_id(); i < segments; i += 32) {
    if (stats.max[i] > -INFINITY) total += double{stats.sum[i]} * weight_of(stats.max[i], softmax);
  }
  return warp_sum(total);
}

}  // namespace vivace::device::select
