// Causal attention of prompts: threads take (request, KV head, block of query rows).
//
// Two numbers for one query row of a head of width D over L keys, g query heads per KV head
//   bytes  8 D L / rows   a block of about 64 rows shares one pass over K and V (fp32)
//   flops  4 D L          the arithmetic is the only roof: 512 tokens of 9 heads x 64 are 0.3 GFLOP a layer

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/attention_prefill/cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "src/cpu/simd.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/attention/tile-inl.h"
#include "src/ops/attention_prefill/table.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

/// Tokens [token, token + tokens) of a request, for the `heads` query heads from `head` on, which share a KV
/// head.
void attention_prefill_block(const AttentionPrefillArgs& args, int64_t request, int64_t token, int64_t tokens,
                             int64_t head, int64_t heads) {
  const AttentionArgs& a = args.attention;
  const RequestRange range = request_range(a, request);
  const KeySource source(a, request, head / (a.q.shape[1] / a.k.shape[2]));
  QueryBlock rows;
  KeyBlock keys;
  load_queries(a, range, token, tokens, head, heads, rows);
  const int64_t pitch = rows.pitch;
  const int64_t begin = range.first_key(token, a.window), end = range.last_key(token + tokens - 1);
  if (args.split_tokens == 0 || begin / args.split_tokens >= (end - 1) / args.split_tokens) {
    attend(source, begin, end, rows, keys);
  } else {
    RowState total[kMaxRows];
    alignas(64) float total_sum[kMaxRows * kMaxHeadDim];
    for (int64_t group = begin / args.split_tokens * args.split_tokens; group < end;
         group += args.split_tokens) {
      rows.clear();
      attend(source, group, group + args.split_tokens, rows, keys);
      for (int64_t r = 0; r < rows.rows; ++r)
        merge(total[r], total_sum + r * pitch, rows.state[r], rows.sum + r * pitch, pitch);
    }
    for (int64_t r = 0; r < rows.rows; ++r) {
      if (total[r].weightless()) continue;
      rows.state[r] = total[r];
      std::copy(total_sum + r * pitch, total_sum + (r + 1) * pitch, rows.sum + r * pitch);
    }
  }
  for (int64_t r = 0; r < rows.rows; ++r)
    finish(a, range, token + r / heads, head + r % heads, rows.state[r], rows.sum + r * pitch);
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vivace {

namespace {

/// How a request's rows become tasks: blocks of tokens times runs of query heads of one KV head.
struct Tasks {
  int64_t heads, runs, tokens;  ///< query heads per run, runs over all heads, tokens per block

  explicit Tasks(const AttentionArgs& args) {
    constexpr int64_t kRows = 64;  // enough to share a key, few enough to stay in the second-level cache
    const int64_t group = args.q.shape[1] / args.k.shape[2];
    heads = std::min(group, kRows);
    while (group % heads != 0) --heads;
    runs = args.q.shape[1] / heads;
    tokens = std::max<int64_t>(1, kRows / heads);
  }
  int64_t blocks(int64_t rows) const { return (rows + tokens - 1) / tokens; }
};

}  // namespace

Status attention_prefill_cpu(const AttentionPrefillArgs& args, const Stream& stream) {
  const auto block = VIVACE_SIMD(attention_prefill_block);
  const AttentionArgs& a = args.attention;
  const Tasks tasks(a);
  const int64_t requests = a.page_table.shape[0];
  int64_t count = 0;
  for (int64_t b = 0; b < requests; ++b) count += tasks.blocks(request_range(a, b).rows) * tasks.runs;
  cpu::parallel_for(stream.threads, count, [&](int64_t task, int) {
    int64_t b = 0, rows = request_range(a, 0).rows;
    while (task >= tasks.blocks(rows) * tasks.runs) {
      task -= tasks.blocks(rows) * tasks.runs;
      rows = request_range(a, ++b).rows;
    }
    // The last tokens see the most keys; they go first, so that no long block is left for the end.
    const int64_t token = (tasks.blocks(rows) - 1 - task / tasks.runs) * tasks.tokens;
    block(args, b, token, std::min(tasks.tokens, rows - token), task % tasks.runs * tasks.heads, tasks.heads);
  });
  return {};
}

}  // namespace vivace
#endif
