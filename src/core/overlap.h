#pragma once

#include <optional>

#include "vivace/tensor.h"

namespace vivace {

/// Whether two views are known to share a byte. Exact where one of them is dense, and where both are runs of bytes at one step, such as
/// columns of one matrix, or keys and values side by side; of other pairs only those that begin together are known. Pointers count, so a
/// tensor without elements or memory shares nothing.
bool overlap(const Tensor& a, const Tensor& b);

/// A dimension that steps over less than it has to.
struct ShortStride {
  int axis;
  int64_t least;  ///< the stride from which on it would fit
};

/// What keeps the elements of a view from having memory of their own: a dimension that does not step over all that dimensions of smaller
/// steps reach. Slices and permutations of a dense tensor pass; rows that interleave without sharing memory are taken for rows that overlap.
std::optional<ShortStride> overlaps_itself(const Tensor& tensor);

}  // namespace vivace
