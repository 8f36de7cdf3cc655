#pragma once

// Which part of a list of parts a block of threads works on, searched on the device, so that a grid depends on shapes alone.

#include <cuda_runtime.h>

#include <cstdint>

#include "src/device/reduce.h"

namespace vivace::device {

struct FoundItem {
  int32_t part;
  int64_t place;  ///< of the item in its part
};

/// Shared memory of a search.
template <int kThreads>
struct FindMemory {
  int64_t warp_items[kThreads / 32];
  FoundItem found;
};

/// Parts [0, parts) have items_of(part) items each, one after another: the part that holds `item`; false when there are
/// fewer. All threads of the block, kThreads of them, call it and get the same answer.
template <int kThreads, class ItemsOf>
__device__ __forceinline__ bool find_item(int64_t parts, int64_t item, ItemsOf&& items_of,
                                          FindMemory<kThreads>& memory, FoundItem& out) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t before_chunk = 0;
  for (int64_t first = 0; first < parts; first += kThreads) {
    const int64_t part = first + threadIdx.x;
    const int64_t items = part < parts ? items_of(part) : 0;
    int64_t inclusive = items;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t below = __shfl_up_sync(kAllLanes, inclusive, step);
      if (lane >= step) inclusive += below;
    }
    if (lane == 31) memory.warp_items[warp] = inclusive;
    __syncthreads();
    int64_t before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) before += memory.warp_items[w];
      all += memory.warp_items[w];
    }
    const int64_t mine = before_chunk + before + inclusive - items;
    if (item >= mine && item < mine + items)
      memory.found = FoundItem{static_cast<int32_t>(part), item - mine};
    before_chunk += all;
    __syncthreads();
    if (item < before_chunk) {
      out = memory.found;
      return true;
    }
  }
  return false;
}

}  // namespace vivace::device
