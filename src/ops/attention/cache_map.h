#pragma once

// K or V as the copy engine sees it. For files that are compiled with CUDA.

#include <algorithm>

#include "src/device/tensor_map.h"
#include "vivace/tensor.h"

namespace vivace {

/// Dimensions of a copy: bytes of a panel, tokens, panels, heads, pages. A panel is at most 128 bytes of a head; a copy brings
/// `tokens` of `panels` of them, so that it lies in shared memory as the products read it.
inline Status make_cache_map(const Tensor& cache, int64_t tokens, int64_t panels, CUtensorMap& map) {
  const int64_t element = info_of(cache.dtype).block_bytes, row_bytes = cache.shape[3] * element;
  const int64_t panel = std::min<int64_t>(128, row_bytes);
  const auto stride = [&](int dimension) {  // that of a single element may be anything
    const int64_t bytes = cache.stride[dimension] * element;
    return static_cast<uint64_t>(cache.shape[dimension] == 1 ? 16 : bytes);
  };
  const auto extent = [](int64_t n) { return static_cast<uint64_t>(n); };
  const auto box = [](int64_t n) { return static_cast<uint32_t>(n); };
  return device::make_tensor_map({.data = cache.data,
                                  .extent = {extent(panel), extent(cache.shape[1]), extent(row_bytes / panel),
                                             extent(cache.shape[2]), extent(cache.shape[0])},
                                  .stride = {stride(1), static_cast<uint64_t>(panel), stride(2), stride(0)},
                                  .box = {box(panel), box(tokens), box(panels), 1, 1},
                                  .swizzle = static_cast<int>(panel)},
                                 map);
}

}  // namespace vivace
