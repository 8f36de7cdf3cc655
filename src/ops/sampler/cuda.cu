// One token per row         a block per row, or a cluster where rows are few; no sort of the vocabulary
//
// Two numbers for a row of V logits
//   bytes  4 V or 2 V   read once; what is looked at again are the segments of the draw or of the short list, from the L2
//   flops  6 V          and V exponentials, 16 per cycle and SM: 4.3 us for 120,832 logits on one SM, its longest part
//
// A warp takes a segment of 1024 logits at a time and leaves its maximum and the sum of its weights below that. The sums,
// against the row's maximum, say in which segment a free draw falls; that one alone is read again.
//
// Every lane notes the largest logit that it has seen. The k-th largest of those notes bounds the k-th largest logit
// from below, so a look at the segments that reach it collects a short list that holds what top-k or top-p keep; it is
// sorted in shared memory, cut, sorted by id, and drawn from. Where the list is too short or too long (flat or tied rows, a k
// above a few hundred) the cut is searched for over the whole row, eight ways at a time.
//
// Segments, and which notes a lane's logits go to, follow from the vocabulary alone, and all sums have a fixed order: bits do
// not depend on how many blocks share a row, nor on the order in which the list is collected.
//
// A row whose logits are changed by biases, bans or penalties has an fp32 copy in the workspace.

#include <algorithm>
#include <cfloat>

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
  bool count_ids, wide;
};

__device__ __forceinline__ float field(const float* list, int64_t row, float otherwise) {
  return list != nullptr ? list[row] : otherwise;
}

template <class T>
__global__ __launch_bounds__(kThreads, kBlocksPerSm) void sampler_kernel(const __grid_constant__ Params p) {
  __shared__ Shared s;
  const int blocks = p.blocks_per_row, block = static_cast<int>(blockIdx.x) % blocks;
  const int64_t r = blockIdx.x / blocks;
  wait_for_previous_kernel();

  // Parameters: out of range makes the row invalid. NaN fails every comparison.
  SampleParams penalties;
  const float temperature = field(p.temperature, r, 1.f);
  const float top_p = field(p.top_p, r, 1.f), min_p = field(p.min_p, r, 0.f);
  const float repetition = field(p.repetition, r, 1.f), presence = field(p.presence, r, 0.f);
  const float frequency = field(p.frequency, r, 0.f);
  const int top_k = p.top_k != nullptr ? p.top_k[r] : 0;
  penalties.repetition_penalty = repetition;
  penalties.presence_penalty = presence;
  penalties.frequency_penalty = frequency;
  int64_t state = -1;
  if (p.prompt_bits != nullptr || p.output_counts != nullptr) state = p.state != nullptr ? p.state[r] : r;
  const int64_t bias_begin = p.bias_start != nullptr ? p.bias_start[r] : 0;
  const int64_t bias_end = p.bias_start != nullptr ? p.bias_start[r + 1] : 0;
  bool valid = temperature >= 0.f && temperature < INFINITY && top_k >= 0 && top_p > 0.f && top_p <= 1.f &&
               min_p >= 0.f && min_p <= 1.f && repetition > 0.f && repetition < INFINITY &&
               fabsf(presence) < INFINITY && fabsf(frequency) < INFINITY && state >= -1 && state < p.states &&
               bias_begin >= 0 && bias_begin <= bias_end && bias_end <= p.entries;
  const uint32_t* prompt = nullptr;
  int32_t* counts = nullptr;
  if (valid && state >= 0) {
    if (p.prompt_bits != nullptr) prompt = p.prompt_bits + state * p.bits_stride;
    if (p.output_counts != nullptr) counts = p.output_counts + state * p.counts_stride;
  }
  const bool penalised =
      (prompt != nullptr || counts != nullptr) && (repetition != 1.f || presence != 0.f || frequency != 0.f);
  const uint32_t* allowed = p.allowed_bits != nullptr ? p.allowed_bits + r * p.allowed_stride : nullptr;
  const bool changes = valid && (penalised || bias_end > bias_begin || allowed != nullptr);

  const Segments segments(p.vocab);
  const RowOfLogits<T> given{static_cast<const T*>(p.logits) + r * p.logits_stride, nullptr,
                             static_cast<uint32_t>(p.vocab), p.wide, segments};
  RowOfLogits<T> row = given;
  float* const copy = p.scratch + r * p.scratch_stride;
  const bool sums_given = p.logprobs != nullptr || p.top > 0;
  constexpr double kLog2E = 1.4426950408889634;
  const float scale = static_cast<float>(
      fmin(fmax(kLog2E / static_cast<double>(temperature), double{FLT_MIN}), double{FLT_MAX}));
  const int used_top_k = top_k > 0 && top_k < p.vocab ? top_k : 0;
  const bool sums_drawn = temperature > 0.f && used_top_k == 0 && (top_p < 1.f || !(min_p > 0.f));
  const float given_scale = sums_given ? static_cast<float>(kLog2E) : 0.f;
  const float drawn_scale = sums_drawn ? scale : 0.f;

  // Eight logits as they are drawn from, once biases are in.
  const bool wide_counts = reinterpret_cast<uintptr_t>(counts) % sizeof(int4) == 0;
  const auto change = [&](uint32_t begin, float(&v)[kGroup]) {
    const uint32_t bans = allowed != nullptr ? ~(allowed[begin / 32] >> (begin % 32)) : 0u;
    const uint32_t prompts = penalised && prompt != nullptr ? prompt[begin / 32] >> (begin % 32) : 0u;
    int count[kGroup] = {};
    if (penalised && counts != nullptr) {
      if (wide_counts && begin + kGroup <= p.vocab) {
        const int4 a = reinterpret_cast<const int4*>(counts + begin)[0];
        const int4 b = reinterpret_cast<const int4*>(counts + begin)[1];
        count[0] = a.x, count[1] = a.y, count[2] = a.z, count[3] = a.w;
        count[4] = b.x, count[5] = b.y, count[6] = b.z, count[7] = b.w;
      } else {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) count[j] = begin + j < p.vocab ? counts[begin + j] : 0;
      }
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      if (bans >> j & 1) v[j] = -INFINITY;
      const bool in_prompt = prompts >> j & 1;
      if (count[j] > 0 || in_prompt) v[j] = penalised_logit(v[j], penalties, count[j], in_prompt);
    }
  };

  // One look, which also changes the logits that need it; a second one where biases have to come in between.
  const bool keeps_given = sums_given || changes;
  const int looks = bias_end > bias_begin && changes ? 2 : 1;
  Seen seen_given, seen;
  for (int look = 0; look < looks; ++look) {
    const bool first = look == 0, last = look == looks - 1;
    if (!first) {
      __syncthreads();  // this block's part of the copy is complete
      // A thread owns ids and adds in the order of the list, so equal ids add up the same way every time.
      for (int64_t i = bias_begin; i < bias_end; ++i) {
        const int32_t id = p.bias_ids[i];
        if (id < 0 || id >= p.vocab || id % kThreads != static_cast<int>(threadIdx.x)) continue;
        if (id / segments.length / kWarps % blocks != block) continue;
        const float bias = p.bias_values[i];
        copy[id] = bias == -INFINITY ? -INFINITY : copy[id] + bias;  // a ban holds whatever the logit
      }
      __syncthreads();
      row.changed = copy;
    }
    for (int i = block * kWarps + warp_id(); i < segments.count; i += blocks * kWarps) {
      const uint32_t end = row.end_of(i);
      Running as_given, as_drawn;
      for (uint32_t begin = i * segments.length; begin < end; begin += kChunk) {
        float v[kBatch][kGroup];
        row.load_chunk(begin, end, v);
        float own_max = max_of(v), chunk_max = warp_reduce<MaxOrNan>(own_max);
        if (first && keeps_given) {
          seen_given.note = fmaxf(seen_given.note, own_max);
          as_given.add(v, chunk_max, given_scale);
        }
        if (changes) {
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            const uint32_t at = begin + b * kStep + lane_id() * kGroup;
            if (at >= end) continue;
            if (last) change(at, v[b]);
            store_group(v[b], copy + at);
          }
          own_max = max_of(v), chunk_max = warp_reduce<MaxOrNan>(own_max);
        }
        if (last) {
          seen.note = fmaxf(seen.note, own_max);
          as_drawn.add(v, chunk_max, drawn_scale);
        }
      }
      if (first && keeps_given) as_given.store(s.given, i);
      if (last) as_drawn.store(s.drawn, i);
    }
  }
  if (changes) row.changed = copy;

  // The row's first block goes on with what all of them have seen.
  const int own = static_cast<int>(threadIdx.x);
  const auto take = [&](const SegmentStats& stats, Seen& into) {
    if (own < segments.count) into.max = stats.max[own], into.sum = stats.sum[own];
  };
  if (blocks == 1) {
    __syncthreads();
    take(s.given, seen_given);
    take(s.drawn, seen);
  }
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    s.given_notes[own] = seen_given.note;
    s.drawn_notes[own] = seen.note;
    cluster_barrier();  // copies in the workspace are complete, too
    if (block == 0) {
      for (int other = 1; other < blocks; ++other) {
        seen_given.note = fmaxf(seen_given.note, in_cta(s.given_notes, other)[own]);
        seen.note = fmaxf(seen.note, in_cta(s.drawn_notes, other)[own]);
      }
      const Shared& owner = *in_cta(&s, own / kWarps % blocks);
      take(owner.given, seen_given);
      take(owner.drawn, seen);
      s.given.max[own] = seen_given.max;
      s.drawn.max[own] = seen.max;
    }
    cluster_barrier();  // nobody ends while its notes are read
    if (block != 0) return;
  }
#endif
  if (!keeps_given) seen_given = seen;

  const RowBounds bounds = combine(seen, drawn_scale, s);
  const RowBounds as_given = keeps_given ? combine(seen_given, given_scale, s) : bounds;
  valid = valid && !as_given.nan && as_given.max > -INFINITY && !bounds.nan && bounds.max > -INFINITY;
  int id = 0;
  if (valid && temperature > 0.f) {
    const uint64_t seed = p.seed != nullptr ? static_cast<uint64_t>(p.seed[r]) : 0;
    const double u = draw_uniform(seed, p.position != nullptr ? p.position[r] : 0);
    id = draw(row, {{bounds.max, scale}, used_top_k, top_p, min_p, u}, seen.note, bounds, s);
  } else if (valid) {
    id = largest(row, seen.max, bounds.max, s);
  }

  let_next_kernel_start();
  const double log_sum = sums_given && valid ? log(as_given.total) : 0.;
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
    list_largest(given, p.top, seen_given.note, as_given.max, write, s);
  } else {
    for (int64_t i = threadIdx.x; i < p.top; i += kThreads) write(i, -1, 0.f);
  }
}

bool may_change(const SamplerArgs& args) {
  return args.prompt_bits.present() || args.output_counts.present() || args.bias_start.present() ||
         args.allowed_bits.present();
}

int64_t copy_stride(int64_t vocab) {
  return (vocab + kGroup - 1) / kGroup * kGroup;
}

/// Whether the code that the current device runs was compiled for one with clusters.
template <class T>
bool has_clusters() {
  static const bool has = [] {
    cudaFuncAttributes attributes{};
    return cudaFuncGetAttributes(&attributes, sampler_kernel<T>) == cudaSuccess &&
           attributes.ptxVersion >= 90;
  }();
  return has;
}

/// As many as the GPU runs at once and as have segments to look at; a power of two. The result does not depend on it.
template <class T>
Result<int> blocks_per_row(int64_t rows, int64_t vocab, const Stream& stream) {
  constexpr int kMostBlocks = 8;
  VIVACE_TRY_ASSIGN(const device::DeviceInfo* info, device::device_info(stream.ordinal));
  const device::DeviceGuard guard(stream.ordinal);
  int blocks = 1;
  if (info->major < 9 || !has_clusters<T>()) return blocks;
  while (blocks < kMostBlocks && 2 * blocks * rows <= kBlocksPerSm * info->sms &&
         blocks * kWarps * int64_t{kChunk} < vocab) {
    blocks *= 2;
  }
  return blocks;
}

}  // namespace

int64_t sampler_cuda_workspace_bytes(const SamplerArgs& args, const Stream&) {
  if (!may_change(args)) return 0;
  return args.logits.shape[0] * copy_stride(args.logits.shape[1]) * int64_t{sizeof(float)} + kWorkspaceSlack;
}

Status sampler_cuda(const SamplerArgs& args, const Stream& stream) {
  const int64_t rows = args.logits.shape[0], vocab = args.logits.shape[1];
  const Tensor& history = args.prompt_bits.present() ? args.prompt_bits : args.output_counts;
  Params params{.logits = args.logits.data,
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
                .scratch = may_change(args) ? reinterpret_cast<float*>(first_line(args.workspace)) : nullptr,
                .vocab = vocab,
                .logits_stride = args.logits.stride[0],
                .bits_stride = args.prompt_bits.stride[0],
                .counts_stride = args.output_counts.stride[0],
                .allowed_stride = args.allowed_bits.stride[0],
                .top_ids_stride = args.top_ids.stride[0],
                .top_logprobs_stride = args.top_logprobs.stride[0],
                .scratch_stride = may_change(args) ? copy_stride(vocab) : 0,
                .states = history.shape[0],
                .entries = args.bias_ids.shape[0],
                .top = args.top_ids.present() ? args.top_ids.shape[1] : 0,
                .blocks_per_row = 1,
                .count_ids = args.count_ids,
                .wide = alignment_of(args.logits) % int64_t{sizeof(float4)} == 0};
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
