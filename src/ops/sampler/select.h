#pragma once

// What a block of threads does with one row of logits: sums in a fixed order, a short list of the most likely tokens and a
// draw from it, and the same over the whole row where a list does not do. For cuda.cu.

#include <climits>

#include "src/device/number.h"
#include "src/device/reduce.h"

namespace vivace::device::select {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kGroup = 4;         // neighbouring logits of one access
constexpr int kBatch = 4;         // accesses that a thread has under way
constexpr int kShortList = 2048;  // tokens that fit the list
constexpr int kMostNotes = 512;   // notes that a threshold may rest on: with more the list would overflow
constexpr int kSegmentStep = 32 * kGroup * kBatch, kMostSegments = 1024;
constexpr int kWays = 8;  // of the search over a whole row
constexpr uint32_t kAllLanes = 0xffffffffu;

struct Shared {
  uint64_t list[kShortList];
  double sums[kMostSegments];  // of segments
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

__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
  return v;
}

__device__ __forceinline__ float block_max(float v, Shared& s) {
  v = warp_reduce<Max>(v);
  if (lane_id() == 0) s.floats[warp_id()] = v;
  __syncthreads();
  v = warp_reduce<Max>(s.floats[lane_id()]);
  __syncthreads();
  return v;
}

__device__ __forceinline__ int block_min(int v, Shared& s) {
  v = __reduce_min_sync(kAllLanes, v);
  if (lane_id() == 0) s.ints[warp_id()] = v;
  __syncthreads();
  v = __reduce_min_sync(kAllLanes, s.ints[lane_id()]);
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
  for (int i = 0; i < kCount; ++i) v[i] = warp_sum(s.doubles[i][lane_id()]);
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
  const double warps = warp_scan(s.doubles[0][lane_id()]);
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

struct Softmax {
  float max, inverse_temperature;
};

/// exp((v - max) / temperature), where equals of an infinite maximum count 1.
__device__ __forceinline__ float weight_of(float v, Softmax softmax) {
  return v == softmax.max ? 1.f : expf((v - softmax.max) * softmax.inverse_temperature);
}

/// The logits of a row: as given, or the changed copy, which is padded with -inf to whole groups.
template <class T>
struct RowOfLogits {
  const T* given;
  const float* changed;
  int64_t vocab;
  bool wide;  // groups are aligned

  __device__ __forceinline__ float at(int64_t id) const {
    return changed ? changed[id] : to_float(given[id]);
  }

  /// The group that begins at `begin`, a multiple of kGroup below vocab; -inf past the end.
  __device__ __forceinline__ void load(int64_t begin, float (&v)[kGroup]) const {
    if (changed != nullptr) {
      load_floats(changed + begin, v);
    } else if (wide && begin + kGroup <= vocab) {
      load_floats(given + begin, v);
    } else {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) v[j] = begin + j < vocab ? to_float(given[begin + j]) : -INFINITY;
    }
  }

  /// body(begin, values) for the groups of this thread, by rising id.
  template <class Body>
  __device__ __forceinline__ void for_each_group(Body&& body) const {
    constexpr int64_t kStep = int64_t{kThreads} * kGroup;
    for (int64_t first = int64_t{threadIdx.x} * kGroup; first < vocab; first += kStep * kBatch) {
      float v[kBatch][kGroup];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b * kStep < vocab) load(first + b * kStep, v[b]);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b * kStep < vocab) body(first + b * kStep, v[b]);
      }
    }
  }

  /// body(logit, id) for the tokens of this thread.
  template <class Body>
  __device__ __forceinline__ void for_each(Body&& body) const {
    for_each_group([&](int64_t begin, const float(&v)[kGroup]) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (begin + j < vocab) body(v[j], static_cast<int>(begin + j));
      }
    });
  }
};

/// What a thread, and then the block, knows of a row after one look.
struct Bounds {
  float max = -INFINITY;
  int id = INT_MAX;  // the lowest that holds the maximum
  bool nan = false;
  float sums[2] = {0.f, 0.f};  // of weights below `max`, at two temperatures

  /// The next group by rising id; sums[i] is kept when inverse[i] > 0.
  __device__ __forceinline__ void add(int64_t begin, const float (&v)[kGroup], const float (&inverse)[2]) {
    float larger = max;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      nan = nan || v[j] != v[j];
      if (v[j] > larger) {
        larger = v[j];
        id = static_cast<int>(begin + j);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!(inverse[i] > 0.f)) continue;
      if (larger > max) sums[i] *= expf((max - larger) * inverse[i]);
      if (larger == -INFINITY) continue;
      const Softmax softmax{larger, inverse[i]};
#pragma unroll
      for (int j = 0; j < kGroup; ++j) sums[i] += weight_of(v[j], softmax);
    }
    max = larger;
  }
};

struct RowBounds {
  float max;
  int id;
  bool nan;
  double sums[2];
};

__device__ __forceinline__ RowBounds combine(const Bounds& b, const float (&inverse)[2], Shared& s) {
  RowBounds row;
  row.nan = __syncthreads_or(b.nan) != 0;
  row.max = block_max(b.max, s);
  row.id = block_min(b.max == row.max ? b.id : INT_MAX, s);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    row.sums[i] = 0;
    if (inverse[i] > 0.f) {
      const Softmax softmax{row.max, inverse[i]};
      row.sums[i] = block_sum(b.max > -INFINITY ? double{b.sums[i]} * weight_of(b.max, softmax) : 0., s);
    }
  }
  return row;
}

// ---- the short list

/// A threshold that at least `notes` threads have seen a logit at or above; -inf when not so many have seen one.
__device__ __forceinline__ float threshold_of(float seen, int notes, float max) {
  uint32_t low = key_of(-INFINITY), high = key_of(max);
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
/// than the list holds.
template <class T>
__device__ __forceinline__ int collect(const RowOfLogits<T>& row, float threshold, bool minus_infinity,
                                       Shared& s) {
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  row.for_each([&](float logit, int id) {
    if (!(logit >= threshold) || (logit == -INFINITY && !minus_infinity)) return;
    const int at = atomicAdd(&s.count, 1);
    if (at < kShortList) s.list[at] = falling_item(logit, id);
  });
  __syncthreads();
  return s.count;
}

/// Sorts the first `count` items, rising.
__device__ __forceinline__ void sort_list(int count, Shared& s) {
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

/// The first token, by rising id, whose running sum of weight(logit, id) exceeds `target`, or u * the total when
/// of_total; the last of positive weight when none does.
template <class T, class Weight>
__device__ __forceinline__ int locate(const RowOfLogits<T>& row, Weight&& weight, double target,
                                      bool of_total, Shared& s) {
  const int64_t steps = (row.vocab + kSegmentStep - 1) / kSegmentStep;
  const int64_t length = (steps + kMostSegments - 1) / kMostSegments * kSegmentStep;
  const int segments = static_cast<int>((row.vocab + length - 1) / length);
  const int lane = lane_id();
  for (int segment = warp_id(); segment < segments; segment += kWarps) {
    const int64_t begin = segment * length, end = min(begin + length, row.vocab);
    double sum = 0;
    for (int64_t first = begin + lane * kGroup; first < end; first += kSegmentStep) {
      float v[kBatch][kGroup];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b * 32 * kGroup < end) row.load(first + b * 32 * kGroup, v[b]);
      }
      float some = 0.f;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          const int64_t id = first + b * 32 * kGroup + j;
          if (id < end) some += weight(v[b][j], static_cast<int>(id));
        }
      }
      sum += some;
    }
    sum = warp_sum(sum);
    if (lane == 0) s.sums[segment] = sum;
  }
  __syncthreads();
  if (warp_id() == 0) {
    // 32 segments per lane.
    constexpr int kPerLane = kMostSegments / 32;
    double own = 0;
    for (int i = 0; i < kPerLane; ++i) {
      const int segment = lane * kPerLane + i;
      if (segment < segments) own += s.sums[segment];
    }
    const double inclusive = warp_scan(own);
    if (of_total) target *= __shfl_sync(kAllLanes, inclusive, 31);
    double running = __shfl_up_sync(kAllLanes, inclusive, 1);
    if (lane == 0) running = 0;
    int hit = INT_MAX, last = -1;
    double before_hit = 0, before_last = 0;
    for (int i = 0; i < kPerLane; ++i) {
      const int segment = lane * kPerLane + i;
      if (segment >= segments || !(s.sums[segment] > 0)) continue;
      last = segment;
      before_last = running;
      running += s.sums[segment];
      if (running > target && hit == INT_MAX) {
        hit = segment;
        before_hit = before_last;
      }
    }
    int chosen = __reduce_min_sync(kAllLanes, hit);
    double before = 0;
    if (chosen != INT_MAX) {
      before = __shfl_sync(kAllLanes, before_hit, chosen / kPerLane);
    } else {
      chosen = max(__reduce_max_sync(kAllLanes, last), 0);
      before = __shfl_sync(kAllLanes, before_last, chosen / kPerLane);
    }
    const int64_t begin = chosen * length, end = min(begin + length, row.vocab);
    int found = INT_MAX, last_id = -1;
    for (int64_t step = begin; step < end && found == INT_MAX; step += 32 * kGroup) {
      const int64_t first = step + lane * kGroup;
      float w[kGroup] = {};
      if (first < end) {
        float v[kGroup];
        row.load(first, v);
#pragma unroll
        for (int j = 0; j < kGroup; ++j)
          w[j] = first + j < end ? weight(v[j], static_cast<int>(first + j)) : 0.f;
      }
      double sum = 0;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) sum += w[j];
      const double scanned = warp_scan(sum);
      double at = __shfl_up_sync(kAllLanes, scanned, 1);
      at = before + (lane == 0 ? 0 : at);
      int mine = INT_MAX, positive = -1;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (!(w[j] > 0.f)) continue;
        at += w[j];
        positive = static_cast<int>(first + j);
        if (at > target && mine == INT_MAX) mine = positive;
      }
      found = __reduce_min_sync(kAllLanes, mine);
      last_id = max(last_id, __reduce_max_sync(kAllLanes, positive));
      before += __shfl_sync(kAllLanes, scanned, 31);
    }
    if (lane == 0) s.found = found != INT_MAX ? found : max(last_id, 0);
  }
  __syncthreads();
  const int found = s.found;
  __syncthreads();
  return found;
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

/// A token of the row. `seen` is the largest logit that this thread saw, `total` the sum of all weights if only top_p cuts.
template <class T>
__device__ __forceinline__ int draw(const RowOfLogits<T>& row, const Filters& f, float seen, double total,
                                    Shared& s) {
  Cut cut;
  if (f.top_k > 0 || f.top_p < 1.f) {
    const int notes = f.top_k > 0 ? min(f.top_k, kMostNotes) : kMostNotes;
    const float threshold = threshold_of(seen, notes, f.softmax.max);
    const int count = collect(row, threshold, false, s);
    const bool complete = threshold == -INFINITY;  // of all tokens that could be drawn
    if (count <= kShortList && (complete || f.top_k == 0 || count >= f.top_k)) {
      const int id = draw_from_list(count, complete, f, total, s);
      if (id >= 0) return id;
    }
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
  }
  const auto weight = [&](float l, int id) {
    const float w = weight_of(l, f.softmax);
    return cut.keeps(l, id) && w >= f.min_p ? w : 0.f;
  };
  return locate(row, weight, f.u, true, s);
}

/// The `wanted` most likely tokens, in order: write(i, id, logit), with id -1 past the vocabulary.
template <class T, class Write>
__device__ __forceinline__ void list_largest(const RowOfLogits<T>& row, int64_t wanted, float seen, float max,
                                             Write&& write, Shared& s) {
  if (wanted <= kMostNotes) {
    const float threshold = threshold_of(seen, static_cast<int>(wanted), max);
    const int count = collect(row, threshold, true, s);
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
