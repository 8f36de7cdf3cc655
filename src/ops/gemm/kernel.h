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
//
// With scales of blocks a sum is a chain over blocks of k, but a block's products need none of the others. Where tiles are
// few, teams of a CTA multiply four blocks at once, and then add them up in the order of the chain: the same bits.

#include <algorithm>

#include "src/device/launch.h"
#include "src/ops/gemm/tile.h"

namespace vivace::gemm {

template <class T, class E, bool kBlockScales, bool kGated>
__global__ __launch_bounds__(T::kAllThreads,
                             T::kCtasPerSm) void gemm_kernel(const __grid_constant__ Problem p,
                                                             Access access) {
  static_assert(T::kTeams == 1 || (kBlockScales && !kGated), "teams exchange blocks of k that have scales");
  extern __shared__ __align__(128) uint8_t stages[];
  constexpr int kK = kRowBytes / static_cast<int>(sizeof(E)),
                kChunk = kChunkBytes / static_cast<int>(sizeof(E));
  constexpr int kMBlocks = T::kMBlocks, kNBlocks = T::kNBlocks;
  constexpr int kColumns = kGated ? T::kN / 2 : T::kN;  // of y
  const int team = T::kTeams > 1 ? threadIdx.x / T::kThreads : 0;
  const unsigned thread = T::kTeams > 1 ? threadIdx.x % T::kThreads : threadIdx.x;
  const int warp = thread / 32, lane = thread % 32;
  const int warp_row = warp / T::kWarpsN * T::kWarpRows, warp_column = warp % T::kWarpsN * T::kWarpColumns;
  device::wait_for_previous_kernel();
  TileRows tile;
  if (!find_tile<T::kM, T::kAllThreads>(p, blockIdx.x, tile)) return;

  // This thread's share of a stage: one chunk of these rows.
  const int copy_row = thread / kChunks, chunk = thread % kChunks;
  const E *a_rows[T::kACopies], *b_rows[T::kBCopies];  // null: zeros
#pragma unroll
  for (int i = 0; i < T::kACopies; ++i) {
    const int64_t row = tile.row + copy_row + i * T::kRowsAtOnce;
    a_rows[i] = nullptr;
    if (row < tile.end) {
      const int64_t source = p.a_index != nullptr ? p.a_index[row] : row;
      a_rows[i] = static_cast<const E*>(p.a) + source * p.a_stride;
    }
  }
  const int64_t first_column = int64_t{blockIdx.y} * kColumns, column_step = int64_t{gridDim.y} * kColumns;
  // At least one, so that y is written (with the bias) when k is 0.
  const int k_tiles = max(1, static_cast<int>((p.k + p.k_offset + kK - 1) / kK));
  // A team takes block round * kTeams + team: zeros past k.
  const int rounds = T::kTeams > 1 ? (k_tiles + T::kTeams - 1) / T::kTeams : k_tiles;
  uint8_t* const ring = stages + team * T::kRingBytes;

  // Stages are filled in the order in which they are used: k by k, then the next tile of columns.
  int64_t fill_column = first_column;
  int fill_round = 0, fill_slot = 0;
  const auto fill_stage = [&] {
    if (fill_column < p.n) {
      if (fill_round == 0) {
#pragma unroll
        for (int i = 0; i < T::kBCopies; ++i) {
          // Gated: rows of gate and up alternate in blocks of 8, so that a lane holds both values of a column.
          const int row = copy_row + i * T::kRowsAtOnce;
          const int64_t column = fill_column + (kGated ? row / 16 * 8 + row % 8 : row);
          const void* matrix = kGated && row / 8 % 2 == 1 ? p.b_up : p.b;
          b_rows[i] = nullptr;
          if (column < p.n) {
            b_rows[i] = static_cast<const E*>(matrix) + tile.group * p.b_group_stride + column * p.b_stride;
          }
        }
      }
      uint8_t* a = ring + fill_slot * T::kStageBytes;
      uint8_t* b = a + T::kM * kRowBytes;
      const int64_t k = int64_t{fill_round * T::kTeams + team} * kK - p.k_offset + chunk * kChunk;
      const bool inside = k >= 0 && k < p.k;
#pragma unroll
      for (int i = 0; i < T::kACopies; ++i) {
        const bool valid = inside && a_rows[i] != nullptr;
        const void* source = valid ? static_cast<const void*>(a_rows[i] + k) : p.a;
        device::copy_16_async(a + device::swizzled<kRowBytes>(copy_row + i * T::kRowsAtOnce, chunk), source,
                              valid);
      }
#pragma unroll
      for (int i = 0; i < T::kBCopies; ++i) {
        const bool valid = inside && b_rows[i] != nullptr;
        const void* source = valid ? static_cast<const void*>(b_rows[i] + k) : p.b;
        device::copy_16_async(b + device::swizzled<kRowBytes>(copy_row + i * T::kRowsAtOnce, chunk), source,
                              valid);
      }
      if (++fill_round == rounds) {
        fill_round = 0;
        fill_column += column_step;
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
  [[maybe_unused]] int buffer = 0;  // of what teams exchange
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
    float total[kBlockScales && T::kTeams == 1 ? kMBlocks : 1][kNBlocks][4] = {};
    float pair_total[2] = {};  // with teams: of block team / 2, half team % 2
    for (int round = 0; round < rounds; ++round) {
      float pair_scale[T::kTeams];  // asked for before the wait, which hides most of their latency
      if constexpr (T::kTeams > 1) {
#pragma unroll
        for (int other = 0; other < T::kTeams; ++other) {
          const int k_tile = round * T::kTeams + other;
          const float* row_scales = team % 2 == 0 ? a_scales[0][0] : a_scales[0][1];
          pair_scale[other] = k_tile < k_tiles ? row_scales[k_tile] * b_scale_of(team / 2, k_tile) : 0.f;
        }
      }
      device::wait_for_copies<T::kStages - 2>();
      // This stage is complete, and everyone is done with the one before it, which is filled next.
      if constexpr (T::kTeams > 1) {
        device::named_barrier(1 + team, T::kThreads);
      } else {
        __syncthreads();
      }
      fill_stage();
      const uint8_t* a = ring + slot * T::kStageBytes;
      const uint8_t* b = a + T::kM * kRowBytes;
      if (++slot == T::kStages) slot = 0;
      if constexpr (T::kTeams > 1) {
        if (!idle) multiply_stage<T, E>(a + warp_row * kRowBytes, b + warp_column * kRowBytes, lane, acc);
        // Pair i of a thread's values goes to the same thread of team i, which adds up the blocks in their order. The
        // buffer of this round is free: all have passed the barrier of the round before, so they have read what was in it.
        using Exchange = float2[T::kTeams][T::kTeams][T::kThreads];
        Exchange& exchange = reinterpret_cast<Exchange*>(stages + T::kTeams * T::kRingBytes)[buffer];
        buffer ^= 1;
#pragma unroll
        for (int i = 0; i < T::kTeams; ++i) {
          float* pair = acc[0][i / 2] + 2 * (i % 2);
          exchange[team][i][thread] = make_float2(pair[0], pair[1]);
          pair[0] = pair[1] = 0.f;
        }
        __syncthreads();
#pragma unroll
        for (int other = 0; other < T::kTeams; ++other) {
          if (round * T::kTeams + other >= k_tiles) break;
          const float2 pair = exchange[other][team][thread];
          pair_total[0] = fmaf(pair.x, pair_scale[other], pair_total[0]);
          pair_total[1] = fmaf(pair.y, pair_scale[other], pair_total[1]);
        }
      } else if constexpr (kBlockScales) {
        float a_scale[kMBlocks][2], b_scale[kNBlocks];
#pragma unroll
        for (int i = 0; i < kMBlocks; ++i)
          a_scale[i][0] = a_scales[i][0][round], a_scale[i][1] = a_scales[i][1][round];
#pragma unroll
        for (int j = 0; j < kNBlocks; ++j) b_scale[j] = b_scale_of(j, round);
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

    const auto value = [&](int i, int j, int v) {
      if constexpr (T::kTeams > 1) {
        return pair_total[v % 2];
      } else if constexpr (kBlockScales) {
        return total[i][j][v];
      } else if constexpr (sizeof(E) == 1) {
        return acc[i][j][v] * (a_scales[i][v / 2][0] * b_scale_of(j, 0));
      } else {
        return acc[i][j][v];
      }
    };
    // Blocks of 8 columns of y that a lane stores a run of: whole sectors in place of halves.
    constexpr int kOfY = kGated ? 2 : 1, kYBlocks = kNBlocks / kOfY;
    constexpr int kTogether = T::kTeams > 1 ? 1 : kYBlocks % 4 == 0 ? 4 : kYBlocks % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = row_of(i, half);
#pragma unroll
        for (int first = 0; first < kYBlocks; first += kTogether) {
          if (T::kTeams > 1 && team != 2 * first + half) continue;
          float v[kTogether][2];
#pragma unroll
          for (int block = 0; block < kTogether; ++block) {
            const int j = (first + block) * kOfY;
            const int64_t column = column_of(j) + lane % 4 * 2;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              float& result = v[block][c];
              result = value(i, j, 2 * half + c);
              if constexpr (kGated) {
                result = result / (1.f + expf(-result)) * value(i, j + 1, 2 * half + c);
              } else if (p.bias != nullptr && column + c < p.n) {
                result += device::load_any(p.bias_type, p.bias, column + c);
              }
              if (p.y_scale != nullptr) result = __fdiv_rn(result, y_scale);
            }
          }
          const int64_t column = column_of(first * kOfY);
          if constexpr (kTogether > 1) {
            if (access == Access::runs && column + 8 * kTogether <= p.n) {
              store_run(p, row * p.y_stride + column, row < tile.end, lane % 4, v);
              continue;
            }
          }
          if (row >= tile.end) continue;
#pragma unroll
          for (int block = 0; block < kTogether; ++block) {
            const int64_t at = column + block * 8 + lane % 4 * 2;
            if (at >= p.n) continue;
            store_pair(p, access != Access::single, row * p.y_stride + at, at + 1 < p.n, v[block][0],
                       v[block][1]);
          }
        }
      }
    }
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
                          .block = dim3(T::kAllThreads),
                          .smem_bytes = T::kTeams * T::kRingBytes + T::kExchangeBytes,
                          .overlap_previous = true};
  auto kernel = gemm_kernel<T, E, kBlockScales, false>;
  if constexpr (T::kTeams == 1) {
    if (p.gated) kernel = gemm_kernel<T, E, kBlockScales, true>;
  }
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
  if constexpr (kBlockScales) {
    using Teams = Tile<16, 32, 1, 2, 3, 2, 4>;
    if (!p.gated && p.groups == 1 && rows <= 64 && tiles(64) < kEnoughTiles) {
      return run_tile<Teams, E, kBlockScales>(name, p, stream);
    }
  }
  if (rows <= 16 || tiles(64) < kEnoughTiles / 2) return run_tile<Few, E, kBlockScales>(name, p, stream);
  const int64_t large = tiles(128);
  if (rows <= 96 || large < kEnoughTiles) return run_tile<Some, E, kBlockScales>(name, p, stream);
  // Rows of the last tile that are not there cost as much as those that are.
  const auto computed = [&](int64_t tile) { return (rows + tile - 1) / tile * tile; };
  if (computed(More::kM) < computed(Many::kM)) return run_tile<More, E, kBlockScales>(name, p, stream);
  return run_tile<Many, E, kBlockScales>(name, p, stream);
}

}  // namespace vivace::gemm
