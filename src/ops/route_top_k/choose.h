#pragma once

// The choice of one token's experts by one warp, which has the logits in registers.
//
// Choices are integers that order as the floats do, so no expert is chosen twice, whatever the logits are. A lane's largest
// key is a bound: the k-th largest of the lanes' has k keys or more at or above it, and seldom many more. Those are
// written one behind the other by rising id, and each finds its place by comparison with all others.

#include "src/device/reduce.h"
#include "src/ops/route_top_k/table.h"

namespace vivace::route {

/// A call without its scores.
struct Rule {
  const float* bias;
  const int32_t* live_tokens;
  int32_t* ids;
  float *weights, *zero_weight;
  int64_t tokens, ids_stride, weights_stride, zero_weight_stride;
  double scale;
  int experts, top_k, groups, top_groups, zero_experts;
  RouteScoring scoring;
  bool renormalise;
};

inline Rule rule_of(const RouteTopKArgs& args, int64_t experts) {
  return {.bias = args.correction_bias.as<const float>(),
          .live_tokens = args.live_tokens.as<const int32_t>(),
          .ids = args.expert_ids.as<int32_t>(),
          .weights = args.expert_weights.as<float>(),
          .zero_weight = args.zero_weight.as<float>(),
          .tokens = args.expert_ids.shape[0],
          .ids_stride = args.expert_ids.stride[0],
          .weights_stride = args.expert_weights.stride[0],
          .zero_weight_stride = args.zero_weight.stride[0],
          .scale = args.scale,
          .experts = static_cast<int>(experts),
          .top_k = static_cast<int>(args.expert_ids.shape[1]),
          .groups = static_cast<int>(args.groups),
          .top_groups = static_cast<int>(args.top_groups),
          .zero_experts = static_cast<int>(args.zero_experts),
          .scoring = args.scoring,
          .renormalise = args.renormalise};
}

inline constexpr int kMostCandidates = 32;  // one a lane

/// Words of shared memory that a warp takes: what weights are made from, the chosen ids, the candidates, and with groups
/// their keys and the experts'.
__host__ __device__ constexpr int warp_words(int experts, int top_k, int groups) {
  return experts + top_k + 2 * kMostCandidates + (groups > 1 ? groups + experts : 0);
}

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

/// The index of the largest of all lanes' `best`, the lowest of equals.
__device__ __forceinline__ int index_of_largest(uint32_t best, int index) {
  const uint32_t largest = __reduce_max_sync(device::kAllLanes, best);
  return static_cast<int>(
      __reduce_min_sync(device::kAllLanes, best == largest ? static_cast<unsigned>(index) : 0xffffffffu));
}

/// How many of the first `lanes` hold a larger key, or the same one before this lane.
__device__ __forceinline__ int rank_of(uint32_t key, int lane, int lanes) {
  int rank = 0;
#pragma unroll 8
  for (int other = 0; other < lanes; ++other) {
    const uint32_t theirs = __shfl_sync(device::kAllLanes, key, other);
    rank += theirs > key || (theirs == key && other < lane);
  }
  return rank;
}

/// Takes the largest of the groups' keys, `times` times: they become taken. All lanes of the warp.
__device__ __forceinline__ void take_groups(uint32_t* keys, int groups, int times, int lane) {
  for (int t = 0; t < times; ++t) {
    uint32_t best = kTaken;
    int at = groups;
    for (int g = lane; g < groups; g += 32) {
      if (keys[g] > best) best = keys[g], at = g;
    }
    const int winner = index_of_largest(best, at);
    __syncwarp();  // all have read
    if (winner < groups && lane == 0) keys[winner] = kTaken;
    __syncwarp();
  }
}

/// The key of a group: the sum of its two largest choices.
__device__ __forceinline__ uint32_t group_key(const uint32_t* keys, int size) {
  uint32_t first = kTaken, second = kTaken;
  for (int e = 0; e < size; ++e) {
    const uint32_t key = keys[e];
    if (key > first) {
      second = first;
      first = key;
    } else if (key > second) {
      second = key;
    }
  }
  float value = first == kTaken ? 0.f : value_of(first);
  if (second != kTaken) value += value_of(second);
  return key_of(value);
}

/// Writes the ids of the `top_k` largest keys to `chosen`, in falling order. `candidates`: 2 kMostCandidates words.
template <int kPerLane>
__device__ __forceinline__ void take_largest(uint32_t (&keys)[kPerLane], int top_k, int lane,
                                             uint32_t* candidates, int* chosen) {
  if (top_k == 0) return;
  if (top_k <= kMostCandidates) {
    uint32_t best = keys[0];
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) best = max(best, keys[i]);
    const unsigned last = __ballot_sync(device::kAllLanes, rank_of(best, lane, 32) == top_k - 1);
    const uint32_t least = __shfl_sync(device::kAllLanes, best, __ffs(last) - 1);
    int count = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const bool fits = keys[i] >= least;
      const unsigned lanes = __ballot_sync(device::kAllLanes, fits);
      const int at = count + __popc(lanes & ((1u << lane) - 1));
      if (fits && at < kMostCandidates) {
        candidates[at] = keys[i];
        candidates[kMostCandidates + at] = lane + 32 * i;
      }
      count += __popc(lanes);
    }
    __syncwarp();
    if (count <= kMostCandidates) {
      const uint32_t key = lane < count ? candidates[lane] : kTaken;
      const int rank = rank_of(key, lane, count);
      if (lane < count && rank < top_k) chosen[rank] = static_cast<int>(candidates[kMostCandidates + lane]);
      return;
    }
  }
  for (int j = 0; j < top_k; ++j) {
    uint32_t best = keys[0];
    int at = lane;
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) {
      if (keys[i] > best) best = keys[i], at = lane + 32 * i;
    }
    const int winner = index_of_largest(best, at);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + 32 * i == winner) keys[i] = kTaken;
    }
    if (lane == 0) chosen[j] = winner;
  }
}

/// A whole warp. A lane gives the logits of experts lane, lane + 32, ...; what it gives from p.experts on does not matter.
/// `bias` are those of p.bias, if there are any, `live_tokens` the number that p.live_tokens points to, `memory` warp_words()
/// words.
template <int kPerLane>
__device__ __forceinline__ void choose_for_token(const Rule& p, int64_t token, int64_t live_tokens,
                                                 const float (&logits)[kPerLane],
                                                 const float (&bias)[kPerLane], uint32_t* memory) {
  using namespace device;
  const int lane = threadIdx.x % 32;
  if (token >= live_tokens) {
    for (int j = lane; j < p.top_k; j += 32) {
      p.ids[token * p.ids_stride + j] = -1;
      p.weights[token * p.weights_stride + j] = 0.f;
    }
    if (p.zero_weight != nullptr && lane == 0) p.zero_weight[token * p.zero_weight_stride] = 0.f;
    return;
  }
  float* kept = reinterpret_cast<float*>(memory);
  int* chosen = reinterpret_cast<int*>(kept + p.experts);
  uint32_t* candidates = memory + p.experts + p.top_k;
  uint32_t *group_keys = candidates + 2 * kMostCandidates, *expert_keys = group_keys + p.groups;
  const bool softmax_chosen = p.scoring == RouteScoring::softmax_chosen;
  const bool by_score = p.bias != nullptr || p.groups > 1;

  uint32_t keys[kPerLane];
  float scores[kPerLane];
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + 32 * i;
    keys[i] = e < p.experts ? key_of(logits[i]) : kTaken;
    scores[i] = e < p.experts ? logit_of(logits[i]) : -INFINITY;
    largest = fmaxf(largest, scores[i]);
    if (softmax_chosen && e < p.experts) kept[e] = scores[i];
  }
  float factor = 1.f;  // scores hold weights up to this factor
  if (p.scoring == RouteScoring::sigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) scores[i] = __frcp_rn(1.f + expf(-scores[i]));
  } else if (!softmax_chosen || by_score) {
    largest = warp_reduce<Max>(largest);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores[i] = weight_below(scores[i], largest);
      if (lane + 32 * i < p.experts) sum += scores[i];
    }
    factor = 1.f / warp_reduce<Sum>(sum);
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + 32 * i;
    if (e >= p.experts) continue;
    if (!softmax_chosen) kept[e] = scores[i];
    if (by_score && keys[i] != kNan) {  // the score is a number of its own: no fused product and sum
      keys[i] = key_of(__fadd_rn(__fmul_rn(scores[i], factor), p.bias != nullptr ? bias[i] : 0.f));
    }
    if (p.groups > 1) expert_keys[e] = keys[i];
  }

  if (p.groups > 1) {
    const int size = p.experts / p.groups;
    __syncwarp();
    for (int g = lane; g < p.groups; g += 32) group_keys[g] = group_key(expert_keys + g * size, size);
    __syncwarp();
    take_groups(group_keys, p.groups, p.top_groups, lane);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int e = lane + 32 * i;
      if (e < p.experts && group_keys[e / size] != kTaken) keys[i] = kTaken;  // its group was not taken
    }
  }
  take_largest(keys, p.top_k, lane, candidates, chosen);
  __syncwarp();

  // The weights, in float64: a few operations per choice, and a scale of any size times a weight of 0 stays 0.
  float chosen_max = -INFINITY;
  if (softmax_chosen) {
    for (int j = lane; j < p.top_k; j += 32) chosen_max = fmaxf(chosen_max, kept[chosen[j]]);
    chosen_max = warp_reduce<Max>(chosen_max);
  }
  const auto weight_of = [&](int e) {
    return softmax_chosen ? double{weight_below(kept[e], chosen_max)} : double{kept[e]} * factor;
  };
  double scale = p.scale;
  if (p.renormalise || softmax_chosen) {
    double sum = 0;
    for (int j = lane; j < p.top_k; j += 32) sum += weight_of(chosen[j]);
    scale /= warp_sum(sum) + kRenormaliseEps;
  }
  double zero_weight = 0;
  for (int j = lane; j < p.top_k; j += 32) {
    const int e = chosen[j];
    const double weight = weight_of(e) * scale;
    const bool zero = e >= p.experts - p.zero_experts;
    if (zero) zero_weight += weight;
    p.ids[token * p.ids_stride + j] = zero ? -1 : e;
    p.weights[token * p.weights_stride + j] = zero ? 0.f : static_cast<float>(weight);
  }
  if (p.zero_weight != nullptr) {
    zero_weight = warp_sum(zero_weight);
    if (lane == 0) p.zero_weight[token * p.zero_weight_stride] = static_cast<float>(zero_weight);
  }
}

}  // namespace vivace::route
