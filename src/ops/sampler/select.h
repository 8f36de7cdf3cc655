#pragma once

// What a block of threads does after its look at a row: a short list of the most likely tokens and a draw from it, and the
// same over the whole row where a list does not do. For cuda.cu.

#include <climits>

#include "src/ops/sampler/look.h"

namespace vivace::device::select {

constexpr int kMostNotes = 448;           // that a threshold may rest on
constexpr int kShortList = 4 * kThreads;  // tokens that fit the list
constexpr int kWays = 8;                  // of the search over a whole row

struct Shared {
  union {
    uint64_t list[kShortList];
    double sums[kMostSegments];  // of segments, while there is no list
  };
  SegmentStats given, drawn;
  Changes changes;
  uint16_t hits[kMostSegments * kPieces];  // pieces to be read again
  double doubles[kWays - 1][kWarps];
  uint32_t keys[kWarps];
  int ints[kWarps];
  int count, found;
};

// ---- reductions over a warp, and over the block; every thread gets the result, and the shared slots may be used again at once

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

__device__ __forceinline__ float block_max(float v, Shared& s) {
  uint32_t key = __reduce_max_sync(kAllLanes, key_of(v));
  if (lane_id() == 0) s.keys[warp_id()] = key;
  __syncthreads();
  key = __reduce_max_sync(kAllLanes, s.keys[lane_id() % kWarps]);
  __syncthreads();
  return value_of(key);
}

/// The sum of the lanes up to this one, right for the first kLanes.
template <int kLanes = 32>
__device__ __forceinline__ double warp_scan(double v) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const double below = __shfl_up_sync(kAllLanes, v, step);
    if (lane_id() >= step) v += below;
  }
  return v;
}

/// Threads that share the work on a list: the first warp where that does, else the block.
struct Warp {
  static constexpr int kSize = 32, kItems = 2;  // threads, and tokens of a list that are one's
  Shared& s;
  __device__ __forceinline__ void sync() const { __syncwarp(); }
  __device__ __forceinline__ int min(int v) const { return __reduce_min_sync(kAllLanes, v); }
  __device__ __forceinline__ int sum(int v) const { return __reduce_add_sync(kAllLanes, v); }
  /// The sum of the threads before this one, and of all.
  __device__ __forceinline__ double sum_before(double v, double& total) const {
    const double inclusive = warp_scan(v), before = __shfl_up_sync(kAllLanes, inclusive, 1);
    total = __shfl_sync(kAllLanes, inclusive, 31);
    return lane_id() == 0 ? 0 : before;
  }
};

struct Block {
  static constexpr int kSize = kThreads, kItems = kShortList / kThreads;
  Shared& s;
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ int min(int v) const {
    v = __reduce_min_sync(kAllLanes, v);
    if (lane_id() == 0) s.ints[warp_id()] = v;
    __syncthreads();
    v = __reduce_min_sync(kAllLanes, s.ints[lane_id() % kWarps]);
    __syncthreads();
    return v;
  }
  __device__ __forceinline__ int sum(int v) const {
    v = __reduce_add_sync(kAllLanes, v);
    if (lane_id() == 0) s.ints[warp_id()] = v;
    __syncthreads();
    v = __reduce_add_sync(kAllLanes, lane_id() < kWarps ? s.ints[lane_id()] : 0);
    __syncthreads();
    return v;
  }
  __device__ __forceinline__ double sum_before(double v, double& total) const {
    double of_warp;
    const double before = Warp{s}.sum_before(v, of_warp);
    if (lane_id() == 0) s.doubles[0][warp_id()] = of_warp;
    __syncthreads();
    const double warps = warp_scan<kWarps>(s.doubles[0][lane_id() % kWarps]);
    total = __shfl_sync(kAllLanes, warps, kWarps - 1);
    const double warps_before = __shfl_sync(kAllLanes, warps, warp_id() > 0 ? warp_id() - 1 : 0);
    __syncthreads();
    return warp_id() > 0 ? warps_before + before : before;
  }
};

// ---- the short list

/// A threshold that at least `wanted` pieces reach; -inf when not so many have a logit. Each warp counts for a value of its own.
template <class T>
__device__ __forceinline__ float threshold_of(const RowOfLogits<T>& row, const SegmentStats& stats,
                                              int wanted, const RowBounds& bounds, Shared& s) {
  const int notes = row.segments.count * kPieces;
  uint32_t low = key_of(wanted <= row.segments.count ? bounds.least : -INFINITY), high = key_of(bounds.max);
  for (bool near_enough = false; low < high && !near_enough;) {
    const uint32_t step = (high - low + kWarps - 1) / kWarps;
    const uint32_t middle = min(low + (warp_id() + 1) * step, high);
    int count = 0;
    for (int i = lane_id(); i < notes; i += 32) count += stats.notes[i] >= middle;
    count = __reduce_add_sync(kAllLanes, count);
    if (lane_id() == 0) s.ints[warp_id()] = count;
    __syncthreads();
    const int counts = s.ints[lane_id() % kWarps];
    const int reached = __popc(__ballot_sync(kAllLanes, counts >= wanted) & ((1u << kWarps) - 1));
    __syncthreads();
    if (reached < kWarps) high = min(low + (reached + 1) * step - 1, high);
    if (reached == 0) continue;
    low = min(low + reached * step, high);
    near_enough = __shfl_sync(kAllLanes, counts, reached - 1) <= wanted + wanted / 8 + 2;
  }
  return value_of(low);
}

/// body(logit, id) for the tokens with logit >= threshold, by whichever thread. Only pieces whose note reaches it are read
/// again, by their number of lanes each.
template <class T, class Body>
__device__ __forceinline__ void for_each_from(const RowOfLogits<T>& row, const SegmentStats& stats,
                                              float threshold, Body&& body, Shared& s) {
  if (threadIdx.x == 0) s.found = 0;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < row.segments.count * kPieces; i += kThreads) {
    if (stats.notes[i] >= key_of(threshold)) s.hits[atomicAdd(&s.found, 1)] = static_cast<uint16_t>(i);
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % kPieceLanes, hits = s.found;
  for (int h = static_cast<int>(threadIdx.x) / kPieceLanes; h < hits; h += kThreads / kPieceLanes) {
    const int segment = s.hits[h] / kPieces, piece = s.hits[h] % kPieces;
    const uint32_t end = row.end_of(segment);
    for (uint32_t begin = segment * row.segments.length; begin < end; begin += kChunk) {
      const uint32_t first = begin + (piece * kPieceLanes + lane) * kGroup;
      float v[kBatch][kGroup];
      uint32_t reach = 0;
      if (row.changes != nullptr && row.changes->raise()) {
        const Touched touched = row.changes->template touched<kBatch>(first, end);
        reach = touched.seen | touched.special;
      }
      row.load_unchanged(first, end, v);
#pragma unroll
      for (int i = 0; i < kBatch * kGroup; ++i) {
        const bool inside = first + i / kGroup * kStep + i % kGroup < end;
        reach |= (inside && v[i / kGroup][i % kGroup] >= threshold ? 1u : 0u) << i;
      }
      for (; reach != 0; reach &= reach - 1) {
        const int i = __ffs(reach) - 1;
        const uint32_t id = first + i / kGroup * kStep + i % kGroup;
        const float logit = row.at(id);
        if (logit >= threshold) body(logit, static_cast<int>(id));
      }
    }
  }
  __syncthreads();
}

/// Items order by falling logit, then by rising id.
__device__ __forceinline__ uint64_t falling_item(float logit, int id) {
  return static_cast<uint64_t>(~key_of(logit)) << 32 | static_cast<uint32_t>(id);
}
__device__ __forceinline__ float logit_of(uint64_t falling) {
  return value_of(~static_cast<uint32_t>(falling >> 32));
}

/// Lists the tokens with logit >= threshold, in any order, -inf only if asked; returns how many there are, which may be more
/// than the list holds.
template <class T>
__device__ __forceinline__ int collect(const RowOfLogits<T>& row, const SegmentStats& stats, float threshold,
                                       bool minus_infinity, Shared& s) {
  if (threadIdx.x == 0) s.count = 0;
  const auto list = [&](float logit, int id) {
    if (logit == -INFINITY && !minus_infinity) return;
    const int at = atomicAdd(&s.count, 1);
    if (at < kShortList) s.list[at] = falling_item(logit, id);
  };
  for_each_from(row, stats, threshold, list, s);
  return s.count;
}

/// Sorts the first `count` items, rising. No two are equal.
template <class Threads>
__device__ __forceinline__ void sort_list(int count, const Threads& threads) {
  uint64_t* const list = threads.s.list;
  const int own = static_cast<int>(threadIdx.x);
  threads.sync();
  // Few are counted: an item's place is the number of smaller ones.
  constexpr int kOwn = Threads::kSize == 32 ? Threads::kItems : 1;
  if (count <= kOwn * Threads::kSize) {
    uint64_t item[kOwn];
    int place[kOwn] = {};
#pragma unroll
    for (int j = 0; j < kOwn; ++j)
      item[j] = own + j * Threads::kSize < count ? list[own + j * Threads::kSize] : 0;
#pragma unroll 4
    for (int other = 0; other < count; ++other) {
      const uint64_t value = list[other];
#pragma unroll
      for (int j = 0; j < kOwn; ++j) place[j] += value < item[j];
    }
    threads.sync();
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      if (own + j * Threads::kSize < count) list[place[j]] = item[j];
    }
    threads.sync();
    return;
  }
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + own; i < size; i += Threads::kSize) list[i] = ~uint64_t{0};
  threads.sync();
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      for (int i = own; i < size; i += Threads::kSize) {
        const int partner = i ^ distance;
        if (partner < i) continue;
        const uint64_t a = list[i], b = list[partner];
        if ((a > b) == ((i & run) == 0)) {
          list[i] = b;
          list[partner] = a;
        }
      }
      threads.sync();
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
template <class Threads>
__device__ __forceinline__ int draw_from_list(int count, bool complete, const Filters& f, double total,
                                              const Threads& threads) {
  constexpr int kItems = Threads::kItems;
  uint64_t* const list = threads.s.list;
  sort_list(count, threads);
  const int first = kItems * static_cast<int>(threadIdx.x);
  const int within = f.top_k > 0 && f.top_k < count ? f.top_k : count;
  uint64_t item[kItems];
  float weight[kItems];
  double before[kItems], mass;
  // Sums of weights before each item of this thread, and of all.
  const auto add_up = [&] {
    double own = 0;
#pragma unroll
    for (int j = 0; j < kItems; ++j) before[j] = own, own += weight[j];
    const double others = threads.sum_before(own, mass);
#pragma unroll
    for (int j = 0; j < kItems; ++j) before[j] += others;
  };
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    item[j] = first + j < within ? list[first + j] : 0;
    weight[j] = first + j < within ? weight_of(logit_of(item[j]), f.softmax) : 0.f;
  }
  add_up();
  double wanted = INFINITY;
  if (f.top_p < 1.f) {
    wanted = f.top_p * (f.top_k > 0 ? mass : total);
    if (f.top_k == 0 && !complete && mass < wanted) return -1;
  }
  // Weights fall and sums rise: what is kept is the front of the list.
  int kept = 0;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const bool in_set = first + j == 0 || before[j] < wanted;
    kept += first + j < within && in_set && weight[j] >= f.min_p && weight[j] > 0.f;
  }
  kept = threads.sum(kept);
  // By id, with the logit's key in the low half.
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    if (first + j < kept) list[first + j] = item[j] << 32 | static_cast<uint32_t>(~(item[j] >> 32));
  }
  sort_list(kept, threads);
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    item[j] = first + j < kept ? list[first + j] : 0;
    weight[j] = first + j < kept ? weight_of(value_of(static_cast<uint32_t>(item[j])), f.softmax) : 0.f;
  }
  add_up();
  const double target = f.u * mass;
  int drawn = kept - 1;  // rounding may leave the last sum below the target
#pragma unroll
  for (int j = kItems - 1; j >= 0; --j) {
    if (first + j < kept && before[j] + weight[j] > target) drawn = min(drawn, first + j);
  }
  drawn = threads.min(drawn);
  return static_cast<int>(list[drawn] >> 32);
}

// ---- the whole row

/// The first token of segment `i`, by rising id, whose running sum of weight(logit, id) from `before` on exceeds
/// `target`; the last of positive weight when none does, 0 when there is none. For one warp.
template <class T, class Weight>
__device__ __forceinline__ int walk(const RowOfLogits<T>& row, Weight&& weight, int i, double before,
                                    double target) {
  const uint32_t end = row.end_of(i);
  int found = 0;
  bool reached = false;
  for (uint32_t begin = i * row.segments.length; begin < end && !reached; begin += kChunk) {
    const uint32_t first = begin + lane_id() * kGroup;
    float w[kBatch][kGroup];  // weights, then their sums up to each
    row.load(first, end, w);
    double upto[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        const uint32_t id = first + b * kStep + j;
        sum += id < end ? weight(w[b][j], static_cast<int>(id)) : 0.f;
        w[b][j] = sum;
      }
      upto[b] = warp_scan(sum);
    }
    // The access first: the first whose sum reaches the target, else the last that weighs anything.
    int chosen = -1;
    double before_chosen = 0, upto_chosen = 0;
    float sums[kGroup] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const double sum = __shfl_sync(kAllLanes, upto[b], 31);
      if (reached || !(sum > 0)) continue;
      chosen = b, before_chosen = before, upto_chosen = upto[b];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) sums[j] = w[b][j];
      before += sum;
      reached = before > target;
    }
    if (chosen < 0) continue;
    const double lane_before = __shfl_up_sync(kAllLanes, upto_chosen, 1);
    const double at = before_chosen + (lane_id() == 0 ? 0 : lane_before);
    const int id = static_cast<int>(first) + chosen * kStep;
    int mine = INT_MAX, positive = 0;
#pragma unroll
    for (int j = kGroup - 1; j >= 0; --j) {
      const bool weighs = sums[j] > (j > 0 ? sums[j - 1] : 0.f);
      if (weighs && positive == 0) positive = id + j;
      if (weighs && at + sums[j] > target) mine = id + j;
    }
    mine = __reduce_min_sync(kAllLanes, mine);
    found = mine != INT_MAX ? mine : __reduce_max_sync(kAllLanes, positive);
  }
  return found;
}

/// The first token, by rising id, whose running sum of weight(logit, id) exceeds `target`, or target * the total when
/// of_total; the last of positive weight when none does. segment_weight(i) is that of a segment. For one warp.
template <class T, class Weight, class SegmentWeight>
__device__ __forceinline__ int locate_in(const RowOfLogits<T>& row, Weight&& weight,
                                         SegmentWeight&& segment_weight, double target, bool of_total,
                                         Shared& s) {
  // A lane has neighbouring segments.
  const int each = (row.segments.count + 31) / 32, begin = lane_id() * each;
  const int end = min(begin + each, row.segments.count);
  double own = 0, total;
  for (int i = begin; i < end; ++i) own += segment_weight(i);
  double before = Warp{s}.sum_before(own, total);
  if (of_total) target *= total;
  const uint32_t some = __ballot_sync(kAllLanes, own > 0);
  const uint32_t reach = __ballot_sync(kAllLanes, own > 0 && before + own > target);
  if (some == 0) return 0;
  // Rounding may leave the last sum below the target: then the last segment that weighs anything.
  const int lane = reach != 0 ? __ffs(reach) - 1 : 31 - __clz(some);
  int chosen = -1;  // two orders of one sum may differ in the last bit: never none
  double before_chosen = before;
  for (int i = begin; i < end && (chosen < 0 || before <= target); ++i) {
    const double sum = segment_weight(i);
    if (!(sum > 0)) continue;
    chosen = i, before_chosen = before;
    before += sum;
  }
  chosen = __shfl_sync(kAllLanes, chosen, lane);
  return walk(row, weight, chosen, __shfl_sync(kAllLanes, before_chosen, lane), target);
}

/// The same from the logits alone, by the block.
template <class T, class Weight>
__device__ __forceinline__ int locate(const RowOfLogits<T>& row, Weight&& weight, double target,
                                      bool of_total, Shared& s) {
  for (int i = warp_id(); i < row.segments.count; i += kWarps) {
    const uint32_t end = row.end_of(i);
    double sum = 0;
    for (uint32_t first = i * row.segments.length + lane_id() * kGroup; first < end; first += kStep) {
      float v[1][kGroup];
      row.load(first, end, v);
      float some = 0.f;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (first + j < end) some += weight(v[0][j], static_cast<int>(first + j));
      }
      sum += some;
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) s.sums[i] = sum;
  }
  __syncthreads();
  if (warp_id() == 0) {
    const int found = locate_in(
        row, weight, [&](int i) { return s.sums[i]; }, target, of_total, s);
    if (lane_id() == 0) s.found = found;
  }
  __syncthreads();
  const int found = s.found;
  __syncthreads();
  return found;
}

/// The lowest id with the row's largest logit.
template <class T>
__device__ __forceinline__ int largest(const RowOfLogits<T>& row, const SegmentStats& stats, float max,
                                       Shared& s) {
  int lowest = INT_MAX;
  for_each_from(
      row, stats, max, [&](float, int id) { lowest = min(lowest, id); }, s);
  return Block{s}.min(lowest);
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

/// A threshold for the `wanted` largest logits, or for about as many as a list holds with 0.
template <class T>
__device__ __forceinline__ float threshold_for(const RowOfLogits<T>& row, const SegmentStats& stats,
                                               int64_t wanted, const RowBounds& bounds, Shared& s) {
  if (row.vocab <= kShortList) return -INFINITY;
  const int most = min(row.segments.count * kPieces * 2 / 3, kMostNotes);
  return threshold_of(row, stats, wanted > 0 && wanted < most ? static_cast<int>(wanted) : most, bounds, s);
}

/// A token of the row; the first warp has it.
template <class T>
__device__ __forceinline__ int draw(const RowOfLogits<T>& row, const Filters& f, const RowBounds& bounds,
                                    Shared& s) {
  if (f.is_free()) {
    if (warp_id() != 0) return 0;
    const auto weight = [&](float l, int) { return weight_of(l, f.softmax); };
    const auto segment_weight = [&](int i) {
      const float max = s.drawn.max[i];
      return max > -INFINITY ? double{s.drawn.sum[i]} * weight_of(max, f.softmax) : 0.;
    };
    return locate_in(row, weight, segment_weight, f.u, true, s);
  }
  if (f.top_k > 0 || f.top_p < 1.f) {
    const float threshold = threshold_for(row, s.drawn, f.top_k, bounds, s);
    const int count = collect(row, s.drawn, threshold, false, s);
    const bool complete = threshold == -INFINITY;  // of all tokens that could be drawn
    if (count <= kShortList && (complete || f.top_k == 0 || count >= f.top_k)) {
      const double total = f.top_k > 0 ? 0. : total_of(s.drawn, row.segments.count, f.softmax);
      if (count > Warp::kSize * Warp::kItems) {
        const int id = draw_from_list(count, complete, f, total, Block{s});
        if (id >= 0) return id;
      } else {
        if (warp_id() == 0) {
          const int id = draw_from_list(count, complete, f, total, Warp{s});
          if (lane_id() == 0) s.found = id;
        }
        __syncthreads();
        const int id = s.found;
        __syncthreads();
        if (id >= 0) return id;
      }
    }
  }
  return draw_from_row(row, f, s);
}

/// The `wanted` most likely tokens, in order: write(i, id, logit), with id -1 past the vocabulary.
template <class T, class Write>
__device__ __forceinline__ void list_largest(const RowOfLogits<T>& row, int64_t wanted,
                                             const RowBounds& bounds, Write&& write, Shared& s) {
  const float threshold = threshold_for(row, s.given, wanted, bounds, s);
  const int count = collect(row, s.given, threshold, true, s);
  if (count <= kShortList && (threshold == -INFINITY || count >= wanted)) {
    sort_list(count, Block{s});
    for (int64_t i = threadIdx.x; i < wanted; i += kThreads) {
      const uint64_t item = i < count ? s.list[i] : 0;
      write(i, i < count ? static_cast<int>(static_cast<uint32_t>(item)) : -1, logit_of(item));
    }
    __syncthreads();
    return;
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
    last_id = Block{s}.min(best == last ? best_id : INT_MAX);
    const bool none = last_id == INT_MAX;
    if (threadIdx.x == 0) write(i, none ? -1 : last_id, last);
    if (none) last = -INFINITY;
  }
}

}  // namespace vivace::device::select
