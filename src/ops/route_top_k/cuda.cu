// experts of each token from its router logits         fp32 scores; a token has a block, or a warp where there are many
//
// Two numbers for a token with E experts and k choices
//   bytes  4 E + 8 k   in the L2: router_gemm has just written the logits
//   flops  about 18 E  the exponential; what counts is how many steps one after the other lie between logits and weights
//
// In a block a thread has one expert, up to 1,024: the fewest steps one after the other. A warp per token takes the fewest
// instructions, no barriers and no second round of blocks. What is added is added in the same order: the bits are the same.

#include <algorithm>

#include "src/device/launch.h"
#include "src/ops/route_top_k/choose.h"

namespace vivace {

namespace {

using namespace route;

constexpr int kWarpsOfBlock = 8;                // each with a token of its own
constexpr int64_t kMostSharedBytes = 99 << 10;  // of a block, that GPUs from compute capability 8.0 on have
constexpr int64_t kManyTokens = 640;            // from which on each has a warp: blocks would come in rounds

struct Params {
  const float* scores;
  int64_t scores_stride;
  int shared_bytes;  // of a warp with a token of its own
  Rule rule;
};

/// How many threads a block has at most, and how many blocks registers are left for. A token's block has no more registers than
/// find room beside two CTAs of router_gemm; 32 experts a lane would spill.
template <int kPerThread, bool kWarpPerToken, int kMost>
struct Bounds {
  static constexpr int kThreads = kWarpPerToken ? 32 * kWarpsOfBlock : kMost;
  static constexpr int kBlocks = kWarpPerToken ? (kPerThread <= 24 ? 2 : 1) : 1536 / kMost;
};
constexpr int kUsualThreads = 768;

template <Kind kKind, int kPerThread, bool kWarpPerToken, int kMost = kMostThreads>
__global__ __launch_bounds__(
    Bounds<kPerThread, kWarpPerToken, kMost>::kThreads,
    Bounds<kPerThread, kWarpPerToken, kMost>::kBlocks) void route_top_k_kernel(const __grid_constant__ Params
                                                                                   p) {
  using Crew = std::conditional_t<kWarpPerToken, OneWarp, WholeBlock>;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ CrewMemory memory;
  const int warp = kWarpPerToken ? static_cast<int>(threadIdx.x) / 32 : 0;  // that has a token of its own
  const Crew crew{kWarpPerToken ? static_cast<int>(threadIdx.x) % 32 : static_cast<int>(threadIdx.x),
                  kWarpPerToken ? 32 : static_cast<int>(blockDim.x)};
  const int64_t token = kWarpPerToken ? int64_t{blockIdx.x} * kWarpsOfBlock + warp : blockIdx.x;
  if (token >= p.rule.tokens) return;

  // The next kernel is not let in before this one has ended: fused_moe has a CTA an SM, and where some have one of these, two of
  // its own would share another.
  device::wait_for_previous_kernel();
  // All is asked for together: each of these waits for memory.
  const int64_t live_tokens = p.rule.live_tokens != nullptr ? *p.rule.live_tokens : p.rule.tokens;
  const float* const row = p.scores + token * p.scores_stride;
  float logits[kPerThread], bias[kPerThread] = {};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int e = crew.thread + crew.threads * i;
    logits[i] = e < p.rule.experts ? row[e] : 0.f;
  }
  if (p.rule.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int e = crew.thread + crew.threads * i;
      if (e < p.rule.experts) bias[i] = p.rule.bias[e];
    }
  }
  choose<kKind>(p.rule, crew, token, live_tokens, logits, bias, row, shared + warp * p.shared_bytes, memory);
}

/// The instance of a warp that has so many experts.
auto kernel_of_warp(int64_t experts) {
  return experts <= 64    ? route_top_k_kernel<Kind::any, 2, true>
         : experts <= 128 ? route_top_k_kernel<Kind::any, 4, true>
         : experts <= 192 ? route_top_k_kernel<Kind::any, 6, true>
         : experts <= 256 ? route_top_k_kernel<Kind::any, 8, true>
         : experts <= 384 ? route_top_k_kernel<Kind::any, 12, true>
         : experts <= 768 ? route_top_k_kernel<Kind::any, 24, true>
                          : route_top_k_kernel<Kind::any, 32, true>;
}

/// The instance of a block of so many threads with so many experts each.
auto kernel_of_block(int64_t threads, int64_t per_thread, Kind kind) {
  return per_thread > 1            ? route_top_k_kernel<Kind::any, 4, false>
         : threads > kUsualThreads ? route_top_k_kernel<Kind::any, 1, false>
         : kind == Kind::sigmoid   ? route_top_k_kernel<Kind::sigmoid, 1, false, kUsualThreads>
         : kind == Kind::softmax   ? route_top_k_kernel<Kind::softmax, 1, false, kUsualThreads>
                                   : route_top_k_kernel<Kind::any, 1, false, kUsualThreads>;
}

}  // namespace

Status route_top_k_cuda(const RouteTopKArgs& args, const Stream& stream) {
  const int64_t tokens = args.scores.shape[0], experts = args.scores.shape[1];
  const int64_t top_k = args.expert_ids.shape[1];
  const int64_t per_thread = experts <= kMostThreads ? 1 : 4;
  const int64_t warps = std::max<int64_t>(1, (experts + 32 * per_thread - 1) / (32 * per_thread));
  const int64_t bytes_many = bytes_of_warp(experts, top_k, args.groups) * kWarpsOfBlock;
  const bool many =
      tokens >= kManyTokens && experts <= kMostThreads && args.groups <= 32 && bytes_many <= kMostSharedBytes;
  const int64_t bytes = many ? bytes_many : bytes_of_crew(32 * warps, per_thread, top_k, args.groups);
  const Params params{.scores = args.scores.as<const float>(),
                      .scores_stride = args.scores.stride[0],
                      .shared_bytes = static_cast<int>(bytes / kWarpsOfBlock),
                      .rule = rule_of(args)};
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(many ? (tokens + kWarpsOfBlock - 1) / kWarpsOfBlock : tokens)),
      .block = dim3(static_cast<unsigned>(32 * (many ? kWarpsOfBlock : warps))),
      .smem_bytes = bytes,
      .overlap_previous = true};
  const auto kernel = many ? kernel_of_warp(experts) : kernel_of_block(32 * warps, per_thread, kind_of(args));
  return launch("route_top_k", kernel, shape, stream, params);
}

}  // namespace vivace
