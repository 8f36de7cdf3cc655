#pragma once

#include <algorithm>
#include <span>

#include "src/ops/problem.h"
#include "vivace/fused_moe.h"

namespace vivace {

enum class MoeRouting {
  distinct,  ///< a token's experts differ
  any,       ///< with repetitions, ids -1 and ids past the experts
  one,       ///< every choice of every token is expert 0
  none,      ///< no choice has work
};

struct FusedMoeCase {
  const char* name;
  int64_t tokens, hidden, intermediate, experts, top_k;
  DType weight = DType::f32;
  MoeRouting routing = MoeRouting::distinct;
  int64_t shared = 0;      ///< intermediate of the shared expert; 0: none
  bool separate = false;   ///< experts given one by one
  int64_t row_stride = 0;  ///< of x and y; 0: contiguous
  DType x = DType::f32;
};

inline constexpr FusedMoeCase kFusedMoeTestCases[] = {
    {"no tokens", 0, 32, 16, 4, 2},
    {"one of each", 1, 1, 1, 1, 1},
    {"no choices", 3, 16, 8, 4, 0, DType::f32, MoeRouting::distinct, 24},
    {"no experts", 3, 16, 8, 0, 2, DType::f32, MoeRouting::none, 24},
    {"all remote", 5, 32, 16, 4, 2, DType::f32, MoeRouting::none},
    {"all remote, shared", 5, 32, 16, 4, 2, DType::bf16, MoeRouting::none, 40},
    {"decode", 1, 96, 72, 12, 3, DType::bf16},
    {"odd sizes", 7, 37, 19, 5, 2, DType::f32, MoeRouting::any, 23},
    {"f16", 9, 64, 130, 8, 4, DType::f16},
    {"bf16, one by one, shared", 33, 128, 64, 16, 4, DType::bf16, MoeRouting::any, 96, true},
    {"one token, one expert k times", 1, 64, 32, 4, 4, DType::f32, MoeRouting::one},
    {"many tokens, one expert k times", 150, 64, 32, 4, 4, DType::f32, MoeRouting::one},
    {"strided rows", 6, 40, 24, 4, 2, DType::f32, MoeRouting::distinct, 16, false, 64},
    {"more experts than tokens", 4, 16, 8, 768, 12, DType::bf16, MoeRouting::any},
    {"more pairs than a block", 600, 24, 16, 16, 8, DType::f32, MoeRouting::any, 8},
    {"bf16 activations", 3, 64, 32, 4, 2, DType::bf16, MoeRouting::distinct, 16, false, 0, DType::bf16},
};

inline constexpr FusedMoeCase kFusedMoeServingCases[] = {
    {"Qwen3-30B decode 1, 32 of 128 experts", 1, 2048, 768, 32, 8, DType::bf16},
    {"Qwen3-30B decode 8, 32 of 128 experts", 8, 2048, 768, 32, 8, DType::bf16},
    {"Qwen3-30B prefill 128, 32 of 128 experts", 128, 2048, 768, 32, 8, DType::bf16},
};

inline std::span<const FusedMoeCase> fused_moe_cases(CaseSize size) {
  if (size == CaseSize::test) return kFusedMoeTestCases;
  return kFusedMoeServingCases;
}

/// A case with its memory: random inputs, poisoned outputs. Matrices are scaled by 1 / sqrt(columns), so values
/// stay near 1.
struct FusedMoeProblem {
  Guarded x, gate_up, down, shared_gate, shared_up, shared_down, ids, weights, y, workspace;
  std::vector<ExpertWeights> experts;
  FusedMoeArgs args;

  FusedMoeProblem(const FusedMoeCase& c, uint32_t seed, const Stream& stream = {}) {
    std::mt19937 rng(seed);
    const auto matrix = [&](std::vector<int64_t> shape) {
      Guarded m(c.weight, shape);
      m.random(rng, 1 / std::sqrt(static_cast<double>(shape.back())));
      return m;
    };
    x = Guarded(c.x, {c.tokens, c.hidden}, c.row_stride);
    x.random(rng);
    y = Guarded(c.x, {c.tokens, c.hidden}, c.row_stride);
    gate_up = matrix({c.experts, 2 * c.intermediate, c.hidden});
    down = matrix({c.experts, c.hidden, c.intermediate});
    ids = Guarded(DType::i32, {c.tokens, c.top_k});
    weights = Guarded(DType::f32, {c.tokens, c.top_k});
    weights.random(rng, 0.3, 0.5);
    route(c, rng);
    args = {.x = x, .gate_up = gate_up, .down = down, .expert_ids = ids, .expert_weights = weights, .y = y};
    if (c.shared > 0) {
      shared_gate = matrix({c.shared, c.hidden});
      shared_up = matrix({c.shared, c.hidden});
      shared_down = matrix({c.hidden, c.shared});
      args.shared = {shared_gate, shared_up, shared_down};
    }
    if (c.separate) {
      for (int64_t e = 0; e < c.experts; ++e) {
        const Tensor both = args.gate_up.at(e);
        experts.push_back(
            {both.rows(0, c.intermediate), both.rows(c.intermediate, c.intermediate), args.down.at(e)});
      }
      args.gate_up = args.down = Tensor();
      args.experts = experts;
    }
    take_workspace(stream);
  }

  /// Scratch for these arguments on this stream.
  void take_workspace(const Stream& stream) {
    const Result<int64_t> bytes = fused_moe_workspace_bytes(args, stream);
    workspace = Guarded(DType::u8, {bytes.ok() ? *bytes : 0});
    args.workspace = workspace;
  }

  /// What benchmarks of many calls must spread over: unvisited experts too.
  int64_t footprint_bytes() const { return gate_up.bytes() + down.bytes() + x.bytes() + y.bytes(); }

 private:
  void route(const FusedMoeCase& c, std::mt19937& rng) {
    std::vector<int32_t> all(static_cast<size_t>(c.experts));
    for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int32_t>(e);
    constexpr int32_t kNoWork[] = {-1, INT32_MIN, INT32_MAX};
    for (int64_t t = 0; t < c.tokens; ++t) {
      std::shuffle(all.begin(), all.end(), rng);
      for (int64_t j = 0; j < c.top_k; ++j) {
        int32_t& id = ids.as<int32_t>()[t * c.top_k + j];
        switch (c.routing) {
          case MoeRouting::distinct:
            id = all[j % c.experts];
            break;
          case MoeRouting::any:
            id = static_cast<int32_t>(rng() % (c.experts + 2)) - 1;
            break;
          case MoeRouting::one:
            id = 0;
            break;
          case MoeRouting::none:
            id = j % 4 == 3 ? static_cast<int32_t>(c.experts) : kNoWork[j % 4];
            break;
        }
      }
    }
  }
};

}  // namespace vivace
