// y[r] = a[r] · b[g]ᵀ        fp8, hundreds of rows a group, compute capability 9.0a
//
// Two numbers for m rows of a group
//   bytes  n k + m k + m n
//   flops  2 m n k         the wall is the tensor cores, and then what enters an SM
//
// Rows of A are the rows of a product and rows of B its columns: a thread has few rows, so few scales of A, and a scale of B goes for
// all of its columns. A pair of CTAs has a tile of up to 256 rows of A by twice 128 of B. Each brings its own rows of B, and every
// second block of 64 rows of A to both: a stage is 48 KB in an SM, of which the L2 gives 32, for 1,024 cycles of the tensor cores. A
// warp group multiplies one or two blocks of 64 rows of A, one after the other; while it adds one up, the other groups multiply.
// Tensor cores add with 13 bits, so sums of a stage are added up in fp32, as in sm90_wide.cuh: the bits are the same.
//
// `gated` interleaves rows of gate and up in blocks of 8, by the tensor copy; a pair then has 128 columns of y, which is a block of
// scales if the next product takes them: the two CTAs tell each other the largest value of a row.

#include <algorithm>
#include <utility>

#include "src/ops/gemm/sm90_tiles.cuh"

namespace vivace::gemm {

namespace {

/// Steps of k whose scales of A come together: of one step they would be a sector of the L2 per row all the same.
constexpr int kScaleSteps = 4;

template <bool kBlockScales_, bool kGated_, int kGroups_, int kBlocks_>
struct TallTile {
  static constexpr bool kBlockScales = kBlockScales_, kGated = kGated_, kGather = false;
  static constexpr int kGroups = kGroups_;  // that multiply
  static constexpr int kBlocks = kBlocks_;  // of rows of A, of a group at most
  static constexpr int kBlockRows = 64, kBoxRows = kBlockRows;
  static constexpr int kRows = kGroups * kBlocks * kBlockRows;  // of A, at most
  static constexpr int kBRows = 128;                            // of B, of a CTA
  static constexpr int kOwnColumns = kGated ? kBRows / 2 : kBRows, kColumns = 2 * kOwnColumns;  // of y
  static constexpr int kShareRows = kBlockRows, kHalvings = 0;
  static constexpr bool kRowsFirst = false;
  static constexpr int kCtas = 2, kConsumers = 128 * kGroups, kThreads = kConsumers + 128,
                       kWarps = kConsumers / 32;
  static constexpr int kBBytes = kBRows * kRowBytes, kABytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kBBytes + kABytes;
  static constexpr int kScaleBytes = kBlockScales ? kRows * kScaleSteps * 4 : 0;           // twice
  static constexpr int kOutBytes = 2048;                                                   // of a warp
  static constexpr int kLargestBytes = kBlockScales && kGated ? 2 * kBlocks * 16 * 4 : 0;  // of a warp
  static constexpr int kListBytes = GroupList::bytes(kMostTallGroups, kHalvings, kThreads / 32);
  static constexpr int kMostStages = 8;
  static constexpr int kBarrierBytes =
      (2 * kMostStages + 4 + kWarps) * static_cast<int>(sizeof(device::Barrier));
  static constexpr int kTileBytes = kMostStages * static_cast<int>(sizeof(WideTileAt));
  static constexpr int kRest =
      2 * kScaleBytes + kWarps * (kOutBytes + kLargestBytes) + kTileBytes + kBarrierBytes + kListBytes;
  static constexpr int kStages = std::min((227 * 1024 - kRest) / kStageBytes, kMostStages);
  static constexpr int kScalesAt = kStages * kStageBytes, kOutAt = kScalesAt + 2 * kScaleBytes;
  static constexpr int kLargestAt = kOutAt + kWarps * kOutBytes;
  static constexpr int kTilesAt = kLargestAt + kWarps * kLargestBytes;
  static constexpr int kBarriersAt = kTilesAt + kTileBytes, kListAt = kBarriersAt + kBarrierBytes;
  static constexpr int kSmemBytes = kListAt + kListBytes;
  static constexpr int kRegisters = kGroups == 2 ? 232 : 160;  // of a thread that multiplies
  static constexpr int kFeedRegisters = kGroups == 2 ? 40 : 32;
  static_assert(kStages >= 4);
};

/// The same box for both CTAs of the pair, at one place in their shared memory, counted by the barrier of each.
__device__ __forceinline__ void tensor_load_to_pair(void* destination, const CUtensorMap* map,
                                                    device::Barrier* barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], "
      "[%1, {%3, %4, %5, %5, %5}], [%2], %6;" ::"r"(device::shared_address(destination)),
      "l"(map), "r"(device::shared_address(barrier)), "r"(c0), "r"(c1), "r"(0), "h"(static_cast<uint16_t>(3))
      : "memory");
}

/// Arrives at the same barrier of a CTA of the pair. What was read before it was used, and nothing was written: a release would wait for
/// all of the thread's memory traffic, in every stage.
__device__ __forceinline__ void arrive_of_pair(device::Barrier* barrier, uint32_t cta_rank) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                   device::address_in_cta(barrier, cta_rank))
               : "memory");
}

/// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(device::shared_address(row)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

/// Fills the ring.
template <class T>
struct PairFeed {
  const WideMaps& maps;
  const Problem& p;
  int steps, rank;
  uint8_t* smem;
  device::Barrier *full, *empty;

  /// By a warp. A stage is empty once it is in both CTAs.
  __device__ __forceinline__ void copy_boxes(TileWalk walk) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    auto* const tiles = reinterpret_cast<WideTileAt*>(smem + T::kTilesAt);
    device::RingPosition<T::kStages> at;
    at.parity = 1;
    WideTileAt tile;
    while (walk.next<T>(tile)) {
      const int blocks = (tile.rows + T::kBlockRows - 1) / T::kBlockRows, block = 2 * lane + rank;
      const int column = tile.column + rank * T::kOwnColumns;
      for (int step = 0; step < steps; ++step, at.next()) {
        const int k = step * kRowBytes - static_cast<int>(p.k_offset);
        uint8_t* const stage = smem + at.stage * T::kStageBytes;
        if (lane == 0) {
          device::wait_for(empty + at.stage, at.parity);
          if (step == 0) tiles[at.stage] = tile;
          device::arrive_and_expect(full + at.stage, T::kBBytes + blocks * T::kBlockRows * kRowBytes);
          copy_b<T>(maps, stage, full + at.stage, k, column, tile.group);
        }
        __syncwarp();
        if (block < blocks) {
          tensor_load_to_pair(stage + T::kBBytes + block * T::kBlockRows * kRowBytes, &maps.a,
                              full + at.stage, k, tile.row + block * T::kBlockRows);
        }
      }
    }
    if (lane != 0) return;
    device::wait_for(empty + at.stage, at.parity);
    tiles[at.stage] = {};
    device::arrive(full + at.stage);
  }

  /// Scales of rows of A, by another warp, in turn to two places. They arrive when they are there.
  __device__ __forceinline__ void copy_scales(TileWalk walk, device::Barrier* scales_full,
                                              device::Barrier* scales_empty) const {
    constexpr int kCopies = T::kRows / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool whole = steps % kScaleSteps == 0 && p.a_scale_stride % kScaleSteps == 0 &&
                       reinterpret_cast<uintptr_t>(p.a_scale) % (4 * kScaleSteps) == 0;
    device::RingPosition<2> at;
    at.parity = 1;
    WideTileAt tile;
    while (walk.next<T>(tile)) {
      int32_t rows[kCopies];
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = tile.row + min(lane + 32 * i, tile.rows - 1);
        rows[i] = p.a_scale_index != nullptr ? p.a_scale_index[row] : row;
      }
      for (int step = 0; step < steps; step += kScaleSteps, at.next()) {
        device::wait_for(scales_empty + at.stage, at.parity);
        uint8_t* const to = smem + T::kScalesAt + at.stage * T::kScaleBytes + lane * (4 * kScaleSteps);
        const int count = min(kScaleSteps, steps - step);
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          if (32 * i >= tile.rows) break;
          const float* from = p.a_scale + rows[i] * p.a_scale_stride + step;
          if (whole) {
            device::copy_16_async(to + i * (32 * 4 * kScaleSteps), from);
          } else {
#pragma unroll 1
            for (int next = 0; next < count; ++next)
              device::copy_4_async(to + i * (32 * 4 * kScaleSteps) + 4 * next, from + next);
          }
        }
        device::arrive_after_copies(scales_full + at.stage);
      }
    }
    device::commit_copies();
    device::wait_for_copies<0>();  // nobody leaves with copies under way
  }
};

/// Where a warp's part of y goes: 16 rows of a block, all columns of the CTA.
template <class T>
struct WarpOut {
  const Problem& p;
  uint8_t* out;  ///< the warp's shared memory
  int64_t row;   ///< the first
  int rows, column, lane;

  /// v[4 i + j]: row lane / 4 + 8 (j / 2), column 8 i + 2 (lane % 4) + j % 2.
  __device__ __forceinline__ void store_bf16(const float (&v)[64]) const {
    constexpr int kHalf = 64;  // columns at once, 128 bytes of a row
    const int first_row = lane / 8, chunk = lane % 8;
    device::bf16* const y =
        static_cast<device::bf16*>(p.y) + (row + first_row) * p.y_stride + column + 8 * chunk;
    const int64_t four_rows = 4 * p.y_stride;
#pragma unroll
    for (int half = 0; half < T::kOwnColumns / kHalf; ++half) {
      __syncwarp();  // what was there is stored
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float* of = v + 32 * half + 4 * i;
        const uint32_t words[4] = {device::pack<bf16>(of[0], of[1]), device::pack<bf16>(of[2], of[3]),
                                   device::pack<bf16>(of[4], of[5]), device::pack<bf16>(of[6], of[7])};
        store_matrices(out + device::swizzled<128>(lane % 16, i + lane / 16), words);
      }
      __syncwarp();
      uint4 of_rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        of_rows[i] = *reinterpret_cast<const uint4*>(out + device::swizzled<128>(first_row + 4 * i, chunk));
      const int there = column + kHalf * half + 8 * chunk < p.n ? rows - first_row : 0;
      device::bf16* to = y + kHalf * half;
#pragma unroll
      for (int i = 0; i < 4; ++i, to += four_rows) {
        if (4 * i < there) *reinterpret_cast<uint4*>(to) = of_rows[i];
      }
    }
  }

  /// Joined values, v[4 i + j] as above.
  __device__ __forceinline__ void store_fp8(const float (&v)[32]) const {
    // A matrix has the pairs of two blocks of 8 columns in turn. Rows of 64 bytes meet the same banks every second time.
    const auto place = [&](int r, int chunk) { return out + r * 64 + (chunk ^ r / 2 % 4) * 16; };
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      uint32_t words[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float* of = v + 4 * (i + m / 2 * 2) + 2 * (m % 2);
        words[m] = device::pack<fp8>(of[0], of[1]) | device::pack<fp8>(of[4], of[5]) << 16;
      }
      store_matrices(place(lane % 16, i / 2 + lane / 16), words);
    }
    __syncwarp();
    const int chunk = lane % 4, at = column + 16 * chunk;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane / 4 + 8 * half;
      const uint4 w = *reinterpret_cast<const uint4*>(place(r, chunk));
      const uint2 first = make_uint2(__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410));
      const uint2 second = make_uint2(__byte_perm(w.x, w.y, 0x7632), __byte_perm(w.z, w.w, 0x7632));
      uint8_t* const y = static_cast<uint8_t*>(p.y) + (row + r) * p.y_stride + at;
      if (r >= rows || at >= p.n) continue;
      if (at + 8 < p.n) {
        *reinterpret_cast<uint4*>(y) = make_uint4(first.x, first.y, second.x, second.y);
      } else {
        *reinterpret_cast<uint2*>(y) = first;
      }
    }
  }

  __device__ __forceinline__ void store_f32(const float (&v)[32]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane / 4 + 8 * half;
      if (r >= rows) continue;
      float* const y = static_cast<float*>(p.y) + (row + r) * p.y_stride + column;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int at = 8 * i + lane % 4 * 2;
        if (column + at < p.n)
          *reinterpret_cast<float2*>(y + at) = make_float2(v[4 * i + 2 * half], v[4 * i + 2 * half + 1]);
      }
    }
  }
};

/// What the same warps of a pair tell each other: the largest values of their rows.
template <class T>
struct PairTalk {
  float* largest;  ///< [2, kBlocks, 8 lanes, 2] of the warp, one half written while the other is read
  device::Barrier* barrier;
  uint32_t other;
  uint32_t turn = 0;

  /// v: of rows lane / 4 and 8 below it, of each block; of both CTAs after it.
  template <int kBlocks>
  __device__ __forceinline__ void agree(float (&v)[kBlocks][2]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float2* const of_lane = reinterpret_cast<float2*>(largest + turn % 2 * (T::kBlocks * 16)) + lane / 4;
    if (lane == 0) device::arrive_and_expect_of_cluster(barrier, kBlocks * 64);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (lane % 4 == 0) device::store_async(of_lane + 8 * i, v[i], barrier, other);
    }
    device::wait_for_cluster_writes(barrier, turn % 2);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const float2 there = of_lane[8 * i];
      v[i][0] = device::MaxMagnitude{}(v[i][0], there.x);
      v[i][1] = device::MaxMagnitude{}(v[i][1], there.y);
    }
    ++turn;
  }
};

/// The two places of scales of A.
struct ScaleRing {
  device::Barrier *full, *empty;
  device::RingPosition<2> at;

  /// Before the products of `step`, after them.
  __device__ __forceinline__ void begin(int step) const {
    if (step % kScaleSteps == 0) device::wait_for(full + at.stage, at.parity);
  }
  __device__ __forceinline__ void end(int step, int steps) {
    if (step % kScaleSteps != kScaleSteps - 1 && step != steps - 1) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) device::arrive(empty + at.stage);
    at.next();
  }
};

/// A warp group's part of a tile whose first stage is there: kBlocks blocks of 64 rows of A, every kGroups-th.
template <class T, int kBlocks>
__device__ __forceinline__ void multiply_tall(const Problem& p, const WideTileAt& tile, int steps, int rank,
                                              bool up_first, uint8_t* smem, device::Barrier* full,
                                              device::Barrier* empty, device::RingPosition<T::kStages>& at,
                                              ScaleRing& scale_ring, PairTalk<T>& talk) {
  const auto group = static_cast<int>(uniform(threadIdx.x / 128));
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const int column = tile.column + rank * T::kOwnColumns;
  const auto release = [&](uint32_t stage) {
    __syncwarp();
    if (lane < 2) arrive_of_pair(empty + stage, static_cast<uint32_t>(lane));
  };
  if constexpr (kBlocks == 0) {
    for (int step = 0; step < steps; ++step, at.next()) {
      if constexpr (T::kBlockScales) scale_ring.begin(step);
      if (step > 0) device::wait_for(full + at.stage, at.parity);
      release(at.stage);
      if constexpr (T::kBlockScales) scale_ring.end(step, steps);
    }
  } else {
    const TileScales scales = tile_scales<!T::kBlockScales, T::kGated>(p, tile.group);
    // Scales of B's blocks are asked for a step ahead.
    const float *b_scales = nullptr, *b_up_scales = nullptr;
    float b_scale = 0.f, b_up_scale = 0.f;
    if constexpr (T::kBlockScales) {
      const int64_t block = tile.group * p.b_scale_group_stride +
                            min(int64_t{column}, p.n - 1) / kScaleBlock * p.b_scale_stride;
      b_scales = p.b_scale + block;
      b_up_scales = T::kGated ? p.b_up_scale + block : b_scales;
      b_scale = b_scales[0], b_up_scale = b_up_scales[0];
    }
    float sums[kBlocks][64] = {};
    const uint64_t first_b = device::swizzled_operand(smem);
    const uint64_t first_a = device::swizzled_operand(smem + T::kBBytes + group * T::kBlockRows * kRowBytes);
    for (int step = 0; step < steps; ++step, at.next()) {
      const uint32_t of_stage = uniform(at.stage) * (T::kStageBytes / 16);
      float next_scale = 0.f, next_up_scale = 0.f;
      if constexpr (T::kBlockScales) {
        const int ahead = min(step + 1, steps - 1);
        next_scale = b_scales[ahead];
        next_up_scale = T::kGated ? b_up_scales[ahead] : next_scale;
      }
      const float* scales_at = nullptr;
      if constexpr (T::kBlockScales) {
        scale_ring.begin(step);
        scales_at =
            reinterpret_cast<const float*>(smem + T::kScalesAt + scale_ring.at.stage * T::kScaleBytes) +
            step % kScaleSteps;
      }
      if (step > 0) device::wait_for(full + at.stage, at.parity);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const uint32_t of_block = of_stage + block * (T::kGroups * T::kBlockRows * kRowBytes / 16);
        float products[64];
        device::begin_products();
#pragma unroll
        for (int k = 0; k < kSlices; ++k) {
          device::Wgmma<fp8, T::kBRows>::multiply(products, moved(first_a, of_block + 2 * k),
                                                  moved(first_b, of_stage + 2 * k), k > 0);
        }
        device::commit_products();
        float of_row[2] = {};
        if constexpr (T::kBlockScales) {
          const int row = (block * T::kGroups + group) * T::kBlockRows + 16 * warp + lane / 4;
          of_row[0] = scales_at[row * kScaleSteps], of_row[1] = scales_at[(row + 8) * kScaleSteps];
        }
        device::wait_for_products<0>();
        device::hold_products(products);
        if (block == kBlocks - 1) {
          release(at.stage);
          if constexpr (T::kBlockScales) scale_ring.end(step, steps);
        }
        if constexpr (T::kBlockScales) {
          const float scale[2][2] = {{of_row[0] * b_scale, of_row[1] * b_scale},
                                     {of_row[0] * b_up_scale, of_row[1] * b_up_scale}};
#pragma unroll
          for (int i = 0; i < 64; ++i)
            sums[block][i] = fmaf(products[i], scale[T::kGated ? i / 4 % 2 : 0][i / 2 % 2], sums[block][i]);
        } else {
#pragma unroll
          for (int i = 0; i < 64; ++i) sums[block][i] += products[i];
        }
      }
      b_scale = next_scale, b_up_scale = next_up_scale;
    }

    const auto out_of = [&](int block) {
      const int first = (block * T::kGroups + group) * T::kBlockRows + 16 * warp;
      return WarpOut<T>{p,
                        smem + T::kOutAt + (4 * group + warp) * T::kOutBytes,
                        int64_t{tile.row} + first,
                        tile.rows - first,
                        column,
                        lane};
    };
    if constexpr (!T::kGated) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if constexpr (!T::kBlockScales) {
#pragma unroll
          for (int i = 0; i < 64; ++i) sums[block][i] *= scales.first();
        }
        out_of(block).store_bf16(sums[block]);
      }
    } else {
      float joined[kBlocks][32];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          float first = sums[block][i / 4 * 8 + i % 4], second = sums[block][i / 4 * 8 + 4 + i % 4];
          if constexpr (!T::kBlockScales) first *= scales.first(), second *= scales.second();
          joined[block][i] = join(p.gate, up_first ? second : first, up_first ? first : second);
        }
      }
      if constexpr (!T::kBlockScales) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          device::divide(joined[block], scales.y);
          out_of(block).store_fp8(joined[block]);
        }
      } else if (p.y_type == DType::f32) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) out_of(block).store_f32(joined[block]);
      } else {
        float largest[kBlocks][2] = {};
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 32; ++i)
            largest[block][i / 2 % 2] = device::MaxMagnitude{}(largest[block][i / 2 % 2], joined[block][i]);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
              largest[block][half] = device::MaxMagnitude{}(
                  largest[block][half], __shfl_xor_sync(device::kAllLanes, largest[block][half], step));
            }
          }
        }
        talk.agree(largest);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const WarpOut<T> out = out_of(block);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float scale = device::made_scale(largest[block][half]);
            float of_row[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) of_row[i] = joined[block][i / 2 * 4 + 2 * half + i % 2];
            device::divide(of_row, scale);
#pragma unroll
            for (int i = 0; i < 16; ++i) joined[block][i / 2 * 4 + 2 * half + i % 2] = of_row[i];
            const int row = lane / 4 + 8 * half;
            if (rank == 0 && lane % 4 == 0 && row < out.rows)
              p.y_scales[(out.row + row) * p.y_scales_stride + tile.column / kScaleBlock] = scale;
          }
          out.store_fp8(joined[block]);
        }
      }
    }
  }
}

template <class T>
__global__ __launch_bounds__(T::kThreads, 1) void tall_kernel(const __grid_constant__ WideMaps maps,
                                                              const __grid_constant__ Problem p,
                                                              int column_tiles, int steps, bool up_first) {
  extern __shared__ __align__(1024) uint8_t smem[];
  auto* const full = reinterpret_cast<device::Barrier*>(smem + T::kBarriersAt);
  auto* const empty = full + T::kMostStages;
  auto* const scales_full = empty + T::kMostStages;
  auto* const scales_empty = scales_full + 2;
  auto* const of_warps = scales_empty + 2;
  GroupList list(reinterpret_cast<int32_t*>(smem + T::kListAt), kMostTallGroups);
  const auto rank = static_cast<int>(device::cluster_rank());
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < T::kStages; ++i) {
      device::init_barrier(full + i, 1);
      device::init_barrier(empty + i, 2 * T::kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      device::init_barrier(scales_full + i, 32);
      device::init_barrier(scales_empty + i, T::kWarps);
    }
#pragma unroll
    for (int i = 0; i < T::kWarps; ++i) device::init_barrier(of_warps + i, 1);
    device::publish_barriers();
    device::prefetch_tensor_map(&maps.a);
    device::prefetch_tensor_map(&maps.b);
  }
  device::cluster_barrier();
  device::wait_for_previous_kernel();
  device::let_next_kernel_start();
  list.template build<T>(p, column_tiles);
  TileWalk walk(list, p, static_cast<int>(gridDim.x / 2), static_cast<int>(blockIdx.x / 2));
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp >= T::kWarps) {
    device::give_up_registers<T::kFeedRegisters>();
    const PairFeed<T> feed{maps, p, steps, rank, smem, full, empty};
    if (warp == T::kWarps) feed.copy_boxes(walk);
    if (T::kBlockScales && warp == T::kWarps + 1) feed.copy_scales(walk, scales_full, scales_empty);
  } else {
    device::take_registers<T::kRegisters>();
    device::RingPosition<T::kStages> at;
    ScaleRing scale_ring{scales_full, scales_empty, {}};
    PairTalk<T> talk{reinterpret_cast<float*>(smem + T::kLargestAt + warp * T::kLargestBytes),
                     of_warps + warp, static_cast<uint32_t>(rank ^ 1)};
    const auto* const tiles = reinterpret_cast<const WideTileAt*>(smem + T::kTilesAt);
    for (;;) {
      device::wait_for(full + at.stage, at.parity);
      const WideTileAt tile = tiles[at.stage];
      if (tile.rows == 0) break;
      const int all = (tile.rows + T::kBlockRows - 1) / T::kBlockRows;
      const int blocks = (all - warp / 4 + T::kGroups - 1) / T::kGroups;  // of this group
      const auto multiply = [&]<int kBlocks> {
        if constexpr (kBlocks <= T::kBlocks)
          multiply_tall<T, kBlocks>(p, tile, steps, rank, up_first, smem, full, empty, at, scale_ring, talk);
      };
      if (blocks == 2) {
        multiply.template operator()<2>();
      } else if (blocks == 1) {
        multiply.template operator()<1>();
      } else {
        multiply.template operator()<0>();
      }
    }
  }
  __syncwarp();
  device::cluster_barrier();  // nobody leaves while the other CTA writes here
}

template <bool kBlockScales, bool kGated, int kGroups, int kBlocks>
Status run_tall_tile(std::string_view name, Problem p, const Stream& stream, int sms) {
  using T = TallTile<kBlockScales, kGated, kGroups, kBlocks>;
  const bool up_first = kGated && put_in_order(p);
  WideMaps maps;
  VIVACE_TRY((make_maps<T, fp8>(p, maps)));
  const int64_t column_tiles = (p.n + T::kColumns - 1) / T::kColumns;
  const int64_t most_tiles = (p.rows / T::kRows + std::min(p.groups, p.rows)) * column_tiles;
  const auto steps = static_cast<int>((p.k + p.k_offset + kRowBytes - 1) / kRowBytes);
  const LaunchShape shape{.grid = dim3(2 * static_cast<unsigned>(std::min<int64_t>(most_tiles, sms / 2))),
                          .block = dim3(T::kThreads),
                          .smem_bytes = T::kSmemBytes,
                          .cluster = 2,
                          .overlap_previous = true};
  return launch(name, tall_kernel<T>, shape, stream, maps, p, static_cast<int>(column_tiles), steps,
                up_first);
}

template <bool kBlockScales, bool kGated>
Status run_any_tall_tile(std::string_view name, const Problem& p, const Stream& stream, int sms) {
  return wide_plan(p, sms).warp_groups == 3 ? run_tall_tile<kBlockScales, kGated, 3, 1>(name, p, stream, sms)
                                            : run_tall_tile<kBlockScales, kGated, 2, 2>(name, p, stream, sms);
}

}  // namespace

Status run_sm90_tall(std::string_view name, const Problem& p, const Stream& stream, int sms) {
  if (p.block_scales) {
    return p.gated ? run_any_tall_tile<true, true>(name, p, stream, sms)
                   : run_any_tall_tile<true, false>(name, p, stream, sms);
  }
  return p.gated ? run_any_tall_tile<false, true>(name, p, stream, sms)
                 : run_any_tall_tile<false, false>(name, p, stream, sms);
}

}  // namespace vivace::gemm
