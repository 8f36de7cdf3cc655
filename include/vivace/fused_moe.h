#pragma once

#include <cmath>
#include <span>

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

/// The three matrices of one expert, wherever they lie: checkpoints that store experts one by one are used in
/// place.
struct ExpertWeights {
  Tensor gate, up;  ///< [intermediate, hidden]
  Tensor down;      ///< [hidden, intermediate]
  /// With fp8 weights: f32 [1], or [ceil((block_offset + intermediate) / 128), ceil(hidden / 128)] for gate and up and
  /// the transposed extents for down.
  Tensor gate_scale, up_scale, down_scale;
  Tensor act_scale;  ///< with fp8 weights of one scale: f32 [1], of the values between the two products
  bool present() const { return gate.present() || up.present() || down.present(); }
};

/// How an expert joins its two inner values: g · sigmoid(alpha · g) · (u + beta), where g = min(gate, limit) and u is up, kept
/// within -limit and limit. As it stands it is SiLU; gpt-oss has {1.702, 7, 1}. A NaN stays.
struct SwiGlu {
  double alpha = 1, limit = INFINITY, beta = 0;
};

struct FusedMoeArgs {
  Tensor x;
  Tensor x_scale;                          ///< with fp8 x: f32 [1], or [tokens, ceil(hidden / 128)]; see Scales
  Tensor gate_up, down;                    ///< stacked experts; absent when `experts` is given
  Tensor gate_up_scale;                    ///< with fp8 weights: f32 [experts, 2], or [experts, 2, block rows of I, of H]
  Tensor down_scale;                       ///< with fp8 weights: f32 [experts], or [experts, block rows of H, of I]
  Tensor act_scale;                        ///< with fp8 weights of one scale an expert: f32 [1] or [experts]
  int64_t block_offset = 0;                ///< 0 .. 127: where this slice of the intermediate starts in a block of 128; 0 without such scales
  std::span<const ExpertWeights> experts;  ///< or one by one; read during the call only
  ExpertWeights shared;                    ///< optional expert that every token visits
  Tensor expert_ids;
  Tensor expert_weights;
  int64_t first_expert = 0;                ///< the id of expert 0 here: a slice of neighbours, as expert parallelism cuts them
  int64_t total_experts = 0;               ///< of all slices, where there are others: how many rows to expect here; 0: those here alone
  Tensor expert_map;                       ///< or i32 [ids]: which expert here an id is, negative for those elsewhere
  SwiGlu swiglu;                           ///< of all experts, the shared one too
  bool batch_invariant = false;            ///< a token's bits must not depend on how many tokens there are
  Tensor y;
  Tensor workspace;  ///< u8 [>= fused_moe_workspace_bytes()]; absent when that is 0
};

/// The routed experts of a layer:
///   out(t, e) = down_e · (silu(gate_e · x_t) * (up_e · x_t)), or another SwiGlu
///   y_t = sum over j = 0 .. top_k - 1, in this order, of expert_weights[t, j] · out(t, e), where e is expert_ids[t, j] -
///         first_expert or expert_map[expert_ids[t, j]]
///         + shared(t), added last and without a factor
///
/// Scales   fp8 values mean stored * scale, and fp8 weights go with an fp8 x. With one scale an expert the values
///          between the products, silu(gate) * up, are quantised by the given act_scale; with blocks of 128 x 128
///          they get a made scale per token and 128 neighbours (Fp8Scaling::block), aligned with the weight's blocks,
///          so the first group is 128 - block_offset wide. I has ceil((block_offset + intermediate) / 128) block
///          rows, gate and up their own; H has ceil(hidden / 128).
///          x may come unquantised to fp8 weights: then quantize_fp8 runs first, into the workspace, with the given x_scale
///          [1], or with made scales of 128 neighbours where the weights have blocks; there is no x_scale then.
///
/// Ids      -1 (not here), any other negative id, ids that are no expert here and ids past the map mean no work; their weights
///          are not read. An expert named twice by a token counts twice. A token without work gets its shared expert, or 0.
///
/// Shapes   x, y [tokens, hidden]; gate_up [experts, 2 * intermediate, hidden], gate rows first; down
///          [experts, hidden, intermediate]; or `experts` of equal shapes, which only CPU rows take: GPU rows
///          need the stacked form. expert_ids, expert_weights [tokens, top_k]; expert_map [ids]. shared may have another
///          intermediate size. Rows may be strided.
/// Types    x f32, bf16 or fp8_e4m3; y of x's type, f32 or bf16 with fp8 weights; gate and up of one type, down of another
///          or the same: f32, f16, bf16 or a block format, or all fp8_e4m3; expert_ids and expert_map i32; expert_weights f32.
///          Intermediates and sums are fp32; GPU rows with bf16 weights round silu(gate) * up to bf16, and GPU rows
///          may round out(t, e) to bf16. sm90.wide sums each 128 products of fp8 with 13 bits below the largest of them,
///          and these sums in fp32.
/// Writes   y and workspace; y may be an x that is quantised here, else nothing may overlap.
/// Cost     fused_moe_cost(): it reads expert_ids, since a visited expert's weights are moved once and others
///          not at all. Ids on a device are not read: then as many experts count as the pairs can visit, and of the pairs
///          those that are here if all experts are alike.
/// Runs     on `stream`; allocates nothing.
/// Repeats  bit for bit; a token's result does not depend on which tokens are beside it, and with batch_invariant, not on
///          how many.
/// Fails    invalid_argument: a shape, stride or type disagrees, or the workspace is too small. unsupported:
///          no row fits.
/// Source   src/ops/fused_moe/
Status fused_moe(const FusedMoeArgs& args, const Stream& stream);
/// Scratch for this call on this stream; depends on shapes and the number of threads. It does not grow with
/// tokens without bound, but for an x that is quantised here. `workspace` itself is not looked at.
Result<int64_t> fused_moe_workspace_bytes(const FusedMoeArgs& args, const Stream& stream);
Cost fused_moe_cost(const FusedMoeArgs& args);
Choice fused_moe_explain(const FusedMoeArgs& args, const Stream& stream);

}  // namespace vivace
