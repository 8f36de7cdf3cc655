#pragma once

#include <span>

#include "src/ops/problem.h"
#include "vivace/router_gemm.h"

namespace vivace {

struct RouterGemmCase {
  const char* name;
  int64_t tokens, experts, hidden;
  DType x = DType::bf16, weight = DType::f32;
  RouterMode mode = RouterMode::exact;
  bool bias = false;
  DType scores = DType::f32;
  int64_t row_stride = 0;  ///< of x and scores; 0: contiguous
};

inline constexpr RouterGemmCase kRouterGemmTestCases[] = {
    {"no tokens", 0, 8, 64},
    {"no experts", 2, 0, 64},
    {"hidden 0", 2, 3, 0},
    {"one of each", 1, 1, 1},
    {"odd n, k no multiple of 8", 3, 160, 4100},
    {"odd n, k below a vector", 5, 7, 3, DType::f32},
    {"two terms", 7, 72, 512, DType::bf16, DType::f32, RouterMode::two_term},
    {"bf16 weight", 6, 12, 96, DType::f32, DType::bf16},
    {"bf16 weight, two_term", 6, 12, 96, DType::f32, DType::bf16, RouterMode::two_term},
    {"f16 weight", 4, 32, 333, DType::f32, DType::f16},
    {"bias, bf16 scores", 9, 32, 256, DType::bf16, DType::f32, RouterMode::exact, true, DType::bf16},
    {"strided rows", 4, 20, 100, DType::f32, DType::f32, RouterMode::exact, true, DType::f32, 128},
    {"more tokens than a task", 67, 17, 64},
    {"Hy3's shape, few tokens", 4, 192, 1096, DType::bf16, DType::bf16},
    {"wide tile, two terms", 70, 40, 608, DType::bf16, DType::f32, RouterMode::two_term, true},
    {"wide tile, one term", 131, 33, 264, DType::bf16, DType::bf16, RouterMode::exact, false, DType::bf16},
    {"a tile that is not full, three terms", 90, 200, 648, DType::bf16, DType::f32, RouterMode::exact, true},
    {"two tiles of tokens, one term", 200, 70, 136, DType::bf16, DType::bf16},
    {"a prompt, two terms", 530, 72, 328, DType::bf16, DType::f32, RouterMode::two_term, true},
    {"a prompt, one term, bf16 scores", 650, 40, 72, DType::bf16, DType::bf16, RouterMode::exact, false,
     DType::bf16},
    {"a prompt, three terms, strided rows", 515, 130, 200, DType::bf16, DType::f32, RouterMode::exact, false,
     DType::f32, 264},
    {"Hy3, one token", 1, 192, 4096},
    {"Hy3, 48 tokens", 48, 192, 4096, DType::bf16, DType::bf16},
    {"a lone token, wide tile", 1, 2200, 64, DType::bf16, DType::bf16},
    {"one expert, many tokens", 600, 1, 64, DType::bf16, DType::bf16},
    {"a prompt, 192 columns a tile", 6000, 300, 72, DType::bf16, DType::bf16},
    {"a prompt, 128 columns a tile", 6000, 200, 72, DType::bf16, DType::bf16},
    {"a prompt, three terms, totals", 2060, 300, 328},
    {"a prompt, one term, more steps than stages", 2060, 12, 3080, DType::bf16, DType::bf16,
     RouterMode::exact, true},
    // Of 96, 128 and 192 columns a tile with more steps than stages.
    {"a prompt, one term, 96 columns a tile", 3000, 100, 1032, DType::bf16, DType::bf16},
    {"a prompt, one term, 128 columns a tile", 1000, 200, 3080, DType::bf16, DType::bf16, RouterMode::exact,
     true},
    {"a prompt, one term, 192 columns a tile", 6000, 260, 520, DType::bf16, DType::bf16},
    {"a prompt, one term, strided rows", 1030, 100, 392, DType::bf16, DType::bf16, RouterMode::exact, false,
     DType::f32, 400},
    {"long rows", 3, 9, 8200},
    {"long rows, f32", 3, 9, 8200, DType::f32},
};

inline constexpr RouterGemmCase kRouterGemmServingCases[] = {
    {"Qwen3-30B decode 1", 1, 128, 2048, DType::f32, DType::bf16},
    {"Hy3 decode 8", 8, 192, 4096, DType::f32, DType::bf16},
    {"LongCat decode 8", 8, 768, 6144, DType::f32, DType::f32},
    {"Qwen3-30B prefill 512", 512, 128, 2048, DType::f32, DType::bf16},
};

inline std::span<const RouterGemmCase> router_gemm_cases(CaseSize size) {
  if (size == CaseSize::test) return kRouterGemmTestCases;
  return kRouterGemmServingCases;
}

/// A case with its memory: random inputs, a prepared weight, poisoned outputs. Weights are scaled by
/// 1 / sqrt(hidden), as a trained router's are: logits of a few units.
struct RouterGemmProblem {
  Guarded x, weight, storage, bias, scores;
  RouterGemmArgs args;

  RouterGemmProblem(const RouterGemmCase& c, uint32_t seed) {
    std::mt19937 rng(seed);
    x = Guarded(c.x, {c.tokens, c.hidden}, c.row_stride);
    weight = Guarded(c.weight, {c.experts, c.hidden});
    scores = Guarded(c.scores, {c.tokens, c.experts}, c.row_stride);
    x.random(rng);
    weight.random(rng, 1 / std::sqrt(static_cast<double>(std::max<int64_t>(1, c.hidden))));
    // Prepared on the host, wherever the case lives; the terms then belong to that device.
    RouterWeightSource source{.weight = weight, .mode = c.mode, .version = seed};
    storage = Guarded(DType::u8, {router_weight_bytes(source)});
    source.storage = storage;
    source.weight.device = source.storage.device = Device::cpu;
    if (Result<RouterWeight> prepared = prepare_router_weight(source); prepared.ok()) args.weight = *prepared;
    for (int i = 0; i < args.weight.term_count; ++i) args.weight.terms[i].device = weight.tensor().device;
    args.weight_version = seed;
    if (c.bias) {
      bias = Guarded(DType::f32, {c.experts});
      bias.random(rng);
    }
    args.x = x;
    args.bias = bias;
    args.scores = scores;
  }
};

}  // namespace vivace
