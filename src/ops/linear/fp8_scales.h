#pragma once

#include <cstdint>

#include "src/ops/quantize_fp8/quantize.h"
#include "vivace/tensor.h"

// Scales of a matrix of fp8 values, whichever scheme: one for all, one per row, or one per block.

namespace vivace {

/// What stored values are multiplied by. Without fp8, `first` is null and the factor 1.
struct Fp8Scales {
  const float* first = nullptr;
  int64_t row_stride = 0;
  int64_t row_block = 1, column_block = 0;    ///< 0: all columns share a scale
  int64_t row_offset = 0, column_offset = 0;  ///< where the matrix starts inside a block

  float at(int64_t row, int64_t column) const {
    if (first == nullptr) return 1;
    return of_row(row)[column_block == 0 ? 0 : (column + column_offset) / column_block];
  }
  const float* of_row(int64_t row) const { return first + (row + row_offset) / row_block * row_stride; }
};

/// Scales of a weight: absent, [1], or [block rows, block columns] of 128 x 128.
inline Fp8Scales fp8_scales(const Tensor& scale, int64_t row_offset = 0, int64_t column_offset = 0) {
  if (!scale.present()) return {};
  if (scale.rank < 2) return {.first = scale.as<const float>()};
  return {.first = scale.as<const float>(),
          .row_stride = scale.stride[0],
          .row_block = kFp8ScaleBlock,
          .column_block = kFp8ScaleBlock,
          .row_offset = row_offset,
          .column_offset = column_offset};
}

/// Scales of activations: absent, [1], [tokens], or [tokens, blocks of 128 columns].
inline Fp8Scales activation_scales(const Tensor& scale) {
  if (!scale.present()) return {};
  return {.first = scale.as<const float>(),
          .row_stride = scale.rank == 2 || scale.shape[0] > 1 ? scale.stride[0] : 0,
          .column_block = scale.rank == 2 ? kFp8ScaleBlock : 0};
}

}  // namespace vivace
