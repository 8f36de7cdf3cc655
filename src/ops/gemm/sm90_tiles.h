#pragma once

#include "src/ops/gemm/gemm.h"
#include "src/ops/gemm/limits.h"

namespace vivace::gemm {

/// Enqueues the product on warp groups of compute capability 9.0. For more rows a group than a few, and where a row's bits may
/// depend on the row of a table that was chosen: sums are in blocks of 128 bytes of k.
///
/// k is at least 1, groups at most kMostGroups, rows and tiles below 2^31; no bias; scales of A in fp8 are blocks, or one a
/// group. y in 8 or 16 bits: addresses and row strides are multiples of 16 bytes, n of 8. Gated: n is a multiple of 8, y in
/// 8 or 16 bits is of A's type.
Status run_sm90(std::string_view name, const Problem& problem, const Stream& stream);

/// The three families of kernels, each in a file of its own.
Status run_sm90_bf16(std::string_view name, const Problem& problem, const Stream& stream, int sms);
Status run_sm90_fp8(std::string_view name, const Problem& problem, const Stream& stream, int sms);
Status run_sm90_fp8_block(std::string_view name, const Problem& problem, const Stream& stream, int sms);

}  // namespace vivace::gemm
