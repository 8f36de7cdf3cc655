// Rows of any weight type as floats, with SIMD. Included once per SIMD target.
#if defined(VIVACE_LINEAR_DEQUANTIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef VIVACE_LINEAR_DEQUANTIZE_INL_H_
#undef VIVACE_LINEAR_DEQUANTIZE_INL_H_
#else
#define VIVACE_LINEAR_DEQUANTIZE_INL_H_
#endif

#include <hwy/highway.h>

#include "src/cpu/convert-inl.h"
#include "src/ops/linear/block_formats.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

/// out = d q + m for `count` integers; `count` is a multiple of 16.
template <class Integer>
HWY_INLINE void scale_integers(const Integer* q, int count, float d, float m, float* out) {
  const hn::CappedTag<float, 8> df;
  const hn::RebindToSigned<decltype(df)> di;
  const hn::Rebind<Integer, decltype(df)> dq;
  const int lanes = static_cast<int>(hn::Lanes(df));
  for (int i = 0; i < count; i += lanes) {
    const auto value = hn::ConvertTo(df, hn::PromoteTo(di, hn::LoadU(dq, q + i)));
    hn::StoreU(hn::MulAdd(value, hn::Set(df, d), hn::Set(df, m)), df, out + i);
  }
}

/// `count` packed bytes: out[0..count) from low nibbles, out[high..high + count) from high ones.
HWY_INLINE void scale_nibbles(const uint8_t* q, int count, float d_low, float m_low, float d_high,
                              float m_high, float* out, int high) {
  const hn::FixedTag<uint8_t, 16> d8;
  alignas(16) uint8_t low[16], up[16];
  for (int i = 0; i < count; i += 16) {
    const auto packed = hn::LoadU(d8, q + i);
    hn::Store(hn::And(packed, hn::Set(d8, 15)), d8, low);
    hn::Store(hn::And(hn::ShiftRight<4>(packed), hn::Set(d8, 15)), d8, up);
    scale_integers(low, 16, d_low, m_low, out + i);
    scale_integers(up, 16, d_high, m_high, out + high + i);
  }
}

/// The 256 values of e4m3.
struct Fp8Values {
  float of[256];
  Fp8Values() {
    for (int code = 0; code < 256; ++code) of[code] = fp8_to_f32(static_cast<uint8_t>(code));
  }
};

/// As vivace::dequantize_row, except that d q + m is rounded once.
inline void dequantize(DType dtype, const uint8_t* row, int64_t k, float* out) {
  switch (dtype) {
    case DType::q4_0:
      for (int64_t i = 0; i < k; i += 32, row += sizeof(BlockQ4_0)) {
        BlockQ4_0 block;
        std::memcpy(&block, row, sizeof block);
        const float d = f16_to_f32(block.d);
        scale_nibbles(block.q, 16, d, -8 * d, d, -8 * d, out + i, 16);
      }
      break;
    case DType::q4_1:
      for (int64_t i = 0; i < k; i += 32, row += sizeof(BlockQ4_1)) {
        BlockQ4_1 block;
        std::memcpy(&block, row, sizeof block);
        const float d = f16_to_f32(block.d), m = f16_to_f32(block.m);
        scale_nibbles(block.q, 16, d, m, d, m, out + i, 16);
      }
      break;
    case DType::q8_0:
      for (int64_t i = 0; i < k; i += 32, row += sizeof(BlockQ8_0)) {
        BlockQ8_0 block;
        std::memcpy(&block, row, sizeof block);
        scale_integers(block.q, 32, f16_to_f32(block.d), 0.0f, out + i);
      }
      break;
    case DType::q4_k:
      for (int64_t i = 0; i < k; i += 256, row += sizeof(BlockQ4K)) {
        BlockQ4K block;
        std::memcpy(&block, row, sizeof block);
        const float d = f16_to_f32(block.d), dmin = f16_to_f32(block.dmin);
        for (int pair = 0; pair < 4; ++pair) {
          uint8_t scale[2], min[2];
          for (int j = 0; j < 2; ++j) q4k_scale_min(block.scales, 2 * pair + j, scale[j], min[j]);
          scale_nibbles(block.q + 32 * pair, 32, d * scale[0], -dmin * min[0], d * scale[1], -dmin * min[1],
                        out + i + 64 * pair, 32);
        }
      }
      break;
    case DType::q6_k:
      for (int64_t i = 0; i < k; i += 256, row += sizeof(BlockQ6K)) {
        BlockQ6K block;
        std::memcpy(&block, row, sizeof block);
        const float d = f16_to_f32(block.d);
        int8_t q[256];
        for (int j = 0; j < 256; ++j) q[j] = static_cast<int8_t>(q6k_value(block, j));
        for (int j = 0; j < 16; ++j)
          scale_integers(q + 16 * j, 16, d * block.scales[j], 0.0f, out + i + 16 * j);
      }
      break;
    case DType::fp8_e4m3: {
      static const Fp8Values values;
      for (int64_t i = 0; i < k; ++i) out[i] = values.of[row[i]];
      break;
    }
    default:
      with_storage(dtype, [&](auto type) {
        using T = decltype(type);
        const hn::CappedTag<float, 8> d;
        const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
        const auto* elements = reinterpret_cast<const typename T::Element*>(row);
        int64_t i = 0;
        for (; i + lanes <= k; i += lanes) hn::StoreU(load_as_f32(d, T{}, elements + i), d, out + i);
        for (; i < k; ++i) out[i] = load_one(T{}, elements + i);
      });
  }
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
