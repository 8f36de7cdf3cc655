#pragma once

// What a block of threads does with one row of logits: sums in a fixed order, a short list of the most likely tokens and a
// draw from it, and the same over the whole row where a list does not do. For cuda.cu.

#include <climits>

#include "src/device/number.h"
#include "src/device/reduce.h"

namespace vivace::device::select {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 2;                              // so that one reads while the other chooses
constexpr int kGroup = 8;                                    // neighbouring logits of one access of a lane
constexpr int kBatch = 4;                                    // accesses that a lane has under way
constexpr int kStep = 32 * kGroup, kChunk = kStep * kBatch;  // logits of a warp's access, and of its batch
constexpr int kMostSegments = kThreads;                      // a thread per segment puts them together
constexpr int kShortList = 2048;                             // tokens that fit the list
constexpr int kFew = 128;                                    // tokens that are sorted by counting
constexpr int kMostNotes = 384;  // notes that a threshold may rest on: with more the list would overflow
constexpr int kWays = 8;         // of the search over a whole row

/// What one look leaves of each segment of a row.
struct SegmentStats {
  float max[kMostSegments];  // NaN when one was seen
  float sum[kMostSegments];  // of weights below `max`
};

struct Shared {
  union {
    uint64_t list[kShortList];
    double sums[kMostSegments];  // of segments, while there is no list
  };
  SegmentStats given, drawn;
  float given_notes[kThreads], drawn_notes[kThreads];  // for another block of the row
  double doubles[kWays - 1][kWarps];
  float floats[kWarps];
  int ints[kWarps];
  int count, found;
};

__device__ __forceinline__ int lane_id() {
  return threadIdx.x % 32;
}
__device__ __forceinline__ int warp_id() {
  return threadIdx.x / 32;
}

// ---- reductions over the block; every thread gets the result, and the shared slots may be used again at once

__device__ __forceinline__ float block_max(float v, Shared& s) {
  v = warp_reduce<Max>(v);
  if (lane_id() == 0) s.floats[warp_id()] = v;
  __syncthreads();
  v = warp_reduce<Max>(s.floats[lane_id() % kWarps]);
  __syncthreads();
  return v;
}

__device__ __forceinline__ int block_min(int v, Shared& s) {
  v = __reduce_min_sync(kAllLanes, v);
  if (lane_id() == 0) s.ints[warp_id()] = v;
  __syncthreads();
  v = __reduce_min_sync(kAllLanes, s.ints[lane_id() % kWarps]);
  __syncthreads();
  return v;
}

template <int kCount>
__device__ __forceinline__ void block_sums(double (&v)[kCount], Shared& s) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v[i] = warp_sum(v[i]);
    if (lane_id() == 0) s.doubles[i][warp_id()] = v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = warp_sum(lane_id() < kWarps ? s.doubles[i][lane_id()] : 0.);
  __syncthreads();
}

__device__ __forceinline__ double block_sum(double v, Shared& s) {
  double one[1] = {v};
  block_sums(one, s);
  return one[0];
}

__device__ __forceinline__ double warp_scan(double v) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double below = __shfl_up_sync(kAllLanes, v, step);
    if (lane_id() >= step) v += below;
  }
  return v;
}

/// The sum of the threads before this one, and of all.
__device__ __forceinline__ double sum_before(double v, double& total, Shared& s) {
  const double inclusive = warp_scan(v);
  double before = __shfl_up_sync(kAllLanes, inclusive, 1);
  if (lane_id() == 0) before = 0;
  if (lane_id() == 31) s.doubles[0][warp_id()] = inclusive;
  __syncthreads();
  const double warps = warp_scan(lane_id() < kWarps ? s.doubles[0][lane_id()] : 0.);
  total = __shfl_sync(kAllLanes, warps, 31);
  const double warps_before = __shfl_sync(kAllLanes, warps, warp_id() > 0 ? warp_id() - 1 : 0);
  __syncthreads();
  return warp_id() > 0 ? warps_before + before : before;
}

// ---- logits

/// A number that orders as the float does, -0 equal to 0; there is no NaN here.
__device__ __forceinline__ uint32_t key_of(float v) {
  const uint32_t bits = __float_as_uint(v + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

/// `scale` is log2(e) / temperature, finite.
struct Softmax {
  float max, scale;
};

/// exp((v - max) / temperature), where equals of an infinite maximum count 1.
__device__ __forceinline__ float weight_of(float v, Softmax softmax) {
  return v == softmax.max ? 1.f : exp2_of((v - softmax.max) * softmax.scale);
}

/// How a row is cut, the same for every call with this vocabulary: warps look at whole segments. Each has a chunk of
/// logits; of a vocabulary beyond kMostSegments chunks several, of a small one a part, so that all warps work.
struct Segments {
  uint32_t length;
  int count;
  __device__ __forceinline__ explicit Segments(int64_t vocab) {
    const int64_t steps = (vocab + kStep - 1) / kStep;
    const int64_t part = (steps + kWarps - 1) / kWarps;
    const int64_t chunks = (steps + int64_t{kMostSegments} * kBatch - 1) / (int64_t{kMostSegments} * kBatch);
    length = static_cast<uint32_t>(part < kBatch ? part * kStep : chunks * kChunk);
    count = static_cast<int>((vocab + length - 1) / length);
  }
};

/// The logits of a row: as given, or the changed copy, which is padded with -inf to whole groups. Places are 32-bit: a
/// vocabulary is below 2^31, and registers are scarce.
template <class T>
struct RowOfLogits {
  const T* given;
  const float* changed;
  uint32_t vocab;
  bool wide;  // groups are aligned
  Segments segments;

  __device__ __forceinline__ float at(int64_t id) const {
    return changed ? changed[id] : to_float(given[id]);
  }

  /// The group that begins at `begin`, a multiple of kGroup below vocab; -inf past the end.
  __device__ __forceinline__ void load(uint32_t begin, float (&v)[kGroup]) const {
    if (changed != nullptr) {
      load_group(changed + begin, v);
    } else if (wide && begin + kGroup <= vocab) {
      load_group(given + begin, v);
    } else {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) v[j] = begin + j < vocab ? to_float(given[begin + j]) : -INFINITY;
    }
  }

  /// The chunk of a warp at `begin`: access b of a lane begins at begin + b * kStep + lane * kGroup; -inf from `end` on,
  /// which is a multiple of kStep or the end of the row.
  __device__ __forceinline__ void load_chunk(uint32_t begin, uint32_t end, float (&v)[kBatch][kGroup]) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const uint32_t first = begin + b * kStep + lane_id() * kGroup;
      if (first < end) {
        load(first, v[b]);
      } else {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) v[b][j] = -INFINITY;
      }
    }
  }

  /// Where segment `i` ends.
  __device__ __forceinline__ uint32_t end_of(int i) const {
    return min((i + 1) * segments.length, vocab);
  }

  /// body(logit, id) for the tokens of this thread, in the segments for which use(i) holds for all of the warp.
  template <class Use, class Body>
  __device__ __forceinline__ void for_each_in(Use&& use, Body&& body) const {
    for (int i = warp_id(); i < segments.count; i += kWarps) {
      if (!use(i)) continue;
      const uint32_t end = end_of(i);
      for (uint32_t first = i * segments.length + lane_id() * kGroup; first < end; first += kStep) {
        float v[kGroup];
        load(first, v);
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          if (first + j < end) body(v[j], static_cast<int>(first + j));
        }
      }
    }
  }
  template <class Body>
  __device__ __forceinline__ void for_each(Body&& body) const {
    for_each_in([](int) { return true; }, body);
  }

 private:
  static __device__ __forceinline__ void load_group(const float* p, float (&v)[kGroup]) {
    const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
  static __device__ __forceinline__ void load_group(const bf16* p, float (&v)[kGroup]) {
    load_floats(p, v);
  }
};

__device__ __forceinline__ void store_group(const float (&v)[kGroup], float* p) {
  reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

/// The larger; a NaN wins.
struct MaxOrNan {
  __device__ __forceinline__ float operator()(float a, float b) const {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
  }
};

__device__ __forceinline__ float max_of(const float (&v)[kBatch][kGroup]) {
  float max = v[0][0];
#pragma unroll
  for (int i = 1; i < kBatch * kGroup; ++i) max = MaxOrNan{}(max, v[i / kGroup][i % kGroup]);
  return max;
}

/// A segment while its warp looks at it.
struct Running {
  float max = -INFINITY;  // of the warp
  float sum = 0.f;        // of this lane

  /// The next chunk, whose maximum over the warp is `chunk_max`; no sum is kept when `scale` is 0.
  __device__ __forceinline__ void add(const float (&v)[kBatch][kGroup], float chunk_max, float scale) {
    const float before = max;
    max = MaxOrNan{}(max, chunk_max);
    if (!(scale > 0.f) || max == -INFINITY) return;
    if (max == INFINITY) {
      if (before != INFINITY) sum = 0.f;
#pragma unroll
      for (int i = 0; i < kBatch * kGroup; ++i) sum += v[i / kGroup][i % kGroup] == INFINITY ? 1.f : 0.f;
      return;
    }
    if (before > -INFINITY) sum *= exp2_of((before - max) * scale);
#pragma unroll
    for (int i = 0; i < kBatch * kGroup; ++i) sum += exp2_of((v[i / kGroup][i % kGroup] - max) * scale);
  }

  __device__ __forceinline__ void store(SegmentStats& stats, int segment) const {
    const float all = warp_reduce<Sum>(sum);
    if (lane_id() == 0) stats.max[segment] = max, stats.sum[segment] = all;
  }
};

/// What a thread knows of the row: its segment, and the largest logit of those that lanes of its number looked at, a note.
struct Seen {
  float max = -INFINITY, sum = 0.f, note = -INFINITY;
};

struct RowBounds {
  float max;
  bool nan;
  double weight, before,
      total;  // of this thread's segment, of those before it, of all: against the row's maximum
};

__device__ __forceinline__ RowBounds combine(const Seen& seen, float scale, Shared& s) {
  RowBounds row;
  row.nan = __syncthreads_or(seen.max != seen.max) != 0;
  row.max = block_max(seen.max, s);
  row.weight = row.before = row.total = 0;
  if (scale > 0.f) {
    if (seen.max > -INFINITY) row.weight = double{seen.sum} * weight_of(seen.max, {row.max, scale});
    row.before = sum_before(row.weight, row.total, s);
  }
  return row;
}

// ---- the short list

/// A threshold that at least `notes` threads have seen a logit at or above; -inf when not so many have seen one.
__device__ __forceinline__ float threshold_of(float seen, int notes, float max, Shared& s) {
  uint32_t low = key_of(-block_max(-seen, s)), high = key_of(max);  // all have seen the lowest note
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const int count = __syncthreads_count(seen >= value_of(middle));
    if (count < notes) {
      high = middle - 1;
      continue;
    }
    low = middle;
    if (count <= notes + notes / 4) break;  // near enough
  }
  return value_of(low);
}

/// Items order by falling logit, then by rising id.
__device__ __forceinline__ uint64_t falling_item(float logit, int id) {
  return static_cast<uint64_t>(~key_of(logit)) << 32 | static_cast<uint32_t>(id);
}
__device__ __forceinline__ float logit_of(uint64_t falling) {
  return value_of(~static_cast<uint32_t>(falling >> 32));
}

/// Lists the tokens with logit >= threshold, in any order, -inf only if asked; returns how many there are, which may be more
/// than the list holds. Segments whose maximum is below are not looked at again.
template <class T>
__device__ __forceinline__ int collect(const RowOfLogits<T>& row, const SegmentStats& stats, float threshold,
                                       bool minus_infinity, Shared& s) {
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  const auto may_hold = [&](int segment) { return stats.max[segment] >= threshold; };
  row.for_each_in(may_hold, [&](float logit, int id) {
    if (!(logit >= threshold) || (logit == -INFINITY && !minus_infinity)) return;
    const int at = atomicAdd(&s.count, 1);
    if (at < kShortList) s.list[at] = falling_item(logit, id);
  });
  __syncthreads();
  return s.count;
}

/// As sort_list, up to kFew items: some neighbouring lanes count the smaller ones of an item. No two are equal.
__device__ __forceinline__ void sort_few(int count, Shared& s) {
  constexpr int kLanes = kThreads / kFew;
  static_assert(kLanes <= 32 && kThreads % kFew == 0, "the lanes of an item are of one warp");
  const int i = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  const uint64_t item = i < count ? s.list[i] : 0;
  int rank = 0;
  for (int other = lane; other < count; other += kLanes) rank += s.list[other] < item;
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) rank += __shfl_xor_sync(kAllLanes, rank, step);
  __syncthreads();
  if (i < count && lane == 0) s.list[rank] = item;
  __syncthreads();
}

/// Sorts the first `count` items, rising.
__device__ __forceinline__ void sort_list(int count, Shared& s) {
  if (count <= kFew) {
    __syncthreads();
    return sort_few(count, s);
  }
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += kThreads) s.list[i] = ~uint64_t{0};
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      for (int i = threadIdx.x; i < size; i += kThreads) {
        const int partner = i ^ distance;
        if (partner < i) continue;
        const uint64_t a = s.list[i], b = s.list[partner];
        if ((a > b) == ((i & run) == 0)) {
          s.list[i] = b;
          s.list[partner] = a;
        }
      }
      __syncthreads();
    }
  }
}

struct Filters {
  Softmax softmax;
  int top_k;  // 0: all
  float top_p, min_p;
  double u;
  __device__ __forceinline__ bool is_free() const { return top_k == 0 && !(top_p < 1.f) && !(min_p > 0.f); }
};

/// Draws from the list of `count` items, which holds all tokens down to some logit. -1: the list ends before top_p does.
/// `total` is the sum of all weights of the row; with top_k the list is all that counts.
__device__ __forceinline__ int draw_from_list(int count, bool complete, const Filters& f, double total,
                                              Shared& s) {
  sort_list(count, s);
  // Items 2 t and 2 t + 1 are thread t's.
  const int first = 2 * threadIdx.x;
  const int within = f.top_k > 0 && f.top_k < count ? f.top_k : count;
  uint64_t item[2];
  float weight[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    item[j] = first + j < within ? s.list[first + j] : 0;
    weight[j] = first + j < within ? weight_of(logit_of(item[j]), f.softmax) : 0.f;
  }
  double mass;
  double before[2];
  before[0] = sum_before(double{weight[0]} + weight[1], mass, s);
  before[1] = before[0] + weight[0];
  double wanted = INFINITY;
  if (f.top_p < 1.f) {
    wanted = f.top_p * (f.top_k > 0 ? mass : total);
    if (f.top_k == 0 && !complete && mass < wanted) return -1;
  }
  // Weights fall and sums rise: what is kept is the front of the list.
  int kept = 0;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const bool in_set = first + j == 0 || before[j] < wanted;
    kept += __syncthreads_count(first + j < within && in_set && weight[j] >= f.min_p && weight[j] > 0.f);
  }
  // By id, with the logit's key in the low half.
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (first + j < kept) s.list[first + j] = item[j] << 32 | static_cast<uint32_t>(~(item[j] >> 32));
  }
  sort_list(kept, s);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    item[j] = first + j < kept ? s.list[first + j] : 0;
    weight[j] = first + j < kept ? weight_of(value_of(static_cast<uint32_t>(item[j])), f.softmax) : 0.f;
  }
  before[0] = sum_before(double{weight[0]} + weight[1], mass, s);
  before[1] = before[0] + weight[0];
  const double target = f.u * mass;
  int drawn = kept - 1;  // rounding may leave the last sum below the target
#pragma unroll
  for (int j = 1; j >= 0; --j) {
    if (first + j < kept && before[j] + weight[j] > target) drawn = min(drawn, first + j);
  }
  drawn = block_min(drawn, s);
  return static_cast<int>(s.list[drawn] >> 32);
}

// ---- the whole row

/// The first token of segment `i`, by rising id, whose running sum of weight(logit, id) from `before` on exceeds
/// `target`; the last of positive weight when none does, 0 when there is none. For one warp.
template <class T, class Weight>
__device__ __forceinline__ int walk(const RowOfLogits<T>& row, Weight&& weight, int i, double before,
                                    double target) {
  // The access first: the first whose sum reaches the target, else the last that weighs anything.
  const uint32_t end = row.end_of(i);
  uint32_t chosen = i * row.segments.length;
  double before_chosen = before;
  bool reached = false;
  for (uint32_t begin = chosen; begin < end && !reached; begin += kChunk) {
    float v[kBatch][kGroup];
    row.load_chunk(begin, end, v);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const uint32_t first = begin + b * kStep + lane_id() * kGroup;
      double sum = 0;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (first + j < end) sum += weight(v[b][j], static_cast<int>(first + j));
      }
      sum = warp_sum(sum);
      if (reached || !(sum > 0)) continue;
      chosen = begin + b * kStep;
      before_chosen = before;
      before += sum;
      reached = before > target;
    }
  }
  const uint32_t first = chosen + lane_id() * kGroup;
  float w[kGroup] = {};
  double sum = 0;
  if (first < end) {
    float v[kGroup];
    row.load(first, v);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      w[j] = first + j < end ? weight(v[j], static_cast<int>(first + j)) : 0.f;
      sum += w[j];
    }
  }
  const double scanned = warp_scan(sum);
  double at = __shfl_up_sync(kAllLanes, scanned, 1);
  at = before_chosen + (lane_id() == 0 ? 0 : at);
  int mine = INT_MAX, positive = 0;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    if (!(w[j] > 0.f)) continue;
    at += w[j];
    positive = static_cast<int>(first + j);
    if (at > target && mine == INT_MAX) mine = positive;
  }
  mine = __reduce_min_sync(kAllLanes, mine);
  const int last = __reduce_max_sync(kAllLanes, positive);
  return mine != INT_MAX ? mine : last;
}

/// The segment of the draw: `segment_weight` is that of this thread's segment, `before` the sum of those before it.
template <class T, class Weight>
__device__ __forceinline__ int locate_in(const RowOfLogits<T>& row, Weight&& weight, double segment_weight,
                                         double before, double target, Shared& s) {
  const int mine = static_cast<int>(threadIdx.x);
  const bool reaches = segment_weight > 0 && before + segment_weight > target;
  int chosen = block_min(reaches ? mine : INT_MAX, s);
  // Rounding may leave the last sum below the target: then the last segment that weighs anything.
  if (chosen == INT_MAX) chosen = -block_min(segment_weight > 0 ? -mine : 0, s);
  if (chosen / 32 == warp_id()) {
    const int found = walk(row, weight, chosen, __shfl_sync(kAllLanes, before, chosen % 32), target);
    if (lane_id() == 0) s.found = found;
  }
  __syncthreads();
  const int found = s.found;
  __syncthreads();
  return found;
}

/// The first token, by rising id, whose running sum of weight(logit, id) exceeds `target`, or u * the total when
/// of_total; the last of positive weight when none does.
template <class T, class Weight>
__device__ __forceinline__ int locate(const RowOfLogits<T>& row, Weight&& weight, double target,
                                      bool of_total, Shared& s) {
  for (int i = warp_id(); i < row.segments.count; i += kWarps) {
    const uint32_t end = row.end_of(i);
    double sum = 0;
    for (uint32_t first = i * row.segments.length + lane_id() * kGroup; first < end; first += kStep) {
      float v[kGroup];
      row.load(first, v);
      float some = 0.f;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (first + j < end) some += weight(v[j], static_cast<int>(first + j));
      }
      sum += some;
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) s.sums[i] = sum;
  }
  __syncthreads();
  const double own = static_cast<int>(threadIdx.x) < row.segments.count ? s.sums[threadIdx.x] : 0;
  double total;
  const double before = sum_before(own, total, s);
  return locate_in(row, weight, own, before, of_total ? target * total : target, s);
}

/// The lowest id with the row's largest logit. `seen` is the largest logit of this thread's segment.
template <class T>
__device__ __forceinline__ int largest(const RowOfLogits<T>& row, float seen, float max, Shared& s) {
  const int chosen = block_min(seen == max ? static_cast<int>(threadIdx.x) : INT_MAX, s);
  int id = INT_MAX;
  const auto is_chosen = [&](int segment) { return segment == chosen; };
  row.for_each_in(is_chosen, [&](float logit, int i) {
    if (logit == max) id = min(id, i);
  });
  return block_min(id, s);
}

/// The last token kept, in falling order: larger logits are, and of its equals those up to `id`.
struct Cut {
  float logit = -INFINITY;
  int id = INT_MAX;
  __device__ __forceinline__ bool keeps(float l, int i) const { return l > logit || (l == logit && i <= id); }
};

/// Where the sums of `measure` of what `within` keeps, in falling order, reach `goal`. Its equals have one measure.
template <class T, class Measure>
__device__ __forceinline__ Cut cut_row(const RowOfLogits<T>& row, Measure&& measure, const Cut& within,
                                       double goal, float max, Shared& s) {
  uint32_t low = key_of(-INFINITY), high = key_of(max);
  while (low < high) {
    const uint32_t step = (high - low + kWays - 1) / kWays;
    float threshold[kWays - 1];
    double sums[kWays - 1];
#pragma unroll
    for (int i = 0; i < kWays - 1; ++i) {
      threshold[i] = value_of(min(low + (i + 1) * step, high));
      sums[i] = 0;
    }
    row.for_each([&](float l, int id) {
      if (l < threshold[0] || !within.keeps(l, id)) return;
      const double m = measure(l);
#pragma unroll
      for (int i = 0; i < kWays - 1; ++i) sums[i] += l >= threshold[i] ? m : 0.;
    });
    block_sums(sums, s);
    int reached = 0;  // thresholds that are low enough
#pragma unroll
    for (int i = 0; i < kWays - 1; ++i) reached += sums[i] >= goal;
    const uint32_t next_high = reached == kWays - 1 ? high : min(low + (reached + 1) * step, high) - 1;
    if (reached > 0) low = min(low + reached * step, high);
    high = next_high;
  }
  Cut cut;
  cut.logit = value_of(low);
  double above_and_equals[2] = {0, 0};
  row.for_each([&](float l, int id) {
    if (!within.keeps(l, id)) return;
    if (l > cut.logit) above_and_equals[0] += measure(l);
    if (l == cut.logit) above_and_equals[1] += 1;
  });
  block_sums(above_and_equals, s);
  const double one = measure(cut.logit);
  const double needed = one > 0 ? fmax(ceil((goal - above_and_equals[0]) / one), 1.) : above_and_equals[1];
  if (needed < above_and_equals[1]) {
    const auto is_equal = [&](float l, int id) { return l == cut.logit && within.keeps(l, id) ? 1.f : 0.f; };
    cut.id = locate(row, is_equal, needed - 0.5, false, s);
  } else if (cut.logit == within.logit) {
    cut.id = within.id;
  }
  return cut;
}

/// As draw, by looks at the whole row. Out of line: it is rare, and would take registers from what is not.
template <class T>
__device__ __noinline__ int draw_from_row(RowOfLogits<T> row, Filters f, Shared& s) {
  Cut cut;
  if (f.top_k > 0) {
    cut = cut_row(
        row, [](float) { return 1.; }, cut, f.top_k, f.softmax.max, s);
  }
  if (f.top_p < 1.f) {
    const auto mass = [&](float l) { return double{weight_of(l, f.softmax)}; };
    double kept = 0;
    row.for_each([&](float l, int id) { kept += cut.keeps(l, id) ? mass(l) : 0.; });
    kept = block_sum(kept, s);
    cut = cut_row(row, mass, cut, f.top_p * kept, f.softmax.max, s);
  }
  const auto weight = [&](float l, int id) {
    const float w = weight_of(l, f.softmax);
    return cut.keeps(l, id) && w >= f.min_p ? w : 0.f;
  };
  return locate(row, weight, f.u, true, s);
}

/// A token of the row, of which `bounds` knows the weights unless top_k or min_p cut; `seen` is this thread's note.
template <class T>
__device__ __forceinline__ int draw(const RowOfLogits<T>& row, const Filters& f, float seen,
                                    const RowBounds& bounds, Shared& s) {
  if (f.is_free()) {
    const auto weight = [&](float l, int) { return weight_of(l, f.softmax); };
    return locate_in(row, weight, bounds.weight, bounds.before, f.u * bounds.total, s);
  }
  if (f.top_k > 0 || f.top_p < 1.f) {
    const int notes = f.top_k > 0 ? min(f.top_k, kMostNotes) : kMostNotes;
    const float threshold = threshold_of(seen, notes, f.softmax.max, s);
    const int count = collect(row, s.drawn, threshold, false, s);
    const bool complete = threshold == -INFINITY;  // of all tokens that could be drawn
    if (count <= kShortList && (complete || f.top_k == 0 || count >= f.top_k)) {
      const int id = draw_from_list(count, complete, f, bounds.total, s);
      if (id >= 0) return id;
    }
  }
  return draw_from_row(row, f, s);
}

/// The `wanted` most likely tokens, in order: write(i, id, logit), with id -1 past the vocabulary.
template <class T, class Write>
__device__ __forceinline__ void list_largest(const RowOfLogits<T>& row, int64_t wanted, float seen, float max,
                                             Write&& write, Shared& s) {
  if (wanted <= kMostNotes) {
    const float threshold = threshold_of(seen, static_cast<int>(wanted), max, s);
    const int count = collect(row, s.given, threshold, true, s);
    if (count <= kShortList) {
      sort_list(count, s);
      for (int64_t i = threadIdx.x; i < wanted; i += kThreads) {
        const uint64_t item = i < count ? s.list[i] : 0;
        write(i, i < count ? static_cast<int>(static_cast<uint32_t>(item)) : -1, logit_of(item));
      }
      __syncthreads();
      return;
    }
  }
  // Too many, or too many equals: one after the other.
  float last = INFINITY;
  int last_id = -1;
  for (int64_t i = 0; i < wanted; ++i) {
    float best = -INFINITY;
    int best_id = INT_MAX;
    row.for_each([&](float l, int id) {
      if (l > last || (l == last && id <= last_id)) return;
      if (l > best || (l == best && id < best_id)) {
        best = l;
        best_id = id;
      }
    });
    last = block_max(best_id == INT_MAX ? -INFINITY : best, s);
    last_id = block_min(best == last ? best_id : INT_MAX, s);
    const bool none = last_id == INT_MAX;
    if (threadIdx.x == 0) write(i, none ? -1 : last_id, last);
    if (none) last = -INFINITY;
  }
}

}  // namespace vivace::device::select
