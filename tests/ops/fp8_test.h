#pragma once

#include <algorithm>

#include "src/ops/quantize_fp8/quantize.h"
#include "tests/ops/op_test.h"

namespace vivace {

/// Half the distance between the neighbours of `value` in e4m3.
inline double half_ulp_e4m3(double value) {
  return std::abs(value) < 0x1p-6 ? 0x1p-10 : std::ldexp(1.0, std::ilogb(value) - 4);
}

/// Whether `y` and `scale` are what quantising `exact` gives, when the values that were quantised are within `error` of
/// it: made scales are within that of max / 448, and stored values are the nearest e4m3 of the quotient, or its neighbour
/// when the quotient is within its error of a tie.
inline ::testing::AssertionResult quantised(const Tensor& y, const Tensor& scale, Fp8Scaling scaling,
                                            const Tensor& exact, const Bound& error) {
  const int64_t tokens = y.shape[0], width = y.shape[1], span = scale_span(scaling, width);
  // The scale and the quotient are rounded to fp32 once each.
  const double relative = error.relative + 2 * 0x1p-24;
  for (int64_t t = 0; t < tokens; ++t) {
    const std::vector<double> want = values_of(exact.at(t)), got = values_of(y.at(t));
    for (int64_t begin = 0; begin < width; begin += span) {
      const int64_t end = std::min(width, begin + span);
      const double s = scales_of(scale, scaling, t)[scaling == Fp8Scaling::block ? begin / span : 0];
      if (scaling != Fp8Scaling::tensor) {
        double max = 0;
        for (int64_t i = begin; i < end; ++i) max = std::max(max, std::abs(want[i]));
        const double made = std::max(max / kFp8Max, 0x1p-126);
        if (!(std::abs(s - made) <= relative * made + error.absolute / kFp8Max)) {
          return ::testing::AssertionFailure()
                 << "scale of row " << t << ", column " << begin << " is " << s << ", reference " << made;
        }
      }
      for (int64_t i = begin; i < end; ++i) {
        const double q = std::clamp(want[i] / s, -double{kFp8Max}, double{kFp8Max});
        const double slack = relative * std::abs(q) + error.absolute / s;
        const double allowed = half_ulp_e4m3(std::abs(q) + slack) + slack;
        if (std::abs(got[i] - q) <= allowed) continue;
        return ::testing::AssertionFailure() << "row " << t << ", column " << i << " is " << got[i]
                                             << ", the quotient " << q << ", allowed " << allowed;
      }
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace vivace
