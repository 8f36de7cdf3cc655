#pragma once

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/quantize_fp8.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

struct SiluMulArgs {
  Tensor gate, up;
  Tensor y;
  Tensor y_scale;  ///< with fp8 y, as in QuantizeFp8Args
  Fp8Scaling y_scaling = Fp8Scaling::tensor;
};

/// y = silu(gate) * up, where silu(v) = v / (1 + exp(-v)); an fp8 y is that quantised as quantize_fp8 does, without a
/// rounding between.
///
/// Shapes   gate, up, y [tokens, intermediate]. Rows may be strided, so the halves of a fused [tokens, 2 *
///          intermediate] are two views of it.
/// Types    gate and up of one type, f32 or bf16, y the same or fp8_e4m3; arithmetic in fp32, rounded once.
///          silu(-inf) is 0, not NaN: the limit.
/// Writes   y, which may be gate or up, and made scales; nothing else may overlap.
/// Cost     silu_mul_cost().
/// Runs     on `stream`; allocates nothing.
/// Repeats  bit for bit; an element depends on nothing but its gate and up.
/// Fails    invalid_argument: a shape, stride or type disagrees, or a scale as in quantize_fp8. unsupported: no row fits.
/// Source   src/ops/silu_mul/
Status silu_mul(const SiluMulArgs& args, const Stream& stream);
Cost silu_mul_cost(const SiluMulArgs& args);
Choice silu_mul_explain(const SiluMulArgs& args, const Stream& stream);

}  // namespace vivace
