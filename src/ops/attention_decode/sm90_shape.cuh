#pragma once

// What the parts of the sm90.* kernel share: what is fixed when it is compiled, its arguments, its shared memory.

#include <type_traits>

#include "src/device/mma.h"
#include "src/device/ptx.h"
#include "src/device/reduce.h"
#include "src/ops/attention/params.cuh"
#include "src/ops/attention_decode/sm90_plan.h"
#include "src/ops/decode_schedule/view.h"

namespace vivace::attention_sm90 {

using namespace attention_cuda;
using device::Barrier;
using device::bf16;
using device::f16;
using device::fp8;
using device::kAllLanes;

constexpr int kSegments = 32;  ///< of a worker that are described at a time

/// What is fixed when a kernel is compiled: elements of K and V, width of a head, blocks of 8 query rows a warp.
template <class Raw_, int kHead_, int kBlocks_>
struct Shape {
  using Raw = Raw_;
  static constexpr bool kFp8 = std::is_same_v<Raw, fp8>;
  using Operand = std::conditional_t<kFp8, f16, bf16>;
  static constexpr int kHead = kHead_, kBlocks = kBlocks_, kWarps = kCtaWarps, kThreads = 32 * kWarps;
  static constexpr int kRowBytes = kHead * static_cast<int>(sizeof(Raw));
  static constexpr int kBoxKeys = static_cast<int>(sm90_box_keys(kRowBytes)),
                       kBoxBytes = kBoxKeys * kRowBytes;
  static constexpr int kPanelBytes = kRowBytes < 128 ? kRowBytes : 128, kPanels = kRowBytes / kPanelBytes;
  static constexpr int kKeySteps = kBoxKeys / 16, kHeadSteps = kHead / 16;
  static constexpr int kSlots = (96 << 10) / (kWarps * kBoxBytes);  ///< of a warp's share of a ring
  static constexpr int kRowsPerWarp = 8 * kBlocks;
  static constexpr int kPitch = piece_pitch(kHead);
  static_assert(2 * kRowsPerWarp * kPitch * 4 <= kSlots * kBoxBytes,
                "a ring holds its share of the rows of two pieces a worker");
  /// sm90.few: registers of a thread of the walk, and of the kernel that adds up, a CTA of which has room beside two of the walk.
  static constexpr int kFewRegisters = 176, kAddUpRegisters = 80;

  /// Byte of 16-byte chunk `chunk` of key `key` in a box, as the copy engine permutes it: panels of at most 128 bytes.
  __device__ static int place(int key, int chunk) {
    if constexpr (kRowBytes == 64) return key * 64 + ((chunk ^ (key >> 1)) & 3) * 16;
    return chunk / 8 * kBoxKeys * 128 + key * 128 + ((chunk ^ key) & 7) * 16;
  }
};

struct Sm90Params {
  CUtensorMap k, v;
  Params attention;
  int32_t* schedule;
  float* parked;    ///< [workers][rows][head]: pieces that end before their worker does
  float* partials;  ///< [2 clusters][rows][head]: what a cluster leaves open at its beginning and at its end
  float2* partial_ends;  ///< [2 clusters][rows]: maximum, weight
  /// sm90.few: what workers leave of units that are cut, by slots of the schedule.
  float* pieces;       ///< [2 workers][rows][head]
  float2* piece_ends;  ///< [2 workers][rows]: maximum, weight
  int workers, clusters;
  int rows;  ///< of a unit: max_query_tokens * group
  int max_query_tokens;
  int group_inverse;  ///< 2^16 / group, rounded up: row * it >> 16 is row / group for the rows of a unit
  int team_log2;      ///< warps of a worker
  int boxes_per_tile, page_log2, copy_log2;  ///< tokens of a page, and of one copy
  bool old_keys_ready;
};

/// The counters of a schedule cover one per CTA.
static_assert(decode_schedule_arrivals(1) >= kClusterCtas, "a grid of whole clusters has a counter per CTA");

__device__ __forceinline__ int workers_per_cluster(const Sm90Params& p) {
  return kClusterCtas << (kCtaWarpsLog2 - p.team_log2);
}
/// The token of row `r` of a unit.
__device__ __forceinline__ int token_of_row(const Sm90Params& p, int r) {
  return r * p.group_inverse >> 16;
}

/// The first key that any of the `rows` last tokens of a request sees.
__device__ __forceinline__ int first_key_seen(const Sm90Params& p, int keys, int rows) {
  const int window = p.attention.window;
  return window > 0 ? max(0, max(0, keys - rows + 1) - window) : 0;
}

/// What a worker does of one unit (request, KV head), in one go. Boxes are counted from key 0.
struct Segment {
  int request, head_kv, row_begin, rows, keys, first_box, end_box;
  bool begins, ends;  ///< with the unit
};

/// Where a row of a unit goes.
struct RowPlace {
  int row;   ///< of the output; ~row if it sees no keys
  int head;  ///< query head; -1: there is no such row
};
/// Beside the values of a row of a piece: what they are measured from and add up to, and where the row goes.
struct __align__(16) PieceEnd {
  float maximum, weight;
  RowPlace place;
};

/// Workers first .. last of a cluster have a unit together; first = -1: none.
struct Chain {
  int first, last;
  bool from_before, goes_on;  ///< beyond this cluster
  /// Which of its two pieces a member adds.
  __device__ int which(int member) const { return member == first && !from_before ? 1 : 0; }
};

/// Clusters first .. last have a unit together; first = -1: none.
struct ClusterChain {
  int first, last;

  /// Pieces that are added up in one step, a lane each. More than that are taken in groups, then what the groups left.
  static constexpr int kMost = 32;
  __device__ int count() const { return last - first + 1; }
  __device__ int group_log2() const { return count() <= kMost ? 5 : count() > 128 ? 4 : 3; }
  __device__ int groups() const { return ((count() - 1) >> group_log2()) + 1; }
};
static_assert(kMaxCtas / kClusterCtas <= 16 * ClusterChain::kMost, "two rounds are enough");

template <class T>
struct Shared {
  char ring[T::kWarps][T::kSlots][T::kBoxBytes];
  Barrier full[T::kWarps][T::kSlots];
  Barrier arrived[T::kWarps];  ///< pieces of the rows that a warp adds up
  Segment segments[T::kWarps][kSegments];
  PieceEnd parked_ends[T::kWarps][T::kRowsPerWarp];
  ScheduleView::Start cluster_starts[kMaxCtas / kClusterCtas + 1];

  /// Row `i` of those that warp `warp` adds up, of a piece in place `place`: its values, then its PieceEnd. In the ring, once the
  /// workers of the cluster have drained theirs.
  __device__ float* inbox(int warp, int place, int i, int each_log2) {
    return reinterpret_cast<float*>(ring[warp][0]) + ((place << each_log2) + i) * T::kPitch;
  }
};

/// On sums of this maximum when they join others of maximum `most`; 0 for what saw nothing.
__device__ __forceinline__ float factor_of(float maximum, float most) {
  return exp2_of(__fsub_rn(maximum, most == kNoKeys ? 0.f : most));
}

/// Of a row whose sums are complete: where its values begin, and what becomes of one. Whoever leads stores its lse.
struct RowOutput {
  int64_t at;
  float scale;
  bool sees_keys;

  __device__ __forceinline__ RowOutput(const Params& p, int64_t row, int head, bool sees_keys, float maximum,
                                       float weight, bool leads)
      : sees_keys(sees_keys) {
    const RowEnd end(p, sees_keys, maximum, weight, head);
    scale = end.scale;
    if (p.lse != nullptr && leads) p.lse[row * p.lse_stride[0] + head * p.lse_stride[1]] = end.lse;
    at = row * p.output_stride[0] + head * p.output_stride[1];
  }
  __device__ __forceinline__ float operator()(float sum) const { return sees_keys ? sum * scale : 0.f; }
};

/// A pair of neighbouring outputs; `at` is even and the row aligned to a pair.
__device__ __forceinline__ void store_pair(const Params& p, int64_t at, float v0, float v1) {
  if (p.output_type == DType::bf16) {
    *reinterpret_cast<uint32_t*>(static_cast<bf16*>(p.output) + at) = device::pack<bf16>(v0, v1);
  } else {
    static_cast<float*>(p.output)[at] = v0;
    static_cast<float*>(p.output)[at + 1] = v1;
  }
}

/// Two outputs of a row that a lane has, as Sums lays them over lanes.
template <class T>
__device__ __forceinline__ void store_two(const Params& p, int64_t at, float v0, float v1) {
  if constexpr (T::kFp8) {
    store_pair(p, at, v0, v1);
  } else if (p.output_type == DType::bf16) {
    static_cast<bf16*>(p.output)[at] = device::from_float<bf16>(v0);
    static_cast<bf16*>(p.output)[at + 8] = device::from_float<bf16>(v1);
  } else {
    static_cast<float*>(p.output)[at] = v0;
    static_cast<float*>(p.output)[at + 8] = v1;
  }
}

}  // namespace vivace::attention_sm90
