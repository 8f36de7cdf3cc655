#pragma once

#include "vivace/tensor.h"

namespace vivace {

/// Whether two views are known to share a byte. Exact where one of them is dense, and where both are runs of bytes at one step, such as
/// columns of one matrix, or keys and values side by side; of other pairs only those that begin together are known. Pointers count, so a
/// tensor without elements or memory shares nothing.
bool overlap(const Tensor& a, const Tensor& b);

}  // namespace vivace
