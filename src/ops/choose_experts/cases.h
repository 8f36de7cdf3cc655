#pragma once

#include "src/ops/route_top_k/cases.h"
#include "src/ops/router_gemm/cases.h"
#include "vivace/choose_experts.h"

namespace vivace {

/// The choice has the tokens and experts of the logits.
struct ChooseExpertsCase {
  RouterGemmCase logits;
  RouteTopKCase choice;
  bool scores = false;  ///< whether somebody wants them
  const char* name = logits.name;
};

inline constexpr RouteTopKCase kHy3Rule{
    .name = "", .top_k = 8, .scoring = RouteScoring::sigmoid, .bias = true, .scale = 2.826};
inline constexpr RouteTopKCase kQwen3Rule{.name = "", .top_k = 8};
inline constexpr RouteTopKCase kDeepSeekV3Rule{.name = "",
                                               .top_k = 8,
                                               .scoring = RouteScoring::sigmoid,
                                               .bias = true,
                                               .scale = 2.5,
                                               .groups = 8,
                                               .top_groups = 4};
inline constexpr RouteTopKCase kLongCatLiteRule{
    .name = "", .top_k = 12, .bias = true, .renormalise = false, .scale = 6, .zero_experts = 128};

inline constexpr ChooseExpertsCase kChooseExpertsTestCases[] = {
    {{"no tokens", 0, 16, 64, DType::bf16}, {.name = "", .top_k = 2}},
    {{"one of each", 1, 1, 8}, {.name = "", .top_k = 1}},
    {{"no choices", 20, 128, 64, DType::bf16, DType::bf16}, {.name = "", .top_k = 0}, true},
    {{"one token", 1, 192, 1096, DType::bf16, DType::bf16}, kHy3Rule},
    {{"Qwen3, three clusters", 17, 128, 4096, DType::bf16, DType::bf16}, kQwen3Rule},
    {{"Qwen3, two terms", 29, 128, 4096, DType::bf16, DType::f32, RouterMode::two_term}, kQwen3Rule, true},
    {{"Qwen3, two terms, clusters of 16 tokens", 64, 128, 1096, DType::bf16, DType::f32,
      RouterMode::two_term},
     kQwen3Rule},
    {{"Hy3", 32, 192, 4096, DType::bf16, DType::bf16}, kHy3Rule},
    {{"Hy3, seven clusters", 56, 192, 1096, DType::bf16, DType::bf16}, kHy3Rule, true},
    {{"Hy3, clusters of 16 tokens", 61, 192, 4096, DType::bf16, DType::bf16}, kHy3Rule, true},
    {{"Hy3, two terms, a tile a warp", 20, 192, 200, DType::bf16, DType::f32, RouterMode::two_term},
     kHy3Rule},
    {{"Hy3, three terms", 47, 192, 1096}, kHy3Rule},
    {{"Hy3, more tokens", 65, 192, 520, DType::bf16, DType::bf16}, kHy3Rule},
    {{"DeepSeek-V3", 20, 256, 328, DType::bf16, DType::bf16}, kDeepSeekV3Rule},
    {{"groups", 60, 160, 328, DType::bf16, DType::bf16}, kDeepSeekV3Rule, true},
    {{"zero experts", 18, 192, 264, DType::bf16, DType::bf16}, kLongCatLiteRule, true},
    {{"weights of the chosen", 40, 136, 520, DType::bf16, DType::bf16},
     {.name = "", .top_k = 2, .scoring = RouteScoring::softmax_chosen}},
    {{"by the score, weights of the chosen", 20, 136, 520, DType::bf16, DType::bf16},
     {.name = "", .top_k = 4, .scoring = RouteScoring::softmax_chosen, .bias = true}},
    {{"all experts", 18, 130, 72, DType::bf16, DType::bf16}, {.name = "", .top_k = 130}},
    {{"odd experts, k less than a step", 33, 149, 40, DType::bf16, DType::bf16},
     {.name = "", .top_k = 7, .scoring = RouteScoring::sigmoid},
     true},
    {{"a bias of the logits", 18, 140, 136, DType::bf16, DType::bf16, RouterMode::exact, true},
     {.name = "", .top_k = 6},
     true},
    {{"padding", 30, 192, 264, DType::bf16, DType::bf16},
     {.name = "",
      .top_k = 8,
      .scoring = RouteScoring::sigmoid,
      .bias = true,
      .scale = 2.826,
      .live_tokens = 5}},
    {{"strided rows", 20, 132, 200, DType::bf16, DType::bf16, RouterMode::exact, false, DType::f32, 264},
     kQwen3Rule,
     true},
    {{"x in fp32", 20, 128, 96, DType::f32, DType::bf16}, kQwen3Rule},
};

inline constexpr ChooseExpertsCase kChooseExpertsServingCases[] = {
    {{"Qwen3-30B decode 8", 8, 128, 2048, DType::f32, DType::bf16}, kQwen3Rule},
    {{"Hy3 decode 8", 8, 192, 4096, DType::f32, DType::bf16}, kHy3Rule},
};

inline std::span<const ChooseExpertsCase> choose_experts_cases(CaseSize size) {
  if (size == CaseSize::test) return kChooseExpertsTestCases;
  return kChooseExpertsServingCases;
}

/// A case with its memory, that of scores which nobody wants among it.
struct ChooseExpertsProblem {
  RouterGemmProblem logits;
  RouteTopKProblem choice;
  Guarded workspace;
  ChooseExpertsArgs args;

  ChooseExpertsProblem(const ChooseExpertsCase& c, uint32_t seed)
      : logits(c.logits, seed), choice(choice_of(c), seed), args{logits.args, choice.args, {}} {
    args.choice.scores = Tensor();
    if (c.scores) return;
    args.logits.scores = Tensor();
    workspace = Guarded(DType::u8, {c.logits.tokens * c.logits.experts * 4 + 63});
    args.workspace = workspace;
  }

 private:
  static RouteTopKCase choice_of(const ChooseExpertsCase& c) {
    RouteTopKCase choice = c.choice;
    choice.tokens = c.logits.tokens;
    choice.experts = c.logits.experts;
    return choice;
  }
};

}  // namespace vivace
