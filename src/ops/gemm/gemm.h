#pragma once

#include <cstdint>
#include <string_view>

#include "src/ops/gemm/gate.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

// The matrix product that GPU rows of several operators share: rows of A times a matrix of B per group of rows.

namespace vivace::gemm {

/// y[r] = a[index(r)] · b[g]ᵀ for each row r of each group g, or with `gated`
/// y[r] = gate(a[index(r)] · b[g]ᵀ, a[index(r)] · b_up[g]ᵀ).
///
/// A value of y is one sum over k in ascending order, whatever the tile: its bits depend on its row of A, its row of B and
/// their scales alone, and on whether run() or run_sm90() makes it. Pointers are device memory and read when the kernel runs; strides count elements.
/// Addresses and strides of A and B are multiples of 16 bytes, and so is k.
struct Problem {
  DType type = DType::bf16;  ///< of A and B: bf16 or fp8_e4m3
  bool block_scales =
      false;  ///< fp8: a scale per 128 of k (and of n in B), else one per row of A and per matrix
  bool gated = false;
  Gate<float> gate;  ///< gated alone

  const void* a = nullptr;
  int64_t a_stride = 0;
  const int32_t* a_index = nullptr;  ///< row of A for row r of y; null: row r
  const void* b = nullptr;           ///< [groups, n, k]
  const void* b_up = nullptr;        ///< gated alone
  int64_t b_stride = 0, b_group_stride = 0;
  int64_t rows = 0, n = 0, k = 0;

  const int32_t* group_start = nullptr;  ///< null: one group of all rows
  const int32_t* group_rows = nullptr;
  int64_t groups = 1;
  bool groups_known =
      false;  ///< where sm90_can(): the kernel in front of this one waited for them, and for b
  int64_t rows_of_group =
      0;  ///< to expect, where rows fall to groups, or to none, by chance; 0: alike in all groups

  const float* a_scale =
      nullptr;  ///< fp8 alone, as those of B; element row · stride + group · group stride (+ block)
  int64_t a_scale_stride = 0, a_scale_group_stride = 0;
  const int32_t* a_scale_index =
      nullptr;  ///< where sm90_can(), without a_index: row of the scales of blocks for row r
  const float* b_scale = nullptr;  ///< element group · group stride (+ block of n · stride + block of k)
  const float* b_up_scale = nullptr;
  int64_t b_scale_stride = 0, b_scale_group_stride = 0;
  int64_t n_offset = 0,
          k_offset = 0;  ///< where n and k start in a block of scales; multiples of 16, below 128

  void* y = nullptr;
  DType y_type = DType::bf16;  ///< bf16, f32, or fp8_e4m3 with y_scale
  int64_t y_stride = 0;
  const float* y_scale = nullptr;
  int64_t y_scale_group_stride = 0;
  float* y_scales =
      nullptr;  ///< where sm90_makes_scales(): y is fp8_e4m3 in blocks of 128 of n, whose scales go here
  int64_t y_scales_stride = 0;
  const void* bias = nullptr;  ///< [n]; not with `gated`
  DType bias_type = DType::none;
};

/// Rows of a group if all are alike, rounded up. There are groups and rows.
constexpr int64_t alike_rows(const Problem& p) {
  return p.rows_of_group > 0 ? p.rows_of_group : (p.rows + p.groups - 1) / p.groups;
}

/// Enqueues the product. The grid depends on shapes alone.
Status run(std::string_view name, const Problem& problem, const Stream& stream);

/// The three families of kernels, each in a file of its own.
Status run_bf16(std::string_view name, const Problem& problem, const Stream& stream);
Status run_fp8(std::string_view name, const Problem& problem, const Stream& stream);
Status run_fp8_block(std::string_view name, const Problem& problem, const Stream& stream);

/// Few rows with scales of blocks, k shared by a cluster of CTAs: whether that suits, and the product.
bool chain_suits(const Problem& problem, const Stream& stream);
Status run_fp8_chain(std::string_view name, const Problem& problem, const Stream& stream);

}  // namespace vivace::gemm
