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
#include <type_traits>

#include "src/device/launch.h"
#include "src/ops/gemm/tile.h"

namespace vivace::gemm {

template <class T, class E, bool kBlockScales, bool kGated>
__global__ __launch_bounds__(T::kAllThreads,
                             T::kCtasPerSm) void gemm_kernel(const __grid_constant__ Problem p,
                                                             bool runs_aligned) {
  static_assert(T::kTeams == 1 || (kBlockScales && !kGated), "teams exchange blocks of k that have scales");
  extern __shared__ __align__(128) uint8_t stages[];
  constexpr int kK = kRowBytes / static_cast<int>(sizeof(E)),
                kChunk = kChunkBytes / static_cast<int>(sizeof(E));
  using Columns = gemm::Columns<T, kGated>;
  constexpr int kMBlocks = T::kMBlocks, kNBlocks = T::kNBlocks, kMatrices = Columns::kMatrices;
  constexpr int kColumns = T::kN / kMatrices;  // of y
  const int team = T::kTeams > 1 ? threadIdx.x / T::kThreads : 0;
  const unsigned thread = T::kTeams > 1 ? threadIdx.x % T::kThreads : threadIdx.x;
  const int warp = thread / 32, lane = thread % 32;
  const int warp_row = warp / T::kWarpsN * T::kWarpRows, warp_column = warp % T::kWarpsN * T::kWarpColumns;
  device::wait_for_previous_kernel();
  TileRows tile;
  if (!find_tile<T::kM, T::kAllThreads>(p, blockIdx.x, tile)) return;

  // This thread's share of a stage: one chunk of these rows. A step of A counts 16 bytes.
  const int copy_row = thread / kChunks, chunk = thread % kChunks;
  const auto a_step = static_cast<uint32_t>(p.a_stride * sizeof(E) / kChunkBytes);
  __shared__ uint32_t a_source[T::kM];  // rows of A; registers are scarce
  for (int r = threadIdx.x; r < T::kM; r += T::kAllThreads) {
    const int64_t row = min(tile.row + r, tile.end - 1);
    a_source[r] = static_cast<uint32_t>(p.a_index != nullptr ? p.a_index[row] : row);
  }
  __syncthreads();
  const int tile_rows = static_cast<int>(min(tile.end - tile.row, int64_t{T::kM}));
  // Rows of B that a thread copies are all of one matrix.
  const int64_t b_row_bytes = p.b_stride * static_cast<int>(sizeof(E));
  const int b_column = Columns::of_row(copy_row);
  const uint8_t* const b_rows = static_cast<const uint8_t*>(kGated && copy_row / 8 % 2 == 1 ? p.b_up : p.b) +
                                tile.group * p.b_group_stride * static_cast<int>(sizeof(E)) +
                                b_column * b_row_bytes;
  const int k_end = static_cast<int>(p.k), k_offset = static_cast<int>(p.k_offset);
  const int64_t first_column = int64_t{blockIdx.y} * kColumns, column_step = int64_t{gridDim.y} * kColumns;
  // At least one, so that y is written (with the bias) when k is 0.
  const int k_tiles = max(1, static_cast<int>((p.k + p.k_offset + kK - 1) / kK));
  // A team takes block round * kTeams + team: zeros past k.
  const int rounds = T::kTeams > 1 ? (k_tiles + T::kTeams - 1) / T::kTeams : k_tiles;
  uint8_t* const ring = stages + team * T::kRingBytes;

  // Stages are filled in the order in which they are used: k by k, then the next tile of columns.
  int64_t fill_column = first_column;
  int fill_round = 0, fill_slot = 0;
  // A part is what goes out beside one slice of the products. Nothing is read for a copy that is not valid: it stores zeros.
  const auto fill_part = [&](int part) {
    uint8_t* a = ring + fill_slot * T::kStageBytes + device::swizzled<kRowBytes>(copy_row, chunk);
    uint8_t* b = a + T::kM * kRowBytes;
    const int k = (fill_round * T::kTeams + team) * kK - k_offset + chunk * kChunk;
    const int64_t k_bytes = int64_t{k} * static_cast<int>(sizeof(E));
    const bool inside = k >= 0 && k < k_end && fill_column < p.n;
    const int rows = inside ? tile_rows - copy_row : 0;
    const int columns = inside ? static_cast<int>(min(p.n - fill_column, int64_t{kColumns})) - b_column : 0;
    const uint8_t* a_k = static_cast<const uint8_t*>(p.a) + k_bytes;
    const uint8_t* b_k = b_rows + k_bytes + fill_column * b_row_bytes;
    constexpr int kCopies = T::kACopies + T::kBCopies;
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      if (copy * kSlices / kCopies != part) continue;
      if (copy < T::kACopies) {
        const int step = copy * T::kRowsAtOnce;
        device::copy_16_async(a + step * kRowBytes,
                              a_k + uint64_t{a_source[copy_row + step]} * a_step * kChunkBytes, step < rows);
      } else {
        const int step = (copy - T::kACopies) * T::kRowsAtOnce;
        device::copy_16_async(b + step * kRowBytes, b_k + Columns::of_row(step) * b_row_bytes,
                              Columns::of_row(step) < columns);
      }
    }
    if (part < kSlices - 1) return;
    device::commit_copies();  // an empty group at the end keeps the count
    if (++fill_round == rounds) {
      fill_round = 0;
      fill_column += column_step;
    }
    if (++fill_slot == T::kStages) fill_slot = 0;
  };
  const auto fill_stage = [&] {
#pragma unroll
    for (int part = 0; part < kSlices; ++part) fill_part(part);
  };

  // Rows of y in this thread's accumulators, and where their scales begin.
  const auto row_of = [&](int block, int half) {
    return tile.row + warp_row + block * 16 + half * 8 + lane / 4;
  };
  const auto a_scales_of = [&](int block, int half) {
    const int64_t row = row_of(block, half);
    int64_t source = row < tile.end ? row : tile.row;
    if (p.a_index != nullptr) source = p.a_index[source];
    return p.a_scale + source * p.a_scale_stride + tile.group * p.a_scale_group_stride;
  };
  const float* a_scales[kBlockScales ? kMBlocks : 1][2];
  if constexpr (kBlockScales) {
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) a_scales[i][0] = a_scales_of(i, 0), a_scales[i][1] = a_scales_of(i, 1);
  }
  const bool idle = tile.row + warp_row >= tile.end;  // the last tile of a group: this warp only copies
  const float y_scale = p.y_scale != nullptr ? p.y_scale[tile.group * p.y_scale_group_stride] : 1.f;

#pragma unroll
  for (int s = 0; s < T::kStages - 1; ++s) fill_stage();
  int slot = 0;
  [[maybe_unused]] int buffer = 0;  // of what teams exchange
  for (int64_t tile_column = first_column; tile_column < p.n; tile_column += column_step) {
    // A run of this lane, and the scale of its columns for a block of k; a run lies in one block of scales.
    const auto column_of = [&](int run) {
      return tile_column + Columns::of_row(warp_column) + run * 8 * Columns::kTogether +
             lane % 4 * Columns::kRun;
    };
    const auto b_scale_of = [&](int run, int matrix, int k_block) {
      const int64_t column = column_of(run);
      if (column >= p.n) return 0.f;
      const float* scales = matrix == 1 ? p.b_up_scale : p.b_scale;
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
          pair_scale[other] = k_tile < k_tiles ? row_scales[k_tile] * b_scale_of(team / 2, 0, k_tile) : 0.f;
        }
      }
      device::wait_for_copies<T::kStages - 2>();
      // This stage is complete, and everyone is done with the one before it, which is filled next.
      if constexpr (T::kTeams > 1) {
        device::named_barrier(1 + team, T::kThreads);
      } else {
        __syncthreads();
      }
      const uint8_t* a = ring + slot * T::kStageBytes;
      const uint8_t* b = a + T::kM * kRowBytes;
      if (++slot == T::kStages) slot = 0;
      const auto multiply = [&] {
        if (idle) {
          fill_stage();
        } else {
          multiply_stage<T, E>(a + warp_row * kRowBytes, b + warp_column * kRowBytes, lane, acc, fill_part);
        }
      };
      if constexpr (T::kTeams > 1) {
        multiply();
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
        float a_scale[kMBlocks][2], b_scale[Columns::kRuns][kMatrices];
#pragma unroll
        for (int i = 0; i < kMBlocks; ++i)
          a_scale[i][0] = a_scales[i][0][round], a_scale[i][1] = a_scales[i][1][round];
#pragma unroll
        for (int run = 0; run < Columns::kRuns; ++run) {
#pragma unroll
          for (int matrix = 0; matrix < kMatrices; ++matrix)
            b_scale[run][matrix] = b_scale_of(run, matrix, round);
        }
        multiply();
#pragma unroll
        for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
          for (int j = 0; j < kNBlocks; ++j) {
            const float scale = b_scale[j / kMatrices / Columns::kTogether][j % kMatrices];
#pragma unroll
            for (int v = 0; v < 4; ++v) {
              total[i][j][v] = fmaf(acc[i][j][v], a_scale[i][v / 2] * scale, total[i][j][v]);
              acc[i][j][v] = 0.f;
            }
          }
        }
      } else {
        multiply();
      }
    }
    if (tile_column + column_step >= p.n) device::let_next_kernel_start();

#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = row_of(i, half);
        if (row >= tile.end) continue;
        float a_scale = 1.f;
        if constexpr (sizeof(E) == 1 && !kBlockScales) a_scale = *a_scales_of(i, half);
#pragma unroll
        for (int run = 0; run < Columns::kRuns; ++run) {
          if (T::kTeams > 1 && team != 2 * run + half) continue;
          const int64_t column = column_of(run);
          if (column >= p.n) continue;
          float scale[kMatrices];
          if constexpr (sizeof(E) == 1 && !kBlockScales) {
#pragma unroll
            for (int matrix = 0; matrix < kMatrices; ++matrix)
              scale[matrix] = a_scale * b_scale_of(run, matrix, 0);
          }
          float v[Columns::kRun];
#pragma unroll
          for (int c = 0; c < Columns::kRun; ++c) {
            const auto value = [&](int matrix) {
              const int j = (run * Columns::kTogether + c / 2) * kMatrices + matrix, e = 2 * half + c % 2;
              if constexpr (T::kTeams > 1) {
                return pair_total[c % 2];
              } else if constexpr (kBlockScales) {
                return total[i][j][e];
              } else if constexpr (sizeof(E) == 1) {
                return acc[i][j][e] * scale[matrix];
              } else {
                return acc[i][j][e];
              }
            };
            v[c] = value(0);
            if constexpr (kGated) {
              v[c] = v[c] / (1.f + expf(-v[c])) * value(1);
            } else if (p.bias != nullptr && column + c < p.n) {
              v[c] += device::load_any(p.bias_type, p.bias, column + c);
            }
            if (p.y_scale != nullptr) v[c] = __fdiv_rn(v[c], y_scale);
          }
          store_run(p, runs_aligned, row * p.y_stride + column,
                    static_cast<int>(min(p.n - column, int64_t{Columns::kRun})), v);
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
  const auto start = [&](auto gated) {
    constexpr bool kGated = decltype(gated)::value;
    const int64_t element = info_of(p.y_type).block_bytes;
    const int64_t run_bytes = std::min<int64_t>(16, Columns<T, kGated>::kRun * element);
    const bool runs_aligned = reinterpret_cast<uintptr_t>(p.y) % static_cast<uintptr_t>(run_bytes) == 0 &&
                              p.y_stride * element % run_bytes == 0;
    return launch(name, gemm_kernel<T, E, kBlockScales, kGated>, shape, stream, p, runs_aligned);
  };
  if constexpr (T::kTeams == 1) {
    if (p.gated) return start(std::true_type{});
  }
  return start(std::false_type{});
}

/// By rows per group, and whether large tiles are enough to go round. Bits are the same for all.
template <class E, bool kBlockScales>
Status run_any_tile(std::string_view name, const Problem& p, const Stream& stream) {
  // Warps of 48 x 96 and 64 x 64 read shared memory for as long as they multiply; two sets of accumulators, for scales
  // of blocks, leave room for half as many columns.
  using Few = Tile<16, 64, 1, 4, 6, 1>;
  using Some = Tile<64, 64, 2, 2, 4, kBlockScales ? 2 : 3>;
  using More = std::conditional_t<kBlockScales, Tile<96, 128, 2, 4, 3, 1>, Tile<96, 192, 2, 2, 3, 2>>;
  using Many = std::conditional_t<kBlockScales, Tile<128, 128, 2, 4, 3, 1>, Tile<128, 128, 2, 2, 3, 2>>;
  constexpr int64_t kEnoughTiles = 100;  // close to one per SM of the GPUs this is for
  const int64_t rows = p.rows / p.groups, columns = p.n * (p.gated ? 2 : 1);
  const auto tiles = [&](int64_t tile) { return (p.rows + tile - 1) / tile * ((columns + tile - 1) / tile); };
  if constexpr (kBlockScales) {
    using Teams = Tile<16, 32, 1, 2, 3, 2, 4>;
    if (!p.gated && p.groups == 1 && rows <= 64 && tiles(64) < kEnoughTiles) {
      return run_tile<Teams, E, kBlockScales>(name, p, stream);
    }
  }
  if (rows <= 16 || tiles(64) < kEnoughTiles / 2) return run_tile<Few, E, kBlockScales>(name, p, stream);
  const int64_t large = tiles(128);
  if (rows <= 96 || large < kEnoughTiles) return run_tile<Some, E, kBlockScales>(name, p, stream);
  // Rows and columns of the last tile that are not there cost as much as those that are.
  const auto computed = [&](auto tile) {
    using T = decltype(tile);
    return (rows + T::kM - 1) / T::kM * T::kM * ((columns + T::kN - 1) / T::kN * T::kN);
  };
  if (computed(More{}) < computed(Many{})) return run_tile<More, E, kBlockScales>(name, p, stream);
  return run_tile<Many, E, kBlockScales>(name, p, stream);
}

}  // namespace vivace::gemm
