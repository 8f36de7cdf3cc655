#pragma once

#include <cstdint>

#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace::model {

/// Fills a contiguous tensor where the stream runs with random values of mean 0 and this deviation, each a function of
/// (seed, index) alone: normal on a GPU, near to it on a CPU. f32, f16, bf16 or fp8_e4m3.
Status fill_normal(const Tensor& tensor, float deviation, uint64_t seed, const Stream& stream);

}  // namespace vivace::model
