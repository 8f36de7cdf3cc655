// A row of fp32 values, made piece by piece, quantised to fp8. Included once per SIMD target by the cpu.cc files.
#if defined(VIVACE_QUANTIZE_FP8_ROW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef VIVACE_QUANTIZE_FP8_ROW_INL_H_
#undef VIVACE_QUANTIZE_FP8_ROW_INL_H_
#else
#define VIVACE_QUANTIZE_FP8_ROW_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>

#include "src/cpu/convert-inl.h"
#include "src/ops/quantize_fp8/quantize.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

/// The largest magnitude of `count` values, NaN if there is one.
HWY_INLINE float largest_magnitude(const float* values, int64_t count) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  // Magnitudes order as their bits do, with NaN above infinity.
  const hn::Repartition<int32_t, decltype(d)> i32;
  auto max = hn::Zero(i32);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    max = hn::Max(max, hn::BitCast(i32, hn::Abs(hn::LoadU(d, values + i))));
  }
  int32_t largest = hn::GetLane(hn::MaxOfLanes(i32, max));
  for (; i < count; ++i) largest = std::max(largest, std::bit_cast<int32_t>(std::abs(values[i])));
  return std::bit_cast<float>(largest);
}

/// y = e4m3(values / scale).
HWY_INLINE void quantize_floats(const float* values, float scale, int64_t count, uint8_t* y) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto divisor = hn::Set(d, scale);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    store_from_f32(d, Fp8{}, hn::Div(hn::LoadU(d, values + i), divisor), y + i);
  }
  for (; i < count; ++i) y[i] = f32_to_fp8(values[i] / scale);
}

/// Columns [begin, end) of a row. make(i, count, values, last) gives up to kFp8ScaleBlock values from column i; `last`
/// says that no column is asked for again. Under Fp8Scaling::token the columns are the whole row, under block `begin` is a
/// multiple of the block.
template <class Make>
HWY_INLINE void quantize_columns(Make&& make, int64_t begin, int64_t end, Fp8Scaling scaling, float* scales,
                                 uint8_t* y) {
  float values[kFp8ScaleBlock];
  const auto each = [&](auto&& body, bool last) {
    for (int64_t i = begin; i < end; i += kFp8ScaleBlock) {
      const int64_t count = std::min(kFp8ScaleBlock, end - i);
      make(i, count, values, last);
      body(i, count);
    }
  };
  if (scaling == Fp8Scaling::block) {
    each(
        [&](int64_t i, int64_t count) {
          float& scale = scales[i / kFp8ScaleBlock];
          scale = made_scale(largest_magnitude(values, count));
          quantize_floats(values, scale, count, y + i);
        },
        true);
    return;
  }
  if (scaling == Fp8Scaling::token) {
    int32_t largest = 0;
    each(
        [&](int64_t, int64_t count) {
          largest = std::max(largest, std::bit_cast<int32_t>(largest_magnitude(values, count)));
        },
        false);
    *scales = made_scale(std::bit_cast<float>(largest));
  }
  each([&](int64_t i, int64_t count) { quantize_floats(values, *scales, count, y + i); }, true);
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
