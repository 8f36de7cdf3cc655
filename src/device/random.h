#pragma once

#include <cstdint>

#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace::device {

/// Fills a contiguous tensor on the device with normal values of mean 0 and this deviation, each a function of (seed,
/// index) alone. f32, f16, bf16 or fp8_e4m3.
Status fill_normal(const Tensor& tensor, float deviation, uint64_t seed, const Stream& stream);

/// Reads `bytes` (a multiple of 16) once, as fast as loads can: what the memory roof is measured with. `sink` is one float
/// that is practically never written.
Status read_all(const void* data, int64_t bytes, float* sink, const Stream& stream);

}  // namespace vivace::device
