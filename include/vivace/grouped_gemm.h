#pragma once

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

struct GroupedGemmArgs {
  Tensor x;
  Tensor weight;
  Tensor group_start;   ///< i32 [groups]: first row of the group in x and y
  Tensor group_rows;    ///< i32 [groups]: how many rows it has; 0 is legal
  Tensor x_scale;       ///< with fp8 x: f32 [1], or [rows, ceil(k / 128)]
  Tensor weight_scale;  ///< with fp8 weight: f32 [groups], or [groups, ceil(n / 128), ceil(k / 128)]
  bool batch_invariant = false;  ///< a row's bits must not depend on how many rows there are
  Tensor y;
};

/// y[r] = x[r] · weight[g]ᵀ for each row r of each group g: the matrices of experts after tokens were sorted by expert.
/// Groups may leave gaps and come in any order; rows of no group are not written.
///
/// Shapes   x [rows, k]; weight [groups, n, k]; y [rows, n]. Rows may be strided.
/// Types    x and weight both bf16, both fp8_e4m3, or f32 x with any plain weight; y bf16 or f32. Sums in fp32; with
///          blocks of scales each 128 products are summed and then scaled by x_scale * weight_scale. sm90.wide sums each
///          128 products of fp8 with 13 bits below the largest of them, and these sums in fp32.
/// Writes   y, rows of groups only. Nothing may overlap.
/// Cost     grouped_gemm_cost(): of x.shape[0] rows and every weight.
/// Runs     on `stream`; allocates nothing.
/// Repeats  bit for bit; a row does not depend on which other rows there are, and with batch_invariant, not on how many.
/// Fails    invalid_argument: a shape, stride or type disagrees; on the CPU also a group outside x. A GPU row clips
///          such a group to x. unsupported: no row fits.
/// Source   src/ops/grouped_gemm/
Status grouped_gemm(const GroupedGemmArgs& args, const Stream& stream);
Cost grouped_gemm_cost(const GroupedGemmArgs& args);
/// Which row would run this call. Shapes and types count, pointers do not.
Choice grouped_gemm_explain(const GroupedGemmArgs& args, const Stream& stream);

}  // namespace vivace
