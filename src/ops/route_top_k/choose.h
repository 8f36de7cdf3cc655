#pragma once

// The choice of one token's experts from its logits, for the kernels that end in one: by the threads of a block, of a part of
// one, or of a warp.
//
// Choices are integers that order as the floats do, so no expert is chosen twice, whatever the logits are. Nobody waits for k
// maxima one behind the other. Of a crew, a warp finds for each of its 32 experts how many of them lie above it, writes down
// its k best by that, and of all that were written down the place is found in the same way. A warp alone has 32 teams of experts, one
// a lane: the k-th largest of their largest keys is a bound, k keys or more lie at or above it and seldom many more, and those
// find their places by comparison with each other.
//
// What is added is added in the same order by however many threads: the bits are the same. Many instructions that wait for each
// other are what a choice takes, so what a rule leaves out is known where the code is made, for the two most usual ones.

#include <algorithm>
#include <bit>
#include <type_traits>

#include "src/device/ptx.h"
#include "src/device/reduce.h"
#include "src/ops/route_top_k/memory.h"
#include "src/ops/route_top_k/table.h"

namespace vivace::route {

using device::kAllLanes;

/// What is known of a rule. `sigmoid` has a bias, `softmax` none; neither has groups or zero experts, and both renormalise up to 32
/// choices.
enum class Kind { any, sigmoid, softmax };

/// A call without its scores.
struct Rule {
  const float* bias;
  const int32_t* live_tokens;
  int32_t* ids;
  float *weights, *zero_weight;
  int64_t tokens, ids_stride, weights_stride, zero_weight_stride;
  double scale;
  int experts, top_k, groups, top_groups, zero_experts;
  int log_share;             // of a crew's lanes for each of the best of a row
  uint64_t inverse_of_size;  // of a group, times 2^32 and rounded up
  RouteScoring scoring;
  bool renormalise;
};

inline Rule rule_of(const RouteTopKArgs& args) {
  const int64_t experts = args.scores.shape[1], top_k = args.expert_ids.shape[1];
  const auto size_of_group = static_cast<uint64_t>(std::max<int64_t>(1, experts / args.groups));
  return {.bias = args.correction_bias.as<const float>(),
          .live_tokens = args.live_tokens.as<const int32_t>(),
          .ids = args.expert_ids.as<int32_t>(),
          .weights = args.expert_weights.as<float>(),
          .zero_weight = args.zero_weight.as<float>(),
          .tokens = args.scores.shape[0],
          .ids_stride = args.expert_ids.stride[0],
          .weights_stride = args.expert_weights.stride[0],
          .zero_weight_stride = args.zero_weight.stride[0],
          .scale = args.scale,
          .experts = static_cast<int>(experts),
          .top_k = static_cast<int>(top_k),
          .groups = static_cast<int>(args.groups),
          .top_groups = static_cast<int>(args.top_groups),
          .zero_experts = static_cast<int>(args.zero_experts),
          .log_share = 5 - std::countr_zero(std::bit_ceil(static_cast<unsigned>(best_of_row(top_k)))),
          .inverse_of_size = ((uint64_t{1} << 32) + size_of_group - 1) / size_of_group,
          .scoring = args.scoring,
          .renormalise = args.renormalise};
}

inline Kind kind_of(const RouteTopKArgs& args) {
  const bool plain =
      args.groups == 1 && args.zero_experts == 0 && args.renormalise && args.expert_ids.shape[1] <= 32;
  if (plain && args.scoring == RouteScoring::sigmoid && args.correction_bias.present()) return Kind::sigmoid;
  if (plain && args.scoring == RouteScoring::softmax && !args.correction_bias.present()) return Kind::softmax;
  return Kind::any;
}

/// The threads that choose for a token: which one this is, of how many, and what they wait for each other by.
struct OneWarp {
  static constexpr bool kOneWarp = true;
  int thread, threads = 32;
  __device__ __forceinline__ void barrier() const { __syncwarp(); }
};
struct WholeBlock {
  static constexpr bool kOneWarp = false;
  int thread, threads;
  __device__ __forceinline__ void barrier() const { __syncthreads(); }
};
struct PartOfBlock {
  static constexpr bool kOneWarp = false;
  int thread, threads, id;
  __device__ __forceinline__ void barrier() const { device::named_barrier(id, threads); }
};

inline constexpr uint32_t kTaken = 0, kNan = 1;  // below the key of every number

/// A number that orders as the float does, -0 equal to 0 and NaN below all.
__device__ __forceinline__ uint32_t key_of(float v) {
  if (v != v) return kNan;
  const uint32_t bits = __float_as_uint(v + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  if (key == kNan) return NAN;
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

/// NaN counts as -inf in scores.
__device__ __forceinline__ float logit_of(float v) {
  return v == v ? v : -INFINITY;
}

/// exp(v - max), where equals of an infinite maximum count 1.
__device__ __forceinline__ float weight_below(float v, float max) {
  return v == max ? 1.f : expf(v - max);
}

/// A key and its expert, the lower id above an equal.
using Candidate = uint64_t;

__device__ __forceinline__ Candidate candidate_of(uint32_t key, int expert) {
  return uint64_t{key} << 32 | ~static_cast<uint32_t>(expert);
}
__device__ __forceinline__ int expert_of(Candidate c) {
  return static_cast<int>(~static_cast<uint32_t>(c));
}

/// The key of a group, by a warp: the sum of its two largest choices.
__device__ __forceinline__ uint32_t group_key(const uint32_t* keys, int size, int lane) {
  uint32_t first = kTaken, second = kTaken;
#pragma unroll 1
  for (int e = lane; e < size; e += 32) {
    second = max(second, min(first, keys[e]));
    first = max(first, keys[e]);
  }
  const uint32_t largest = __reduce_max_sync(kAllLanes, first);
  const unsigned with_it = __ballot_sync(kAllLanes, first == largest);
  const uint32_t next = __reduce_max_sync(kAllLanes, lane == __ffs(with_it) - 1 ? second : first);
  const float value = value_of(largest);
  return key_of(next == kTaken ? value : value + value_of(next));
}

/// The weights of the chosen, by a warp. The last product is in float64: a scale of any size times a weight of 0 stays 0. `scores`
/// are up to `factor`.
template <Kind kKind>
__device__ __forceinline__ void write_weights(const Rule& p, int64_t token, const int* chosen,
                                              const float* scores, float factor, int lane) {
  const bool of_chosen = kKind == Kind::any && p.scoring == RouteScoring::softmax_chosen;
  const auto each_of_lane = [&](auto&& act) {
    if constexpr (kKind == Kind::any) {
#pragma unroll 1
      for (int j = lane; j < p.top_k; j += 32) act(j);
    } else if (lane < p.top_k) {
      act(lane);
    }
  };
  float largest = -INFINITY;
  if (of_chosen) {
    each_of_lane([&](int j) { largest = fmaxf(largest, scores[j]); });
    largest = device::warp_reduce<device::Max>(largest);
  }
  const auto weight_of = [&](float score) {
    return of_chosen ? weight_below(score, largest) : score * factor;
  };
  float sum = 1.f;
  if (kKind != Kind::any || p.renormalise || of_chosen) {
    sum = 0.f;
    each_of_lane([&](int j) { sum += weight_of(scores[j]); });
    sum = device::warp_reduce<device::Sum>(sum) + static_cast<float>(kRenormaliseEps);
  }
  float zero_weight = 0.f;
  each_of_lane([&](int j) {
    const float share = __fdividef(weight_of(scores[j]), sum);  // of a sum in [1e-20, 4096]
    const auto weight = static_cast<float>(share * p.scale);
    const bool zero = kKind == Kind::any && chosen[j] >= p.experts - p.zero_experts;
    if (zero) zero_weight += weight;
    p.ids[token * p.ids_stride + j] = zero ? -1 : chosen[j];
    p.weights[token * p.weights_stride + j] = zero ? 0.f : weight;
  });
  if (kKind != Kind::any || p.zero_weight == nullptr) return;
  zero_weight = device::warp_reduce<device::Sum>(zero_weight);
  if (lane == 0) p.zero_weight[token * p.zero_weight_stride] = zero_weight;
}

/// Takes one from `count` where a > b: by the borrow of their difference, in two instructions.
__device__ __forceinline__ void take_one_if_above(int& count, uint32_t a, uint32_t b) {
  asm("{\n.reg .u32 d;\nsub.cc.u32 d, %2, %1;\nsubc.u32 %0, %0, 0;\n}" : "+r"(count) : "r"(a), "r"(b));
}

/// How many of a row of 32 keys, one a lane, lie above this lane's; of equals those before it.
__device__ __forceinline__ int rank_in_row(const uint32_t* row, uint32_t key, int lane) {
  uint4 quads[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) quads[i] = *reinterpret_cast<const uint4*>(row + 4 * i);
  const auto four = *reinterpret_cast<const uint4*>(row + (lane & ~3));
  __syncwarp();  // all are asked for before one is looked at
  int minus_ranks[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t below = lane / 4 > i ? key - 1 : key;
    take_one_if_above(minus_ranks[0], quads[i].x, below);
    take_one_if_above(minus_ranks[1], quads[i].y, below);
    take_one_if_above(minus_ranks[2], quads[i].z, below);
    take_one_if_above(minus_ranks[3], quads[i].w, below);
  }
  minus_ranks[0] -= lane % 4 > 0 && four.x == key;
  minus_ranks[1] -= lane % 4 > 1 && four.y == key;
  minus_ranks[2] -= lane % 4 > 2 && four.z == key;
  return -(minus_ranks[0] + minus_ranks[1] + (minus_ranks[2] + minus_ranks[3]));
}

/// The sum of all values of a warp, where each of kRows rows is first added up on its own. One exchange serves two rows, as
/// long as there are two: the upper bits of a lane's number become those of its row's, the other way round.
template <int kRows>
__device__ __forceinline__ float sum_of_rows(const float (&rows)[kRows], int lane) {
  constexpr int kPadded = static_cast<int>(std::bit_ceil(static_cast<unsigned>(kRows)));
  float sums[kPadded] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) sums[i] = rows[i];
  constexpr int kLevels = std::countr_zero(static_cast<unsigned>(kPadded));
#pragma unroll
  for (int level = 0; level < kLevels; ++level) {
    const int step = 16 >> level;
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < kPadded / 2; ++i) {
      if (i >= kPadded >> level >> 1) break;
      const float even = sums[2 * i], odd = sums[2 * i + 1];
      sums[i] = (upper ? odd : even) + __shfl_xor_sync(kAllLanes, upper ? even : odd, step);
    }
  }
  float sum = sums[0];
#pragma unroll
  for (int step = 16 >> kLevels; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
#pragma unroll
  for (int step = 32 >> kLevels; step <= 16; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return sum;
}

/// A crew chooses for a token and writes its ids and weights. A thread gives the logits of experts thread, thread + threads, ...,
/// and their bias; what it gives from p.experts on does not matter. `row` are all logits, which softmax_chosen may read again;
/// `shared` has bytes_of_warp() or bytes_of_crew(), aligned to 16; `memory` is a crew's of more than a warp.
template <Kind kKind, int kPerThread, class Crew>
__device__ __forceinline__ void choose(const Rule& p, const Crew& crew, int64_t token, int64_t live_tokens,
                                       const float (&logits)[kPerThread], const float (&bias)[kPerThread],
                                       const float* row, uint8_t* shared, CrewMemory& memory) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = crew.thread / 32;
  const int thread = crew.thread, threads = crew.threads, warps = threads / 32;
  if (token >= live_tokens || p.top_k == 0) {  // nobody is chosen
#pragma unroll 1
    for (int j = thread; j < p.top_k; j += threads) {
      p.ids[token * p.ids_stride + j] = -1;
      p.weights[token * p.weights_stride + j] = 0.f;
    }
    if (p.zero_weight != nullptr && thread == 0) p.zero_weight[token * p.zero_weight_stride] = 0.f;
    return;
  }

  auto* const expert_keys = reinterpret_cast<uint32_t*>(shared);  // whole rows of 32
  uint32_t* const group_keys =
      expert_keys + (Crew::kOneWarp ? p.experts + p.experts % 2 : threads * kPerThread);
  constexpr bool kAny = kKind == Kind::any;
  const bool of_chosen = kAny && p.scoring == RouteScoring::softmax_chosen;
  const bool sigmoid = kAny ? p.scoring == RouteScoring::sigmoid : kKind == Kind::sigmoid;
  const bool by_score = kAny ? p.bias != nullptr || p.groups > 1 : kKind == Kind::sigmoid;
  const bool softmax =
      kAny ? p.scoring == RouteScoring::softmax || (of_chosen && by_score) : kKind == Kind::softmax;
  const bool grouped = kAny && p.groups > 1;
  uint32_t keys[kPerThread];
  float scores[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const bool valid = thread + threads * i < p.experts;
    keys[i] = valid ? key_of(logits[i]) : kTaken;
    scores[i] = valid ? logit_of(logits[i]) : -INFINITY;
    if (sigmoid) scores[i] = __frcp_rn(1.f + expf(-scores[i]));
  }
  const auto largest_of_thread = [&] {
    uint32_t key = keys[0];
#pragma unroll
    for (int i = 1; i < kPerThread; ++i) key = max(key, keys[i]);
    return key;
  };
  // Scores are up to a factor, the inverse of their sum. In a block it is known behind the barrier that follows.
  float sum_of_scores = 0.f;
  const auto exponentials = [&](uint32_t largest_key) {
    const float largest = logit_of(value_of(largest_key));
    float summands[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      scores[i] = weight_below(scores[i], largest);
      summands[i] = thread + threads * i < p.experts ? scores[i] : 0.f;
    }
    if constexpr (Crew::kOneWarp) {
      sum_of_scores = sum_of_rows(summands, lane);
    } else {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) sum += summands[i];
      sum = device::warp_reduce<device::Sum>(sum);
      if (lane == 0) memory.warp_sums[warp] = sum;
    }
  };
  const auto inverse_sum = [&] {
    if constexpr (Crew::kOneWarp) return 1.f / sum_of_scores;
    return 1.f / device::warp_reduce<device::Sum>(lane < warps ? memory.warp_sums[lane] : 0.f);
  };

  float factor = 1.f;
  if (by_score) {
    if (softmax) {
      uint32_t largest = __reduce_max_sync(kAllLanes, largest_of_thread());
      if constexpr (!Crew::kOneWarp) {
        if (lane == 0) memory.warp_keys[warp] = largest;
        crew.barrier();
        largest = __reduce_max_sync(kAllLanes, lane < warps ? memory.warp_keys[lane] : kTaken);
      }
      exponentials(largest);
      crew.barrier();
      factor = inverse_sum();
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {  // the score is a number of its own: no fused product and sum
      if (keys[i] > kNan) keys[i] = key_of(__fadd_rn(__fmul_rn(scores[i], factor), bias[i]));
    }
  }
  if (grouped) {
    const int size = p.experts / p.groups;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (thread + threads * i < p.experts) expert_keys[thread + threads * i] = keys[i];
    }
    crew.barrier();
    for (int g = warp; g < p.groups; g += warps) {
      const uint32_t key = group_key(expert_keys + g * size, size, lane);
      if (lane == 0) group_keys[g] = key;
    }
    crew.barrier();
    const auto is_open = [&](int mine) {
      const uint32_t key = group_keys[mine];
      int before = 0;
      for (int g = 0; g < p.groups; ++g) before += group_keys[g] > key || (group_keys[g] == key && g < mine);
      return before < p.top_groups;
    };
    // A lane looks at a group for all of a warp: no more than 32 of them.
    const unsigned open = Crew::kOneWarp ? __ballot_sync(kAllLanes, lane < p.groups && is_open(lane)) : 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int e = thread + threads * i;
      if (e >= p.experts) continue;
      const int mine = static_cast<int>(e * p.inverse_of_size >> 32);
      if (Crew::kOneWarp ? (open >> mine & 1) == 0 : !is_open(mine)) keys[i] = kTaken;
    }
  }

  if constexpr (Crew::kOneWarp) {
    auto* const candidates =
        reinterpret_cast<Candidate*>(group_keys + (grouped ? p.groups + p.groups % 2 : 0));
    auto* const candidate_scores = reinterpret_cast<float*>(candidates + p.experts + kAtOnce);
    auto* const chosen = reinterpret_cast<int*>(candidate_scores + p.experts);
    auto* const chosen_scores = reinterpret_cast<float*>(chosen + p.top_k);
    // A lane is a team. Equals leave together: the bound is then lower than it need be.
    uint32_t of_team = largest_of_thread();
    const uint32_t largest = __reduce_max_sync(kAllLanes, of_team);
    uint32_t bound = largest;
    for (int j = 1; j < p.top_k && bound != kTaken; ++j) {
      if (of_team == bound) of_team = kTaken;
      bound = __reduce_max_sync(kAllLanes, of_team);
    }
    bound = max(bound, kTaken + 1);
    if (softmax && !by_score) {
      exponentials(largest);
      factor = inverse_sum();
    }
    int count = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool fits = keys[i] >= bound;
      const unsigned fitting = __ballot_sync(kAllLanes, fits);
      if (fitting == 0) continue;
      const int at = count + __popc(fitting & ((1u << lane) - 1));
      count += __popc(fitting);
      if (!fits) continue;
      candidates[at] = candidate_of(keys[i], thread + threads * i);
      candidate_scores[at] = scores[i];
    }
    if (lane < kAtOnce) candidates[count + lane] = 0;  // below all others
    __syncwarp();
    for (int c = lane; c < count; c += 32) {
      const Candidate mine = candidates[c];
      int rank = 0;
      for (int other = 0; other < count && rank < p.top_k; other += kAtOnce) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) rank += candidates[other + j] > mine;
      }
      if (rank >= p.top_k) continue;
      chosen[rank] = expert_of(mine);
      // Of the logits where exponentials were for the choice alone.
      chosen_scores[rank] = of_chosen && by_score ? logit_of(row[expert_of(mine)]) : candidate_scores[c];
    }
    __syncwarp();
    write_weights<kKind>(p, token, chosen, chosen_scores, factor, lane);
    return;
  }

  const int best = best_of_row(p.top_k), rows = warps * kPerThread;
  uint32_t* const best_keys = group_keys + (grouped ? (p.groups + 3) / 4 * 4 : 0);  // [rows][best]
  auto* const best_experts = reinterpret_cast<int*>(best_keys + rows * best);
  auto* const best_scores = reinterpret_cast<float*>(best_experts + rows * best);
  auto* const chosen = reinterpret_cast<int*>(best_scores + rows * best);
  auto* const chosen_scores = reinterpret_cast<float*>(chosen + p.top_k);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    expert_keys[thread + threads * i] = keys[i];
    if (lane < best) best_keys[(warp + warps * i) * best + lane] = kTaken;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int rank = rank_in_row(expert_keys + threads * i + 32 * warp, keys[i], lane);
    const int at = (warp + warps * i) * best + rank;
    if (rank >= best || keys[i] == kTaken) continue;
    best_keys[at] = keys[i];
    best_experts[at] = thread + threads * i;
    best_scores[at] = of_chosen && by_score ? logit_of(logits[i]) : scores[i];
  }
  crew.barrier();
  float largest_logit = 0.f;
  if (softmax && !by_score) {  // a row's best are in falling order
    uint32_t largest = kTaken;
    for (int r = lane; r < rows; r += 32) largest = max(largest, best_keys[r * best]);
    largest = __reduce_max_sync(kAllLanes, largest);
    largest_logit = logit_of(value_of(largest));
    exponentials(largest);
  }
  // Some lanes share one of the best: each looks at every so many rows, which are in the order of experts. Where a row's fourth
  // is not above, nothing behind it is, so the first quads nearly always suffice.
  const int share = 1 << p.log_share, place = lane >> p.log_share, sharer = lane & (share - 1);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int own = warp + warps * i, at = own * best + place;
    const uint32_t key = place < best ? best_keys[at] : kTaken;
    int minus_rank = sharer == 0 ? -place : 0;
    bool goes_on = false;
    const auto look_at = [&](int other, int quad) {
      const auto four = *reinterpret_cast<const uint4*>(best_keys + other * best + quad);
      const uint32_t below = other < own ? key - 1 : other > own ? key : ~0u;
      for (const uint32_t theirs : {four.x, four.y, four.z, four.w})
        take_one_if_above(minus_rank, theirs, below);
      goes_on |= four.w > below;
    };
    const auto of_all_sharers = [&](int v) {
      for (int step = 1; step < share; step *= 2) v += __shfl_xor_sync(kAllLanes, v, step);
      return v;
    };
#pragma unroll 2
    for (int other = sharer; other < rows; other += share) look_at(other, 0);
    int rank = of_all_sharers(-minus_rank);
    if (best > 4 && __any_sync(kAllLanes, goes_on && key != kTaken && rank < p.top_k)) {
#pragma unroll 1
      for (int other = sharer; other < rows; other += share)
        for (int quad = 4; quad < best; quad += 4) look_at(other, quad);
      rank = of_all_sharers(-minus_rank);
    }
    if (sharer > 0 || key == kTaken || rank >= p.top_k) continue;
    chosen[rank] = best_experts[at];
    chosen_scores[rank] =
        softmax && !by_score ? weight_below(best_scores[at], largest_logit) : best_scores[at];
  }
  crew.barrier();
  if (warp > 0) return;
  if (softmax && !by_score) factor = inverse_sum();
  write_weights<kKind>(p, token, chosen, chosen_scores, factor, lane);
}

}  // namespace vivace::route
