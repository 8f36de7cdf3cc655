// One token per row         a block per row, no sort of the vocabulary
//
// Two numbers for a row of V logits
//   bytes  4 V or 2 V   read once from memory; the second look, which collects or draws, is served by the L2
//   flops  10 V         for each look with exponentials: one for log-probabilities, one for a free draw
//
// Every thread notes the largest logit that it has seen. The k-th largest of those notes bounds the k-th largest logit
// from below, so one more look collects a short list that holds what top-k or top-p keep; it is sorted in shared memory, cut,
// sorted by id, and drawn from. Where the list is too short or too long (flat or tied rows, a k above a few hundred) the cut
// is searched for over the whole row, eight ways at a time. All sums have a fixed order, and nothing depends on the order in
// which the list is collected.
//
// A row whose logits are changed by biases, bans or penalties has an fp32 copy in the workspace.

#include <cfloat>

#include "src/core/workspace.h"
#include "src/device/launch.h"
#include "src/device/ptx.h"
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
  bool count_ids, wide;
};

__device__ __forceinline__ float field(const float* list, int64_t row, float otherwise) {
  return list != nullptr ? list[row] : otherwise;
}

template <class T>
__global__ __launch_bounds__(kThreads) void sampler_kernel(const __grid_constant__ Params p) {
  __shared__ Shared s;
  const int64_t r = blockIdx.x;
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

  // One look at the logits as given.
  const RowOfLogits<T> given{static_cast<const T*>(p.logits) + r * p.logits_stride, nullptr, p.vocab, p.wide};
  RowOfLogits<T> row = given;
  float* const copy = p.scratch + r * p.scratch_stride;
  const bool sums_given = p.logprobs != nullptr || p.top > 0;
  const float inverse =
      static_cast<float>(fmin(fmax(1. / static_cast<double>(temperature), double{FLT_MIN}), double{FLT_MAX}));
  const int used_top_k = top_k > 0 && top_k < p.vocab ? top_k : 0;
  const float of_draw = temperature > 0.f && top_p < 1.f && used_top_k == 0 ? inverse : 0.f;
  const float first_inverse[2] = {sums_given ? 1.f : 0.f, changes ? 0.f : of_draw};
  Bounds seen_given;
  given.for_each_group([&](int64_t begin, const float(&v)[kGroup]) {
    seen_given.add(begin, v, first_inverse);
    if (changes) store_floats(v, copy + begin);
  });
  const RowBounds as_given = combine(seen_given, first_inverse, s);
  valid = valid && !as_given.nan && as_given.max > -INFINITY;

  // And one at the logits as they are drawn from, if those differ.
  Bounds seen = seen_given;
  RowBounds bounds = as_given;
  if (valid && changes) {
    __syncthreads();  // the copy is complete
    // A thread owns ids and adds in the order of the list, so equal ids add up the same way every time.
    for (int64_t i = bias_begin; i < bias_end; ++i) {
      const int32_t id = p.bias_ids[i];
      if (id < 0 || id >= p.vocab || id % kThreads != static_cast<int>(threadIdx.x)) continue;
      const float bias = p.bias_values[i];
      copy[id] = bias == -INFINITY ? -INFINITY : copy[id] + bias;  // a ban holds whatever the logit
    }
    __syncthreads();
    row.changed = copy;
    const float inverses[2] = {0.f, of_draw};
    seen = Bounds();
    row.for_each_group([&](int64_t begin, const float(&v)[kGroup]) {
      float changed[kGroup];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        changed[j] = v[j];
        const int64_t id = begin + j;
        if (id >= p.vocab) continue;
        if (allowed != nullptr && (allowed[id / 32] >> (id % 32) & 1) == 0) changed[j] = -INFINITY;
        if (!penalised) continue;
        const int count = counts != nullptr ? counts[id] : 0;
        const bool in_prompt = prompt != nullptr && (prompt[id / 32] >> (id % 32) & 1) != 0;
        if (count > 0 || in_prompt) changed[j] = penalised_logit(changed[j], penalties, count, in_prompt);
      }
      store_floats(changed, copy + begin);
      seen.add(begin, changed, inverses);
    });
    bounds = combine(seen, inverses, s);  // its barriers also complete the copy
    valid = !bounds.nan && bounds.max > -INFINITY;
  }

  int id = 0;
  if (valid) {
    id = bounds.id;
    if (temperature > 0.f) {
      const uint64_t seed = p.seed != nullptr ? static_cast<uint64_t>(p.seed[r]) : 0;
      const double u = draw_uniform(seed, p.position != nullptr ? p.position[r] : 0);
      const Filters filters{{bounds.max, inverse}, used_top_k, top_p, min_p, u};
      id = draw(row, filters, seen.max, bounds.sums[1], s);
    }
  }

  let_next_kernel_start();
  const double log_sum = sums_given && valid ? log(as_given.sums[0]) : 0.;
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
    list_largest(given, p.top, seen_given.max, as_given.max, write, s);
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

}  // namespace

int64_t sampler_cuda_workspace_bytes(const SamplerArgs& args, const Stream&) {
  if (!may_change(args)) return 0;
  return args.logits.shape[0] * copy_stride(args.logits.shape[1]) * int64_t{sizeof(float)} + kWorkspaceSlack;
}

Status sampler_cuda(const SamplerArgs& args, const Stream& stream) {
  const int64_t vocab = args.logits.shape[1];
  const int64_t group_bytes = kGroup * info_of(args.logits.dtype).block_bytes;
  const Tensor& history = args.prompt_bits.present() ? args.prompt_bits : args.output_counts;
  const Params params{
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
      .count_ids = args.count_ids,
      .wide = alignment_of(args.logits) % group_bytes == 0};
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(args.logits.shape[0])),
                          .block = dim3(kThreads),
                          .overlap_previous = true};
  Status status;
  with_type<float, bf16>(args.logits.dtype, [&](auto type) {
    using T = decltype(type);
    status = launch("sampler", sampler_kernel<T>, shape, stream, params);
  });
  return status;
}

}  // namespace vivace
