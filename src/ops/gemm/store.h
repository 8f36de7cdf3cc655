#pragma once

// What becomes of a warp's sums. For files that are compiled with CUDA.
//
// Bias, scale and type of y are asked for once per tile of a warp, not per value: with a short k that would cost more than
// the products.

#include <algorithm>

#include "src/ops/gemm/tile.h"

namespace vivace::gemm {

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

/// Stores kTogether blocks of 8 columns of a row from `y` on, of which a lane of four has columns 2 quad and 2 quad + 1: the
/// lanes trade pairs so that each has a run of 2 kTogether columns. All lanes of the warp call it.
template <class Y, int kTogether>
__device__ __forceinline__ void store_run(Y* y, bool stores, int quad, uint32_t (&words)[kTogether]) {
  static_assert(sizeof(Y) <= 2 && (kTogether == 2 || kTogether == 4));
  const bool odd = quad & 1, upper = quad & 2;
#pragma unroll
  for (int block = 0; block < kTogether; block += 2) {  // the even lane keeps the first block of two
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? words[block] : words[block + 1], 1);
    (odd ? words[block] : words[block + 1]) = got;
  }
  int column = odd * 8 + upper * 4;
  if constexpr (kTogether == 4) {  // the lower lanes keep the first two blocks
    uint32_t got[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) got[i] = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[2 + i], 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) (upper ? words[i] : words[2 + i]) = got[i];
    column = quad * 8;
  }
  if (!stores) return;
  y += column;
  if constexpr (sizeof(Y) == 2 && kTogether == 4) {
    *reinterpret_cast<uint4*>(y) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if constexpr (sizeof(Y) == 2) {
    *reinterpret_cast<uint2*>(y) = make_uint2(words[0], words[1]);
  } else if constexpr (kTogether == 4) {
    *reinterpret_cast<uint2*>(y) = make_uint2(words[0] | words[1] << 16, words[2] | words[3] << 16);
  } else {
    *reinterpret_cast<uint32_t*>(y) = words[0] | words[1] << 16;
  }
}

/// The rows and columns of y that a warp has: sums[i][j] are those of rows row + 16 i and columns column + 8 j on, in the
/// layout of a product's fragments. Rows from `end` on are not there.
struct WarpPlace {
  int64_t row, end, column;
  int lane;
};

template <class Y, int kYBlocks, int kMBlocks, int kNBlocks>
__device__ __forceinline__ void store_as(const Problem& p, Access access, const WarpPlace& at,
                                         const float (&values)[kMBlocks][kNBlocks][4]) {
  constexpr bool kRuns = sizeof(Y) <= 2 && kYBlocks % 2 == 0;
  const int quad = at.lane % 4;
  const int64_t step = 8 * p.y_stride;
  int64_t row = at.row + at.lane / 4;
  Y* y = static_cast<Y*>(p.y) + row * p.y_stride + at.column;
  if (access >= (kRuns ? Access::runs : Access::pairs) && at.column + 8 * kYBlocks <= p.n) {
#pragma unroll
    for (int i = 0; i < 2 * kMBlocks; ++i, row += 8, y += step) {
      const bool stores = row < at.end;
      if constexpr (kRuns) {
        constexpr int kTogether = kYBlocks % 4 == 0 ? 4 : 2;
#pragma unroll
        for (int j = 0; j < kYBlocks; j += kTogether) {
          uint32_t words[kTogether];
#pragma unroll
          for (int block = 0; block < kTogether; ++block) {
            const float* v = values[i / 2][j + block] + 2 * (i % 2);
            words[block] = device::pack<Y>(v[0], v[1]);
          }
          store_run(y + 8 * j, stores, quad, words);
        }
      } else if (stores) {
#pragma unroll
        for (int j = 0; j < kYBlocks; ++j) {
          const float v[2] = {values[i / 2][j][2 * (i % 2)], values[i / 2][j][2 * (i % 2) + 1]};
          device::store_floats(v, y + 8 * j + 2 * quad);
        }
      }
    }
    return;
  }
  // The edge of y, or an alignment that is rare: little code, from a copy in local memory.
  float copy[kMBlocks][kYBlocks][4];
#pragma unroll
  for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < kYBlocks; ++j) {
#pragma unroll
      for (int v = 0; v < 4; ++v) copy[i][j][v] = values[i][j][v];
    }
  }
#pragma unroll 1
  for (int i = 0; i < 2 * kMBlocks && row < at.end; ++i, row += 8, y += step) {
#pragma unroll 1
    for (int v = 0; v < 2 * kYBlocks; ++v) {
      const int column = v / 2 * 8 + 2 * quad + v % 2;
      if (at.column + column < p.n) y[column] = device::from_float<Y>(copy[i / 2][v / 2][i % 2 * 2 + v % 2]);
    }
  }
}

/// Gates (kGated: blocks of gate and up alternate), adds the bias, divides by y's scale, and stores. `at.column` counts
/// columns of y.
template <bool kGated, int kMBlocks, int kNBlocks>
__device__ __forceinline__ void finish(const Problem& p, Access access, const WarpPlace& at, float y_scale,
                                       float (&sums)[kMBlocks][kNBlocks][4]) {
  constexpr int kYBlocks = kGated ? kNBlocks / 2 : kNBlocks;
  if constexpr (kGated) {
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kYBlocks; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          sums[i][j][v] = p.gate(sums[i][2 * j][v], sums[i][2 * j + 1][v]);
        }
      }
    }
  } else if (p.bias != nullptr) {
#pragma unroll
    for (int j = 0; j < kYBlocks; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int64_t column = at.column + 8 * j + at.lane % 4 * 2 + c;
        const float bias = column < p.n ? device::load_any(p.bias_type, p.bias, column) : 0.f;
#pragma unroll
        for (int i = 0; i < 2 * kMBlocks; ++i) sums[i / 2][j][2 * (i % 2) + c] += bias;
      }
    }
  }
  if (p.y_scale != nullptr) {
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kYBlocks; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sums[i][j][v] = __fdiv_rn(sums[i][j][v], y_scale);
      }
    }
  }
  if (p.y_type == DType::bf16) {
    store_as<bf16, kYBlocks>(p, access, at, sums);
  } else if (p.y_type == DType::f32) {
    store_as<float, kYBlocks>(p, access, at, sums);
  } else {
    store_as<fp8, kYBlocks>(p, access, at, sums);
  }
}

}  // namespace vivace::gemm
