#pragma once

#include <cstdint>
#include <cstring>

#include "src/core/number.h"
#include "vivace/tensor.h"

// GGUF's block formats, one weight at a time: the definition that fast code is tested against.

namespace vivace {

struct BlockQ4_0 {
  uint16_t d;     ///< f16
  uint8_t q[16];  ///< low nibbles are weights 0..15, high nibbles 16..31
};
struct BlockQ4_1 {
  uint16_t d, m;  ///< f16
  uint8_t q[16];
};
struct BlockQ8_0 {
  uint16_t d;  ///< f16
  int8_t q[32];
};
struct BlockQ4K {
  uint16_t d, dmin;    ///< f16
  uint8_t scales[12];  ///< eight 6-bit scales and eight 6-bit mins
  uint8_t q[128];      ///< four groups of 32 bytes: low nibbles are sub-block 2 g, high nibbles 2 g + 1
};
struct BlockQ6K {
  uint8_t low[128];  ///< lower four bits
  uint8_t high[64];  ///< upper two bits
  int8_t scales[16];
  uint16_t d;  ///< f16
};
static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ8_0) == 34);
static_assert(sizeof(BlockQ4K) == 144 && sizeof(BlockQ6K) == 210);

/// Scale and min of sub-block `j` (0..7) of a Q4_K block. The first four of each are the low six bits of a
/// byte; of the last four, four bits lie in bytes 8..11 and the upper two in the spare bits of the first
/// eight bytes.
inline void q4k_scale_min(const uint8_t* scales, int j, uint8_t& scale, uint8_t& min) {
  if (j < 4) {
    scale = scales[j] & 63;
    min = scales[j + 4] & 63;
  } else {
    scale = static_cast<uint8_t>((scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4);
    min = static_cast<uint8_t>(scales[j + 4] >> 4 | (scales[j] >> 6) << 4);
  }
}

/// Weight `i` (0..255) of a Q6_K block without its scales: -32..31. A half of 128 weights has 64 bytes of
/// `low` and 32 of `high`; its four groups of 32 take low nibbles of the first and second 32 bytes, then the
/// high nibbles.
inline int q6k_value(const BlockQ6K& block, int i) {
  const int half = i / 128, group = i % 128 / 32, l = i % 32;
  const uint8_t low = block.low[64 * half + 32 * (group & 1) + l];
  const uint8_t high = block.high[32 * half + l];
  return ((group < 2 ? low & 15 : low >> 4) | (high >> 2 * group & 3) << 4) - 32;
}

/// out[0..k) = the exact values of `k` weights that start at `row`. `k` is a multiple of the format's block.
/// Plain types too; other types give NaN.
inline void dequantize_row(DType dtype, const void* row, int64_t k, float* out) {
  const auto each_block = [&](auto block, int64_t elements, auto&& unpack) {
    const auto* bytes = static_cast<const uint8_t*>(row);
    for (int64_t i = 0; i < k; i += elements, bytes += sizeof(block)) {
      std::memcpy(&block, bytes, sizeof(block));  // rows of a mapped file need not be aligned
      unpack(block, out + i);
    }
  };
  switch (dtype) {
    case DType::q4_0:
      return each_block(BlockQ4_0{}, 32, [](const BlockQ4_0& b, float* w) {
        const float d = f16_to_f32(b.d);
        for (int i = 0; i < 32; ++i)
          w[i] = d * static_cast<float>((i < 16 ? b.q[i] & 15 : b.q[i - 16] >> 4) - 8);
      });
    case DType::q4_1:
      return each_block(BlockQ4_1{}, 32, [](const BlockQ4_1& b, float* w) {
        const float d = f16_to_f32(b.d), m = f16_to_f32(b.m);
        for (int i = 0; i < 32; ++i)
          w[i] = d * static_cast<float>(i < 16 ? b.q[i] & 15 : b.q[i - 16] >> 4) + m;
      });
    case DType::q8_0:
      return each_block(BlockQ8_0{}, 32, [](const BlockQ8_0& b, float* w) {
        const float d = f16_to_f32(b.d);
        for (int i = 0; i < 32; ++i) w[i] = d * static_cast<float>(b.q[i]);
      });
    case DType::q4_k:
      return each_block(BlockQ4K{}, 256, [](const BlockQ4K& b, float* w) {
        const float d = f16_to_f32(b.d), dmin = f16_to_f32(b.dmin);
        for (int j = 0; j < 8; ++j) {
          uint8_t scale, min;
          q4k_scale_min(b.scales, j, scale, min);
          const uint8_t* q = b.q + 32 * (j / 2);
          for (int i = 0; i < 32; ++i) {
            const int value = j % 2 == 0 ? q[i] & 15 : q[i] >> 4;
            w[32 * j + i] = d * scale * static_cast<float>(value) - dmin * min;
          }
        }
      });
    case DType::q6_k:
      return each_block(BlockQ6K{}, 256, [](const BlockQ6K& b, float* w) {
        const float d = f16_to_f32(b.d);
        for (int i = 0; i < 256; ++i) w[i] = d * b.scales[i / 16] * static_cast<float>(q6k_value(b, i));
      });
    default:
      for (int64_t i = 0; i < k; ++i) out[i] = load(dtype, row, i);
  }
}

}  // namespace vivace
