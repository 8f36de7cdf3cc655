#pragma once

// y[r] = a[index(r)] · b[g]ᵀ        warp-group products, compute capability 9.0a
//
// Two numbers for m rows of a group
//   bytes  n k (weights once, while the rows of a group fit a tile) + m k + m n
//   flops  2 m n k
// Up to some 170 rows of fp8 the weights' bytes are the wall; then what enters an SM: a stage of 128 bytes of k brings
// 128 (128 + rows) bytes for 4 rows cycles of the tensor cores.
//
// Rows of B are the rows of a product and rows of A its columns, of which a tile has as many as its group needs, in steps of
// 32 up to 256: dozens of rows waste little, and B is read once while tiles are as many as CTAs. A CTA stays and takes every gridDim-th tile. One warp group fills a
// ring of stages: B by tensor copies, A as well where its rows lie in order, else by copies of 16 bytes. Two or three warp groups multiply
// 64 rows of B each. Tensor cores add fp8 products with 13 bits, so sums of a stage, which is a block of scales, are added up in fp32.
//
// `gated` interleaves rows of gate and up in blocks of 8, by the tensor copy: a thread then holds both values of a column.
// Values of y that are 8 or 16 bits wide are turned from columns into rows of y on their way through shared memory.

#include <algorithm>
#include <utility>

#include "src/ops/gemm/sm90_tiles.cuh"

namespace vivace::gemm {

/// kGather_: rows of A lie anywhere, else one after another. kGroups_: warp groups that multiply.
template <class E, bool kBlockScales, bool kGated_, bool kGather_, int kGroups_, int kRows_>
struct WideTile {
  static constexpr bool kGated = kGated_, kGather = kGather_;
  static constexpr int kRows = kRows_;  // of A, at most
  static constexpr int kGroups = kGroups_;
  static constexpr int kBRows = 64 * kGroups;                    // of B, of gate and up together if gated
  static constexpr int kColumns = kGated ? kBRows / 2 : kBRows;  // of y
  static constexpr int kCtas = 1, kConsumers = 128 * kGroups, kProducers = 128,
                       kThreads = kConsumers + kProducers;
  static constexpr bool kPromotes = sizeof(E) == 1;
  static constexpr int kBBytes = kBRows * kRowBytes, kABytes = kRows * kRowBytes;
  static constexpr int kScaleBytes = kBlockScales ? (kRows * 4 + 1023) / 1024 * 1024 : 0;
  static constexpr int kStageBytes = kBBytes + kABytes + kScaleBytes;
  // Of y on its way to memory, so many rows at once, a part for each group that multiplies.
  static constexpr int kOutWidth = (kGated ? static_cast<int>(sizeof(E)) * 32 : 2 * 64);  // bytes of a row
  static constexpr int kOutRows = std::min(kRows, (kGroups == 2 ? 8 : 4) * 1024 / kOutWidth);
  static constexpr int kOutBytes = kGroups * kOutRows * kOutWidth;
  // Where tiles would be fewer than CTAs they have a half, a quarter .. of the rows.
  static constexpr int kShareRows = 1;
  static constexpr bool kRowsFirst = true;
  static constexpr int kHalvings = kRows == 64 ? 1 : kRows == 192 ? 2 : 3;
  static constexpr int kListBytes = GroupList::bytes(kMostGroups, kHalvings, kThreads / 32);
  static constexpr int kMostStages = 8,
                       kBarrierBytes = 2 * kMostStages * static_cast<int>(sizeof(device::Barrier));
  static constexpr int kTileBytes = kMostStages * static_cast<int>(sizeof(WideTileAt));
  static constexpr int kRoom = 227 * 1024 - kOutBytes - kListBytes - kTileBytes - kBarrierBytes;
  static constexpr int kStages = std::min(kRoom / kStageBytes, kMostStages);
  static constexpr int kTilesAt = kStages * kStageBytes + kOutBytes;
  static constexpr int kBarriersAt = kTilesAt + kTileBytes;
  static constexpr int kListAt = kBarriersAt + kBarrierBytes;
  static constexpr int kSmemBytes = kListAt + kListBytes;
  static constexpr int kBoxRows = 32;  // of A, in a box of the tensor copy
  static_assert(kStages >= 3 && kRows >> kHalvings >= 32);
  // Of a thread that multiplies, and of one that fills the ring: rows that lie anywhere are pointers.
  static constexpr int kRegisters = kGroups == 2 ? 232 : kGather ? 152 : 160;
  static constexpr int kFeedRegisters = kGroups == 2 ? 40 : kGather ? 56 : 32;
};

/// The next kernel starts behind the wait of all CTAs, so it may use from its beginning what this one does.
__device__ __forceinline__ void take_turn() {
  device::wait_for_previous_kernel();
  device::let_next_kernel_start();
}

/// Fills the ring. By a warp group.
template <class T, class E>
struct Feed {
  const WideMaps& maps;
  const Problem& p;
  int steps;
  uint8_t* smem;
  device::Barrier *full, *empty;

  __device__ __forceinline__ void run(TileWalk walk) const {
    if constexpr (T::kGather) {
      gather(walk);
    } else {
      const int warp = static_cast<int>(threadIdx.x) / 32 - T::kConsumers / 32;
      if (warp == 0) copy_boxes(walk);
      if (T::kScaleBytes > 0 && warp == 1) copy_scales(walk);
    }
  }
  /// Arrivals at a full barrier.
  static constexpr int kArrivals = 1 + (T::kGather ? T::kProducers : T::kScaleBytes > 0 ? 32 : 0);

 private:
  __device__ __forceinline__ WideTileAt& tile_of(uint32_t stage) const {
    return reinterpret_cast<WideTileAt*>(smem + T::kTilesAt)[stage];
  }

  /// By one thread: announces a stage and brings its part of B.
  __device__ __forceinline__ void copy_b(const WideTileAt& tile, int step, uint32_t stage,
                                         int more_bytes) const {
    if (step == 0) tile_of(stage) = tile;
    const int k = step * kRowBytes - static_cast<int>(p.k_offset);
    uint8_t* const to = smem + stage * T::kStageBytes;
    device::arrive_and_expect(full + stage, T::kBBytes + more_bytes);
    gemm::copy_b<T>(maps, to, full + stage, k, tile.column, tile.group);
  }

  /// The stages of a walk, one after the other.
  struct StageWalk {
    TileWalk tiles;
    int steps, step;  ///< of k
    WideTileAt tile;
    device::RingPosition<T::kStages> at;

    __device__ __forceinline__ StageWalk(const TileWalk& walk, int steps)
        : tiles(walk), steps(steps), step(steps) {
      at.parity = 1;
    }
    /// Whether there is one more, which `tile`, `step` and the place before next_place() then say.
    __device__ __forceinline__ bool next() {
      if (step < steps - 1) {
        ++step;
        return true;
      }
      step = 0;
      return steps > 0 && tiles.template next<T>(tile);
    }
  };

  /// Of rows one after another all comes in boxes, a lane each. Rows behind the last are of the next group, or zeros. What is known
  /// before the kernel in front of this one ends is asked for first.
  __device__ __forceinline__ void copy_boxes(const TileWalk& walk) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto boxes_of = [](const WideTileAt& tile) { return (tile.rows + T::kBoxRows - 1) / T::kBoxRows; };
    const auto begin = [&](const StageWalk& s) {
      if (lane == 0) copy_b(s.tile, s.step, s.at.stage, boxes_of(s.tile) * T::kBoxRows * kRowBytes);
    };
    int begun = 0;
    if (p.groups_known) {
      StageWalk ahead(walk, steps);
      for (; begun < T::kStages && ahead.next(); ++begun, ahead.at.next()) begin(ahead);
      take_turn();
    }
    StageWalk now(walk, steps);
    for (; now.next(); now.at.next()) {
      if (begun > 0) {
        --begun;
      } else {
        if (lane == 0) device::wait_for(empty + now.at.stage, now.at.parity);
        begin(now);
      }
      __syncwarp();
      if (lane < boxes_of(now.tile)) {
        uint8_t* const to = smem + now.at.stage * T::kStageBytes + T::kBBytes;
        device::tensor_load(to + lane * T::kBoxRows * kRowBytes, &maps.a, full + now.at.stage,
                            now.step * kRowBytes - static_cast<int>(p.k_offset),
                            now.tile.row + lane * T::kBoxRows, 0, 0, 0);
      }
    }
    if (lane == 0) end(now.at);
  }

  /// By one thread: no tile is left.
  __device__ __forceinline__ void end(const device::RingPosition<T::kStages>& at) const {
    device::wait_for(empty + at.stage, at.parity);
    tile_of(at.stage) = {};
    device::arrive(full + at.stage);
  }

  /// Scales of rows, by a warp beside the boxes: they arrive when they are there.
  __device__ __forceinline__ void copy_scales(TileWalk walk) const {
    constexpr int kCopies = T::kRows / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    device::RingPosition<T::kStages> at;
    at.parity = 1;
    WideTileAt tile;
    if (p.groups_known) take_turn();
    while (walk.next<T>(tile)) {
      int32_t rows[kCopies];
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = tile.row + min(lane + 32 * i, tile.rows - 1);
        rows[i] = p.a_scale_index != nullptr ? p.a_scale_index[row] : row;
      }
      for (int step = 0; step < steps; ++step, at.next()) {
        device::wait_for(empty + at.stage, at.parity);
        uint8_t* const to = smem + at.stage * T::kStageBytes + T::kBBytes + T::kABytes;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          if (32 * i >= tile.rows) break;
          device::copy_4_async(to + (lane + 32 * i) * 4, p.a_scale + rows[i] * p.a_scale_stride + step);
        }
        device::arrive_after_copies(full + at.stage);
      }
    }
    device::wait_for(empty + at.stage, at.parity);
    device::arrive(full + at.stage);
    device::commit_copies();
    device::wait_for_copies<0>();  // nobody leaves with copies under way
  }

  /// Of rows anywhere chunks of 16 bytes, 16 rows at once. They arrive when they are there; who multiplies publishes them.
  __device__ __forceinline__ void gather(TileWalk walk) const {
    constexpr int kRowsAtOnce = T::kProducers / kChunks, kCopies = T::kRows / kRowsAtOnce;
    constexpr int kScaleCopies = (T::kRows + T::kProducers - 1) / T::kProducers;
    const int thread = static_cast<int>(threadIdx.x) - T::kConsumers;
    const int copy_row = thread / kChunks, chunk = thread % kChunks;
    const auto* a = static_cast<const uint8_t*>(p.a);
    const int64_t a_bytes = p.a_stride * static_cast<int64_t>(sizeof(E));
    const int k_bytes = static_cast<int>(p.k) * static_cast<int>(sizeof(E));
    device::RingPosition<T::kStages> at;
    at.parity = 1;
    WideTileAt tile;
    while (walk.next<T>(tile)) {
      const int row_steps = (tile.rows + 31) / 32;  // of 32
      uint32_t from[kCopies];  // where rows of A begin, in chunks; rows past the last repeat it
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        if (i / 2 >= row_steps) break;
        const int64_t source = p.a_index[tile.row + min(copy_row + i * kRowsAtOnce, tile.rows - 1)];
        from[i] = static_cast<uint32_t>(source * a_bytes / kChunkBytes);
      }
      int32_t scale_rows[kScaleCopies];
      if constexpr (T::kScaleBytes > 0) {
#pragma unroll
        for (int i = 0; i < kScaleCopies; ++i)
          scale_rows[i] = p.a_index[tile.row + min(thread + i * T::kProducers, tile.rows - 1)];
      }
      for (int step = 0; step < steps; ++step, at.next()) {
        device::wait_for(empty + at.stage, at.parity);
        uint8_t* const stage = smem + at.stage * T::kStageBytes;
        if (thread == 0) copy_b(tile, step, at.stage, 0);
        const int byte = step * kRowBytes - static_cast<int>(p.k_offset) + chunk * kChunkBytes;
        const bool inside = byte >= 0 && byte < k_bytes;
        uint8_t* to = stage + T::kBBytes + device::swizzled<kRowBytes>(copy_row, chunk);
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          if (i / 2 >= row_steps) break;
          device::copy_16_async(to + i * kRowsAtOnce * kRowBytes,
                                a + int64_t{from[i]} * kChunkBytes + (inside ? byte : 0), inside);
        }
        if constexpr (T::kScaleBytes > 0) {
#pragma unroll
          for (int i = 0; i < kScaleCopies; ++i) {
            const int row = thread + i * T::kProducers;
            if (row < 32 * row_steps) {
              device::copy_4_async(stage + T::kBBytes + T::kABytes + row * 4,
                                   p.a_scale + scale_rows[i] * p.a_scale_stride + step);
            }
          }
        }
        device::arrive_after_copies(full + at.stage);
      }
    }
    if (thread == 0) end(at);
    device::wait_for(empty + at.stage, at.parity);
    device::arrive(full + at.stage);
    device::commit_copies();
    device::wait_for_copies<0>();  // nobody leaves with copies under way
  }
};

/// A warp's share of y: the 16 rows of B that it multiplied, by up to kN rows of A.
template <class T, class E, int kN>
struct WideSums {
  const Problem& p;
  const WideTileAt& tile;
  uint8_t* out;           ///< of the warp's group
  int group, warp, lane;  ///< of consumers, of the group, of the warp
  bool up_first;          ///< of rows of gate and up

  static constexpr bool kGated = T::kGated;
  static constexpr int kBlocks = kN / 8;  // of 8 rows of A

  __device__ __forceinline__ int first_column() const {  // of the warp
    return tile.column + (group * 4 + warp) * (kGated ? 8 : 16);
  }

  /// Asked for before the products.
  __device__ __forceinline__ TileScales scales() const {
    return tile_scales < sizeof(E) == 1 && T::kScaleBytes == 0, kGated > (p, tile.group);
  }

  /// Scales, SiLU.
  __device__ __forceinline__ void finish(float (&sums)[kN / 2], const TileScales& scales) const {
    if constexpr (sizeof(E) == 1 && T::kScaleBytes == 0) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) sums[i] *= i % 4 < 2 || !kGated ? scales.first() : scales.second();
    }
    if constexpr (kGated) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {  // a column's two rows in sums[2 i] and sums[2 i + 1]
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float first = sums[4 * i + e], second = sums[4 * i + 2 + e];
          sums[2 * i + e] = join(p.gate, up_first ? second : first, up_first ? first : second);
        }
      }
      if (p.y_scale != nullptr) device::divide(reinterpret_cast<float(&)[kN / 4]>(sums), scales.y);
    }
  }

  /// fp32: a lane's values one by one, eight lanes a sector.
  __device__ __forceinline__ void store_wide(const float (&sums)[kN / 2]) const {
    constexpr int kHalves = kGated ? 1 : 2;
    const int column = first_column() + lane / 4;
    float* y = static_cast<float*>(p.y) + int64_t{tile.row} * p.y_stride + column;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * i + lane % 4 * 2 + e;
        if (row >= tile.rows) continue;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          if (column + 8 * half < p.n) y[row * p.y_stride + 8 * half] = sums[2 * kHalves * i + 2 * half + e];
        }
      }
    }
  }

  /// Narrow values, turned through shared memory: chunks of 16 bytes, of which a row of `out` has kOutWidth / 16.
  __device__ __forceinline__ void store_narrow(const float (&sums)[kN / 2]) const {
    constexpr int kChunksOfRow = (kGated && sizeof(E) == 1 ? 2 : 1) * T::kOutWidth / 16;
    // Rows of 64 bytes meet the same banks every second time.
    const auto place = [&](int row, int of_row) {
      const int shift = kChunksOfRow == 8 ? row % 8 : row / 2 % 4;
      return out + row * (kChunksOfRow * 16) + (of_row ^ shift) * 16;
    };
    const int thread = warp * 32 + lane;
    const int column = tile.column + group * (T::kColumns / T::kGroups) + thread % kChunksOfRow * 8;
#pragma unroll
    for (int first = 0; first < kBlocks; first += T::kOutRows / 8) {
      const int end = min(int{kBlocks}, first + T::kOutRows / 8);  // blocks that `out` has room for
      device::named_barrier(1 + group, 128);                       // what it had is stored
      if constexpr (!kGated) {
#pragma unroll
        for (int i = first; i < end; i += 2) {
          uint32_t words[4];
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const float* v = sums + 4 * (i + m / 2) + 2 * (m % 2);
            words[m] = device::pack<bf16>(v[0], v[1]);
          }
          device::store_matrices_transposed(
              place(8 * (i - first + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2), words);
        }
      } else if constexpr (sizeof(E) == 2) {
#pragma unroll
        for (int i = first; i < end; i += 4) {
          uint32_t words[4];
#pragma unroll
          for (int m = 0; m < 4; ++m) words[m] = device::pack<bf16>(sums[2 * (i + m)], sums[2 * (i + m) + 1]);
          device::store_matrices_transposed(place(8 * (i - first + lane / 8) + lane % 8, warp), words);
        }
      } else {
        // Pairs of rows as 16 bits: a chunk has 8 columns of rows r and r + 1, in turn. Of 16 rows the pairs of the first 8
        // alternate with those of the others.
#pragma unroll
        for (int i = first; i < end; i += 4) {
          uint32_t words[4];
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const float* v = sums + 2 * (i + 2 * m);
            words[m] = device::pack<fp8>(v[0], v[1]) | device::pack<fp8>(v[2], v[3]) << 16;
          }
          device::store_two_matrices_transposed(place(4 * (i - first) + lane % 16, warp), words[0], words[1]);
        }
      }
      device::named_barrier(1 + group, 128);

      const int rows = tile.rows - 8 * first, out_rows = 8 * (end - first);
      if (column >= p.n) continue;
      if constexpr (kGated && sizeof(E) == 1) {
        fp8* const y = static_cast<fp8*>(p.y) + (int64_t{tile.row} + 8 * first) * p.y_stride + column;
#pragma unroll 4
        for (int pair = thread / kChunksOfRow; pair < out_rows / 2; pair += 128 / kChunksOfRow) {
          const int row = pair / 8 * 16 + pair % 2 * 8 + pair % 8 / 2 * 2;
          const uint4 v = *reinterpret_cast<const uint4*>(place(pair, thread % kChunksOfRow));
          fp8* const to = y + row * p.y_stride;
          if (row < rows) {
            *reinterpret_cast<uint2*>(to) =
                make_uint2(__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.z, v.w, 0x6420));
          }
          if (row + 1 < rows) {
            *reinterpret_cast<uint2*>(to + p.y_stride) =
                make_uint2(__byte_perm(v.x, v.y, 0x7531), __byte_perm(v.z, v.w, 0x7531));
          }
        }
      } else {
        bf16* const y = static_cast<bf16*>(p.y) + (int64_t{tile.row} + 8 * first) * p.y_stride + column;
#pragma unroll 4
        for (int row = thread / kChunksOfRow; row < min(rows, out_rows); row += 128 / kChunksOfRow) {
          *reinterpret_cast<uint4*>(y + row * p.y_stride) =
              *reinterpret_cast<const uint4*>(place(row, thread % kChunksOfRow));
        }
      }
    }
  }
};

/// Adds a stage's products to sums of the same place; fp8 in blocks, times their scales.
template <class T, int kCount>
__device__ __forceinline__ void add_products(float* sums, const float (&products)[kCount],
                                             const float* row_scales, float b_scale, float b_up_scale) {
  if constexpr (T::kScaleBytes == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += products[i];
  } else {
    row_scales += threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float2 of_rows = *reinterpret_cast<const float2*>(row_scales + 8 * i);
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const float scale = (v % 2 == 0 ? of_rows.x : of_rows.y) * (v < 2 ? b_scale : b_up_scale);
        sums[4 * i + v] = fmaf(products[4 * i + v], scale, sums[4 * i + v]);
      }
    }
  }
}

/// One tile with up to kN rows of A, whose first stage is there: its products, and what becomes of them.
///
/// Products that are added up in fp32 are made in parts of the rows of A: while one part is added, the tensor cores have the
/// next.
template <class T, class E, int kN>
__device__ __forceinline__ void multiply_tile(const Problem& p, const WideTileAt& tile, int steps,
                                              bool up_first, uint8_t* smem, device::Barrier* full,
                                              device::Barrier* empty, device::RingPosition<T::kStages>& at) {
  constexpr bool kGated = T::kGated;
  const int group = static_cast<int>(threadIdx.x) / 128, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const WideSums<T, E, kN> result{
      p,    tile,    smem + T::kStages * T::kStageBytes + group * (T::kOutBytes / T::kGroups), group, warp,
      lane, up_first};
  const auto scales = result.scales();
  float sums[kN / 2] = {};
  const auto release = [&](uint32_t stage) {
    __syncwarp();
    if (lane == 0) device::arrive(empty + stage);
  };
  // Scales of the blocks that the warp's rows of B lie in, loaded a step ahead.
  const float *b_scales = nullptr, *b_up_scales = nullptr;
  float b_scale = 0.f, b_up_scale = 0.f;
  if constexpr (T::kScaleBytes > 0) {
    const int64_t column = min(int64_t{result.first_column()}, p.n - 1);
    const int64_t block =
        tile.group * p.b_scale_group_stride + (column + p.n_offset) / kScaleBlock * p.b_scale_stride;
    b_scales = p.b_scale + block;
    b_up_scales = (kGated ? p.b_up_scale : p.b_scale) + block;
    b_scale = b_scales[0];
    b_up_scale = b_up_scales[0];
  }
  // Two parts are under way at once, or one where registers are few. They read what they have in common from registers, or shared
  // memory would be read more than it can be. With scales of blocks parts were no faster.
  constexpr int kOfPart = !T::kPromotes || T::kScaleBytes > 0 || kN < 128 ? kN
                          : T::kGroups == 3                               ? (kN > 160 ? 48 : 32)
                                                                          : kN / (kN > 192 ? 4 : 2);
  constexpr int kParts = kN / kOfPart, kUnderWay = T::kGroups == 3 && kN > 160 ? 1 : std::min(kParts, 2);
  float products[kUnderWay][T::kPromotes ? kOfPart / 2 : 1];
  [[maybe_unused]] uint32_t before = at.stage;
  const uint64_t first_a = device::swizzled_operand(smem + T::kBBytes);
  const uint64_t first_b = device::swizzled_operand(smem + uniform(group) * (64 * kRowBytes));
  const uint32_t first_row = device::shared_address(
      smem + group * (64 * kRowBytes) + device::swizzled<kRowBytes>(16 * warp + lane % 16, lane / 16));
  for (int step = 0; step < steps; ++step, at.next()) {
    const uint32_t of_stage = uniform(at.stage) * (T::kStageBytes / 16);
    float next_scale = 0.f, next_up_scale = 0.f;
    if constexpr (T::kScaleBytes > 0) {
      const int ahead = min(step + 1, steps - 1);
      next_scale = b_scales[ahead];
      next_up_scale = kGated ? b_up_scales[ahead] : next_scale;
    }
    if (step > 0) device::wait_for(full + at.stage, at.parity);
    if constexpr (T::kGather) device::publish_to_async_proxy();  // copies of 16 bytes are ordinary stores
    uint32_t rows[kSlices][4];
    if constexpr (kParts > 1) {
#pragma unroll
      for (int k = 0; k < kSlices; ++k) {
        device::load_matrices(rows[k], (first_row + at.stage * T::kStageBytes) ^ (32 * k));
      }
    }
    const auto multiply = [&](int part) {
      device::begin_products();
#pragma unroll
      for (int k = 0; k < kSlices; ++k) {
        const uint64_t columns = moved(first_a, of_stage + part * (kOfPart * kRowBytes / 16) + 2 * k);
        if constexpr (kParts > 1) {
          device::Wgmma<E, kOfPart>::multiply(products[part % kUnderWay], rows[k], columns, k > 0);
        } else if constexpr (T::kPromotes) {
          device::Wgmma<E, kN>::multiply(products[0], moved(first_b, of_stage + 2 * k), columns, k > 0);
        } else {
          device::Wgmma<E, kN>::multiply(sums, moved(first_b, of_stage + 2 * k), columns);
        }
      }
      device::commit_products();
    };
#pragma unroll
    for (int part = 0; part < kUnderWay; ++part) multiply(part);
    if constexpr (T::kPromotes) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (part + 1 < kParts && kUnderWay > 1) {
          device::wait_for_products<1>();
        } else {
          device::wait_for_products<0>();
        }
        auto& these = products[part % kUnderWay];
        device::hold_products(these);
        if (part == kParts - 1 && T::kScaleBytes == 0) release(at.stage);
        const uint8_t* const row_scales = smem + at.stage * T::kStageBytes + T::kBBytes + T::kABytes;
        add_products<T>(sums + part * (kOfPart / 2), these,
                        reinterpret_cast<const float*>(row_scales) + part * kOfPart, b_scale, b_up_scale);
        if (part + kUnderWay < kParts) multiply(part + kUnderWay);
      }
      if (T::kScaleBytes > 0) release(at.stage);
      b_scale = next_scale, b_up_scale = next_up_scale;
    } else {
      if (step > 0) {
        device::wait_for_products<1>();
        release(before);
      }
      before = at.stage;
    }
  }
  if constexpr (!T::kPromotes) {
    device::wait_for_products<0>();
    device::hold_products(sums);
    release(before);
  }
  result.finish(sums, scales);
  if (p.y_type == DType::f32) {
    result.store_wide(sums);
  } else {
    result.store_narrow(sums);
  }
}

template <class T, class E>
__global__ __launch_bounds__(T::kThreads, 1) void wide_kernel(const __grid_constant__ WideMaps maps,
                                                              const __grid_constant__ Problem p,
                                                              int column_tiles, int steps, bool up_first) {
  extern __shared__ __align__(1024) uint8_t smem[];
  using Feeder = Feed<T, E>;
  auto* const full = reinterpret_cast<device::Barrier*>(smem + T::kBarriersAt);
  auto* const empty = full + T::kStages;
  GroupList list(reinterpret_cast<int32_t*>(smem + T::kListAt), kMostGroups);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < T::kStages; ++i) {
      device::init_barrier(full + i, Feeder::kArrivals);
      device::init_barrier(empty + i, T::kConsumers / 32);
    }
    device::publish_barriers();
    device::prefetch_tensor_map(&maps.b);
    if (!T::kGather) device::prefetch_tensor_map(&maps.a);
  }
  const bool early = !T::kGather && p.groups_known;
  if (!early) take_turn();
  list.template build<T>(p, column_tiles);
  TileWalk walk(list, p, static_cast<int>(gridDim.x), static_cast<int>(blockIdx.x));

  if (threadIdx.x >= T::kConsumers) {
    device::give_up_registers<T::kFeedRegisters>();
    Feeder{maps, p, steps, smem, full, empty}.run(walk);
    return;
  }
  device::take_registers<T::kRegisters>();
  if (early) take_turn();
  device::RingPosition<T::kStages> at;
  WideTileAt tile;
  const auto* const tiles = reinterpret_cast<const WideTileAt*>(smem + T::kTilesAt);
  const auto multiply = [&]<int kN> {
    if constexpr (kN <= T::kRows) multiply_tile<T, E, kN>(p, tile, steps, up_first, smem, full, empty, at);
  };
  for (;;) {
    device::wait_for(full + at.stage, at.parity);
    tile = tiles[at.stage];
    if (tile.rows == 0) break;
    switch ((tile.rows + 31) / 32) {
      case 1:
        multiply.template operator()<32>();
        break;
      case 2:
        multiply.template operator()<64>();
        break;
      case 3:
        multiply.template operator()<96>();
        break;
      case 4:
        multiply.template operator()<128>();
        break;
      case 5:
        multiply.template operator()<160>();
        break;
      case 6:
        multiply.template operator()<192>();
        break;
      case 7:
        multiply.template operator()<224>();
        break;
      default:
        multiply.template operator()<256>();
        break;
    }
  }
}

template <class E, bool kBlockScales, bool kGated, bool kGather, int kGroups, int kRows>
Status run_wide_tile(std::string_view name, Problem p, const Stream& stream, int sms) {
  using T = WideTile<E, kBlockScales, kGated, kGather, kGroups, kRows>;
  const bool up_first = kGated && put_in_order(p);
  WideMaps maps;
  VIVACE_TRY((make_maps<T, E>(p, maps)));
  const int64_t column_tiles = (p.n + T::kColumns - 1) / T::kColumns;
  const int64_t most_tiles = (p.rows / (kRows >> T::kHalvings) + std::min(p.groups, p.rows)) * column_tiles;
  const auto size = static_cast<int64_t>(sizeof(E));
  const auto steps = static_cast<int>((p.k * size + p.k_offset + kRowBytes - 1) / kRowBytes);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(std::min<int64_t>(most_tiles, sms))),
                          .block = dim3(T::kThreads),
                          .smem_bytes = T::kSmemBytes,
                          .overlap_previous = true};
  return launch(name, wide_kernel<T, E>, shape, stream, maps, p, static_cast<int>(column_tiles), steps,
                up_first);
}

template <class E, bool kBlockScales, bool kGated, bool kGather>
Status run_any_wide_tile(std::string_view name, const Problem& p, const Stream& stream, int sms) {
  const WidePlan plan = wide_plan(p, sms);
  const auto run = [&]<int kGroups, int kRows>() {
    return run_wide_tile<E, kBlockScales, kGated, kGather, kGroups, kRows>(name, p, stream, sms);
  };
  if (plan == WidePlan{3, 64}) return run.template operator()<3, 64>();
  if (plan == WidePlan{2, 64}) return run.template operator()<2, 64>();
  if constexpr (kBlockScales) {
    return run.template operator()<2, 192>();
  } else {
    return plan == WidePlan{3, 192} ? run.template operator()<3, 192>() : run.template operator()<2, 256>();
  }
}

template <class E, bool kBlockScales>
Status run_wide_tiles(std::string_view name, const Problem& p, const Stream& stream, int sms) {
  if (!p.gated) return run_any_wide_tile<E, kBlockScales, false, false>(name, p, stream, sms);
  return p.a_index != nullptr ? run_any_wide_tile<E, kBlockScales, true, true>(name, p, stream, sms)
                              : run_any_wide_tile<E, kBlockScales, true, false>(name, p, stream, sms);
}

}  // namespace vivace::gemm
