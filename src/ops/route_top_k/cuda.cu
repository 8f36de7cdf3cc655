// experts of each token from its logits         fp32 scores, k rounds of a warp's maximum
//
// Two numbers for a token with E experts and k choices
//   bytes  4 E + 8 k   in the L2: router_gemm has just written the logits
//   flops  about 18 E  the exponential; then k scans of E / 32 keys per lane, latency rather than a roof
//
// A warp per token. Choices are integers that order as the floats do, so no expert is chosen twice, whatever the logits
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

/// The index of the largest of `count` keys, the lowest of equals; it becomes taken. All lanes of the warp.
__device__ __forceinline__ int take_largest(uint32_t* keys, int count, int lane) {
  uint32_t best = kTaken;
  int at = count;
  for (int i = lane; i < count; i += 32) {
    if (keys[i] > best) best = keys[i], at = i;
  }
  const uint32_t largest = __reduce_max_sync(kAllLanes, best);
  const int winner = static_cast<int>(
      __reduce_min_sync(kAllLanes, best == largest ? static_cast<unsigned>(at) : 0xffffffffu));
  __syncwarp();  // all have read
  if (winner < count && lane == 0) keys[winner] = kTaken;
  __syncwarp();
  return winner;
}

__global__ __launch_bounds__(kMostWarps * 32) void route_top_k_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint32_t shared[];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = int64_t{blockIdx.x} * warps + warp;
  if (token >= p.tokens) return;
  // Of this warp alone: keys, then scores, then the groups' keys whose place the chosen ids take later.
  uint32_t* keys = shared + warp * (2 * p.experts + max(p.groups, p.top_k));
  float* scores = reinterpret_cast<float*>(keys + p.experts);
  uint32_t* group_keys = keys + 2 * p.experts;
  const float* source = p.scores + token * p.scores_stride;
  wait_for_previous_kernel();

  const int64_t live_tokens = p.live_tokens != nullptr ? *p.live_tokens : p.tokens;
  float largest = -INFINITY;
  for (int e = lane; e < p.experts; e += 32) {
    const float v = source[e];
    keys[e] = key_of(v);
    scores[e] = logit_of(v);
    largest = fmaxf(largest, scores[e]);
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
    for (int e = lane; e < p.experts; e += 32) scores[e] = __fdiv_rn(1.f, 1.f + expf(-scores[e]));
  } else {
    largest = warp_reduce<Max>(largest);
    float sum = 0.f;
    for (int e = lane; e < p.experts; e += 32) {
      scores[e] = weight_below(scores[e], largest);
      sum += scores[e];
    }
    factor = 1.f / warp_reduce<Sum>(sum);
  }
  if (p.bias != nullptr || p.groups > 1) {
    for (int e = lane; e < p.experts; e += 32) {
      if (keys[e] == kNan) continue;
      keys[e] = key_of(scores[e] * factor + (p.bias != nullptr ? p.bias[e] : 0.f));
    }
  }
  __syncwarp();

  if (p.groups > 1) {
    const int size = p.experts / p.groups;
    for (int g = lane; g < p.groups; g += 32) {
      uint32_t first = kTaken, second = kTaken;
      for (int e = g * size; e < (g + 1) * size; ++e) {
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
      group_keys[g] = key_of(value);
    }
    __syncwarp();
    for (int i = 0; i < p.top_groups; ++i) take_largest(group_keys, p.groups, lane);
    for (int e = lane; e < p.experts; e += 32) {
      if (group_keys[e / size] != kTaken) keys[e] = kTaken;  // its group was not taken
    }
    __syncwarp();
  }

  int* chosen = reinterpret_cast<int*>(group_keys);
  float chosen_max = -INFINITY;
  for (int j = 0; j < p.top_k; ++j) {
    const int e = take_largest(keys, p.experts, lane);
    if (lane == 0) chosen[j] = e;
    chosen_max = fmaxf(chosen_max, logit_of(source[e]));
  }
  __syncwarp();

  // The weights, in float64: a few operations per choice, and a scale of any size times a weight of 0 stays 0.
  const bool softmax_chosen = p.scoring == RouteScoring::softmax_chosen;
  const auto weight_of = [&](int e) {
    return softmax_chosen ? double{weight_below(logit_of(source[e]), chosen_max)}
                          : double{scores[e]} * factor;
  };
  double sum = 0;
  for (int j = lane; j < p.top_k; j += 32) sum += weight_of(chosen[j]);
  sum = warp_sum(sum);
  const double scale = p.renormalise || softmax_chosen ? p.scale / (sum + kRenormaliseEps) : p.scale;
  let_next_kernel_start();
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
                          .smem_bytes = warps * 4 * (2 * experts + std::max(args.groups, top_k)),
                          .overlap_previous = true};
  return launch("route_top_k", route_top_k_kernel, shape, stream, params);
}

}  // namespace vivace
