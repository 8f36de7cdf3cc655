#pragma once

#include <cmath>

#include "src/core/checks.h"
#include "src/core/dispatch.h"
#include "vivace/attention.h"
#include "vivace/cost.h"
#include "vivace/stream.h"

// What attention_prefill and attention_decode check, ask and read in the same way.

namespace vivace {

void check_query_start(Checker& check, const Tensor& query_start, int64_t requests);

/// Shapes, types and options. Defines "tokens", "requests", "heads_q", "heads_kv", "head_dim", "pages",
/// "page_tokens" and "max_pages".
void check_attention(Checker& check, const AttentionArgs& args);

/// What only memory knows, on the CPU: row ranges, lengths and the page ids that will be read.
/// `max_query_tokens` 0: no limit.
Status check_attention_contents(std::string_view op, const AttentionArgs& args, int64_t max_query_tokens);

Facts attention_facts(const AttentionArgs& args);

/// What rows need that keep a head on the stack.
inline constexpr Need kHeadOnStack[] = {{"head_dim", Need::at_most, kMaxHeadDim}};

/// Bytes of q, output, lse and of all keys and values that the page table has room for; flops of all rows
/// over all of them.
Cost attention_cost(const AttentionArgs& args);

inline double softmax_scale_of(const AttentionArgs& args) {
  return args.softmax_scale != 0 ? args.softmax_scale : 1 / std::sqrt(static_cast<double>(args.q.shape[2]));
}

/// The query rows and the keys of one request, on the CPU.
struct RequestRange {
  int64_t row_begin, rows, keys;
  /// Keys [first, last) that row `i` of this request sees.
  int64_t last_key(int64_t i) const { return keys - rows + i + 1 < 0 ? 0 : keys - rows + i + 1; }
  int64_t first_key(int64_t i, int64_t window) const {
    const int64_t last = last_key(i);
    return window > 0 && last > window ? last - window : 0;
  }
};

inline RequestRange request_range(const AttentionArgs& args, int64_t request) {
  const int32_t* start = args.query_start.as<const int32_t>();
  const int64_t begin = start[request];
  return {begin, start[request + 1] - begin,
          args.kv_lengths.as<const int32_t>()[request * args.kv_lengths.stride[0]]};
}

}  // namespace vivace
