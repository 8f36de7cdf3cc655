#pragma once

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "src/ops/problem.h"
#include "vivace/sampler.h"

namespace vivace {

struct SamplerCase {
  const char* name;
  int64_t rows, vocab;
  DType logits = DType::f32;
  double deviation = 4;  ///< of the logits: 4 is as peaked as a language model, 1 is nearly flat
  double temperature = 0.8;
  int32_t top_k = 0;
  double top_p = 1, min_p = 0;
  bool penalties = false;  ///< all three, with history, bias and banned tokens
  int32_t logprobs = -1;   ///< -1: none; n: the chosen token's and the n best
  int64_t row_stride = 0;  ///< 0: contiguous
  double repetition = 1.3;
  bool repetition_alone =
      false;  ///< of the penalties, over a prompt that holds every seventh id; no bias, no ban
};

inline constexpr SamplerCase kSamplerTestCases[] = {
    {"no rows", 0, 100},
    {"one token", 3, 1, DType::f32, 4, 0.8, 1, 0.9, 0.1, false, 1},
    {"narrow", 9, 7, DType::f32, 1, 1, 3, 0.9, 0, true, 5},
    {"greedy", 4, 49152, DType::f32, 4, 0, 0, 1, 0, false, 0},
    {"greedy, bf16, penalties", 4, 1003, DType::bf16, 4, 0, 0, 1, 0, true, 3},
    {"free draw", 20, 1003, DType::f32, 1, 1},
    {"free draw, LLaMA vocab", 6, 32000, DType::bf16, 2, 1.2},
    {"top-k", 20, 1003, DType::f32, 1, 1, 50},
    {"top-k 1", 5, 1003, DType::f32, 1, 1, 1},
    {"top-k of most", 6, 1003, DType::f32, 1, 1, 900},
    {"top-k above the vocab", 6, 1003, DType::f32, 1, 1, 5000},
    {"top-p", 20, 1003, DType::f32, 4, 0.8, 0, 0.9},
    {"top-p, flat", 10, 5000, DType::f32, 0.5, 1, 0, 0.95},
    {"top-p tiny", 5, 1003, DType::f32, 1, 1, 0, 1e-9},
    {"min-p", 20, 1003, DType::f32, 2, 1, 0, 1, 0.05},
    {"min-p 1", 5, 1003, DType::bf16, 2, 1, 0, 1, 1},
    {"all filters", 30, 1003, DType::bf16, 2, 0.9, 50, 0.9, 0.05, true, 20},
    {"Llama 3", 3, 128256, DType::f32, 4, 0.8, 50, 0.9, 0, true, 5},
    {"Qwen3", 3, 151936, DType::bf16, 4, 0.6, 20, 0.95, 0, false, 20},
    {"Qwen2.5", 2, 152064, DType::f32, 4, 0.7, 0, 0.8, 0, true, 1},
    {"gpt-oss", 2, 201088, DType::f32, 4, 1, 0, 1, 0.02},
    {"Gemma 3", 2, 262144, DType::bf16, 4, 1, 64, 0.95, 0, false, 2},
    {"beyond known vocabs, greedy", 2, 300000, DType::f32, 4, 0, 0, 1, 0, false, 0},
    {"beyond known vocabs, top-k, top-p", 2, 300000, DType::bf16, 4, 0.8, 50, 0.9, 0, true, 3},
    {"beyond known vocabs, free draw", 1, 300000, DType::bf16, 1, 1},
    {"segments of several chunks", 1, 600011, DType::bf16, 1, 1, 0, 0.9, 0, false, 1},
    {"top-k beyond a short list", 3, 20000, DType::f32, 1, 1, 3000, 0.9},
    {"top-p, flat, ties", 4, 30011, DType::bf16, 0.1, 1, 0, 0.7, 0, false, 600},
    {"strided rows", 5, 333, DType::f32, 2, 1, 10, 0.9, 0, true, 4, 340},
    {"repetition", 5, 32000, DType::bf16, 4, 1, 20, 0.9, 0, true, 0, 0, 1.1, true},
    {"repetition, free draw", 5, 40007, DType::f32, 3, 1, 0, 1, 0, true, -1, 0, 1.2, true},
    {"repetition below 1", 5, 32000, DType::bf16, 2, 1, 50, 1, 0, true, 3, 0, 0.7, true},
    {"repetition far from 1", 5, 20000, DType::f32, 2, 1, 10, 1, 0, true, -1, 0, 4e6, true},
};

inline constexpr SamplerCase kSamplerServingCases[] = {
    {"SmolLM2 greedy", 1, 49152, DType::f32, 4, 0, 0, 1, 0, false, 0},
    {"SmolLM2 free draw", 1, 49152, DType::f32, 4, 1},
    {"SmolLM2 top-k 50, top-p 0.9", 1, 49152, DType::f32, 4, 0.8, 50, 0.9, 0, false, 0},
    {"SmolLM2 top-p 0.95", 1, 49152, DType::f32, 4, 1, 0, 0.95, 0, false, 0},
    {"SmolLM2 everything", 1, 49152, DType::f32, 4, 0.8, 50, 0.9, 0.05, true, 5},
    {"Qwen3 batch 8", 8, 151936, DType::f32, 4, 0.6, 20, 0.95},
    {"Hy3 batch 64", 64, 120832, DType::f32, 4, 0.9, 50, 0.95},
    {"Hy3 batch 64, free draw", 64, 120832, DType::f32, 4, 1},
};

inline std::span<const SamplerCase> sampler_cases(CaseSize size) {
  if (size == CaseSize::test) return kSamplerTestCases;
  return kSamplerServingCases;
}

/// How one row is sampled, in plain lists. Ids outside the vocabulary count for nothing.
struct SampleSpec {
  double temperature = 1;
  int32_t top_k = 0;
  double top_p = 1, min_p = 0;
  double repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  uint64_t seed = 0;
  int64_t position = 0;
  std::vector<int32_t> prompt_ids, output_ids;
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<int32_t> banned_ids;
  std::vector<uint32_t> allowed_bits;  ///< empty: all
};

/// The tensors that say the same, set in `args`. Tensors that no row needs are absent. States lie in the reverse order of
/// rows, one of them nobody's; a row without history has none.
struct SampleTensors {
  Guarded temperature, top_p, min_p, top_k, repetition, presence, frequency, seed, position;
  Guarded prompt_bits, output_counts, state, bias_start, bias_ids, bias_values, allowed_bits;

  SampleTensors() = default;
  SampleTensors(const std::vector<SampleSpec>& specs, int64_t vocab, SamplerArgs& args) {
    const auto rows = static_cast<int64_t>(specs.size());
    const int64_t words = (vocab + 31) / 32;
    const auto column = [&](Guarded& to, Tensor& arg, DType type, auto value) {
      to = Guarded(type, {rows});
      for (int64_t r = 0; r < rows; ++r) to.as<decltype(value(specs[r]))>()[r] = value(specs[r]);
      arg = to;
    };
    const auto any = [&](auto has) { return std::any_of(specs.begin(), specs.end(), has); };
    column(temperature, args.temperature, DType::f32,
           [](const SampleSpec& s) { return float(s.temperature); });
    column(top_p, args.top_p, DType::f32, [](const SampleSpec& s) { return float(s.top_p); });
    column(min_p, args.min_p, DType::f32, [](const SampleSpec& s) { return float(s.min_p); });
    column(top_k, args.top_k, DType::i32, [](const SampleSpec& s) { return s.top_k; });
    column(repetition, args.repetition_penalty, DType::f32,
           [](const SampleSpec& s) { return float(s.repetition_penalty); });
    column(presence, args.presence_penalty, DType::f32,
           [](const SampleSpec& s) { return float(s.presence_penalty); });
    column(frequency, args.frequency_penalty, DType::f32,
           [](const SampleSpec& s) { return float(s.frequency_penalty); });
    column(seed, args.seed, DType::i64, [](const SampleSpec& s) { return int64_t(s.seed); });
    column(position, args.position, DType::i64, [](const SampleSpec& s) { return s.position; });
    if (any([](const SampleSpec& s) { return !s.prompt_ids.empty() || !s.output_ids.empty(); })) {
      prompt_bits = Guarded(DType::i32, {rows + 1, words}, words + 1);
      output_counts = Guarded(DType::i32, {rows + 1, vocab}, vocab + 3);
      state = Guarded(DType::i32, {rows});
      for (int64_t r = 0; r < rows; ++r) {
        const SampleSpec& spec = specs[r];
        const int64_t at = rows - r;
        uint32_t* bits = prompt_bits.tensor().at(at).as<uint32_t>();
        int32_t* counts = output_counts.tensor().at(at).as<int32_t>();
        std::fill(bits, bits + words, 0);
        std::fill(counts, counts + vocab, 0);
        const auto known = [&](int32_t id) { return id >= 0 && id < vocab; };
        for (int32_t id : spec.prompt_ids) {
          if (known(id)) bits[id / 32] |= 1u << (id % 32);
        }
        for (int32_t id : spec.output_ids) counts[known(id) ? id : 0] += known(id);
        const bool none = spec.prompt_ids.empty() && spec.output_ids.empty();
        state.as<int32_t>()[r] = none ? -1 : static_cast<int32_t>(at);
      }
      args.prompt_bits = prompt_bits;
      args.output_counts = output_counts;
      args.state = state;
    }
    if (any([](const SampleSpec& s) { return !s.logit_bias.empty() || !s.banned_ids.empty(); })) {
      std::vector<std::pair<int32_t, float>> all;
      bias_start = Guarded(DType::i32, {rows + 1});
      bias_start.as<int32_t>()[0] = 0;
      for (int64_t r = 0; r < rows; ++r) {
        all.insert(all.end(), specs[r].logit_bias.begin(), specs[r].logit_bias.end());
        for (int32_t id : specs[r].banned_ids) all.emplace_back(id, -INFINITY);
        bias_start.as<int32_t>()[r + 1] = static_cast<int32_t>(all.size());
      }
      const auto entries = static_cast<int64_t>(all.size());
      bias_ids = Guarded(DType::i32, {entries});
      bias_values = Guarded(DType::f32, {entries});
      for (int64_t i = 0; i < entries; ++i) {
        bias_ids.as<int32_t>()[i] = all[i].first;
        bias_values.as<float>()[i] = all[i].second;
      }
      args.bias_start = bias_start;
      args.bias_ids = bias_ids;
      args.bias_values = bias_values;
    }
    if (any([](const SampleSpec& s) { return !s.allowed_bits.empty(); })) {
      allowed_bits = Guarded(DType::i32, {rows, words}, words + 1);
      for (int64_t r = 0; r < rows; ++r) {
        uint32_t* bits = allowed_bits.tensor().at(r).as<uint32_t>();
        std::fill(bits, bits + words, ~0u);
        std::copy(specs[r].allowed_bits.begin(), specs[r].allowed_bits.end(), bits);
      }
      args.allowed_bits = allowed_bits;
    }
  }
};

/// A case with its memory: random logits, history and lists, poisoned outputs.
struct SamplerProblem {
  Guarded logits, ids, valid, logprobs, top_ids, top_logprobs, workspace;
  std::vector<SampleSpec> specs;
  SamplerArgs args;
  SampleTensors tensors;

  SamplerProblem(const SamplerCase& c, uint32_t seed, const Stream& stream = {}) {
    std::mt19937 rng(seed);
    logits = Guarded(c.logits, {c.rows, c.vocab}, c.row_stride);
    logits.random(rng, c.deviation);
    ids = Guarded(DType::i32, {c.rows});
    valid = Guarded(DType::u8, {c.rows});
    SampleSpec common{.temperature = c.temperature, .top_k = c.top_k, .top_p = c.top_p, .min_p = c.min_p};
    std::vector<uint32_t> allowed;
    if (c.penalties && c.repetition_alone) {
      for (int32_t id = 3; id < c.vocab; id += 7) common.prompt_ids.push_back(id);
      common.repetition_penalty = c.repetition;
    } else if (c.penalties) {
      const auto any_id = [&] {
        return static_cast<int32_t>(rng() % (c.vocab + 2)) - 1;
      };  // some are no token
      for (int i = 0; i < 40; ++i)
        common.prompt_ids.push_back(any_id()), common.output_ids.push_back(any_id());
      for (int i = 0; i < 10; ++i) common.output_ids.push_back(common.output_ids[i]);
      common.banned_ids = {any_id(), any_id()};
      common.logit_bias = {{any_id(), 3.f}, {any_id(), -2.f}, {any_id(), 5.f}};
      common.repetition_penalty = c.repetition;
      common.presence_penalty = 0.5;
      common.frequency_penalty = 0.25;
      allowed.assign((c.vocab + 31) / 32, 0xFFFFFFFEu);
    }
    for (int64_t r = 0; r < c.rows; ++r) {
      SampleSpec spec = common;
      spec.seed = rng();
      spec.position = r;
      if (r % 2 == 1 && !c.repetition_alone) spec.allowed_bits = allowed;
      specs.push_back(spec);
    }
    args = {.logits = logits, .ids = ids, .valid = valid};
    tensors = SampleTensors(specs, c.vocab, args);
    args.count_ids = args.output_counts.present();
    if (c.logprobs >= 0) {
      logprobs = Guarded(DType::f32, {c.rows});
      args.logprobs = logprobs;
    }
    if (c.logprobs > 0) {
      top_ids = Guarded(DType::i32, {c.rows, c.logprobs});
      top_logprobs = Guarded(DType::f32, {c.rows, c.logprobs});
      args.top_ids = top_ids;
      args.top_logprobs = top_logprobs;
    }
    take_workspace(stream);
  }

  /// Scratch for these arguments on this stream.
  void take_workspace(const Stream& stream) {
    const Result<int64_t> bytes = sampler_workspace_bytes(args, stream);
    workspace = Guarded(DType::u8, {bytes.ok() ? *bytes : 0});
    args.workspace = workspace;
  }
};

}  // namespace vivace
