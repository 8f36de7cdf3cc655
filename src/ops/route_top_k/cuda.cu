// experts of each token from its router logits         fp32 scores; a token has a block, or a warp where there are many
//
// Two numbers for a token with E experts and k choices
//   bytes  4 E + 8 k   in the L2: router_gemm has just written the logits
//   flops  about 18 E  the exponential; what counts is how many steps one after the other lie between logits and weights
//
// Choices are integers that order as the floats do, so no expert is chosen twice, whatever the logits are. Threads form at
// most 32 teams of neighbours. The k-th largest of the teams' largest keys is a bound: k keys or more lie at or above it, and
// seldom many more. Those are written down in any order, and each finds its place by comparison with all others.
//
// In a block a thread has one expert, up to 1,024: the fewest steps one after the other. A warp per token takes the fewest
// instructions, no barriers and no second round of blocks. What is added is added in the same order: the bits are the same.

#include <algorithm>
#include <bit>

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/reduce.h"
#include "src/ops/route_top_k/table.h"

namespace vivace {

namespace {

using device::kAllLanes;

constexpr int kMostThreads = 1024, kTeams = 32;
constexpr int kWarpsOfBlock = 8;                // each with a token of its own
constexpr int64_t kMostSharedBytes = 99 << 10;  // of a block, that GPUs from compute capability 8.0 on have
constexpr int kAtOnce = 8;                      // candidates that one is compared with
constexpr int64_t kManyTokens = 640;            // from which on each has a warp: blocks would come in rounds

struct Params {
  const float *scores, *bias;
  const int32_t* live_tokens;
  int32_t* ids;
  float *weights, *zero_weight;
  int64_t tokens, scores_stride, ids_stride, weights_stride, zero_weight_stride;
  double scale;
  int experts, top_k, groups, top_groups, zero_experts;
  int log_team;              // of the threads of a team
  int shared_bytes;          // of a token
  uint64_t inverse_of_size;  // of a group, times 2^32 and rounded up
  RouteScoring scoring;
  bool renormalise;
};

constexpr uint32_t kTaken = 0, kNan = 1;  // below the key of every number

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

/// Bytes of shared memory: candidates and their scores, the chosen and theirs, and with groups the keys of both.
constexpr int64_t shared_bytes(int64_t experts, int64_t top_k, int64_t groups) {
  const int64_t bytes = 12 * experts + 8 * (kAtOnce + top_k) + (groups > 1 ? 4 * (experts + groups) : 0);
  return (bytes + 15) / 16 * 16;
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

/// The sum of the first `lanes` lanes' values, a power of two, in each of them.
__device__ __forceinline__ double sum_of_lanes(double v, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
  return v;
}

/// The weights of the chosen, by a warp, in float64: a few operations a choice, and a scale of any size times a weight of 0
/// stays 0. `scores` are up to `factor`.
__device__ __forceinline__ void write_weights(const Params& p, int64_t token, const int* chosen,
                                              const float* scores, float factor, int lane) {
  const bool of_chosen = p.scoring == RouteScoring::softmax_chosen;
  float largest = -INFINITY;
  if (of_chosen) {
#pragma unroll 1
    for (int j = lane; j < p.top_k; j += 32) largest = fmaxf(largest, scores[j]);
    largest = device::warp_reduce<device::Max>(largest);
  }
  const auto weight_of = [&](float score) {
    return of_chosen ? double{weight_below(score, largest)} : double{score} * factor;
  };
  const int lanes = p.top_k >= 32 ? 32 : p.top_k <= 1 ? 1 : 1 << (32 - __clz(p.top_k - 1));
  double scale = p.scale;
  if (p.renormalise || of_chosen) {
    double sum = 0;
#pragma unroll 1
    for (int j = lane; j < p.top_k; j += 32) sum += weight_of(scores[j]);
    scale /= sum_of_lanes(sum, lanes) + kRenormaliseEps;
  }
  double zero_weight = 0;
#pragma unroll 1
  for (int j = lane; j < p.top_k; j += 32) {
    const double weight = weight_of(scores[j]) * scale;
    const bool zero = chosen[j] >= p.experts - p.zero_experts;
    if (zero) zero_weight += weight;
    p.ids[token * p.ids_stride + j] = zero ? -1 : chosen[j];
    p.weights[token * p.weights_stride + j] = zero ? 0.f : static_cast<float>(weight);
  }
  if (p.zero_weight == nullptr) return;
  zero_weight = sum_of_lanes(zero_weight, lanes);
  if (lane == 0) p.zero_weight[token * p.zero_weight_stride] = static_cast<float>(zero_weight);
}

/// More than a bound on threads gives. 32 experts a lane would spill.
template <int kPerThread, bool kWarpPerToken>
inline constexpr int kBlocksPerSm = kWarpPerToken&& kPerThread <= 24 ? 2 : 1;

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

template <int kPerThread, bool kWarpPerToken>
__global__ __launch_bounds__(
    kWarpPerToken ? 32 * kWarpsOfBlock : kMostThreads,
    kBlocksPerSm<kPerThread, kWarpPerToken>) void route_top_k_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ __align__(16) uint32_t team_keys[kTeams];
  __shared__ float warp_sums[kMostThreads / 32];
  __shared__ int written;

  // Threads, warps and barriers of a token.
  const int lane = static_cast<int>(threadIdx.x) % 32, warp_of_block = static_cast<int>(threadIdx.x) / 32;
  const int warp = kWarpPerToken ? 0 : warp_of_block, thread = 32 * warp + lane;
  const int threads = kWarpPerToken ? 32 : static_cast<int>(blockDim.x), warps = threads / 32;
  const auto barrier = [] {
    if constexpr (kWarpPerToken) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };
  const int64_t token = kWarpPerToken ? int64_t{blockIdx.x} * kWarpsOfBlock + warp_of_block : blockIdx.x;
  if (token >= p.tokens) return;
  auto* const candidates =
      reinterpret_cast<Candidate*>(shared + (kWarpPerToken ? warp_of_block * p.shared_bytes : 0));
  auto* const candidate_scores = reinterpret_cast<float*>(candidates + p.experts + kAtOnce);
  auto* const chosen = reinterpret_cast<int*>(candidate_scores + p.experts);
  auto* const chosen_scores = reinterpret_cast<float*>(chosen + p.top_k);
  auto* const expert_keys = reinterpret_cast<uint32_t*>(chosen_scores + p.top_k);
  uint32_t* const group_keys = expert_keys + p.experts;

  // The next kernel is not let in before this one has ended: fused_moe has a CTA an SM, and where some have one of these, two of
  // its own would share another.
  device::wait_for_previous_kernel();
  // All is asked for together: each of these waits for memory.
  const int64_t live_tokens = p.live_tokens != nullptr ? *p.live_tokens : p.tokens;
  const float* const row = p.scores + token * p.scores_stride;
  float logits[kPerThread], bias[kPerThread] = {};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
    logits[i] = thread + threads * i < p.experts ? row[thread + threads * i] : 0.f;
  if (p.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
      if (thread + threads * i < p.experts) bias[i] = p.bias[thread + threads * i];
  }
  if (token >= live_tokens) {
#pragma unroll 1
    for (int j = thread; j < p.top_k; j += threads) {
      p.ids[token * p.ids_stride + j] = -1;
      p.weights[token * p.weights_stride + j] = 0.f;
    }
    if (p.zero_weight != nullptr && thread == 0) p.zero_weight[token * p.zero_weight_stride] = 0.f;
    return;
  }

  const bool of_chosen = p.scoring == RouteScoring::softmax_chosen;
  const bool by_score = p.bias != nullptr || p.groups > 1;
  const bool softmax = p.scoring == RouteScoring::softmax || (of_chosen && by_score);
  uint32_t keys[kPerThread];
  float scores[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const bool valid = thread + threads * i < p.experts;
    keys[i] = valid ? key_of(logits[i]) : kTaken;
    scores[i] = valid ? logit_of(logits[i]) : -INFINITY;
    if (p.scoring == RouteScoring::sigmoid) scores[i] = __frcp_rn(1.f + expf(-scores[i]));
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
    if constexpr (kWarpPerToken) {
      sum_of_scores = sum_of_rows(summands, lane);
    } else {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) sum += summands[i];
      sum = device::warp_reduce<device::Sum>(sum);
      if (lane == 0) warp_sums[warp] = sum;
    }
  };
  const auto inverse_sum = [&] {
    if constexpr (kWarpPerToken) return 1.f / sum_of_scores;
    return 1.f / device::warp_reduce<device::Sum>(lane < warps ? warp_sums[lane] : 0.f);
  };

  float factor = 1.f;
  if (by_score) {
    if (softmax) {
      uint32_t largest = __reduce_max_sync(kAllLanes, largest_of_thread());
      if constexpr (!kWarpPerToken) {
        if (lane == 0) team_keys[warp] = largest;
        __syncthreads();
        largest = __reduce_max_sync(kAllLanes, lane < warps ? team_keys[lane] : kTaken);
      }
      exponentials(largest);
      barrier();
      factor = inverse_sum();
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {  // the score is a number of its own: no fused product and sum
      if (keys[i] > kNan) keys[i] = key_of(__fadd_rn(__fmul_rn(scores[i], factor), bias[i]));
    }
  }
  if (p.groups > 1) {
    const int size = p.experts / p.groups;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (thread + threads * i < p.experts) expert_keys[thread + threads * i] = keys[i];
    }
    barrier();
    for (int g = warp; g < p.groups; g += warps) {
      const uint32_t key = group_key(expert_keys + g * size, size, lane);
      if (lane == 0) group_keys[g] = key;
    }
    barrier();
    const auto is_open = [&](int mine) {
      const uint32_t key = group_keys[mine];
      int before = 0;
      for (int g = 0; g < p.groups; ++g) before += group_keys[g] > key || (group_keys[g] == key && g < mine);
      return before < p.top_groups;
    };
    // A lane looks at a group for all of a warp: no more than 32 of them.
    const unsigned open = kWarpPerToken ? __ballot_sync(kAllLanes, lane < p.groups && is_open(lane)) : 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int e = thread + threads * i;
      if (e >= p.experts) continue;
      const int mine = static_cast<int>(e * p.inverse_of_size >> 32);
      if (kWarpPerToken ? (open >> mine & 1) == 0 : !is_open(mine)) keys[i] = kTaken;
    }
  }

  uint32_t largest = largest_of_thread(), bound = kTaken;
  if constexpr (kWarpPerToken) {
    // A lane is a team. Equals leave together: the bound is then lower than it need be.
    uint32_t of_team = largest;
    largest = __reduce_max_sync(kAllLanes, largest);
    bound = largest;
    for (int j = 1; j < p.top_k && bound != kTaken; ++j) {
      if (of_team == bound) of_team = kTaken;
      bound = __reduce_max_sync(kAllLanes, of_team);
    }
  } else {
    for (int step = 1 << p.log_team >> 1; step > 0; step /= 2)
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
    const int team = thread >> p.log_team;
    if (team << p.log_team == thread) team_keys[team] = largest;
    if (thread < kTeams && thread >= threads >> p.log_team) team_keys[thread] = kTaken;  // no such team
    if (thread == 0) written = 0;
    __syncthreads();
    const uint32_t of_team = team_keys[lane];
    int at_least = 0;  // so many teams have a key at or above it
#pragma unroll
    for (int other = 0; other < kTeams; other += 4) {
      const auto four = *reinterpret_cast<const uint4*>(team_keys + other);
      at_least += (four.x >= of_team) + (four.y >= of_team) + (four.z >= of_team) + (four.w >= of_team);
    }
    bound = __reduce_max_sync(kAllLanes, at_least >= p.top_k ? of_team : kTaken);
    largest = __reduce_max_sync(kAllLanes, of_team);
  }
  bound = max(bound, kTaken + 1);
  if (softmax && !by_score) exponentials(largest);

  int count = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const bool fits = keys[i] >= bound;
    const unsigned fitting = __ballot_sync(kAllLanes, fits);
    if (fitting == 0) continue;
    int at = count;
    if constexpr (kWarpPerToken) {
      count += __popc(fitting);
    } else {
      if (lane == 0) at = atomicAdd(&written, __popc(fitting));
      at = __shfl_sync(kAllLanes, at, 0);
    }
    at += __popc(fitting & ((1u << lane) - 1));
    if (!fits) continue;
    candidates[at] = candidate_of(keys[i], thread + threads * i);
    candidate_scores[at] = scores[i];
  }
  if (kWarpPerToken && lane < kAtOnce) candidates[count + lane] = 0;  // below all others
  barrier();
  if constexpr (!kWarpPerToken) count = written;
  const bool few = kWarpPerToken || count <= 32;  // whom one warp ranks
  if (few && warp > 0) return;
  for (int c = thread; c < count; c += threads) {
    const Candidate mine = candidates[c];
    int rank = 0;
    for (int other = 0; other < count && rank < p.top_k; other += kAtOnce) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        rank += (kWarpPerToken || other + j < count) && candidates[other + j] > mine;
    }
    if (rank >= p.top_k) continue;
    chosen[rank] = expert_of(mine);
    // Of the logits where exponentials were for the choice alone.
    chosen_scores[rank] = of_chosen && by_score ? logit_of(row[expert_of(mine)]) : candidate_scores[c];
  }
  if (few) {
    __syncwarp();
  } else {
    __syncthreads();
    if (warp > 0) return;
  }
  if (softmax && !by_score) factor = inverse_sum();
  write_weights(p, token, chosen, chosen_scores, factor, lane);
}

/// The instance of a warp that has so many experts.
auto kernel_of_warp(int64_t experts) {
  return experts <= 64    ? route_top_k_kernel<2, true>
         : experts <= 128 ? route_top_k_kernel<4, true>
         : experts <= 192 ? route_top_k_kernel<6, true>
         : experts <= 256 ? route_top_k_kernel<8, true>
         : experts <= 384 ? route_top_k_kernel<12, true>
         : experts <= 768 ? route_top_k_kernel<24, true>
                          : route_top_k_kernel<32, true>;
}

}  // namespace

Status route_top_k_cuda(const RouteTopKArgs& args, const Stream& stream) {
  const int64_t tokens = args.scores.shape[0], experts = args.scores.shape[1];
  const int64_t top_k = args.expert_ids.shape[1];
  const int64_t per_thread = experts <= kMostThreads ? 1 : 4;
  const int64_t warps = std::max<int64_t>(1, (experts + 32 * per_thread - 1) / (32 * per_thread));
  const int64_t threads_of_team = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(warps)));
  const int64_t bytes = shared_bytes(experts, top_k, args.groups);
  const auto size_of_group = static_cast<uint64_t>(std::max<int64_t>(1, experts / args.groups));
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
                      .log_team = std::countr_zero(static_cast<uint64_t>(threads_of_team)),
                      .shared_bytes = static_cast<int>(bytes),
                      .inverse_of_size = ((uint64_t{1} << 32) + size_of_group - 1) / size_of_group,
                      .scoring = args.scoring,
                      .renormalise = args.renormalise};
  const bool many = tokens >= kManyTokens && experts <= kMostThreads && args.groups <= 32 &&
                    bytes * kWarpsOfBlock <= kMostSharedBytes;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(many ? (tokens + kWarpsOfBlock - 1) / kWarpsOfBlock : tokens)),
      .block = dim3(static_cast<unsigned>(32 * (many ? kWarpsOfBlock : warps))),
      .smem_bytes = bytes * (many ? kWarpsOfBlock : 1),
      .overlap_previous = true};
  const auto kernel = many              ? kernel_of_warp(experts)
                      : per_thread == 1 ? route_top_k_kernel<1, false>
                                        : route_top_k_kernel<4, false>;
  return launch("route_top_k", kernel, shape, stream, params);
}

}  // namespace vivace
