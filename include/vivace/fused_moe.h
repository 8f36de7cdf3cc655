#pragma once

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
  bool present() const { return gate.present() || up.present() || down.present(); }
};

struct FusedMoeArgs {
  Tensor x;
  Tensor gate_up, down;                    ///< stacked experts; absent when `experts` is given
  std::span<const ExpertWeights> experts;  ///< or one by one; read during the call only
  ExpertWeights shared;                    ///< optional expert that every token visits
  Tensor expert_ids;
  Tensor expert_weights;
  Tensor y;
  Tensor workspace;  ///< u8 [>= fused_moe_workspace_bytes()]; absent when that is 0
};

/// The routed experts of a layer:
///   out(t, e) = down_e · (silu(gate_e · x_t) * (up_e · x_t))
///   y_t = sum over j = 0 .. top_k - 1, in this order, of expert_weights[t, j] · out(t, expert_ids[t, j])
///         + shared(t), added last and without a factor
///
/// Ids      -1 (not here), any other negative id and ids >= experts mean no work; their weights are not read.
///          An expert named twice by a token counts twice. A token without work gets its shared expert, or 0.
///
/// Shapes   x, y [tokens, hidden]; gate_up [experts, 2 * intermediate, hidden], gate rows first; down
///          [experts, hidden, intermediate]; or `experts` of equal shapes, which only CPU rows take: GPU rows
///          need the stacked form. expert_ids, expert_weights [tokens, top_k]. shared may have another
///          intermediate size. Rows may be strided.
/// Types    x and y of one type, f32 or bf16; gate and up of one type, down of another or the same: f32, f16,
///          bf16 or a block format; expert_ids i32; expert_weights f32. Intermediates and sums are fp32.
/// Writes   y and workspace; y must not overlap x.
/// Cost     fused_moe_cost(): it reads expert_ids, since a visited expert's weights are moved once and others
///          not at all.
/// Runs     on `stream`; allocates nothing.
/// Repeats  bit for bit; a token's result does not depend on the tokens beside it.
/// Fails    invalid_argument: a shape, stride or type disagrees, or the workspace is too small. unsupported:
///          no row fits.
/// Source   src/ops/fused_moe/
Status fused_moe(const FusedMoeArgs& args, const Stream& stream);
/// Scratch for this call on this stream; depends on shapes and the number of threads. It does not grow with
/// tokens without bound. `workspace` itself is not looked at.
Result<int64_t> fused_moe_workspace_bytes(const FusedMoeArgs& args, const Stream& stream);
Cost fused_moe_cost(const FusedMoeArgs& args);
Choice fused_moe_explain(const FusedMoeArgs& args, const Stream& stream);

}  // namespace vivace
