// logits, the choice of experts and their weights in one kernel         compute capability 9.0
//
// Two numbers for m tokens, n experts, hidden size k and T terms
//   bytes  2 T n k + 2 m k   by the 16 SMs of a cluster, 43 bytes a cycle each; the terms need not wait for the kernel ahead
//   flops  2 T m n k         nothing; what counts is how long one thing waits for another
//
// A cluster has all experts of its tokens: an eighth of k for each of two halves of the experts. A warp stages what it
// multiplies itself and has it in registers before x is there. Sums of steps are added in router_gemm's order: the bits are
// those of its rows for few tokens. They go to the CTA that chooses for their token, so CTAs wait for each other once.

#include <map>
#include <mutex>

#include "src/device/launch.h"
#include "src/device/mma.h"
#include "src/device/runtime.h"
#include "src/ops/choose_experts/sm90_plan.h"
#include "src/ops/choose_experts/table.h"
#include "src/ops/route_top_k/choose.h"
#include "src/ops/router_gemm/sm90.h"

namespace vivace {

namespace {

using namespace router;

constexpr int kCtas = ClusterPlan::kCtas;
constexpr int kSlices = kStep / 16;   // products of 16 in a step
constexpr int kRowBytes = 2 * kStep;  // of an expert, a step
constexpr int kTileBytes = 16 * kRowBytes;

/// Four neighbours of a row, or zeros.
__device__ __forceinline__ uint2 load_4(const bf16* p, bool valid) {
  return valid ? *reinterpret_cast<const uint2*>(p) : make_uint2(0, 0);
}

/// Byte offset of chunk `chunk` of 16 bytes of a staged row: four rows that are read at two chunks hit different banks.
__device__ __forceinline__ int staged_at(int row, int chunk) {
  return row * kRowBytes + (chunk ^ (row & 3) << 1) * 16;
}

template <int kTerms, int kTiles, int kTokenTiles, route::Kind kKind>
__global__ __launch_bounds__(32 * ClusterPlan::kMostWarps,
                             1) void choose_experts_kernel(const __grid_constant__ Params p,
                                                           const __grid_constant__ route::Rule rule,
                                                           const __grid_constant__ ClusterPlan plan) {
  constexpr int kTokens = 8 * kTokenTiles, kRows = 16 * kTiles;  // of a cluster; of a warp, experts
  extern __shared__ __align__(128) uint8_t shared[];
  auto* const sums = reinterpret_cast<float*>(shared + plan.sums_at);          // [steps][kTokens][pitch]
  auto* const received = reinterpret_cast<float*>(shared + plan.received_at);  // [kPieces][padded]
  auto* const all_received = reinterpret_cast<device::Barrier*>(shared + plan.barrier_at);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = lane / 4, pair = lane % 4;
  const int rank = static_cast<int>(blockIdx.x), piece = rank / ClusterPlan::kHalves;
  const int half0 = rank % ClusterPlan::kHalves * plan.experts_of_half();  // first expert
  const int experts = static_cast<int>(p.experts), padded = (experts + 3) / 4 * 4;
  const int steps = static_cast<int>(steps_of(p.hidden)), first = first_step(steps, piece, kPieces);
  const int count = first_step(steps, piece + 1, kPieces) - first;
  const int64_t token0 = int64_t{blockIdx.y} * kTokens;
  const int tokens = static_cast<int>(min(p.tokens - token0, int64_t{kTokens}));

  // A warp has a step of the piece, if there is one, and some experts of the half.
  const int step = warp / plan.parts, part0 = warp % plan.parts * kRows;
  const bool multiplies = step < count;
  const int64_t k0 = int64_t{first + step} * kStep;
  uint8_t* const staged = shared + warp * (kTerms * kTiles * kTileBytes);
  const auto stage = [&] {
    const int64_t k = k0 + lane % 8 * 8;
    const int expert0 = half0 + part0 + lane / 8;
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
      const bf16* from = p.terms[t] + expert0 * p.term_stride[t] + k;
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        device::copy_16_async(staged + t * kTiles * kTileBytes + staged_at(i + lane / 8, lane % 8),
                              from + i * p.term_stride[t], expert0 + i < experts && k < p.hidden);
      }
    }
    device::commit_copies();
  };
  uint2 w[kTerms][kTiles][2][kSlices], x[kTokenTiles][kSlices];
  const auto take_staged = [&] {
    device::wait_for_copies<0>();
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < kSlices; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint8_t* const tile = staged + (t * kTiles + j) * kTileBytes;
            w[t][j][h][i] = *reinterpret_cast<const uint2*>(tile + staged_at(8 * h + row, 2 * i + pair / 2) +
                                                            pair % 2 * 8);
          }
        }
      }
    }
  };
  const auto load_x = [&] {
    const int64_t k = k0 + 4 * pair;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const bf16* from = static_cast<const bf16*>(p.x) + (token0 + 8 * n + row) * p.x_stride + k;
#pragma unroll
      for (int i = 0; i < kSlices; ++i)
        x[n][i] = load_4(from + 16 * i, multiplies && 8 * n + row < tokens && k + 16 * i < p.hidden);
    }
  };
  const auto multiply = [&] {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      float acc[kTiles][4] = {};
#pragma unroll
      for (int t = kTerms - 1; t >= 0; --t) {
#pragma unroll
        for (int i = 0; i < kSlices; ++i) {
          const uint32_t b[2] = {x[n][i].x, x[n][i].y};
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            const uint2 upper = w[t][j][0][i], lower = w[t][j][1][i];
            const uint32_t a[4] = {upper.x, lower.x, upper.y, lower.y};
            device::mma_16x8x16<bf16>(acc[j], a, b);
          }
        }
      }
      float* const to = sums + (step * kTokens + 8 * n + 2 * pair) * plan.pitch() + part0 + row;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        to[16 * j] = acc[j][0];
        to[16 * j + plan.pitch()] = acc[j][1];
        to[16 * j + 8] = acc[j][2];
        to[16 * j + 8 + plan.pitch()] = acc[j][3];
      }
    }
  };

  if (threadIdx.x == 0) {
    device::init_barrier(all_received, 1);
    device::publish_barriers();
    if (rank < tokens) device::arrive_and_expect(all_received, 4 * kPieces * padded);
  }
  __syncwarp();  // a cluster's barrier wants whole warps
  device::cluster_arrive_without_fence();
  if (!p.weight_ready) device::wait_for_previous_kernel();
  if (multiplies) {
    stage();
    take_staged();
  }

  // Token `rank` is this CTA's, whose first threads have an expert each. All is asked for together: each of these waits for memory.
  // The next kernel is not let in before this one has ended, as in route_top_k.
  const route::PartOfBlock crew{static_cast<int>(threadIdx.x), 32 * plan.warps_of_crew, 1};
  const bool has_expert = crew.thread < experts && rank < tokens;
  device::wait_for_previous_kernel();
  load_x();
  const int64_t live_tokens = rule.live_tokens != nullptr ? *rule.live_tokens : rule.tokens;
  float bias[1] = {}, logit_bias = 0;
  if (rule.bias != nullptr && has_expert) bias[0] = rule.bias[crew.thread];
  if (p.bias != nullptr && has_expert) logit_bias = p.bias[crew.thread];
  if (multiplies) multiply();
  __syncthreads();
  device::cluster_wait();  // the others can take what they are sent

  const int pairs = plan.experts_of_half() / 2;
  for (int i = static_cast<int>(threadIdx.x); i < tokens * pairs; i += static_cast<int>(blockDim.x)) {
    const int token = static_cast<int>(__umulhi(i, plan.inverse)), at = 2 * (i - token * pairs);
    if (half0 + at >= padded) continue;
    const float* const from = sums + token * plan.pitch() + at;
    Sums<2> sum = {};
#pragma unroll 8
    for (int s = 0; s < count; ++s)
      sum += *reinterpret_cast<const Sums<2>*>(from + s * kTokens * plan.pitch());
    float* const to = received + piece * padded + half0 + at;
    device::store_async(reinterpret_cast<float2*>(to), sum.v, all_received, token);
  }

  if (rank >= tokens || warp >= plan.warps_of_crew) return;
  const int64_t token = token0 + rank;
  float* const logits = received;  // in the place of the first piece
  float logit[1] = {};
  device::wait_for_cluster_writes(all_received, 0);
  if (has_expert) {
    Sums<1> part[kPieces];
#pragma unroll
    for (int other = 0; other < kPieces; ++other) part[other].v[0] = received[other * padded + crew.thread];
    add_in_pairs<kTerms>(part);
    logit[0] = p.bias != nullptr ? part[0].v[0] + logit_bias : part[0].v[0];
    logits[crew.thread] = logit[0];
    if (p.scores != nullptr) static_cast<float*>(p.scores)[token * p.scores_stride + crew.thread] = logit[0];
  }
  auto& memory = *reinterpret_cast<route::CrewMemory*>(shared + plan.crew_at);
  route::choose<kKind>(rule, crew, token, live_tokens, logit, bias, logits,
                       reinterpret_cast<uint8_t*>(&memory + 1), memory);
}

using Kernel = void (*)(const Params, const route::Rule, const ClusterPlan);

template <int kTerms, int kTiles>
Kernel kernel_of(int token_tiles, route::Kind kind) {
  using route::Kind;
  if (token_tiles == 1) {
    return kind == Kind::sigmoid   ? choose_experts_kernel<kTerms, kTiles, 1, Kind::sigmoid>
           : kind == Kind::softmax ? choose_experts_kernel<kTerms, kTiles, 1, Kind::softmax>
                                   : choose_experts_kernel<kTerms, kTiles, 1, Kind::any>;
  }
  return kind == Kind::sigmoid   ? choose_experts_kernel<kTerms, kTiles, 2, Kind::sigmoid>
         : kind == Kind::softmax ? choose_experts_kernel<kTerms, kTiles, 2, Kind::softmax>
                                 : choose_experts_kernel<kTerms, kTiles, 2, Kind::any>;
}

Kernel kernel_of(const ClusterPlan& plan, int terms, route::Kind kind) {
  const int n = plan.token_tiles;
  if (terms == 2) return plan.tiles == 1 ? kernel_of<2, 1>(n, kind) : kernel_of<2, 2>(n, kind);
  return plan.tiles == 1   ? kernel_of<1, 1>(n, kind)
         : plan.tiles == 2 ? kernel_of<1, 2>(n, kind)
                           : kernel_of<1, 3>(n, kind);
}

/// Clusters that the device of `stream` holds at once where a CTA takes a whole SM, none where it cannot say: asked once.
int clusters_of(const Stream& stream) {
  static std::mutex mutex;
  static std::map<int, int> known;
  std::lock_guard lock(mutex);
  if (const auto it = known.find(stream.ordinal); it != known.end()) return it->second;
  const device::DeviceGuard guard(stream.ordinal);
  const Kernel kernel = choose_experts_kernel<1, 1, 1, route::Kind::any>;
  constexpr int bytes = 160 << 10;  // more than half an SM has
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCtas, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kCtas);
  config.blockDim = dim3(32 * ClusterPlan::kMostWarps);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    clusters = 0;
    cudaGetLastError();  // it is not the next call's
  }
  return known[stream.ordinal] = clusters;
}

}  // namespace

bool has_large_clusters(const Stream& stream) {
  return stream.ordinal < 0 || device::device_count() == 0 || clusters_of(stream) > 0;
}

int64_t choose_experts_sm90_bytes(const ChooseExpertsArgs&, const Stream&) {
  return 0;
}

Status choose_experts_sm90_cluster(const ChooseExpertsArgs& args, const Stream& stream) {
  const int clusters = clusters_of(stream);
  const TwoCalls calls = two_calls_of(args, nullptr);
  const Params p = params_of(calls.logits);
  if (p.tokens == 0) return {};
  const ClusterPlan plan = cluster_plan({p.tokens, p.experts, p.hidden, p.term_count},
                                        calls.choice.expert_ids.shape[1], calls.choice.groups, clusters);
  const int64_t tokens_of_cluster = 8 * plan.token_tiles;
  const LaunchShape shape{
      .grid = dim3(kCtas, static_cast<unsigned>((p.tokens + tokens_of_cluster - 1) / tokens_of_cluster)),
      .block = dim3(static_cast<unsigned>(32 * plan.warps)),
      .smem_bytes = plan.bytes,
      .cluster = kCtas,
      .overlap_previous = true};
  return launch("choose_experts", kernel_of(plan, p.term_count, route::kind_of(args.choice)), shape, stream,
                p, route::rule_of(calls.choice), plan);
}

}  // namespace vivace
