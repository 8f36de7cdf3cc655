#pragma once

// A tile of the product in registers, fed from a ring of stages in shared memory. For files that are compiled with CUDA.
//
// A stage holds 128 bytes of k of kM rows of A and kN rows of B, chunks of 16 bytes swizzled so that ldmatrix meets no
// bank conflict. A row is 64 bf16 values, or 128 fp8 values: one block of scales.

#include "src/device/find.h"
#include "src/device/mma.h"
#include "src/device/number.h"
#include "src/device/ptx.h"
#include "src/ops/gemm/gemm.h"

namespace vivace::gemm {

using device::bf16;
using device::f16;
using device::fp8;
using device::kScaleBlock;

inline constexpr int kRowBytes = 128, kChunkBytes = 16, kChunks = kRowBytes / kChunkBytes;
inline constexpr int kSlices = kRowBytes / 32;  // a slice: what one ldmatrix spans along k

template <int kM_, int kN_, int kWarpsM_, int kWarpsN_, int kStages_, int kCtasPerSm_>
struct Tile {
  static constexpr int kM = kM_, kN = kN_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kStages = kStages_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kWarpRows = kM / kWarpsM, kWarpColumns = kN / kWarpsN;
  static constexpr int kMBlocks = kWarpRows / 16, kNBlocks = kWarpColumns / 8;
  static constexpr int kStageBytes = (kM + kN) * kRowBytes;
  static constexpr int kRowsAtOnce = kThreads / kChunks;  // of a stage, filled by one copy of each thread
  static constexpr int kACopies = kM / kRowsAtOnce, kBCopies = kN / kRowsAtOnce;
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0, "a warp multiplies whole 16 x 16 blocks");
  static_assert(kM % kRowsAtOnce == 0 && kN % kRowsAtOnce == 0, "every thread copies equally much");
  static_assert(kRowsAtOnce % 8 == 0, "rows of one thread have one place in the pattern of swizzled chunks");
};

template <class T>
using Accumulators = float[T::kMBlocks][T::kNBlocks][4];

/// Four fp8 values as two pairs of f16.
__device__ __forceinline__ void fp8_to_f16(uint32_t four, uint32_t& lower, uint32_t& upper) {
#if __CUDA_ARCH__ >= 890
  // Through intrinsics the upper half costs a shift, on the pipe that converts.
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(lower), "=r"(upper)
      : "r"(four));
#else
  const auto pair = [](uint32_t two) {
    const __half2_raw f16s =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two & 0xffffu), __NV_E4M3);
    return static_cast<uint32_t>(f16s.x) | static_cast<uint32_t>(f16s.y) << 16;
  };
  lower = pair(four);
  upper = pair(four >> 16);
#endif
}

/// acc += A · Bᵀ over one stage. `a` and `b` are this warp's first rows.
///
/// fp8: ldmatrix gives a lane four neighbouring bytes. The lower two stand for columns 2 pair and 2 pair + 1 of a step
/// of 16, the upper two for 2 pair + 8 and 2 pair + 9: an order of k that A and B share, so the sum is the same 16
/// products.
template <class T, class E>
__device__ __forceinline__ void multiply_stage(const uint8_t* a, const uint8_t* b, int lane,
                                               Accumulators<T>& acc) {
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    uint32_t a_raw[T::kMBlocks][4], b_raw[T::kNBlocks / 2][4];
#pragma unroll
    for (int i = 0; i < T::kMBlocks; ++i) {
      device::load_matrices(a_raw[i],
                            a + device::swizzled<kRowBytes>(16 * i + lane % 16, 2 * slice + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < T::kNBlocks / 2; ++j) {
      const int row = 16 * j + lane / 16 * 8 + lane % 8;
      device::load_matrices(b_raw[j], b + device::swizzled<kRowBytes>(row, 2 * slice + lane / 8 % 2));
    }
    if constexpr (sizeof(E) == 2) {
#pragma unroll
      for (int j = 0; j < T::kNBlocks; ++j) {
        const uint32_t b_pair[2] = {b_raw[j / 2][j % 2 * 2], b_raw[j / 2][j % 2 * 2 + 1]};
#pragma unroll
        for (int i = 0; i < T::kMBlocks; ++i) device::mma_16x8x16<bf16>(acc[i][j], a_raw[i], b_pair);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a_f16[T::kMBlocks][4];
#pragma unroll
        for (int i = 0; i < T::kMBlocks; ++i) {
          fp8_to_f16(a_raw[i][2 * half], a_f16[i][0], a_f16[i][2]);      // a row
          fp8_to_f16(a_raw[i][2 * half + 1], a_f16[i][1], a_f16[i][3]);  // 8 rows below
        }
#pragma unroll
        for (int j = 0; j < T::kNBlocks; ++j) {
          uint32_t b_pair[2];
          fp8_to_f16(b_raw[j / 2][j % 2 * 2 + half], b_pair[0], b_pair[1]);
#pragma unroll
          for (int i = 0; i < T::kMBlocks; ++i) device::mma_16x8x16<f16>(acc[i][j], a_f16[i], b_pair);
        }
      }
    }
  }
}

/// The rows of y that a CTA works on: [row, min(row + kM, end)) of one group.
struct TileRows {
  int32_t group;
  int64_t row, end;
};

/// The `tile`-th tile of kM rows, counted through the groups in order; false when there are fewer. All threads of the
/// block call it and get the same answer. Groups are clipped to the rows there are.
template <int kM, int kThreads>
__device__ __forceinline__ bool find_tile(const Problem& p, int64_t tile, TileRows& out) {
  if (p.group_start == nullptr) {
    out = TileRows{0, tile * kM, p.rows};
    return out.row < p.rows;
  }
  const auto rows_of = [&](int64_t group) {
    const int64_t start = p.group_start[group];
    const int64_t end = min(start + int64_t{p.group_rows[group]}, p.rows);
    return TileRows{static_cast<int32_t>(group), max(start, int64_t{0}), end};
  };
  __shared__ device::FindMemory<kThreads> memory;
  device::FoundItem found;
  const auto tiles_of = [&](int64_t group) {
    const TileRows all = rows_of(group);
    return all.end > all.row ? (all.end - all.row + kM - 1) / kM : int64_t{0};
  };
  if (!device::find_item<kThreads>(p.groups, tile, tiles_of, memory, found)) return false;
  out = rows_of(found.part);
  out.row += found.place * kM;
  return true;
}

}  // namespace vivace::gemm
