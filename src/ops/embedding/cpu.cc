// y[t] = table[ids[t]]
//
// Two numbers for a row of width H in q8_0
//   bytes  5.1 H   read 1.06 H, write 4 H
//   flops  H       a copy; the scalar unpacking keeps up with it: 576 weights take well under a microsecond

#include <algorithm>

#include "src/core/number.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/embedding/table.h"
#include "src/ops/linear/block_formats.h"

namespace vivace {

namespace {

void unpack(const Tensor& row, int64_t hidden, const Tensor& y) {
  if (y.dtype == DType::f32) return dequantize_row(row.dtype, row.data, hidden, y.as<float>());
  constexpr int64_t kPiece = 256;  // whole blocks of every format
  const DTypeInfo info = info_of(row.dtype);
  float values[kPiece];
  for (int64_t begin = 0; begin < hidden; begin += kPiece) {
    const int64_t count = std::min(kPiece, hidden - begin);
    dequantize_row(row.dtype, row.as<const char>() + begin / info.block_elements * info.block_bytes, count,
                   values);
    for (int64_t i = 0; i < count; ++i) store(y.dtype, y.data, begin + i, values[i]);
  }
}

}  // namespace

Status embedding_cpu(const EmbeddingArgs& args, const Stream& stream) {
  constexpr int64_t kTokensPerTask = 16;
  const int64_t tokens = args.ids.shape[0];
  const auto* ids = args.ids.as<const int32_t>();
  const auto some = [&](int64_t task, int) {
    const int64_t end = std::min(tokens, (task + 1) * kTokensPerTask);
    for (int64_t t = task * kTokensPerTask; t < end; ++t) {
      unpack(args.table.at(ids[t]), args.table.shape[1], args.y.at(t));
    }
  };
  cpu::parallel_for(stream.threads, (tokens + kTokensPerTask - 1) / kTokensPerTask, some);
  return {};
}

}  // namespace vivace
