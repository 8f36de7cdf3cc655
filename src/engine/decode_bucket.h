#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace vivace::engine {

/// How many rows a decode step of `rows` requests, 1 .. max_rows, runs in on a GPU. One graph serves all steps of a bucket: 1,
/// 2, 4 and 8, then the multiples of 8 up to 64, of 16 up to 128 and of 32 beyond, and max_rows as the last.
///
/// A graph costs a capture, which the requests of its step wait for, and memory of the device for a dozen kernels and more
/// per layer; with one per number of rows, a batch that drains by ones would need a new one at each end. A row of padding costs
/// what a step computes per row: norms, products, the sampler's pass over a vocabulary of logits. It reads no keys and no
/// experts, and tensor cores take rows by 8 or 16 anyway. So padding is less than half of a bucket, and beyond 32 rows less
/// than a fifth.
constexpr int64_t decode_bucket(int64_t rows, int64_t max_rows) {
  if (rows <= 8) return std::min(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows))), max_rows);
  const int64_t multiple = rows <= 64 ? 8 : rows <= 128 ? 16 : 32;
  return std::min((rows + multiple - 1) / multiple * multiple, max_rows);
}

}  // namespace vivace::engine
