#pragma once

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

struct EmbeddingArgs {
  Tensor ids;
  Tensor table;
  Tensor y;
};

/// y[t] = table[ids[t]].
///
/// Shapes   ids [tokens]; table [vocab, hidden]; y [tokens, hidden]. Rows may be strided.
/// Types    ids i32; table f32, bf16, f16 or a block format (q4_0, q4_1, q8_0, q4_k, q6_k); y f32 or bf16.
/// Writes   y. Nothing may overlap.
/// Cost     embedding_cost().
/// Runs     on `stream`; allocates nothing.
/// Repeats  bit for bit: y holds the table's values, exact in f32.
/// Fails    invalid_argument: a shape, stride or type disagrees; on the CPU also an id outside [0, vocab),
///          before anything is written. A GPU row writes zeros for such an id. unsupported: no row fits.
/// Source   src/ops/embedding/
Status embedding(const EmbeddingArgs& args, const Stream& stream);
Cost embedding_cost(const EmbeddingArgs& args);
/// Which row would run this call. Shapes and types count, pointers do not.
Choice embedding_explain(const EmbeddingArgs& args, const Stream& stream);

}  // namespace vivace
