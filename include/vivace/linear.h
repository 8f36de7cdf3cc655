#pragma once

#include <array>

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/quantize_fp8.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

/// One weight that x is multiplied by.
struct LinearPart {
  Tensor weight;
  Tensor weight_scale;  ///< with fp8 weight: f32 [1], or [ceil(n / 128), ceil(k / 128)] of 128 x 128 blocks
  Tensor bias;          ///< optional
  Tensor y;
};

struct LinearArgs {
  static constexpr int kMaxParts = 3;

  Tensor x;
  Tensor x_scale;  ///< with fp8 x, as in QuantizeFp8Args
  Fp8Scaling x_scaling = Fp8Scaling::tensor;
  std::array<LinearPart, kMaxParts> parts{};
  int part_count = 1;
  bool exact = false;            ///< forbids the quantisation of activations
  bool batch_invariant = false;  ///< a token's bits must not depend on how many tokens there are
  /// The caller's word that no kernel still under way writes a weight or its scale, which may then load at once (attention_decode.h has which).
  bool weight_ready = false;
  Tensor workspace;    ///< linear_workspace_bytes() bytes; absent when that is 0
};

/// y_p = x · weight_pᵀ + bias_p for each part p. Parts share x (q, k and v; gate and up), so x is converted
/// once and one parallel loop covers them all.
///
/// Shapes   x [tokens, k]; weight [n, k], bias [n], y [tokens, n] with an n per part; workspace [bytes]. Rows
///          may be strided, so that parts can write side by side into one buffer.
/// Types    x f32, bf16 or fp8_e4m3; y f32 or bf16; weight f32, bf16, f16, fp8_e4m3 or a block format (q4_0, q4_1,
///          q8_0, q4_k, q6_k), each part its own; bias f32, bf16 or f16; workspace u8. The CPU rows take x f32, or fp8
///          x with fp8 weights, and y f32; the GPU rows x and weight both bf16 or both fp8.
/// Scales   fp8 values mean stored * scale. Blocks of weight scales go with x_scaling block, one scale with tensor or
///          token. Products of a block of 128 are summed, then scaled: in fp32, by sm90.split (without batch_invariant) with
///          13 bits below the largest of them.
/// Exact    `exact` or plain weights: fp32 arithmetic on the weights' exact values. Otherwise, for block
///          formats, x is rounded in groups of 32 along k to multiples of d = max|x| / 127 (q4_*) or
///          max|x| / 16383 (q8_0, q6_k), and the products of a group are summed exactly. A group with a NaN
///          or an infinity makes all results of its token NaN; one below 1e-35 counts as zero.
/// Writes   y and workspace. Nothing may overlap.
/// Cost     linear_cost().
/// Runs     on `stream`; allocates nothing.
/// Repeats  bit for bit; a token's result does not depend on the tokens beside it or the threads, nor, on the CPU
///          and with batch_invariant, on their number.
/// Fails    invalid_argument: a shape, stride or type disagrees, part_count is not 1..3, or the workspace is
///          too small. unsupported: no row fits.
/// Source   src/ops/linear/
Status linear(const LinearArgs& args, const Stream& stream);
/// Scratch for a call of these shapes, types and `exact`; pointers do not count. It grows with tokens and is
/// never more for fewer tokens, so the size for the largest step serves all.
Result<int64_t> linear_workspace_bytes(const LinearArgs& args, const Stream& stream);
Cost linear_cost(const LinearArgs& args);
/// Which row would run this call. Shapes and types count, pointers do not.
Choice linear_explain(const LinearArgs& args, const Stream& stream);

}  // namespace vivace
