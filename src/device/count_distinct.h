#pragma once

#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace::device {

/// Adds to count[0] how many distinct numbers of [0, limit) each row of `ids` holds, summed over the rows, and to count[1]
/// the number of rows. i32 [rows, n], rows may be strided; i64 [2]. Other numbers are ignored.
Status count_distinct(const Tensor& ids, int64_t limit, const Tensor& count, const Stream& stream);

}  // namespace vivace::device
