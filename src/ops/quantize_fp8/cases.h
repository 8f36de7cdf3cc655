#pragma once

#include <span>

#include "src/ops/problem.h"
#include "src/ops/quantize_fp8/quantize.h"
#include "vivace/quantize_fp8.h"

namespace vivace {

/// The scales of a case's fp8 `y`: given ones are drawn, made ones poisoned.
inline Guarded random_scales(Fp8Scaling scaling, int64_t tokens, int64_t width, std::mt19937& rng,
                             double given) {
  if (scaling == Fp8Scaling::token) return Guarded(DType::f32, {tokens});
  if (scaling == Fp8Scaling::block)
    return Guarded(DType::f32, {tokens, scale_blocks(width)}, scale_blocks(width) + 1);
  Guarded scale(DType::f32, {1});
  scale.as<float>()[0] = static_cast<float>(given * std::uniform_real_distribution<double>(0.5, 1)(rng));
  return scale;
}

struct QuantizeFp8Case {
  const char* name;
  int64_t tokens, width;
  DType x = DType::f32;
  Fp8Scaling scaling = Fp8Scaling::tensor;
  int64_t row_stride = 0;  ///< 0: contiguous
};

inline constexpr QuantizeFp8Case kQuantizeFp8TestCases[] = {
    {"no tokens", 0, 64},
    {"one element", 1, 1, DType::f32, Fp8Scaling::token},
    {"narrow", 3, 7},
    {"narrow blocks", 3, 7, DType::bf16, Fp8Scaling::block},
    {"f16, static", 5, 256, DType::f16},
    {"bf16, static", 9, 1024, DType::bf16},
    {"bf16 per token", 5, 2048, DType::bf16, Fp8Scaling::token},
    {"f32 per token, odd width", 4, 333, DType::f32, Fp8Scaling::token},
    {"bf16 blocks", 5, 2048, DType::bf16, Fp8Scaling::block},
    {"f32 blocks, odd width", 3, 333, DType::f32, Fp8Scaling::block},
    {"f16 blocks, strided", 3, 260, DType::f16, Fp8Scaling::block, 300},
    {"bf16, odd stride", 3, 256, DType::bf16, Fp8Scaling::token, 301},
    {"wide", 2, 50000, DType::bf16, Fp8Scaling::token},
};

inline constexpr QuantizeFp8Case kQuantizeFp8ServingCases[] = {
    {"Hy3 decode 64, static", 64, 4096, DType::bf16},
    {"Qwen3-30B decode 64, blocks", 64, 2048, DType::bf16, Fp8Scaling::block},
    {"Hy3 prefill 4096, static", 4096, 4096, DType::bf16},
    {"Qwen3-30B prefill 4096, blocks", 4096, 2048, DType::bf16, Fp8Scaling::block},
    {"Llama3-8B prefill 4096, per token", 4096, 4096, DType::bf16, Fp8Scaling::token},
};

inline std::span<const QuantizeFp8Case> quantize_fp8_cases(CaseSize size) {
  if (size == CaseSize::test) return kQuantizeFp8TestCases;
  return kQuantizeFp8ServingCases;
}

/// A case with its memory: random inputs, poisoned outputs.
struct QuantizeFp8Problem {
  Guarded x, y, scale;
  QuantizeFp8Args args;

  QuantizeFp8Problem(const QuantizeFp8Case& c, uint32_t seed) {
    std::mt19937 rng(seed);
    x = Guarded(c.x, {c.tokens, c.width}, c.row_stride);
    x.random(rng);
    y = Guarded(DType::fp8_e4m3, {c.tokens, c.width}, c.row_stride);
    scale = random_scales(c.scaling, c.tokens, c.width, rng, 0.01);
    args = {.x = x, .y = y, .scale = scale, .scaling = c.scaling};
  }
};

}  // namespace vivace
