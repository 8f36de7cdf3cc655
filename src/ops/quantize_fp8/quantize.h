#pragma once

// What quantising activations to fp8 means, in one place: for this operator and for those that give quantised results.

#include <cmath>
#include <string_view>

#include "src/core/checks.h"
#include "src/core/number.h"
#include "vivace/quantize_fp8.h"

namespace vivace {

/// Neighbours of a row that share a scale under Fp8Scaling::block.
inline constexpr int64_t kFp8ScaleBlock = 128;
/// The largest finite e4m3.
inline constexpr float kFp8Max = 448.0f;

/// Elements of a row of `width` that share a scale.
inline int64_t scale_span(Fp8Scaling scaling, int64_t width) {
  return scaling == Fp8Scaling::block ? kFp8ScaleBlock : width;
}

/// Scales of a row of `width` under Fp8Scaling::block.
inline int64_t scale_blocks(int64_t width) {
  return (width + kFp8ScaleBlock - 1) / kFp8ScaleBlock;
}

/// max / 448, and at least 2^-126. NaN stays NaN.
inline float made_scale(double max) {
  const float scale = static_cast<float>(max / kFp8Max);
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

/// First scale of row `t`.
inline float* scales_of(const Tensor& scale, Fp8Scaling scaling, int64_t t) {
  return scaling == Fp8Scaling::tensor ? scale.as<float>() : scale.at(t).as<float>();
}

/// Quantises the row value(0) .. value(width - 1) as the formula says: the reference. A float value is divided in fp32,
/// a double in float64.
template <class Value>
void quantize_row(Value&& value, int64_t width, Fp8Scaling scaling, float* scales, uint8_t* y) {
  const int64_t span = scale_span(scaling, width);
  for (int64_t begin = 0; begin < width; begin += span) {
    const int64_t end = begin + span < width ? begin + span : width;
    float* scale = scales + (scaling == Fp8Scaling::block ? begin / span : 0);
    if (scaling != Fp8Scaling::tensor) {
      double max = 0;
      for (int64_t i = begin; i < end; ++i) {
        const double magnitude = std::abs(double{value(i)});
        if (magnitude > max || std::isnan(magnitude)) max = magnitude;
        if (std::isnan(max)) break;
      }
      *scale = made_scale(max);
    }
    for (int64_t i = begin; i < end; ++i) y[i] = f32_to_fp8(static_cast<float>(value(i) / *scale));
  }
}

/// The scales that belong to `y`: a tensor `name` exactly when y is fp8, f32, of the shape that `scaling` says. `check`
/// knows the dimensions "tokens" and `width`, which names y's columns.
Status check_scales(std::string_view op, Checker& check, const Stream& stream, std::string_view name,
                    const Tensor& y, const Tensor& scale, Fp8Scaling scaling, std::string_view width);

}  // namespace vivace
