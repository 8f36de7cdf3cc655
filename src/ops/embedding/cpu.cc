// y[t] = table[ids[t]]
//
// Two numbers for a row of width H in q8_0
//   bytes  5.1 H   read 1.06 H, write 4 H
//   flops  H       a copy; the scalar unpacking keeps up with it: 576 weights take well under a microsecond

#include <algorithm>

#include "src/cpu/thread_pool.h"
#include "src/ops/embedding/table.h"
#include "src/ops/linear/block_formats.h"

namespace vivace {

Status embedding_cpu(const EmbeddingArgs& args, const Stream& stream) {
  constexpr int64_t kTokensPerTask = 16;
  const int64_t tokens = args.ids.shape[0];
  const auto* ids = args.ids.as<const int32_t>();
  const auto some = [&](int64_t task, int) {
    const int64_t end = std::min(tokens, (task + 1) * kTokensPerTask);
    for (int64_t t = task * kTokensPerTask; t < end; ++t)
      dequantize_row(args.table.dtype, args.table.at(ids[t]).data, args.table.shape[1],
                     args.y.at(t).as<float>());
  };
  cpu::parallel_for(stream.threads, (tokens + kTokensPerTask - 1) / kTokensPerTask, some);
  return {};
}

}  // namespace vivace
