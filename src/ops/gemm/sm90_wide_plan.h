#pragma once

// Which tile a product has in sm90.wide. Plain arithmetic: tests need no GPU for it.

#include <cstdint>

#include "src/ops/gemm/gemm.h"

namespace vivace::gemm {

/// Warp groups that multiply and rows of A at most. Wide tiles have 64 rows of B (of gate and up together if gated) for each group; of
/// tall ones a pair of CTAs has 256, see sm90_tall.cu.
struct WidePlan {
  int warp_groups, rows;
  bool tall = false;
  bool operator==(const WidePlan&) const = default;
};

inline constexpr int kMostTallGroups = 512;  ///< their list is in shared memory
/// Whether tall tiles can: fp8 rows one after another, and blocks of scales that begin with a tile.
constexpr bool tall_can(const Problem& p) {
  return p.type == DType::fp8_e4m3 && p.groups <= kMostTallGroups && !(p.gated && p.a_index != nullptr) &&
         p.n_offset == 0 && p.n % 8 == 0 &&
         (p.gated ? p.block_scales || p.y_scale != nullptr : p.y_type == DType::bf16);
}

/// What all rounds of tiles bring to an SM, in rows of B and of A, if groups are alike. Products have 32 rows of A or more of them.
constexpr int64_t rows_of_rounds(const Problem& p, const WidePlan& tile, int sms) {
  const auto parts = [](int64_t count, int64_t of) { return (count + of - 1) / of; };
  const int64_t b_rows = 64 * tile.warp_groups, rows = alike_rows(p), blocks = parts(rows, tile.rows);
  const int64_t tiles = p.groups * blocks * parts((p.gated ? 2 : 1) * p.n, b_rows);
  return parts(tiles, sms) * (b_rows + 32 * parts(rows, 32 * blocks));
}

/// Whether tall tiles are the better ones, as measured. Some of the pairs of CTAs have to have one.
constexpr bool tall_suits(const Problem& p, int sms) {
  constexpr int64_t kShort = 1024, kLeastOfBlocks = 192;
  const int64_t rows = alike_rows(p), columns = ((p.gated ? 2 : 1) * p.n + 255) / 256;
  if (!tall_can(p) || p.groups * ((rows + 255) / 256) * columns < sms / 8) return false;
  return p.block_scales ? p.k >= kLeastOfBlocks && rows > 96 : rows > (p.k < kShort ? 64 : 192);
}

/// Whether tall tiles are better multiplied by three warp groups, as measured: an odd number of blocks of 64 rows leaves one of two idle.
/// Groups that fill tiles of 256 are for two; those to which rows fall by chance seldom do.
constexpr bool three_suit(const Problem& p) {
  constexpr int64_t kLong = 1024, kManyRows = 1100;
  return alike_rows(p) <= 192 || (p.rows_of_group > 0 && p.k >= kLong && alike_rows(p) <= kManyRows);
}

/// Bits are the same for all. Groups have rows.
constexpr WidePlan wide_plan(const Problem& p, int sms) {
  if (tall_suits(p, sms)) return three_suit(p) ? WidePlan{3, 192, true} : WidePlan{2, 256, true};
  // Three warp groups have fewer registers each, which has to pay.
  const auto better = [&](const WidePlan& of_three, const WidePlan& of_two) {
    return 10 * rows_of_rounds(p, of_three, sms) < 9 * rows_of_rounds(p, of_two, sms) ? of_three : of_two;
  };
  constexpr int64_t kFewRows = 48;  // low tiles leave room for more stages, which is what dozens of rows need
  if (alike_rows(p) <= kFewRows) return better({3, 64}, {2, 64});
  if (p.block_scales) return {2, 192};
  constexpr int64_t kLongBytes = 1024;  // of k: of a shorter one stores are what counts
  const int64_t k_bytes = p.k * (p.type == DType::bf16 ? 2 : 1);
  return k_bytes >= kLongBytes ? better({3, 192}, {2, 256}) : WidePlan{2, 256};
}

}  // namespace vivace::gemm
