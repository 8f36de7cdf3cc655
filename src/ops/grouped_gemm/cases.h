#pragma once

#include <algorithm>
#include <span>

#include "src/ops/linear/fp8_scales.h"
#include "src/ops/problem.h"
#include "vivace/grouped_gemm.h"

namespace vivace {

struct GroupedGemmCase {
  const char* name;
  std::vector<int32_t> group_rows;
  int64_t n, k;
  DType x = DType::bf16, weight = DType::bf16, y = DType::bf16;
  bool blocks = false;     ///< fp8: scales of blocks of 128
  int64_t gap = 0;         ///< rows of no group after each group, and groups in reverse order
  int64_t row_stride = 0;  ///< of x and y; 0: contiguous
};

inline std::span<const GroupedGemmCase> grouped_gemm_cases(CaseSize size) {
  constexpr auto f32 = DType::f32, bf16 = DType::bf16, f16 = DType::f16, fp8 = DType::fp8_e4m3;
  // Rows of skewed routing: 240 / r for the r-th most popular of 16; a group in 24; every other group.
  const std::vector<int32_t> zipf = {24, 16, 120, 20, 48, 15, 34, 240, 18, 80, 21, 60, 17, 30, 40, 26};
  const std::vector<int32_t> half = {20, 0, 31, 0, 64, 0, 7, 0, 40, 0, 17, 0, 52, 0};
  std::vector<int32_t> one(24, 0);
  one[13] = 300;
  // More tiles than an H200 has SMs, or they would be halved.
  const std::vector<int32_t> wide = {100, 33, 0, 190, 220, 256, 1, 130};
  const std::vector<int32_t> pairs = {300, 1, 513, 260, 64, 0, 200, 260};
  static const std::vector<GroupedGemmCase> test = {
      {"no groups", {}, 8, 16},
      {"no rows", {0, 0}, 8, 16},
      {"one of each", {1}, 1, 1, f32, f32, f32},
      {"f32 by f32", {3, 0, 5}, 37, 19, f32, f32, f32, false, 2},
      {"f32 by f16", {2, 70}, 65, 64, f32, f16, f32},
      {"bf16, odd k", {3, 2}, 5, 37},
      {"bf16, k is 0", {3, 2}, 5, 0},
      {"bf16, few rows", {1, 0, 3, 17, 2}, 72, 136, bf16, bf16, f32},
      {"bf16, gaps, reversed, strided", {4, 0, 31}, 40, 64, bf16, bf16, bf16, false, 3, 72},
      {"bf16, dozens of rows", {70, 1, 65, 0}, 129, 200},
      {"bf16, one long group of many", {300, 0, 0, 1, 0, 0, 0, 0, 0, 2}, 130, 72},
      {"bf16, more groups than threads", std::vector<int32_t>(300, 1), 16, 64},
      {"bf16, large tiles", {700, 0, 513, 90}, 1160, 72},
      {"fp8", {5, 0, 20}, 72, 272, fp8, fp8, f32},
      {"fp8, large tiles", {140}, 6280, 144, fp8, fp8, bf16},
      {"fp8, odd sizes", {2, 3}, 7, 37, fp8, fp8, f32},
      {"fp8 blocks", {5, 0, 20}, 200, 272, fp8, fp8, f32, true, 1},
      {"fp8 blocks, large tiles", {140}, 6280, 144, fp8, fp8, bf16, true},
      {"fp8, tiles of 64 to 192 rows", {100, 60, 33, 0, 128, 450, 1}, 136, 416, fp8, fp8, bf16, false, 3},
      {"fp8 blocks, tiles of 64 to 192 rows",
       {100, 60, 33, 0, 128, 450, 1},
       136,
       416,
       fp8,
       fp8,
       bf16,
       true,
       0,
       432},
      {"bf16, tiles of 64 to 192 rows", {100, 60, 33, 0, 128, 450, 1}, 136, 208, bf16, bf16, f32},
      {"fp8, tiles of up to 256 rows", wide, 1544, 144, fp8, fp8, bf16},
      {"fp8 blocks, tiles of up to 256 rows", wide, 1544, 144, fp8, fp8, f32, true},
      {"bf16, tiles of up to 256 rows", wide, 1544, 72},
      {"fp8, pairs of CTAs", pairs, 264, 144, fp8, fp8, bf16, false, 3},
      {"fp8 blocks, pairs of CTAs", pairs, 264, 272, fp8, fp8, bf16, true, 3, 288},
      {"fp8 blocks, pairs of CTAs, three warp groups", {100, 33, 0, 190, 220, 256, 1, 60}, 264, 272, fp8, fp8, bf16, true},
      {"fp8, Zipf", zipf, 136, 272, fp8, fp8, bf16},
      {"fp8, half of the groups", half, 136, 272, fp8, fp8, f32},
      {"fp8, one of many groups", one, 136, 272, fp8, fp8, bf16},
      {"fp8 blocks, Zipf", zipf, 136, 272, fp8, fp8, bf16, true},
      {"fp8 blocks, half of the groups", half, 136, 272, fp8, fp8, f32, true},
      {"fp8 blocks, one of many groups", one, 136, 272, fp8, fp8, bf16, true},
      {"bf16, Zipf", zipf, 72, 136},
      {"bf16, half of the groups", half, 72, 136},
      {"fp8 blocks, odd sizes", {2, 3}, 150, 133, fp8, fp8, f32, true},
  };
  static const std::vector<GroupedGemmCase> serving = {
      {"8 groups of 8, f32 by bf16", {8, 8, 8, 8, 8, 8, 8, 8}, 768, 2048, f32, bf16, f32},
  };
  return size == CaseSize::test ? test : serving;
}

/// A case with its memory: random inputs, poisoned outputs.
struct GroupedGemmProblem {
  Guarded x, weight, group_start, group_rows, x_scale, weight_scale, y;
  GroupedGemmArgs args;

  GroupedGemmProblem(const GroupedGemmCase& c, uint32_t seed) {
    std::mt19937 rng(seed);
    constexpr double kSpread = 60;  // of fp8 values, brought back by their scales
    const bool fp8 = c.x == DType::fp8_e4m3;
    const auto groups = static_cast<int64_t>(c.group_rows.size());
    group_start = Guarded(DType::i32, {groups});
    group_rows = Guarded(DType::i32, {groups});
    int64_t rows = 0;
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t g = c.gap > 0 ? groups - 1 - i : i;
      group_start.as<int32_t>()[g] = static_cast<int32_t>(rows);
      group_rows.as<int32_t>()[g] = c.group_rows[g];
      rows += c.group_rows[g] + c.gap;
    }
    x = Guarded(c.x, {rows, c.k}, c.row_stride);
    y = Guarded(c.y, {rows, c.n}, c.row_stride);
    weight = Guarded(c.weight, {groups, c.n, c.k});
    x.random(rng, fp8 ? kSpread : 1);
    weight.random(rng, fp8 ? kSpread : 0.1);
    const auto scales = [&](std::vector<int64_t> shape, double mean) {
      return std::move(Guarded(DType::f32, shape).random(rng, 0.2 * mean, mean));
    };
    if (fp8 && c.blocks) {
      x_scale = scales({rows, scale_blocks(c.k)}, 1 / kSpread);
      weight_scale = scales({groups, scale_blocks(c.n), scale_blocks(c.k)}, 0.1 / kSpread);
    } else if (fp8) {
      x_scale = scales({1}, 1 / kSpread);
      weight_scale = scales({groups}, 0.1 / kSpread);
    }
    args.x = x;
    args.weight = weight;
    args.group_start = group_start;
    args.group_rows = group_rows;
    args.x_scale = x_scale;
    args.weight_scale = weight_scale;
    args.y = y;
  }
};

}  // namespace vivace
