#pragma once

#include <cstdint>
#include <cstring>

#include "src/ops/linear/block_formats.h"
#include "src/ops/linear/cpu_gemm.h"

// Eight weight rows of a block format, unpacked and interleaved for integer products: a lane is a weight row,
// so sums need no reduction across lanes and scales apply to eight rows at once.

namespace vivace::cpu {

struct Panel {
  static constexpr int64_t kRows = kPanelRows;
  static constexpr int64_t kBytes = 16384;  ///< half of a first-level cache
  /// Groups of 32 weights that fit, in int8 and in int16.
  static constexpr int64_t kInt8Groups = kBytes / (kRows * QuantizedRows::kGroup);
  static constexpr int64_t kInt16Groups = kInt8Groups / 2;

  /// int8: [group][k / 4][row][4], values 0..15.
  /// int16: [group][k / 4][2][row][2], where the pairs hold elements 0 and 2, then 1 and 3, of four: the
  /// order in which bytes widen without a shuffle. Quantised activations have the same order.
  alignas(64) uint8_t q[kBytes];
  alignas(32) float d[kInt8Groups][kRows];
  alignas(32) float m[kInt8Groups][kRows];  ///< int8 only; w = d q + m
};

/// Position of element `i` of four in the int16 order.
inline constexpr int kInt16Order[4] = {0, 2, 1, 3};

/// Group `g` of one row: the integers and w = d q + m. The portable unpacking, and the definition of the
/// others.
inline void decode_group(DType dtype, const uint8_t* row, int64_t g, int16_t* q, float& d, float& m) {
  m = 0;
  const auto load_block = [&](auto block, int64_t index) {
    std::memcpy(&block, row + index * static_cast<int64_t>(sizeof(block)), sizeof(block));
    return block;
  };
  const auto nibbles = [&](const uint8_t* bytes) {
    for (int i = 0; i < 16; ++i) {
      q[i] = bytes[i] & 15;
      q[i + 16] = bytes[i] >> 4;
    }
  };
  switch (dtype) {
    case DType::q4_0: {
      const auto block = load_block(BlockQ4_0{}, g);
      nibbles(block.q);
      d = f16_to_f32(block.d);
      m = -8 * d;
      break;
    }
    case DType::q4_1: {
      const auto block = load_block(BlockQ4_1{}, g);
      nibbles(block.q);
      d = f16_to_f32(block.d);
      m = f16_to_f32(block.m);
      break;
    }
    case DType::q8_0: {
      const auto block = load_block(BlockQ8_0{}, g);
      for (int i = 0; i < 32; ++i) q[i] = block.q[i];
      d = f16_to_f32(block.d);
      break;
    }
    case DType::q4_k: {
      const auto block = load_block(BlockQ4K{}, g / 8);
      const int j = static_cast<int>(g % 8);
      uint8_t scale, min;
      q4k_scale_min(block.scales, j, scale, min);
      for (int i = 0; i < 32; ++i)
        q[i] = j % 2 == 0 ? block.q[32 * (j / 2) + i] & 15 : block.q[32 * (j / 2) + i] >> 4;
      d = f16_to_f32(block.d) * scale;
      m = -f16_to_f32(block.dmin) * min;
      break;
    }
    case DType::q6_k: {  // the 8-bit scales of 16 weights go into the integers: 128 * 32 * 16383 * 32 < 2^31
      const auto block = load_block(BlockQ6K{}, g / 8);
      for (int i = 0; i < 32; ++i) {
        const int at = static_cast<int>(g % 8) * 32 + i;
        q[i] = static_cast<int16_t>(q6k_value(block, at) * block.scales[at / 16]);
      }
      d = f16_to_f32(block.d);
      break;
    }
    default:
      break;
  }
}

}  // namespace vivace::cpu
