// One token per row         a block per row, or a cluster where rows are few; no sort of the vocabulary
//
// Two numbers for a row of V logits
//   bytes  4 V or 2 V   read once; what is looked at again are pieces that matter for the draw, from the L2
//   flops  6 V          and V exponentials, 16 per cycle and SM: 4.3 us for 120,832 logits on one SM
//
// A warp takes a segment of 1024 logits at a time and leaves its maximum and the sum of its weights below that. The sums,
// against the row's maximum, say in which segment a free draw falls; that one alone is read again.
//
// Four lanes leave the largest of the 128 logits that they have seen of a segment, a note. The k-th largest of the notes
// bounds the k-th largest logit from below, so that a look at the pieces that reach it collects a short list that holds what
// top-k or top-p keep; it is sorted in shared memory, cut, sorted by id, and drawn from. Where the list is too short or too
// long (flat or tied rows, a k above a few hundred) the cut is searched for over the whole row, eight ways at a time.
//
// Segments and pieces follow from the vocabulary alone, and all sums have a fixed order: bits do not depend on how many blocks
// share a row, nor on the order in which the list is collected.
//
// Bans and penalties are applied again at each look, to the few logits that they touch. Biases add up in the order of their
// list: a row that has some is first copied to the workspace in fp32.

#include <array>
#include <cfloat>
#include <map>
#include <mutex>

#include "src/core/error.h"
#include "src/core/workspace.h"
#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/runtime.h"
#include "src/ops/sampler/random.h"
#include "src/ops/sampler/select.h"
#include "src/ops/sampler/table.h"

namespace vivace {

namespace {

using namespace device;
using namespace device::select;

struct Params {
  const void* logits;
  const float *temperature, *top_p, *min_p, *repetition, *presence, *frequency;
  const int32_t* top_k;
  const int64_t *seed, *position;
  const uint32_t* prompt_bits;
  int32_t* output_counts;
  const int32_t *state, *bias_start, *bias_ids;
  const float* bias_values;
  const uint32_t* allowed_bits;
  int32_t* ids;
  uint8_t* valid;
  float* logprobs;
  int32_t* top_ids;
  float* top_logprobs;
  float* scratch;
  int64_t vocab, logits_stride, bits_stride, counts_stride, allowed_stride, top_ids_stride,
      top_logprobs_stride, scratch_stride;
  int64_t states, entries, top;
  int blocks_per_row;
  bool count_ids, whole;
};

__device__ __forceinline__ float field(const float* list, int64_t row, float otherwise) {
  return list != nullptr ? list[row] : otherwise;
}

constexpr int kBlocksPerSm = 4;  // so that some read while others choose

template <class T>
__global__ __launch_bounds__(kThreads, kBlocksPerSm) void sampler_kernel(const __grid_constant__ Params p) {
  __shared__ Shared s;
  const int blocks = p.blocks_per_row, block = static_cast<int>(blockIdx.x) % blocks;
  const int64_t r = blockIdx.x / blocks;
  const RowOfLogits<T> given{static_cast<const T*>(p.logits) + r * p.logits_stride,
                             nullptr,
                             static_cast<uint32_t>(p.vocab),
                             p.whole,
                             Segments(p.vocab),
                             nullptr};
  given.prefetch(block * kWarps + warp_id());
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) cluster_arrive_without_fence();
#endif
  wait_for_previous_kernel();

  // Parameters: out of range makes the row invalid. NaN fails every comparison.
  const float temperature = field(p.temperature, r, 1.f);
  const float top_p = field(p.top_p, r, 1.f), min_p = field(p.min_p, r, 0.f);
  const float repetition = field(p.repetition, r, 1.f), presence = field(p.presence, r, 0.f);
  const float frequency = field(p.frequency, r, 0.f);
  const int top_k = p.top_k != nullptr ? p.top_k[r] : 0;
  const int64_t seed = p.seed != nullptr ? p.seed[r] : 0,
                position = p.position != nullptr ? p.position[r] : 0;
  int64_t state = -1;
  if (p.prompt_bits != nullptr || p.output_counts != nullptr) state = p.state != nullptr ? p.state[r] : r;
  const int64_t bias_begin = p.bias_start != nullptr ? p.bias_start[r] : 0;
  const int64_t bias_end = p.bias_start != nullptr ? p.bias_start[r + 1] : 0;
  bool valid = temperature >= 0.f && temperature < INFINITY && top_k >= 0 && top_p > 0.f && top_p <= 1.f &&
               min_p >= 0.f && min_p <= 1.f && repetition > 0.f && repetition < INFINITY &&
               fabsf(presence) < INFINITY && fabsf(frequency) < INFINITY && state >= -1 && state < p.states &&
               bias_begin >= 0 && bias_begin <= bias_end && bias_end <= p.entries;
  RowOfLogits<T> row = given;
  int32_t* const counts =
      valid && state >= 0 && p.output_counts != nullptr ? p.output_counts + state * p.counts_stride : nullptr;
  if (valid) {
    const bool penalised = state >= 0 && (repetition != 1.f || presence != 0.f || frequency != 0.f);
    const Changes changes =
        Changes::of(p.allowed_bits != nullptr ? p.allowed_bits + r * p.allowed_stride : nullptr,
                    penalised && p.prompt_bits != nullptr ? p.prompt_bits + state * p.bits_stride : nullptr,
                    penalised ? counts : nullptr, repetition, presence, frequency);
    if (changes.any()) {
      if (threadIdx.x == 0) s.changes = changes;
      row.changes = &s.changes;
    }
  }
  __syncthreads();

  const bool biased = valid && bias_end > bias_begin;
  if (biased) {
    float* const copy = p.scratch + r * p.scratch_stride;
    for (int i = block * kWarps + warp_id(); i < row.segments.count; i += blocks * kWarps) {
      const uint32_t end = row.end_of(i);
      for (uint32_t first = i * row.segments.length + lane_id() * kGroup; first < end; first += kStep) {
        float v[1][kGroup];
        given.load_unchanged(first, end, v);
        store_floats<4>({v[0][0], v[0][1], v[0][2], v[0][3]}, copy + first);
        store_floats<4>({v[0][4], v[0][5], v[0][6], v[0][7]}, copy + first + 4);
      }
    }
    __syncthreads();  // this block's part of the copy is complete
    // A thread owns ids and adds in the order of the list, so equal ids add up the same way every time.
    for (int64_t i = bias_begin; i < bias_end; ++i) {
      const int32_t id = p.bias_ids[i];
      if (id < 0 || id >= p.vocab || id % kThreads != static_cast<int>(threadIdx.x)) continue;
      if (id / row.segments.length / kWarps % blocks != static_cast<uint32_t>(block)) continue;
      const float bias = p.bias_values[i];
      copy[id] = bias == -INFINITY ? -INFINITY : copy[id] + bias;  // a ban holds whatever the logit
    }
    __syncthreads();
    row.copy = copy;
  }

  // Looks at all of the row: as it is drawn from; before that as given, where somebody asks or a bias may hide a NaN.
  const bool sums_given = p.logprobs != nullptr || p.top > 0, looks_at_given = sums_given || biased;
  constexpr float kLog2E = 1.44269504f;
  const float scale = fminf(fmaxf(kLog2E / temperature, FLT_MIN), FLT_MAX);
  const int used_top_k = top_k > 0 && top_k < p.vocab ? top_k : 0;
  const bool sums_drawn = temperature > 0.f && used_top_k == 0 && (top_p < 1.f || !(min_p > 0.f));
  const float given_scale = sums_given ? kLog2E : 0.f;
  const float drawn_scale = sums_drawn ? scale : 0.f;
  Shared* first_block = &s;  // it goes on with what all blocks of the row have seen
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    cluster_wait();  // it runs
    first_block = in_cta(&s, 0);
  }
#endif
  if (looks_at_given) look<false>(given, given_scale, block, blocks, first_block->given);
  if (row.changes != nullptr) {
    look<true>(row, drawn_scale, block, blocks, first_block->drawn);
  } else {
    look<false>(row, drawn_scale, block, blocks, first_block->drawn);
  }
  const double u = draw_uniform(static_cast<uint64_t>(seed), position);
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    cluster_arrive();
    if (block != 0) return;
    cluster_wait();  // copies in the workspace are complete, too
  }
#endif
  if (blocks == 1) __syncthreads();

  let_next_kernel_start();

  const RowBounds bounds = bounds_of(s.drawn, row.segments.count);
  const RowBounds as_given = looks_at_given ? bounds_of(s.given, row.segments.count) : bounds;
  valid = valid && !as_given.nan && as_given.max > -INFINITY && !bounds.nan && bounds.max > -INFINITY;
  int id = 0;
  if (valid && temperature > 0.f) {
    id = draw(row, {{bounds.max, scale}, used_top_k, top_p, min_p, u}, bounds, s);
  } else if (valid) {
    id = largest(row, s.drawn, bounds.max, s);
  }

  const double log_sum =
      sums_given && valid ? log(total_of(s.given, row.segments.count, {as_given.max, given_scale})) : 0.;
  const auto logprob = [&](float logit) {
    const double below = logit == as_given.max ? 0. : static_cast<double>(logit) - as_given.max;
    return static_cast<float>(below - log_sum);
  };
  if (threadIdx.x == 0) {
    p.ids[r] = id;
    p.valid[r] = valid;
    if (p.logprobs != nullptr) p.logprobs[r] = valid ? logprob(given.at(id)) : -INFINITY;
    if (valid && p.count_ids && counts != nullptr) ++counts[id];
  }
  if (p.top == 0) return;
  const auto write = [&](int64_t i, int token, float logit) {
    p.top_ids[r * p.top_ids_stride + i] = token;
    p.top_logprobs[r * p.top_logprobs_stride + i] = token >= 0 ? logprob(logit) : -INFINITY;
  };
  if (valid) {
    list_largest(given, p.top, as_given, write, s);
  } else {
    for (int64_t i = threadIdx.x; i < p.top; i += kThreads) write(i, -1, 0.f);
  }
}

int64_t copy_stride(int64_t vocab) {
  return (vocab + kGroup - 1) / kGroup * kGroup;
}

/// How many blocks may share a row: entry n - 1 is the number of clusters of n blocks that a device runs at once, 0 where the
/// code that it runs was compiled for one without clusters.
constexpr int kMostBlocks = 8;
using Clusters = std::array<int, kMostBlocks>;

template <class T>
Result<Clusters> clusters_of(int ordinal) {
  static std::mutex mutex;
  static std::map<int, Clusters> known;
  const std::lock_guard lock(mutex);
  if (const auto it = known.find(ordinal); it != known.end()) return it->second;
  const device::DeviceGuard guard(ordinal);
  VIVACE_TRY_ASSIGN(const device::DeviceInfo* info, device::device_info(ordinal));
  cudaFuncAttributes attributes{};
  VIVACE_TRY(internal::cuda_status(cudaFuncGetAttributes(&attributes, sampler_kernel<T>), "sampler"));
  Clusters clusters{};
  for (int n = 2; n <= kMostBlocks && info->major >= 9 && attributes.ptxVersion >= 90; ++n) {
    cudaLaunchAttribute cluster{.id = cudaLaunchAttributeClusterDimension, .val = {}};
    cluster.val.clusterDim.x = static_cast<unsigned>(n);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(n));
    config.blockDim = dim3(kThreads);
    config.attrs = &cluster;
    config.numAttrs = 1;
    VIVACE_TRY(internal::cuda_status(
        cudaOccupancyMaxActiveClusters(&clusters[n - 1], sampler_kernel<T>, &config), "sampler"));
  }
  known[ordinal] = clusters;
  return clusters;
}

/// As many as the GPU runs at once, if each of them leaves the others fewer chunks. Clusters of more than two do not spread
/// evenly over the SMs: they are not to fill them. The result does not depend on it.
template <class T>
Result<int> blocks_per_row(int64_t rows, int64_t vocab, const Stream& stream) {
  VIVACE_TRY_ASSIGN(const Clusters clusters, clusters_of<T>(stream.ordinal));
  const auto fit = [&](int blocks) {
    const int64_t all = clusters[blocks - 1];
    return rows <= (blocks > 2 ? all * 7 / 10 : all);
  };
  const auto chunks_of_warp = [&](int blocks) {
    const int64_t all = (vocab + kChunk - 1) / kChunk, warps = int64_t{blocks} * kWarps;
    return (all + warps - 1) / warps;
  };
  int blocks = kMostBlocks;
  while (blocks > 1 && (!fit(blocks) || chunks_of_warp(blocks) == chunks_of_warp(blocks - 1))) --blocks;
  return blocks;
}

}  // namespace

int64_t sampler_cuda_workspace_bytes(const SamplerArgs& args, const Stream&) {
  if (!args.bias_start.present()) return 0;
  return args.logits.shape[0] * copy_stride(args.logits.shape[1]) * int64_t{sizeof(float)} + kWorkspaceSlack;
}

Status sampler_cuda(const SamplerArgs& args, const Stream& stream) {
  const int64_t rows = args.logits.shape[0], vocab = args.logits.shape[1];
  const Tensor& history = args.prompt_bits.present() ? args.prompt_bits : args.output_counts;
  Params params{
      .logits = args.logits.data,
      .temperature = args.temperature.as<const float>(),
      .top_p = args.top_p.as<const float>(),
      .min_p = args.min_p.as<const float>(),
      .repetition = args.repetition_penalty.as<const float>(),
      .presence = args.presence_penalty.as<const float>(),
      .frequency = args.frequency_penalty.as<const float>(),
      .top_k = args.top_k.as<const int32_t>(),
      .seed = args.seed.as<const int64_t>(),
      .position = args.position.as<const int64_t>(),
      .prompt_bits = args.prompt_bits.as<const uint32_t>(),
      .output_counts = args.output_counts.as<int32_t>(),
      .state = args.state.as<const int32_t>(),
      .bias_start = args.bias_start.as<const int32_t>(),
      .bias_ids = args.bias_ids.as<const int32_t>(),
      .bias_values = args.bias_values.as<const float>(),
      .allowed_bits = args.allowed_bits.as<const uint32_t>(),
      .ids = args.ids.as<int32_t>(),
      .valid = args.valid.as<uint8_t>(),
      .logprobs = args.logprobs.as<float>(),
      .top_ids = args.top_ids.as<int32_t>(),
      .top_logprobs = args.top_logprobs.as<float>(),
      .scratch = args.bias_start.present() ? reinterpret_cast<float*>(first_line(args.workspace)) : nullptr,
      .vocab = vocab,
      .logits_stride = args.logits.stride[0],
      .bits_stride = args.prompt_bits.stride[0],
      .counts_stride = args.output_counts.stride[0],
      .allowed_stride = args.allowed_bits.stride[0],
      .top_ids_stride = args.top_ids.stride[0],
      .top_logprobs_stride = args.top_logprobs.stride[0],
      .scratch_stride = args.bias_start.present() ? copy_stride(vocab) : 0,
      .states = history.shape[0],
      .entries = args.bias_ids.shape[0],
      .top = args.top_ids.present() ? args.top_ids.shape[1] : 0,
      .blocks_per_row = 1,
      .count_ids = args.count_ids,
      .whole = alignment_of(args.logits) % int64_t{sizeof(float4)} == 0 && vocab % kGroup == 0};
  Status status;
  with_type<float, bf16>(args.logits.dtype, [&](auto type) {
    using T = decltype(type);
    const Result<int> blocks = blocks_per_row<T>(rows, vocab, stream);
    if (!blocks.ok()) {
      status = blocks.status();
      return;
    }
    params.blocks_per_row = *blocks;
    const LaunchShape shape{.grid = dim3(static_cast<unsigned>(rows * *blocks)),
                            .block = dim3(kThreads),
                            .cluster = *blocks,
                            .overlap_previous = true};
    status = launch("sampler", sampler_kernel<T>, shape, stream, params);
  });
  return status;
}

}  // namespace vivace
