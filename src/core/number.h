#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "vivace/tensor.h"

// Scalar conversions between fp32 and the 16-bit and 8-bit types, and typed access for code that is about clarity, not
// speed.

namespace vivace {

inline float bf16_to_f32(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

/// Round to nearest even; NaN stays NaN.
inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float f16_to_f32(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = half >> 10 & 0x1fu, mantissa = half & 0x3ffu;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24 is exact
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

/// Round to nearest even; overflow becomes infinity, NaN stays NaN.
inline uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {                        // subnormal half: adding 0.5 rounds at 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(shifted) - 0x3f000000u);
  }
  return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

/// e4m3: four exponent bits with bias 7, three of mantissa, no infinity, 0x7f is NaN.
inline float fp8_to_f32(uint8_t code) {
  const uint32_t exponent = code >> 3 & 0xfu, mantissa = code & 7u;
  const float sign = code & 0x80u ? -1.f : 1.f;
  if (exponent == 0) return sign * (static_cast<float>(mantissa) * 0x1p-9f);
  if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(0x7fc00000u);
  return sign * std::bit_cast<float>((exponent + 120) << 23 | mantissa << 20);
}

/// Round to nearest even, saturating at 448; NaN stays NaN.
inline uint8_t f32_to_fp8(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  if (magnitude >= 0x43e00000u) return sign | 0x7eu;  // 448 and more
  if (magnitude < 0x3c800000u) {                      // below 2^-6: adding 2^14 rounds at 2^-9
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return sign | static_cast<uint8_t>(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0x1p14f));
  }
  return sign | static_cast<uint8_t>((magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20);
}

/// Element `i` of a plain floating-point array.
inline float load(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[i];
    case DType::f16:
      return f16_to_f32(static_cast<const uint16_t*>(data)[i]);
    case DType::bf16:
      return bf16_to_f32(static_cast<const uint16_t*>(data)[i]);
    case DType::fp8_e4m3:
      return fp8_to_f32(static_cast<const uint8_t*>(data)[i]);
    default:
      return NAN;
  }
}

inline void store(DType dtype, void* data, int64_t i, double value) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      break;
    case DType::f16:
      static_cast<uint16_t*>(data)[i] = f32_to_f16(static_cast<float>(value));
      break;
    case DType::bf16:
      static_cast<uint16_t*>(data)[i] = f32_to_bf16(static_cast<float>(value));
      break;
    case DType::fp8_e4m3:
      static_cast<uint8_t*>(data)[i] = f32_to_fp8(static_cast<float>(value));
      break;
    default:
      break;
  }
}

}  // namespace vivace
