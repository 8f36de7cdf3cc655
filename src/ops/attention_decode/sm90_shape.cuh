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
  static_assert(kRowsPerWarp * kPitch * 4 <= kSlots * kBoxBytes, "a drained ring holds a piece");
  static_assert(2 * kWarps * kRowsPerWarp <= kThreads, "a thread a row of a piece of a CTA's share");

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
  float* parked;    ///< [workers][rows][pitch]: pieces that end before their worker does
  float* partials;  ///< [2 clusters][rows][head]: what a cluster leaves open at its beginning and at its end
  float2* partial_ends;  ///< [2 clusters][rows]: maximum, weight
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

/// The token of row `r` of a unit.
__device__ __forceinline__ int token_of_row(const Sm90Params& p, int r) {
  return r * p.group_inverse >> 16;
}

/// The first key that any of the `rows` last tokens of a request sees.
__device__ __forceinline__ int first_key_seen(const Sm90Params& p, int keys, int rows) {
  const int window = p.attention.window;
  return window > 0 ? max(0, max(0, keys - rows + 1) - window) : 0;
}

/// Whether the schedule was made for this call's shapes: of another nothing is done.
__device__ __forceinline__ bool is_for(const int32_t* schedule, const Sm90Params& p, int box_keys) {
  using namespace schedule_map;
  return schedule[kRequests] == p.attention.requests && schedule[kHeadsKv] == p.attention.heads_kv &&
         schedule[kTileTokens] == p.boxes_per_tile * box_keys && schedule[kWorkers] == p.workers;
}

/// What a worker does of one unit (request, KV head), in one go. Boxes are counted from key 0.
struct Segment {
  int request, head_kv, row_begin, rows, keys, first_box, end_box;
  bool begins, ends;  ///< with the unit
};

/// A segment that is not its whole unit, once it is done.
struct Piece {
  int head_kv, row_begin, rows, keys;
  bool in_ring;  ///< else in Sm90Params::parked
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

  /// Pieces that are added up at a time. More than that are taken in groups, then what the groups left.
  static constexpr int kAtATime = 16;
  __device__ int count() const { return last - first + 1; }
  __device__ int group_log2() const { return count() <= kAtATime || count() > 8 * kAtATime ? 4 : 3; }
  __device__ int groups() const { return ((count() - 1) >> group_log2()) + 1; }
};
static_assert(kMaxCtas / kClusterCtas <= ClusterChain::kAtATime * ClusterChain::kAtATime,
              "two rounds are enough");

/// A row of a piece: its values, and what they are multiplied by when they join the others of their chain.
struct __align__(16) Part {
  const float* values;
  float factor;
};
/// Where a row goes once its pieces are added up, and what its sums are multiplied by.
struct __align__(16) Destination {
  enum Kind : int32_t { nowhere, partials, output, zeros };
  int64_t at;  ///< of the first value
  float scale;
  Kind kind;
};

/// Shared memory. Pieces: [0] continues one of the worker before, [1] begins its unit.
template <class T>
struct Shared {
  char ring[T::kWarps][T::kSlots][T::kBoxBytes];
  Barrier full[T::kWarps][T::kSlots];
  Segment segments[T::kWarps][kSegments];
  Piece pieces[2][T::kWarps];
  float2 piece_ends[2][T::kWarps * T::kRowsPerWarp];  ///< maximum, weight: [rows] per worker
  Piece cluster_open[2];  ///< what the cluster leaves open at its beginning and at its end
  /// The unit that the boundary before member i cuts, or -1: of workers of the cluster, of clusters.
  int worker_cuts[kClusterCtas * T::kWarps + 1], cluster_cuts[kMaxCtas / kClusterCtas + 1];
  /// Of rows of pieces, a thread each: the CTA's share of the rows of two pieces per worker of the cluster.
  float2 ends[T::kThreads];
  Part parts[T::kThreads];
  Destination destinations[T::kThreads];
  ClusterChain open_at[2];  ///< clusters that have a part of what is open at an end of this one
  bool adds_up[2];          ///< there, this CTA: nothing else is left to come

  /// Values of a piece in the drained ring of a worker that begins at warp `warp`.
  __device__ float* values(int warp) { return reinterpret_cast<float*>(ring[warp][0]); }
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

}  // namespace vivace::attention_sm90
