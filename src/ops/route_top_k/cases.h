#pragma once

#include <span>

#include "src/ops/problem.h"
#include "vivace/route_top_k.h"

namespace vivace {

struct RouteTopKCase {
  const char* name;
  int64_t tokens, experts, top_k;
  RouteScoring scoring = RouteScoring::softmax;
  bool bias = false, renormalise = true;
  double scale = 1;
  int64_t groups = 1, top_groups = 1, zero_experts = 0;
  int64_t row_stride = 0;    ///< of scores; 0: contiguous
  int64_t live_tokens = -1;  ///< -1: not given
};

inline constexpr RouteTopKCase kRouteTopKTestCases[] = {
    {"no tokens", 0, 8, 2},
    {"no choices", 3, 8, 0},
    {"one expert", 3, 1, 1},
    {"all experts", 5, 13, 13},
    {"more choices than a warp has lanes", 5, 70, 40},
    {"as many choices as a warp has lanes", 3, 1024, 32},
    {"LongCat-Flash-Lite", 9, 384, 12, RouteScoring::softmax, true, false, 6, 1, 1, 128},
    {"Qwen3", 9, 128, 8},
    {"OLMoE: not renormalised", 9, 64, 8, RouteScoring::softmax, false, false},
    {"Mixtral", 9, 8, 2, RouteScoring::softmax_chosen},
    {"gpt-oss", 9, 128, 4, RouteScoring::softmax_chosen, false, false},
    {"Hy3", 20, 192, 8, RouteScoring::sigmoid, true, true, 2.826},
    {"sigmoid without bias", 9, 60, 6, RouteScoring::sigmoid},
    {"DeepSeek-V3", 20, 256, 8, RouteScoring::sigmoid, true, true, 2.5, 8, 4},
    {"groups of one", 9, 12, 3, RouteScoring::sigmoid, true, true, 1, 12, 5},
    {"groups under softmax", 9, 64, 6, RouteScoring::softmax, false, false, 16, 8, 3},
    {"LongCat", 20, 768, 12, RouteScoring::softmax, true, false, 6, 1, 1, 256},
    {"only zero experts", 3, 16, 4, RouteScoring::softmax, false, true, 1, 1, 1, 16},
    {"no power of two below 1024", 9, 1000, 10, RouteScoring::sigmoid, true, true, 2.5, 8, 4},
    {"more experts than a stack holds", 2, 1500, 8},
    {"strided rows", 4, 20, 3, RouteScoring::softmax, false, true, 1, 1, 1, 0, 33},
    {"padding", 16, 192, 8, RouteScoring::sigmoid, true, true, 2.826, 1, 1, 0, 0, 5},
    {"padding with zero experts", 20, 768, 12, RouteScoring::softmax, true, false, 6, 1, 1, 256, 0, 11},
    {"padding alone", 3, 64, 8, RouteScoring::softmax, false, true, 1, 1, 1, 0, 0, 0},
    {"Qwen3, a prompt", 700, 128, 8},
    {"Hy3, a prompt", 700, 192, 8, RouteScoring::sigmoid, true, true, 2.826},
    {"DeepSeek-V3, a prompt", 700, 256, 8, RouteScoring::sigmoid, true, true, 2.5, 8, 4},
    {"LongCat, a prompt with padding", 700, 768, 12, RouteScoring::softmax, true, false, 6, 1, 1, 256, 800,
     650},
    {"a prompt, more choices than a warp has lanes", 700, 1000, 40, RouteScoring::softmax_chosen},
    {"a prompt, a warp takes no more groups", 700, 99, 3, RouteScoring::sigmoid, true, true, 1, 33, 5},
    {"more live tokens than there are", 3, 64, 8, RouteScoring::softmax, false, true, 1, 1, 1, 0, 0, 7},
};

inline constexpr RouteTopKCase kRouteTopKServingCases[] = {
    {"Qwen3-30B decode 8", 8, 128, 8},
    {"Hy3 decode 64", 64, 192, 8, RouteScoring::sigmoid, true, true, 2.826},
    {"LongCat decode 64", 64, 768, 12, RouteScoring::softmax, true, false, 6, 1, 1, 256},
    {"Qwen3-30B prefill 512", 512, 128, 8},
};

inline std::span<const RouteTopKCase> route_top_k_cases(CaseSize size) {
  if (size == CaseSize::test) return kRouteTopKTestCases;
  return kRouteTopKServingCases;
}

/// A case with its memory: random logits, poisoned outputs.
struct RouteTopKProblem {
  Guarded scores, bias, ids, weights, zero_weight, live_tokens;
  RouteTopKArgs args;

  RouteTopKProblem(const RouteTopKCase& c, uint32_t seed) {
    std::mt19937 rng(seed);
    scores = Guarded(DType::f32, {c.tokens, c.experts}, c.row_stride);
    scores.random(rng, 2);
    ids = Guarded(DType::i32, {c.tokens, c.top_k});
    weights = Guarded(DType::f32, {c.tokens, c.top_k});
    if (c.bias) {
      bias = Guarded(DType::f32, {c.experts});
      bias.random(rng, c.scoring == RouteScoring::sigmoid ? 0.1 : 0.01);
    }
    if (c.zero_experts > 0) zero_weight = Guarded(DType::f32, {c.tokens});
    if (c.live_tokens >= 0) {
      live_tokens = Guarded(DType::i32, {1});
      live_tokens.as<int32_t>()[0] = static_cast<int32_t>(c.live_tokens);
    }
    args = {.scores = scores,
            .correction_bias = bias,
            .expert_ids = ids,
            .expert_weights = weights,
            .zero_weight = zero_weight,
            .live_tokens = live_tokens,
            .scoring = c.scoring,
            .renormalise = c.renormalise,
            .scale = c.scale,
            .groups = c.groups,
            .top_groups = c.top_groups,
            .zero_experts = c.zero_experts};
  }
};

}  // namespace vivace
