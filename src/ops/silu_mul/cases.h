#pragma once

#include <span>

#include "src/ops/problem.h"
#include "src/ops/quantize_fp8/cases.h"
#include "vivace/silu_mul.h"

namespace vivace {

struct SiluMulCase {
  const char* name;
  int64_t tokens, intermediate;
  DType dtype = DType::f32;
  bool fused = false;      ///< gate and up are halves of one [tokens, 2 * intermediate]
  int64_t row_stride = 0;  ///< 0: contiguous
  bool fp8 = false;        ///< y
  Fp8Scaling scaling = Fp8Scaling::tensor;
};

inline constexpr SiluMulCase kSiluMulTestCases[] = {
    {"no tokens", 0, 64},
    {"one element", 1, 1},
    {"narrow", 3, 7},
    {"SmolLM2", 7, 1536, DType::f32, true},
    {"bf16, odd width", 5, 333, DType::bf16},
    {"bf16 halves", 2, 1280, DType::bf16, true},
    {"one past a chunk", 2, 1025, DType::f32, false, 1100},
    {"bf16, wide", 2, 13312, DType::bf16, true},
    {"fp8, static", 5, 512, DType::bf16, true, 0, true},
    {"fp8, static, odd width", 3, 1101, DType::f32, false, 0, true},
    {"fp8 per token", 3, 2500, DType::bf16, false, 0, true, Fp8Scaling::token},
    {"fp8 blocks", 3, 2048, DType::bf16, true, 0, true, Fp8Scaling::block},
    {"fp8 blocks, odd width", 3, 333, DType::f32, false, 350, true, Fp8Scaling::block},
};

inline constexpr SiluMulCase kSiluMulServingCases[] = {
    {"SmolLM2 decode 8", 8, 1536, DType::f32, true},
    {"Hy3 dense layer decode 64", 64, 13312, DType::bf16, true},
    {"Hy3 dense layer decode 64, fp8", 64, 13312, DType::bf16, true, 0, true},
    {"Qwen3-30B experts, prefill 512", 4096, 768, DType::f32, true},
};

inline std::span<const SiluMulCase> silu_mul_cases(CaseSize size) {
  if (size == CaseSize::test) return kSiluMulTestCases;
  return kSiluMulServingCases;
}

/// A case with its memory: random inputs, poisoned outputs.
struct SiluMulProblem {
  Guarded gate, up, y, y_scale;
  SiluMulArgs args;

  SiluMulProblem(const SiluMulCase& c, uint32_t seed) {
    std::mt19937 rng(seed);
    gate = Guarded(c.dtype, {c.tokens, c.fused ? 2 * c.intermediate : c.intermediate}, c.row_stride);
    gate.random(rng, 4);
    y = Guarded(c.fp8 ? DType::fp8_e4m3 : c.dtype, {c.tokens, c.intermediate}, c.row_stride);
    if (c.fp8) y_scale = random_scales(c.scaling, c.tokens, c.intermediate, rng, 0.02);
    args = {.gate = gate, .up = gate, .y = y, .y_scale = y_scale, .y_scaling = c.scaling};
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
