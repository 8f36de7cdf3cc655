#pragma once

// Descriptors for tensor copies. For files that are compiled with CUDA.

#include <cuda.h>

#include <array>
#include <cstdint>

#include "vivace/status.h"

namespace vivace::device {

/// A tensor of bytes as the copy engine sees it, innermost dimension first. Extents count elements of the dimension inside,
/// the innermost bytes; a box is what one copy moves.
struct TensorMapShape {
  const void* data;                ///< 16-byte aligned
  std::array<uint64_t, 5> extent;  ///< 1 .. 2^32
  std::array<uint64_t, 4>
      stride;  ///< bytes from one element to the next of dimensions 1 to 4: multiples of 16, below 2^40
  std::array<uint32_t, 5> box;  ///< 1 .. 256; box[0] bytes are a multiple of 16
  int swizzle = 128;            ///< width in bytes of the pattern that permutes 16-byte chunks: 128 or 64
};

/// Makes the descriptor of `shape`; out-of-range parts of a box arrive as zeros. Costs about a microsecond of the host.
/// Fails  device_error: the driver lacks it or refuses the shape.
Status make_tensor_map(const TensorMapShape& shape, CUtensorMap& map);

}  // namespace vivace::device
