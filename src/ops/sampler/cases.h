#pragma once

#include <span>

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
    {"strided rows", 5, 333, DType::f32, 2, 1, 10, 0.9, 0, true, 4, 340},
};

inline constexpr SamplerCase kSamplerServingCases[] = {
    {"SmolLM2 greedy", 1, 49152, DType::f32, 4, 0, 0, 1, 0, false, 0},
    {"SmolLM2 free draw", 1, 49152, DType::f32, 4, 1},
    {"SmolLM2 top-k 50, top-p 0.9", 1, 49152, DType::f32, 4, 0.8, 50, 0.9, 0, false, 0},
    {"SmolLM2 top-p 0.95", 1, 49152, DType::f32, 4, 1, 0, 0.95, 0, false, 0},
    {"SmolLM2 everything", 1, 49152, DType::f32, 4, 0.8, 50, 0.9, 0.05, true, 5},
    {"Qwen3 batch 8", 8, 151936, DType::f32, 4, 0.6, 20, 0.95},
};

inline std::span<const SamplerCase> sampler_cases(CaseSize size) {
  if (size == CaseSize::test) return kSamplerTestCases;
  return kSamplerServingCases;
}

/// A case with its memory: random logits, history and lists, poisoned outputs.
struct SamplerProblem {
  Guarded logits, ids, valid, logprobs, top_ids, top_logprobs, workspace;
  std::vector<SampleRow> rows;
  std::vector<int32_t> prompt, output, banned;
  std::vector<LogitBias> bias;
  std::vector<uint32_t> allowed;
  SamplerArgs args;

  SamplerProblem(const SamplerCase& c, uint32_t seed, const Stream& stream = {}) {
    std::mt19937 rng(seed);
    logits = Guarded(c.logits, {c.rows, c.vocab}, c.row_stride);
    logits.random(rng, c.deviation);
    ids = Guarded(DType::i32, {c.rows});
    valid = Guarded(DType::u8, {c.rows});
    if (c.penalties) {
      const auto any_id = [&] {
        return static_cast<int32_t>(rng() % (c.vocab + 2)) - 1;
      };  // some are no token
      for (int i = 0; i < 40; ++i) prompt.push_back(any_id()), output.push_back(any_id());
      for (int i = 0; i < 10; ++i) output.push_back(output[i]);
      banned = {any_id(), any_id()};
      bias = {{any_id(), 3}, {any_id(), -2}, {any_id(), 5}};
      allowed.assign((c.vocab + 31) / 32, 0xFFFFFFFEu);
    }
    for (int64_t r = 0; r < c.rows; ++r) {
      SampleRow row{.temperature = c.temperature,
                    .top_k = c.top_k,
                    .top_p = c.top_p,
                    .min_p = c.min_p,
                    .top_logprobs = std::max(0, c.logprobs),
                    .seed = rng(),
                    .position = r};
      if (c.penalties) {
        row.repetition_penalty = 1.3;
        row.presence_penalty = 0.5;
        row.frequency_penalty = 0.25;
        row.prompt_ids = prompt;
        row.output_ids = output;
        row.banned_ids = banned;
        row.logit_bias = bias;
        if (r % 2 == 1) row.allowed_bits = allowed;
      }
      rows.push_back(row);
    }
    args = {.logits = logits, .rows = rows, .ids = ids, .valid = valid};
    if (c.logprobs >= 0) {
      logprobs = Guarded(DType::f32, {c.rows});
      args.logprobs = logprobs;
    }
    if (c.logprobs > 0) {
      top_ids = Guarded(DType::i32, {c.rows, c.logprobs + 1});
      top_logprobs = Guarded(DType::f32, {c.rows, c.logprobs + 1});
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
