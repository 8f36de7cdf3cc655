// experts of each token from its router logits         fp32 scores, a warp per token
//
// Two numbers for a token with E experts and k choices
//   bytes  4 E + 8 k   in the L2: router_gemm has just written the logits
//   flops  about 18 E  the exponential; then two times 32 comparisons a lane, latency rather than a roof

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/ops/route_top_k/choose.h"

namespace vivace {

namespace {

using namespace route;

constexpr int kMostWarps = 4;

struct Params {
  Rule rule;
  const float* scores;
  int64_t scores_stride;
};

template <int kPerLane>
__global__ __launch_bounds__(kMostWarps * 32) void route_top_k_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint32_t shared[];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = int64_t{blockIdx.x} * warps + warp;
  if (token >= p.rule.tokens) return;
  device::wait_for_previous_kernel();
  device::let_next_kernel_start();
  // All is asked for together: each of these waits for memory.
  const int64_t live_tokens = p.rule.live_tokens != nullptr ? *p.rule.live_tokens : p.rule.tokens;
  float logits[kPerLane], bias[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + 32 * i;
    logits[i] = e < p.rule.experts ? p.scores[token * p.scores_stride + e] : 0.f;
    bias[i] = e < p.rule.experts && p.rule.bias != nullptr ? p.rule.bias[e] : 0.f;
  }
  choose_for_token(p.rule, token, live_tokens, logits, bias,
                   shared + warp * warp_words(p.rule.experts, p.rule.top_k, p.rule.groups));
}

}  // namespace

Status route_top_k_cuda(const RouteTopKArgs& args, const Stream& stream) {
  const int64_t tokens = args.scores.shape[0], experts = args.scores.shape[1];
  const Params params{.rule = rule_of(args, experts),
                      .scores = args.scores.as<const float>(),
                      .scores_stride = args.scores.stride[0]};
  const int64_t warps = experts <= kMaxRouteExperts ? kMostWarps : 1;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>((tokens + warps - 1) / warps)),
      .block = dim3(static_cast<unsigned>(32 * warps)),
      .smem_bytes = warps * 4 * warp_words(params.rule.experts, params.rule.top_k, params.rule.groups),
      .overlap_previous = true};
  const auto kernel = experts <= 128    ? route_top_k_kernel<4>
                      : experts <= 256  ? route_top_k_kernel<8>
                      : experts <= 384  ? route_top_k_kernel<12>
                      : experts <= 768  ? route_top_k_kernel<24>
                      : experts <= 1024 ? route_top_k_kernel<32>
                                        : route_top_k_kernel<128>;
  return launch("route_top_k", kernel, shape, stream, params);
}

}  // namespace vivace
