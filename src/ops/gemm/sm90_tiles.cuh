#pragma once

// Tiles of the products of warp groups: which rows of which group, and what becomes of gate and up. For files that are compiled with
// CUDA.
//
// A tile T says kRows (of A, at most), kHalvings of them, kColumns (of y), kThreads of a CTA, and how a group is shared out.

#include "src/device/launch.h"
#include "src/device/mma.h"
#include "src/device/row.h"
#include "src/device/tensor_map.h"
#include "src/device/wgmma.h"
#include "src/ops/gemm/sm90_wide.h"
#include "src/ops/gemm/sm90_wide_plan.h"
#include "src/ops/gemm/tile.h"

namespace vivace::gemm {

/// The groups with their rows clipped to those there are, and the order of their tiles: groups of one tile first, so that what
/// ends a kernel are the smaller tiles of the others.
struct GroupList {
  int32_t* tiles;         ///< [groups + 1] before each place in that order, in shared memory
  int32_t* group;         ///< [groups] of each place
  int32_t *start, *rows;  ///< [groups]
  int32_t* of_warp;       ///< [halvings + 1, 2, warps]
  int most_rows = 0;      ///< of a tile

  __device__ __forceinline__ GroupList(int32_t* memory, int most_groups)
      : tiles(memory),
        group(tiles + most_groups + 1),
        start(group + most_groups),
        rows(start + most_groups),
        of_warp(rows + most_groups) {}
  static constexpr int bytes(int most_groups, int halvings, int warps) {
    return (4 * most_groups + 1 + (halvings + 1) * 2 * warps) * static_cast<int>(sizeof(int32_t));
  }

  __device__ __forceinline__ int blocks_of(int of, int of_rows) const {
    return static_cast<int>((static_cast<unsigned>(rows[of]) + of_rows - 1) / of_rows);
  }

  /// By all threads of the CTA.
  template <class T>
  __device__ __forceinline__ void build(const Problem& p, int column_tiles) {
    constexpr int kWarps = T::kThreads / 32;
    const int groups = static_cast<int>(p.groups), each = (groups + T::kThreads - 1) / T::kThreads;
    const int first = static_cast<int>(threadIdx.x) * each, last = min(first + each, groups);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    int mine[T::kHalvings + 1][2] = {};  // tiles, and groups of one tile
    for (int g = first; g < last; ++g) {
      int64_t begin = 0, end = p.rows;
      if (p.group_start != nullptr) {
        begin = max(p.group_start[g], 0);
        end = min(int64_t{p.group_start[g]} + p.group_rows[g], p.rows);
      }
      start[g] = static_cast<int32_t>(begin);
      rows[g] = static_cast<int32_t>(max(end - begin, int64_t{0}));
#pragma unroll
      for (int h = 0; h <= T::kHalvings; ++h) {
        const int blocks = blocks_of(g, T::kRows >> h);
        mine[h][0] += blocks * column_tiles;
        mine[h][1] += blocks == 1;
      }
    }
#pragma unroll
    for (int h = 0; h <= T::kHalvings; ++h) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int sum = __reduce_add_sync(device::kAllLanes, mine[h][v]);
        if (lane == 0) of_warp[(2 * h + v) * kWarps + warp] = sum;
      }
    }
    __syncthreads();
    most_rows = T::kRows;
    int own[2] = {mine[0][0], mine[0][1]}, before[2] = {}, all[2] = {};
#pragma unroll
    for (int h = 0; h <= T::kHalvings; ++h) {
      int all_of_h[2], before_of_h[2];
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int of_lane = lane < kWarps ? of_warp[(2 * h + v) * kWarps + lane] : 0;
        before_of_h[v] = __reduce_add_sync(device::kAllLanes, lane < warp ? of_lane : 0);
        all_of_h[v] = __reduce_add_sync(device::kAllLanes, of_lane);
      }
      if (h > 0 && all_of_h[0] > static_cast<int>(gridDim.x)) continue;
      most_rows = T::kRows >> h;
#pragma unroll
      for (int v = 0; v < 2; ++v) own[v] = mine[h][v], before[v] = before_of_h[v], all[v] = all_of_h[v];
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      int inclusive = own[v];
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(device::kAllLanes, inclusive, step);
        if (lane >= step) inclusive += below;
      }
      before[v] += inclusive - own[v];
    }
    for (int g = first; g < last; ++g) {
      const int blocks = blocks_of(g, most_rows);
      const int ones = before[1], of_others = before[0] - ones * column_tiles;
      const int place = blocks == 1 ? ones : all[1] + g - ones;
      group[place] = g;
      tiles[place] = (blocks == 1 ? ones : all[1]) * column_tiles + (blocks == 1 ? 0 : of_others);
      before[0] += blocks * column_tiles;
      before[1] += blocks == 1;
    }
    if (threadIdx.x == 0) tiles[groups] = all[0];
    __syncthreads();
  }
};

/// What a tile is of: columns of one group, and a share of its rows. Who fills a ring of stages finds them, and says with the first
/// stage of a tile which it is; no rows: there is none left.
struct alignas(16) WideTileAt {
  int32_t group, row, rows, column;
};

/// A warp's walk over one of every `walkers` tiles, there and back in turn: who has the last of one round has the first of the
/// next, so that a round which is not full goes to those with small tiles. T::kShareRows: shares of a group's rows are as even as
/// multiples of it can be. T::kRowsFirst: the tiles of a group that meet the same weights are neighbours, else those of the same rows.
struct TileWalk {
  const GroupList& list;
  const Problem& p;
  int tile, step, place = 0;

  __device__ __forceinline__ TileWalk(const GroupList& list, const Problem& p, int walkers, int walker)
      : list(list), p(p), tile(walker), step(2 * (walkers - walker) - 1) {}

  template <class T>
  __device__ __forceinline__ bool next(WideTileAt& at) {
    const auto groups = static_cast<int>(p.groups);
    if (tile >= list.tiles[groups]) return false;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (;;) {
      const int ahead = min(place + 1 + lane, groups);
      const int passed = __popc(__ballot_sync(device::kAllLanes, list.tiles[ahead] <= tile));
      place += passed;
      if (passed < 32) break;
    }
    const int group = list.group[place];
    const auto of_group = static_cast<unsigned>(tile - list.tiles[place]);
    const auto rows = static_cast<unsigned>(list.rows[group]);
    unsigned column = of_group, begin = 0, count = rows;
    if (rows > static_cast<unsigned>(list.most_rows)) {
      const unsigned blocks = list.blocks_of(group, list.most_rows);
      unsigned block;
      if constexpr (T::kRowsFirst) {
        column = of_group / blocks, block = of_group % blocks;
      } else {
        const unsigned columns = static_cast<unsigned>(list.tiles[place + 1] - list.tiles[place]) / blocks;
        column = of_group % columns, block = of_group / columns;
      }
      if constexpr (T::kShareRows == 1) {
        const unsigned each = rows / blocks, more = rows % blocks;  // the first `more` have one more
        begin = block * each + min(block, more);
        count = each + (block < more);
      } else {
        const unsigned each = (rows + blocks * T::kShareRows - 1) / (blocks * T::kShareRows) * T::kShareRows;
        begin = block * each;  // there are more than blocks - 1 times most_rows
        count = min(each, rows - begin);
      }
    }
    at.group = group;
    at.row = list.start[group] + static_cast<int>(begin);
    at.rows = static_cast<int>(count);
    at.column = static_cast<int>(column) * T::kColumns;
    tile += step;
    step = 2 * (static_cast<int>(gridDim.x) / T::kCtas) - step;
    return true;
  }
};

/// The tensor copy goes upwards in memory: gate and up change places where up lies first, which is said.
inline bool put_in_order(Problem& p) {
  if (p.b_up >= p.b) return false;
  std::swap(p.b, p.b_up);
  std::swap(p.b_scale, p.b_up_scale);
  return true;
}

struct WideMaps {
  CUtensorMap a, b;  ///< a: where rows lie one after another
};

/// B as boxes of a stage: 128 bytes of k of a tile's rows, if gated of half as many of gate and up each, in turns of 8. A as rows of
/// 128 bytes.
template <class T, class E>
Status make_maps(const Problem& p, WideMaps& maps) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(E));
  const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
  const int64_t row = p.b_stride * kSize, group = p.groups > 1 ? p.b_group_stride * kSize : row;
  if constexpr (!T::kGated) {
    VIVACE_TRY(device::make_tensor_map({.data = p.b,
                                        .extent = {u(p.k * kSize), u(p.n), u(p.groups), 1, 1},
                                        .stride = {u(row), u(group), u(group), u(group)},
                                        .box = {kRowBytes, T::kBRows, 1, 1, 1}},
                                       maps.b));
  } else {
    const int64_t up = static_cast<const uint8_t*>(p.b_up) - static_cast<const uint8_t*>(p.b);
    VIVACE_TRY(device::make_tensor_map({.data = p.b,
                                        .extent = {u(p.k * kSize), 8, 2, u(p.n / 8), u(p.groups)},
                                        .stride = {u(row), u(up), u(8 * row), u(group)},
                                        .box = {kRowBytes, 8, 2, T::kBRows / 16, 1}},
                                       maps.b));
  }
  if (T::kGather) return {};
  const int64_t a_row = (p.rows > 1 ? p.a_stride : p.k) * kSize;  // a single row's may be anything
  return device::make_tensor_map({.data = p.a,
                                  .extent = {u(p.k * kSize), u(p.rows), 1, 1, 1},
                                  .stride = {u(a_row), u(a_row), u(a_row), u(a_row)},
                                  .box = {kRowBytes, T::kBoxRows, 1, 1, 1}},
                                 maps.a);
}

/// By one thread: brings B's part of a stage, rows from `column` of y on.
template <class T>
__device__ __forceinline__ void copy_b(const WideMaps& maps, void* to, device::Barrier* full, int k,
                                       int column, int group) {
  if constexpr (T::kGated) {
    device::tensor_load(to, &maps.b, full, k, 0, 0, column / 8, group);
  } else {
    device::tensor_load(to, &maps.b, full, k, column, group, 0, 0);
  }
}

/// The same operand elsewhere in shared memory, in units of 16 bytes: its lower half begins with its address.
__device__ __forceinline__ uint64_t moved(uint64_t operand, uint32_t by) {
  return operand & ~uint64_t{0xffffffffu} | (static_cast<uint32_t>(operand) + by);
}

/// What all lanes have, for the registers that operands come from.
__device__ __forceinline__ uint32_t uniform(uint32_t v) {
  return __shfl_sync(device::kAllLanes, v, 0);
}

/// 1 / x to an ulp; of subnormal numbers and to them, 0 and infinity.
__device__ __forceinline__ float reciprocal_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Gate without branches, to a few ulp: the values of a thread go side by side.
__device__ __forceinline__ float join(const Gate<float>& by, float gate, float up) {
  constexpr float kLog2E = 1.44269504f;
  gate = gate > by.limit ? by.limit : gate;
  up = up > by.limit ? by.limit : up;
  up = up < -by.limit ? -by.limit : up;
  return gate * reciprocal_of(1.f + device::exp2_of(-by.alpha * kLog2E * gate)) * (up + by.beta);
}

/// Scales of one per group. Nothing waits for them before they are multiplied.
struct TileScales {
  float a = 1.f, b = 1.f, b_up = 1.f, y = 1.f;

  __device__ __forceinline__ float first() const { return a * b; }  ///< of rows of B
  __device__ __forceinline__ float second() const { return a * b_up; }
};
template <bool kOfGroups, bool kGated>
__device__ __forceinline__ TileScales tile_scales(const Problem& p, int group) {
  TileScales s;
  if constexpr (kOfGroups) {
    s.a = p.a_scale[group * p.a_scale_group_stride];
    s.b = p.b_scale[group * p.b_scale_group_stride];
    if constexpr (kGated) s.b_up = p.b_up_scale[group * p.b_scale_group_stride];
  }
  if (kGated && p.y_scale != nullptr) s.y = p.y_scale[group * p.y_scale_group_stride];
  return s;
}

}  // namespace vivace::gemm
