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

/// kTeams teams of warps take stages of k in turns, each through a ring of its own.
template <int kM_, int kN_, int kWarpsM_, int kWarpsN_, int kStages_, int kCtasPerSm_, int kTeams_ = 1>
struct Tile {
  static constexpr int kM = kM_, kN = kN_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kStages = kStages_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kTeams = kTeams_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN, kAllThreads = kTeams * kThreads;
  static constexpr int kWarpRows = kM / kWarpsM, kWarpColumns = kN / kWarpsN;
  static constexpr int kMBlocks = kWarpRows / 16, kNBlocks = kWarpColumns / 8;
  static constexpr int kStageBytes = (kM + kN) * kRowBytes;
  static constexpr int kRowsAtOnce = kThreads / kChunks;  // of a stage, filled by one copy of each thread
  static constexpr int kACopies = kM / kRowsAtOnce, kBCopies = kN / kRowsAtOnce;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kExchangeBytes =
      kTeams > 1 ? 2 * kTeams* kM* kN * 4 : 0;  // two rounds of accumulators
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0, "a warp multiplies whole 16 x 16 blocks");
  static_assert(kM % kRowsAtOnce == 0 && kN % kRowsAtOnce == 0, "every thread copies equally much");
  static_assert(kTeams == 1 || (kMBlocks == 1 && kTeams == 2 * kNBlocks),
                "a team adds up one pair of a thread's values");
};

template <class T>
using Accumulators = float[T::kMBlocks][T::kNBlocks][4];

__device__ __forceinline__ uint32_t fp8_pair_to_f16(uint32_t bits) {
  const __half2_raw pair =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bits & 0xffffu), __NV_E4M3);
  return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
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
          const uint32_t upper = a_raw[i][2 * half], lower = a_raw[i][2 * half + 1];  // rows, rows + 8
          a_f16[i][0] = fp8_pair_to_f16(upper);
          a_f16[i][1] = fp8_pair_to_f16(lower);
          a_f16[i][2] = fp8_pair_to_f16(upper >> 16);
          a_f16[i][3] = fp8_pair_to_f16(lower >> 16);
        }
#pragma unroll
        for (int j = 0; j < T::kNBlocks; ++j) {
          const uint32_t raw = b_raw[j / 2][j % 2 * 2 + half];
          const uint32_t b_pair[2] = {fp8_pair_to_f16(raw), fp8_pair_to_f16(raw >> 16)};
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

/// How y may be stored: element by element, two neighbours at once, or the runs of store_run.
enum class Access { single, pairs, runs };

inline Access access_of(const Problem& p) {
  const int64_t size = p.y_type == DType::f32 ? 4 : p.y_type == DType::bf16 ? 2 : 1;
  const auto aligned = [&](int64_t elements) {
    const int64_t bytes = std::min<int64_t>(16, elements * size);
    return reinterpret_cast<uintptr_t>(p.y) % static_cast<uintptr_t>(bytes) == 0 &&
           p.y_stride * size % bytes == 0;
  };
  // Two neighbours in fp32 are a sector of four lanes as they are.
  return aligned(8) && size < 4 ? Access::runs : aligned(2) ? Access::pairs : Access::single;
}

/// Stores neighbours (column, column + 1) of a row; `column` is even.
__device__ __forceinline__ void store_pair(const Problem& p, bool pairs_aligned, int64_t offset, bool second,
                                           float v0, float v1) {
  if (p.y_type == DType::f32) {
    float* y = static_cast<float*>(p.y) + offset;
    if (second && pairs_aligned) {
      *reinterpret_cast<float2*>(y) = make_float2(v0, v1);
    } else {
      y[0] = v0;
      if (second) y[1] = v1;
    }
  } else if (p.y_type == DType::bf16) {
    bf16* y = static_cast<bf16*>(p.y) + offset;
    if (second && pairs_aligned) {
      *reinterpret_cast<uint32_t*>(y) = device::pack<bf16>(v0, v1);
    } else {
      y[0] = device::from_float<bf16>(v0);
      if (second) y[1] = device::from_float<bf16>(v1);
    }
  } else {
    fp8* y = static_cast<fp8*>(p.y) + offset;
    y[0] = device::from_float<fp8>(v0);
    if (second) y[1] = device::from_float<fp8>(v1);
  }
}

/// Stores kTogether blocks of 8 columns of a row, of which a lane of four has columns 2 quad and 2 quad + 1: the lanes trade
/// pairs so that each has a run of 2 kTogether columns. All lanes of the warp call it.
template <int kTogether>
__device__ __forceinline__ void store_run(const Problem& p, int64_t offset, bool stores, int quad,
                                          const float (&v)[kTogether][2]) {
  static_assert(kTogether == 2 || kTogether == 4);
  const bool wide = p.y_type == DType::bf16;
  uint32_t words[kTogether];
#pragma unroll
  for (int block = 0; block < kTogether; ++block) {
    words[block] =
        wide ? device::pack<bf16>(v[block][0], v[block][1])
             : __nv_cvt_float2_to_fp8x2(make_float2(v[block][0], v[block][1]), __NV_SATFINITE, __NV_E4M3);
  }
  const bool odd = quad & 1, upper = quad & 2;
#pragma unroll
  for (int block = 0; block < kTogether; block += 2) {  // the even lane keeps the first block of two
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? words[block] : words[block + 1], 1);
    (odd ? words[block] : words[block + 1]) = got;
  }
  int64_t column = odd * 8 + upper * 4;
  if constexpr (kTogether == 4) {  // the lower lanes keep the first two blocks
    uint32_t got[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) got[i] = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[2 + i], 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) (upper ? words[i] : words[2 + i]) = got[i];
    column = quad * 8;
  }
  if (!stores) return;
  if (wide) {
    auto* y = static_cast<bf16*>(p.y) + offset + column;
    if constexpr (kTogether == 4) {
      *reinterpret_cast<uint4*>(y) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *reinterpret_cast<uint2*>(y) = make_uint2(words[0], words[1]);
    }
  } else {
    auto* y = static_cast<fp8*>(p.y) + offset + column;
    if constexpr (kTogether == 4) {
      *reinterpret_cast<uint2*>(y) = make_uint2(words[0] | words[1] << 16, words[2] | words[3] << 16);
    } else {
      *reinterpret_cast<uint32_t*>(y) = words[0] | words[1] << 16;
    }
  }
}

}  // namespace vivace::gemm
