#pragma once

#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace::device {

/// ids[t] = source[-1 - ids[t]] where ids[t] is negative: numbers that were not known when `ids` was copied
/// to the device. i32 [tokens] and i32 [rows], contiguous; an entry that names no row of `source` stays.
Status resolve_ids(const Tensor& ids, const Tensor& source, const Stream& stream);

}  // namespace vivace::device
