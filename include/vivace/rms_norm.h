#pragma once

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/quantize_fp8.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

struct RmsNormArgs {
  Tensor x;
  Tensor residual;  ///< optional; updated in place
  Tensor weight;
  Tensor y;
  Tensor y_scale;  ///< with fp8 y or y_fp8, as in QuantizeFp8Args
  Fp8Scaling y_scaling = Fp8Scaling::tensor;
  double eps = 1e-6;
  Tensor y_fp8;  ///< optional, where y is not fp8 itself: y quantised, for matrices in fp8 beside a reader of y
};

/// With a residual: residual += x and v = residual; without: v = x. Then
/// y = v / sqrt(mean(v * v) + eps) * weight; an fp8 y is that quantised as quantize_fp8 does, without a rounding between.
/// y_fp8 is what quantize_fp8 makes of y, bit for bit.
///
/// Shapes   x, residual, y, y_fp8 [tokens, hidden]; weight [hidden]. Rows may be strided.
/// Types    x, residual and y f32 or bf16 each, y also fp8_e4m3; y_fp8 fp8_e4m3; weight f32, f16 or bf16. Arithmetic in fp32;
///          the sum that enters the norm is the unrounded one. Squares may exceed fp32, values and sums of two may not.
/// Writes   y, residual, y_fp8 and made scales. y may be x; nothing else may overlap.
/// Cost     rms_norm_cost().
/// Runs     on `stream`; allocates nothing.
/// Repeats  bit for bit; a row does not depend on the rows beside it.
/// Fails    invalid_argument: a shape, stride or type disagrees; eps is negative or not finite; a scale as in quantize_fp8.
///          unsupported: no row fits.
/// Source   src/ops/rms_norm/
Status rms_norm(const RmsNormArgs& args, const Stream& stream);
Cost rms_norm_cost(const RmsNormArgs& args);
/// Which row would run this call. Shapes and types count, pointers do not.
Choice rms_norm_explain(const RmsNormArgs& args, const Stream& stream);

}  // namespace vivace
