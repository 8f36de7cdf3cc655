#pragma once

#include <span>

#include "src/ops/problem.h"
#include "vivace/silu_mul.h"

namespace vivace {

struct SiluMulCase {
  const char* name;
  int64_t tokens, intermediate;
  DType dtype = DType::f32;
  bool fused = false;      ///< gate and up are halves of one [tokens, 2 * intermediate]
  int64_t row_stride = 0;  ///< 0: contiguous
};

inline constexpr SiluMulCase kSiluMulTestCases[] = {
    {"no tokens", 0, 64},
    {"one element", 1, 1},
    {"narrow", 3, 7},
    {"SmolLM2", 7, 1536, DType::f32, true},
    {"bf16, odd width", 5, 333, DType::bf16},
    {"bf16 halves", 2, 1280, DType::bf16, true},
    {"one past a chunk", 2, 1025, DType::f32, false, 1100},
};

inline constexpr SiluMulCase kSiluMulServingCases[] = {
    {"SmolLM2 decode 8", 8, 1536, DType::f32, true},
    {"Hy3 dense layer decode 64", 64, 13312, DType::bf16, true},
    {"Qwen3-30B experts, prefill 512", 4096, 768, DType::f32, true},
};

inline std::span<const SiluMulCase> silu_mul_cases(CaseSize size) {
  if (size == CaseSize::test) return kSiluMulTestCases;
  return kSiluMulServingCases;
}

/// A case with its memory: random inputs, poisoned outputs.
struct SiluMulProblem {
  Guarded gate, up, y;
  SiluMulArgs args;

  SiluMulProblem(const SiluMulCase& c, uint32_t seed) {
    std::mt19937 rng(seed);
    gate = Guarded(c.dtype, {c.tokens, c.fused ? 2 * c.intermediate : c.intermediate}, c.row_stride);
    gate.random(rng, 4);
    y = Guarded(c.dtype, {c.tokens, c.intermediate}, c.row_stride);
    args = {.gate = gate, .up = gate, .y = y};
    if (c.fused) {
      args.gate.shape[1] = args.up.shape[1] = c.intermediate;
      args.up.data = gate.as<char>() + c.intermediate * info_of(c.dtype).block_bytes;
    } else {
      up = Guarded(c.dtype, {c.tokens, c.intermediate}, c.row_stride);
      up.random(rng);
      args.up = up;
    }
  }
};

}  // namespace vivace
