// Causal attention of prompts: blocks of 128 query rows against blocks of 64 keys, on tensor cores.
//
// Two numbers for one query row of a head of width D over L keys, bf16 cache
//   bytes  4 D L / 128   a tile of rows shares one pass over K and V, which the
//   L2 holds flops  4 D L         128 flops per byte of the L2: the tensor
//   cores are the roof, half of it above the diagonal is skipped
//
// A tile has the rows of all query heads of a KV head: row r is head r % group of token r / group, as in
// attention_decode, so that short chunks fill it too. Four warps of 32 rows; K and V come two blocks ahead by cp.async
// through the page table.

#include "src/ops/attention_prefill/cuda.cuh"
#include "src/ops/attention_prefill/table.h"

namespace vivace {

Status attention_prefill_cuda(const AttentionPrefillArgs& args, const Stream& stream) {
  using namespace attention_mma;
  PrefillParams d{};
  d.attention = params_of(args.attention);
  d.split_tokens = args.split_tokens;
  const int64_t tokens = args.attention.q.shape[0];
  const int64_t most = args.max_query_tokens > 0 ? std::min(args.max_query_tokens, tokens) : tokens;
  d.most_rows = most * d.attention.group;
  Status status;
  device::with_type<bf16, fp8>(args.attention.k.dtype, [&](auto raw) {
    status = launch_prefill<decltype(raw)>(d, args.attention.q.shape[2], stream);
  });
  return status;
}

}  // namespace vivace
