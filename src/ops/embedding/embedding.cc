#include "vivace/embedding.h"

#include "src/core/checks.h"
#include "src/ops/embedding/table.h"

namespace vivace {

Facts embedding_facts(const EmbeddingArgs& args) {
  Facts facts;
  facts.add("tokens", args.ids.shape[0])
      .add("hidden", args.table.shape[1])
      .add("table", args.table.dtype)
      .add("y", args.y.dtype);
  return facts;
}

Status embedding(const EmbeddingArgs& args, const Stream& stream) {
  Checker check("embedding", stream);
  check.tensor("ids", args.ids, {"tokens"})
      .tensor("table", args.table, {"vocab", "hidden"})
      .tensor("y", args.y, {"tokens", "hidden"})
      .dtype("ids", args.ids, dtypes_mask(DType::i32))
      .dtype("table", args.table,
             dtypes_mask(DType::f32, DType::bf16, DType::f16, DType::q4_0, DType::q4_1, DType::q8_0,
                         DType::q4_k, DType::q6_k))
      .dtype("y", args.y, dtypes_mask(DType::f32, DType::bf16))
      .written("y", args.y);
  VIVACE_TRY(check.status());
  const int64_t tokens = args.ids.shape[0], vocab = args.table.shape[0];
  if (stream.readable()) {  // ids on a GPU are not readable here
    const auto* ids = args.ids.as<const int32_t>();
    for (int64_t t = 0; t < tokens; ++t) {
      if (ids[t] < 0 || ids[t] >= vocab) {
        return invalid_argument("embedding: ids[{}] is {}, needs 0 <= id < vocab = {} (from table.shape[0])",
                                t, ids[t], vocab);
      }
    }
  }
  if (args.y.elements() == 0) return {};
  return dispatch(kEmbedding, args, stream);
}

Cost embedding_cost(const EmbeddingArgs& args) {
  const DTypeInfo table = info_of(args.table.dtype);
  const int64_t rows = args.y.elements() / table.block_elements * table.block_bytes;
  return {args.ids.bytes() + rows + args.y.bytes(), args.y.elements()};
}

Choice embedding_explain(const EmbeddingArgs& args, const Stream& stream) {
  return explain(kEmbedding, args, stream);
}

}  // namespace vivace
