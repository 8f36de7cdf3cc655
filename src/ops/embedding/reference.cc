#include <vector>

#include "src/ops/embedding/table.h"
#include "src/ops/linear/block_formats.h"

namespace vivace {

Status embedding_reference(const EmbeddingArgs& args, const Stream&) {
  const int64_t hidden = args.table.shape[1];
  std::vector<float> row(static_cast<size_t>(hidden));
  for (int64_t t = 0; t < args.ids.shape[0]; ++t) {
    dequantize_row(args.table.dtype, args.table.at(args.ids.as<const int32_t>()[t]).data, hidden, row.data());
    for (int64_t i = 0; i < hidden; ++i) store(args.y.dtype, args.y.at(t).data, i, row[i]);
  }
  return {};
}

}  // namespace vivace
