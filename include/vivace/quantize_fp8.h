#pragma once

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

/// What one scale of an fp8 activation covers, and who makes it. Everywhere a scale means value = stored * scale.
/// The numbers are part of the C ABI.
enum class Fp8Scaling : uint8_t {
  tensor = 0,  ///< f32 [1], given: static quantisation
  token = 1,   ///< f32 [tokens], made from the row: its largest magnitude becomes 448
  block = 2,   ///< f32 [tokens, ceil(width / 128)], made from 128 neighbours of a row in the same way
};

struct QuantizeFp8Args {
  Tensor x;
  Tensor y;
  Tensor scale;
  Fp8Scaling scaling = Fp8Scaling::tensor;
};

/// y = e4m3(x / scale), rounded to nearest even, saturating at 448.
///
/// Made scales are max|x| / 448, and at least 2^-126, so that zeros have a scale too. A NaN makes its made scale and
/// all that it covers NaN; under a given scale only itself. Infinities under a given scale saturate.
///
/// Shapes   x, y [tokens, width]; scale as Fp8Scaling says. Rows may be strided.
/// Types    x f32, bf16 or f16; y fp8_e4m3; the quotient is one fp32 division.
/// Writes   y, and scale unless scaling is tensor. Nothing may overlap.
/// Cost     quantize_fp8_cost().
/// Runs     on `stream`; allocates nothing.
/// Repeats  bit for bit; a row does not depend on the rows beside it.
/// Fails    invalid_argument: a shape, stride or type disagrees; on the CPU a given scale is not finite or <= 0. unsupported: no row fits.
/// Source   src/ops/quantize_fp8/
Status quantize_fp8(const QuantizeFp8Args& args, const Stream& stream);
Cost quantize_fp8_cost(const QuantizeFp8Args& args);
/// Which row would run this call. Shapes and types count, pointers do not.
Choice quantize_fp8_explain(const QuantizeFp8Args& args, const Stream& stream);

}  // namespace vivace
