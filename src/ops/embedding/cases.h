#pragma once

#include <span>

#include "src/ops/linear/cases.h"
#include "vivace/embedding.h"

namespace vivace {

struct EmbeddingCase {
  const char* name;
  int64_t tokens, vocab, hidden;
  DType table = DType::f32;
  bool strided = false;
  DType y = DType::f32;
};

inline constexpr EmbeddingCase kEmbeddingTestCases[] = {
    {"no tokens", 0, 4, 32},
    {"one", 1, 1, 1},
    {"f32, strided", 3, 10, 33, DType::f32, true},
    {"bf16", 17, 50, 100, DType::bf16},
    {"f16", 40, 7, 64, DType::f16},
    {"q4_0", 5, 9, 96, DType::q4_0, true},
    {"q4_1", 5, 9, 64, DType::q4_1},
    {"q8_0", 33, 100, 576, DType::q8_0},
    {"q4_k", 3, 5, 512, DType::q4_k, true},
    {"q6_k", 2, 5, 256, DType::q6_k},
    {"bf16 to bf16", 17, 50, 2048, DType::bf16, false, DType::bf16},
    {"f32 to bf16, strided", 5, 50, 333, DType::f32, true, DType::bf16},
    {"f16 to bf16", 3, 20, 1000, DType::f16, false, DType::bf16},
    {"q4_k to bf16", 3, 5, 512, DType::q4_k, false, DType::bf16},
    {"q8_0 to bf16", 3, 5, 288, DType::q8_0, true, DType::bf16},
};

inline constexpr EmbeddingCase kEmbeddingServingCases[] = {
    {"SmolLM2 x1", 1, 49152, 576, DType::q8_0},
    {"SmolLM2 x512", 512, 49152, 576, DType::q8_0},
    {"bf16 x512", 512, 8192, 2048, DType::bf16},
    {"Hy3 x64, bf16", 64, 120832, 4096, DType::bf16, false, DType::bf16},
};

inline std::span<const EmbeddingCase> embedding_cases(CaseSize size) {
  if (size == CaseSize::test) return kEmbeddingTestCases;
  return kEmbeddingServingCases;
}

/// A case with its memory: random inputs, poisoned outputs.
struct EmbeddingProblem {
  Guarded ids, table, y;
  EmbeddingArgs args;

  EmbeddingProblem(const EmbeddingCase& c, uint32_t seed) {
    std::mt19937 rng(seed);
    ids = Guarded(DType::i32, {c.tokens});
    table = random_weight(c.table, c.vocab, c.hidden, rng, c.strided ? c.hidden + 256 : 0);
    y = Guarded(c.y, {c.tokens, c.hidden}, c.strided ? c.hidden + 3 : 0);
    std::uniform_int_distribution<int32_t> id(0, static_cast<int32_t>(c.vocab - 1));
    for (int64_t t = 0; t < c.tokens; ++t) ids.as<int32_t>()[t] = id(rng);
    args = {.ids = ids, .table = table, .y = y};
  }
  /// A call reads a small part of the table, another one each time.
  int64_t footprint_bytes() const { return table.bytes() + y.bytes(); }
};

}  // namespace vivace
