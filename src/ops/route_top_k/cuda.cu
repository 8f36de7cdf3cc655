// experts of each token from its logits         fp32 scores, k rounds of a warp's maximum
//
// Two numbers for a token with E experts and k choices
//   bytes  4 E + 8 k   in the L2: router_gemm has just written the logits
//   flops  about 18 E  the exponential; then k scans of E / 32 keys per lane, latency rather than a roof
//
// A warp per token, its keys in registers. Choices are integers that order as the floats do, so no expert is chosen twice, whatever the logits
// are; ties fall to the lower id because the second of two warp reductions takes the smallest.

#include <algorithm>

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/reduce.h"
#include "src/ops/route_top_k/table.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kMostWarps = 4;
constexpr uint32_t kTaken = 0, kNan = 1;  // below the key of every number

struct Params {
  const float *scores, *bias;
  const int32_t* live_tokens;
  int32_t* ids;
  float *weights, *zero_weight;
  int64_t tokens, scores_stride, ids_stride, weights_stride, zero_weight_stride;
  double scale;
  int experts, top_k, groups, top_groups, zero_experts;
  RouteScoring scoring;
  bool renormalise;
};

/// Words of shared memory that a warp takes.
__host__ __device__ inline int warp_words(const Params& p) {
  return p.experts + p.top_k + (p.groups > 1 ? p.groups + p.experts : 0);
}

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
  const uint32_t largest = __reduce_max_sync(kAllLanes, best);
  return static_cast<int>(
      __reduce_min_sync(kAllLanes, best == largest ? static_cast<unsigned>(index) : 0xffffffffu));
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

/// A lane has experts lane, lane + 32, ... up to kPerLane of them, in registers.
template <int kPerLane>
__global__ __launch_bounds__(kMostWarps * 32) void route_top_k_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint32_t shared[];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = int64_t{blockIdx.x} * warps + warp;
  if (token >= p.tokens) return;
  // Of this warp alone: what weights are made from, the chosen ids, and with groups their keys and the experts'.
  float* kept = reinterpret_cast<float*>(shared + warp * warp_words(p));
  int* chosen = reinterpret_cast<int*>(kept + p.experts);
  uint32_t *group_keys = shared + warp * warp_words(p) + p.experts + p.top_k,
           *expert_keys = group_keys + p.groups;
  const bool softmax_chosen = p.scoring == RouteScoring::softmax_chosen;
  const bool by_score = p.bias != nullptr || p.groups > 1;
  const float* source = p.scores + token * p.scores_stride;
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int64_t live_tokens = p.live_tokens != nullptr ? *p.live_tokens : p.tokens;
  uint32_t keys[kPerLane];
  float scores[kPerLane];
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + 32 * i;
    const float v = e < p.experts ? source[e] : -INFINITY;
    keys[i] = e < p.experts ? key_of(v) : kTaken;
    scores[i] = logit_of(v);
    largest = fmaxf(largest, scores[i]);
    if (softmax_chosen && e < p.experts) kept[e] = scores[i];
  }
  if (token >= live_tokens) {  // asked here, so that the number arrives together with the logits
    for (int j = lane; j < p.top_k; j += 32) {
      p.ids[token * p.ids_stride + j] = -1;
      p.weights[token * p.weights_stride + j] = 0.f;
    }
    if (p.zero_weight != nullptr && lane == 0) p.zero_weight[token * p.zero_weight_stride] = 0.f;
    return;
  }
  float factor = 1.f;  // scores hold weights up to this factor
  if (p.scoring == RouteScoring::sigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) scores[i] = __fdiv_rn(1.f, 1.f + expf(-scores[i]));
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
    if (by_score && keys[i] != kNan)
      keys[i] = key_of(scores[i] * factor + (p.bias != nullptr ? p.bias[e] : 0.f));
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

  for (int j = 0; j < p.top_k; ++j) {
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

}  // namespace

Status route_top_k_cuda(const RouteTopKArgs& args, const Stream& stream) {
  const int64_t tokens = args.scores.shape[0], experts = args.scores.shape[1],
                top_k = args.expert_ids.shape[1];
  const Params params{.scores = args.scores.as<const float>(),
                      .bias = args.correction_bias.as<const float>(),
                      .live_tokens = args.live_tokens.as<const int32_t>(),
                      .ids = args.expert_ids.as<int32_t>(),
                      .weights = args.expert_weights.as<float>(),
                      .zero_weight = args.zero_weight.as<float>(),
                      .tokens = tokens,
                      .scores_stride = args.scores.stride[0],
                      .ids_stride = args.expert_ids.stride[0],
                      .weights_stride = args.expert_weights.stride[0],
                      .zero_weight_stride = args.zero_weight.stride[0],
                      .scale = args.scale,
                      .experts = static_cast<int>(experts),
                      .top_k = static_cast<int>(top_k),
                      .groups = static_cast<int>(args.groups),
                      .top_groups = static_cast<int>(args.top_groups),
                      .zero_experts = static_cast<int>(args.zero_experts),
                      .scoring = args.scoring,
                      .renormalise = args.renormalise};
  const int64_t warps = experts <= kMaxRouteExperts ? kMostWarps : 1;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((tokens + warps - 1) / warps)),
                          .block = dim3(static_cast<unsigned>(32 * warps)),
                          .smem_bytes = warps * 4 * warp_words(params),
                          .overlap_previous = true};
  const auto kernel = experts <= 256   ? route_top_k_kernel<8>
                      : experts <= 768 ? route_top_k_kernel<24>
                                       : route_top_k_kernel<128>;
  return launch("route_top_k", kernel, shape, stream, params);
}

}  // namespace vivace
