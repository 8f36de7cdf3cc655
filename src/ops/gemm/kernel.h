#pragma once

// y[r] = a[index(r)] · b[g]ᵀ        tensor cores from compute capability 8.0
//
// Two numbers for m rows of a group
//   bytes  n k (weights once, while the rows of a group fit a tile) + m k + m n
//   flops  2 m n k    fp8 is multiplied as f16, to which it converts exactly
// A dozen rows per group are bound by the weights, a hundred and more by the tensor cores.
//
// A CTA takes a tile of kM rows of one group and some tiles of kN columns, one after another through one ring of stages,
// and walks k alone: no sum is ever split, and its order is the same for every tile. Which group a CTA has is searched on
// the device: the grid depends on shapes alone.

#include <algorithm>

#include "src/device/launch.h"
#include "src/ops/gemm/store.h"

namespace vivace::gemm {

template <class T, class E, bool kBlockScales, bool kGated>
__global__ __launch_bounds__(T::kThreads, T::kCtasPerSm) void gemm_kernel(const __grid_constant__ Problem p,
                                                                          Access access) {
  extern __shared__ __align__(128) uint8_t stages[];
  constexpr int kK = kRowBytes / static_cast<int>(sizeof(E)),
                kChunk = kChunkBytes / static_cast<int>(sizeof(E));
  constexpr int kMBlocks = T::kMBlocks, kNBlocks = T::kNBlocks;
  constexpr int kColumns = kGated ? T::kN / 2 : T::kN;  // of y
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / T::kWarpsN * T::kWarpRows, warp_column = warp % T::kWarpsN * T::kWarpColumns;
  device::wait_for_previous_kernel();
  TileRows tile;
  if (!find_tile<T::kM, T::kThreads>(p, blockIdx.x, tile)) return;

  const int64_t first_column = int64_t{blockIdx.y} * kColumns, column_step = int64_t{gridDim.y} * kColumns;
  // This thread's share of a stage: one chunk of these rows, a bit each for those that are there; zeros for the others.
  const int copy_row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
  const E *a_rows[T::kACopies], *b_rows[T::kBCopies];
  uint32_t a_there = 0, b_there = 0;
#pragma unroll
  for (int i = 0; i < T::kACopies; ++i) {
    const int64_t row = tile.row + copy_row + i * T::kRowsAtOnce;
    a_rows[i] = static_cast<const E*>(p.a);
    if (row < tile.end) {
      a_rows[i] += (p.a_index != nullptr ? p.a_index[row] : row) * p.a_stride;
      a_there |= 1u << i;
    }
  }
  // Gated: rows of gate and up alternate in blocks of 8, so that a lane holds both values of a column.
  const auto column_of_copy = [&](int i) {
    const int row = copy_row + i * T::kRowsAtOnce;
    return kGated ? row / 16 * 8 + row % 8 : row;
  };
#pragma unroll
  for (int i = 0; i < T::kBCopies; ++i) {
    const void* matrix = kGated && (copy_row + i * T::kRowsAtOnce) / 8 % 2 == 1 ? p.b_up : p.b;
    b_rows[i] = static_cast<const E*>(matrix) + tile.group * p.b_group_stride +
                (first_column + column_of_copy(i)) * p.b_stride;
  }
  // At least one, so that y is written (with the bias) when k is 0.
  const int k_tiles = max(1, static_cast<int>((p.k + p.k_offset + kK - 1) / kK));

  // Stages are filled in the order in which they are used: k by k, then the next tile of columns.
  int64_t fill_column = first_column;
  int fill_tile = 0, fill_slot = 0;
  const auto fill_stage = [&] {
    if (fill_column < p.n) {
      if (fill_tile == 0) {
        const int columns = static_cast<int>(min(p.n - fill_column, int64_t{kColumns}));
        b_there = 0;
#pragma unroll
        for (int i = 0; i < T::kBCopies; ++i) b_there |= (column_of_copy(i) < columns ? 1u : 0u) << i;
      }
      uint8_t* a = stages + fill_slot * T::kStageBytes + device::swizzled<kRowBytes>(copy_row, chunk);
      uint8_t* b = a + T::kM * kRowBytes;
      const int k = fill_tile * kK - static_cast<int>(p.k_offset) + chunk * kChunk;
      const bool inside = k >= 0 && k < static_cast<int>(p.k);
      const int from = inside ? k : 0;
#pragma unroll
      for (int i = 0; i < T::kACopies; ++i) {
        device::copy_16_async(a + i * T::kRowsAtOnce * kRowBytes, a_rows[i] + from,
                              inside && (a_there & 1u << i) != 0);
      }
#pragma unroll
      for (int i = 0; i < T::kBCopies; ++i) {
        device::copy_16_async(b + i * T::kRowsAtOnce * kRowBytes, b_rows[i] + from,
                              inside && (b_there & 1u << i) != 0);
      }
      if (++fill_tile == k_tiles) {
        fill_tile = 0;
        fill_column += column_step;
#pragma unroll
        for (int i = 0; i < T::kBCopies; ++i) b_rows[i] += column_step * p.b_stride;
      }
      if (++fill_slot == T::kStages) fill_slot = 0;
    }
    device::commit_copies();  // an empty group at the end keeps the count
  };

  // Rows of y in this thread's accumulators, and where their scales begin.
  const auto row_of = [&](int block, int half) {
    return tile.row + warp_row + block * 16 + half * 8 + lane / 4;
  };
  const float* a_scales[kMBlocks][2];
  if constexpr (sizeof(E) == 1) {
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = row_of(i, half);
        int64_t source = row < tile.end ? row : tile.row;
        if (p.a_index != nullptr) source = p.a_index[source];
        a_scales[i][half] = p.a_scale + source * p.a_scale_stride + tile.group * p.a_scale_group_stride;
      }
    }
  }
  const bool idle = tile.row + warp_row >= tile.end;  // the last tile of a group: this warp only copies
  const float y_scale = p.y_scale != nullptr ? p.y_scale[tile.group * p.y_scale_group_stride] : 1.f;

#pragma unroll
  for (int s = 0; s < T::kStages - 1; ++s) fill_stage();
  int slot = 0;
  for (int64_t tile_column = first_column; tile_column < p.n; tile_column += column_step) {
    const auto column_of = [&](int block) {
      return tile_column + (kGated ? (warp_column / 16 + block / 2) * 8 : warp_column + block * 8);
    };
    // The scale of 8 columns for a block of k; 8 columns lie in one block of scales.
    const auto b_scale_of = [&](int block, int k_block) {
      const int64_t column = column_of(block);
      if (column >= p.n) return 0.f;
      const float* scales = kGated && block % 2 == 1 ? p.b_up_scale : p.b_scale;
      return scales[tile.group * p.b_scale_group_stride +
                    (column + p.n_offset) / kScaleBlock * p.b_scale_stride + k_block];
    };
    Accumulators<T> acc = {};
    Accumulators<T> total = {};  // of blocks of k times their scales
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      device::wait_for_copies<T::kStages - 2>();
      // This stage is complete, and everyone is done with the one before it, which is filled next.
      __syncthreads();
      fill_stage();
      const uint8_t* a = stages + slot * T::kStageBytes;
      const uint8_t* b = a + T::kM * kRowBytes;
      if (++slot == T::kStages) slot = 0;
      if constexpr (kBlockScales) {
        float a_scale[kMBlocks][2], b_scale[kNBlocks];
#pragma unroll
        for (int i = 0; i < kMBlocks; ++i)
          a_scale[i][0] = a_scales[i][0][k_tile], a_scale[i][1] = a_scales[i][1][k_tile];
#pragma unroll
        for (int j = 0; j < kNBlocks; ++j) b_scale[j] = b_scale_of(j, k_tile);
        if (!idle) multiply_stage<T, E>(a + warp_row * kRowBytes, b + warp_column * kRowBytes, lane, acc);
#pragma unroll
        for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
          for (int j = 0; j < kNBlocks; ++j) {
#pragma unroll
            for (int v = 0; v < 4; ++v) {
              total[i][j][v] = fmaf(acc[i][j][v], a_scale[i][v / 2] * b_scale[j], total[i][j][v]);
              acc[i][j][v] = 0.f;
            }
          }
        }
      } else {
        if (!idle) multiply_stage<T, E>(a + warp_row * kRowBytes, b + warp_column * kRowBytes, lane, acc);
      }
    }
    if (tile_column + column_step >= p.n) device::let_next_kernel_start();

    if (idle) continue;
    Accumulators<T>& sums = kBlockScales ? total : acc;
    if constexpr (sizeof(E) == 1 && !kBlockScales) {
#pragma unroll
      for (int j = 0; j < kNBlocks; ++j) {
        const float b_scale = b_scale_of(j, 0);
#pragma unroll
        for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
          for (int v = 0; v < 4; ++v) sums[i][j][v] *= a_scales[i][v / 2][0] * b_scale;
        }
      }
    }
    const WarpPlace at{tile.row + warp_row, tile.end, tile_column + warp_column / (T::kN / kColumns), lane};
    finish<kGated>(p, access, at, y_scale, sums);
  }
}

template <class T, class E, bool kBlockScales>
Status run_tile(std::string_view name, const Problem& p, const Stream& stream) {
  // Every group may end in a tile of its own; groups without rows have none.
  const int64_t row_tiles =
      p.group_start == nullptr ? (p.rows + T::kM - 1) / T::kM : p.rows / T::kM + std::min(p.groups, p.rows);
  // More CTAs than fill the GPU a few times only repeat the search and the start of the ring.
  constexpr int64_t kEnoughCtas = 2048;
  const int64_t columns = p.gated ? T::kN / 2 : T::kN, column_tiles = (p.n + columns - 1) / columns;
  const int64_t across = std::min(column_tiles, (kEnoughCtas + row_tiles - 1) / row_tiles);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(row_tiles), static_cast<unsigned>(across)),
                          .block = dim3(T::kThreads),
                          .smem_bytes = T::kStages * T::kStageBytes,
                          .overlap_previous = true};
  const auto kernel =
      p.gated ? gemm_kernel<T, E, kBlockScales, true> : gemm_kernel<T, E, kBlockScales, false>;
  return launch(name, kernel, shape, stream, p, access_of(p));
}

/// By rows per group, and whether large tiles are enough to go round. Bits are the same for all.
template <class E, bool kBlockScales>
Status run_any_tile(std::string_view name, const Problem& p, const Stream& stream) {
  using Few = Tile<16, 64, 1, 4, 6, 1>;
  using Some = Tile<64, 64, 2, 2, 4, kBlockScales ? 2 : 3>;
  using More = Tile<96, 128, 2, 4, 3, sizeof(E) == 1 ? 1 : 2>;  // fp8 operands take more than 128 registers
  using Many = Tile<128, 128, 2, 4, 3, sizeof(E) == 1 ? 1 : 2>;
  constexpr int64_t kEnoughTiles = 100;  // close to one per SM of the GPUs this is for
  const int64_t rows = p.rows / p.groups;
  const auto tiles = [&](int64_t tile) {
    return (p.rows + tile - 1) / tile * ((p.n * (p.gated ? 2 : 1) + tile - 1) / tile);
  };
  if (rows <= 16 || tiles(64) < kEnoughTiles / 2) return run_tile<Few, E, kBlockScales>(name, p, stream);
  const int64_t large = tiles(128);
  if (rows <= 96 || large < kEnoughTiles) return run_tile<Some, E, kBlockScales>(name, p, stream);
  // Rows of the last tile that are not there cost as much as those that are.
  const auto computed = [&](int64_t tile) { return (rows + tile - 1) / tile * tile; };
  if (computed(More::kM) < computed(Many::kM)) return run_tile<More, E, kBlockScales>(name, p, stream);
  return run_tile<Many, E, kBlockScales>(name, p, stream);
}

}  // namespace vivace::gemm
