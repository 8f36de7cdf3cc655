#pragma once

#include "src/ops/gemm/gemm.h"
#include "src/ops/gemm/limits.h"

namespace vivace::gemm {

/// Enqueues the product on warp groups of compute capability 9.0, for calls whose bits need not be those of run(): sums are in blocks
/// of 128 bytes of k.
///
/// k is at least 1, groups at most kMostGroups; no bias; scales of A in fp8 are blocks, or one a group. y is f32, or, with rows
/// and addresses that are multiples of 16 bytes, bf16 or, gated, of A's type; n is a multiple of 8 but for f32 that is not gated.
/// What is beyond 32 bits or a tensor copy's steps goes to run().
Status run_sm90(std::string_view name, const Problem& problem, const Stream& stream);

/// Whether all counts fit 32 bits, and a tensor copy can step from row to row: run_sm90() hands what it cannot do to run().
bool sm90_can(const Problem& problem);

/// Whether run_sm90() makes blocks of scales of gated values: problem.y_scales may then be set, y being fp8_e4m3.
bool sm90_makes_scales(const Problem& problem, const Stream& stream);

/// The families of kernels, each in a file of its own.
Status run_sm90_bf16(std::string_view name, const Problem& problem, const Stream& stream, int sms);
Status run_sm90_fp8(std::string_view name, const Problem& problem, const Stream& stream, int sms);
Status run_sm90_fp8_block(std::string_view name, const Problem& problem, const Stream& stream, int sms);
Status run_sm90_tall(std::string_view name, const Problem& problem, const Stream& stream, int sms);

}  // namespace vivace::gemm
