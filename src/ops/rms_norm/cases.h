#pragma once

#include <span>

#include "src/ops/problem.h"
#include "src/ops/quantize_fp8/cases.h"
#include "vivace/rms_norm.h"

namespace vivace {

struct RmsNormCase {
  const char* name;
  int64_t tokens, hidden;
  DType dtype = DType::f32, weight = DType::f32;
  bool residual = false;
  int64_t row_stride = 0;  ///< 0: contiguous
  double eps = 1e-6;
  DType residual_type = DType::none;  ///< none: x's
  DType y = DType::none;              ///< none: x's
  Fp8Scaling scaling = Fp8Scaling::tensor;
  bool both = false;  ///< y_fp8 beside y
};

inline constexpr RmsNormCase kRmsNormTestCases[] = {
    {"no tokens", 0, 64},
    {"one element", 1, 1},
    {"narrow", 3, 7},
    {"SmolLM2", 7, 576, DType::f32, DType::f32, true},
    {"f16 weight", 2, 576, DType::f32, DType::f16},
    {"bf16", 5, 256, DType::bf16, DType::bf16, true},
    {"bf16, odd width", 3, 333, DType::bf16, DType::f32, true},
    {"strided rows", 4, 100, DType::f32, DType::bf16, true, 128},
    {"eps dominates", 2, 128, DType::f32, DType::f32, false, 0, 1.0},
    {"wide", 2, 12288, DType::f32, DType::bf16, true},
    {"as wide as a GPU takes", 2, 40960, DType::bf16, DType::bf16, true, 0, 1e-6, DType::f32},
    {"wide, odd width", 2, 20001, DType::f32, DType::bf16, true},
    {"fp32 residual", 3, 256, DType::bf16, DType::bf16, true, 0, 1e-6, DType::f32},
    {"bf16 residual of f32", 3, 77, DType::f32, DType::bf16, true, 0, 1e-6, DType::bf16},
    {"bf16 of an fp32 stream", 3, 576, DType::f32, DType::f32, false, 0, 1e-6, DType::none, DType::bf16},
    {"fp8, static", 5, 512, DType::bf16, DType::bf16, true, 0, 1e-6, DType::none, DType::fp8_e4m3},
    {"fp8, static, odd width", 2, 7, DType::f32, DType::f32, false, 0, 1e-6, DType::none, DType::fp8_e4m3},
    {"fp8 per token", 3, 2048, DType::bf16, DType::bf16, true, 0, 1e-6, DType::f32, DType::fp8_e4m3,
     Fp8Scaling::token},
    {"fp8 per token, wide", 2, 16384, DType::bf16, DType::f16, false, 0, 1e-6, DType::none, DType::fp8_e4m3,
     Fp8Scaling::token},
    {"fp8 blocks", 3, 2048, DType::bf16, DType::bf16, true, 0, 1e-6, DType::none, DType::fp8_e4m3,
     Fp8Scaling::block},
    {"fp8 blocks, odd width", 3, 333, DType::bf16, DType::f32, true, 350, 1e-6, DType::none, DType::fp8_e4m3,
     Fp8Scaling::block},
    {"bf16 and fp8, static", 5, 512, DType::bf16, DType::bf16, true, 0, 1e-6, DType::f32, DType::bf16,
     Fp8Scaling::tensor, true},
    {"bf16 and fp8 per token, strided", 3, 1000, DType::bf16, DType::bf16, false, 1024, 1e-6, DType::none,
     DType::bf16, Fp8Scaling::token, true},
    {"bf16 and fp8 blocks, wide", 2, 16384, DType::f32, DType::bf16, true, 0, 1e-6, DType::f32, DType::bf16,
     Fp8Scaling::block, true},
    {"f32 and fp8 blocks, odd width", 3, 333, DType::f32, DType::f32, true, 350, 1e-6, DType::none,
     DType::none, Fp8Scaling::block, true},
    {"bf16 and fp8, static, odd width", 2, 71, DType::bf16, DType::f16, false, 0, 1e-6, DType::none,
     DType::none, Fp8Scaling::tensor, true},
};

inline constexpr RmsNormCase kRmsNormServingCases[] = {
    {"SmolLM2 decode 8", 8, 576, DType::f32, DType::f32, true},
    {"Qwen3-30B decode 64", 64, 2048, DType::bf16, DType::bf16, true},
    {"Hy3 decode 64", 64, 4096, DType::bf16, DType::bf16, true},
    {"Hy3 prefill 4096", 4096, 4096, DType::bf16, DType::bf16, true},
    {"Hy3 decode 64, fp8", 64, 4096, DType::bf16, DType::bf16, true, 0, 1e-6, DType::none, DType::fp8_e4m3},
    {"Qwen3-30B decode 64, fp8 blocks", 64, 2048, DType::bf16, DType::bf16, true, 0, 1e-6, DType::none,
     DType::fp8_e4m3, Fp8Scaling::block},
    {"Hy3 decode 64, bf16 and fp8", 64, 4096, DType::bf16, DType::bf16, true, 0, 1e-6, DType::none,
     DType::bf16, Fp8Scaling::tensor, true},
};

inline std::span<const RmsNormCase> rms_norm_cases(CaseSize size) {
  if (size == CaseSize::test) return kRmsNormTestCases;
  return kRmsNormServingCases;
}

/// A case with its memory: random inputs, poisoned outputs.
struct RmsNormProblem {
  Guarded x, residual, weight, y, y_scale, y_fp8;
  RmsNormArgs args;

  RmsNormProblem(const RmsNormCase& c, uint32_t seed) {
    std::mt19937 rng(seed);
    x = Guarded(c.dtype, {c.tokens, c.hidden}, c.row_stride);
    const DType y_type = c.y == DType::none ? c.dtype : c.y;
    y = Guarded(y_type, {c.tokens, c.hidden}, c.row_stride);
    weight = Guarded(c.weight, {c.hidden});
    x.random(rng);
    weight.random(rng, 0.3, 1);
    if (c.residual) {
      residual = Guarded(c.residual_type == DType::none ? c.dtype : c.residual_type, {c.tokens, c.hidden},
                         c.row_stride);
      residual.random(rng);
    }
    if (c.both) y_fp8 = Guarded(DType::fp8_e4m3, {c.tokens, c.hidden}, c.row_stride);
    if (c.both || y_type == DType::fp8_e4m3)
      y_scale = random_scales(c.scaling, c.tokens, c.hidden, rng, 0.02);
    args = {.x = x,
            .residual = residual,
            .weight = weight,
            .y = y,
            .y_scale = y_scale,
            .y_scaling = c.scaling,
            .eps = c.eps,
            .y_fp8 = y_fp8};
  }
};

}  // namespace vivace
