#pragma once

#include "vivace/attention.h"
#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace {

struct AttentionPrefillArgs {
  AttentionArgs attention;
  /// No request has more query rows; 0: tokens. GPU rows size their grids by it.
  int64_t max_query_tokens = 0;
  /// Adds up the keys in groups of this many, counted from the request's start; 0: in one run. With the
  /// group of a batch-invariant decode_schedule (piece_tiles * tile_tokens) a row has the bits that
  /// attention_decode gives it.
  int64_t split_tokens = 0;
};

/// Causal attention of prompts or chunks of prompts over the paged cache, which already holds the keys and
/// values of the chunk itself and of all tokens before it.
///
/// Shapes   see AttentionArgs. Any head_dim (beyond 512 `reference` alone), any page_tokens, any ratio heads_q / heads_kv.
/// Writes   output and lse; neither may overlap an input.
/// Cost     attention_prefill_cost(): floor bytes, and flops of full rows (the causal half included).
/// Runs     on `stream`; allocates nothing on a device.
/// Repeats  bit for bit. A row's bits depend on its own query, keys and split_tokens only: not on the chunk
///          it comes in, not on the other requests, not on what lies beyond its request's length.
/// Fails    invalid_argument: a shape, stride, type or option disagrees; on the CPU also when a length, a row
///          range or a page id is out of range. unsupported: no row fits.
/// Source   src/ops/attention_prefill/, src/ops/attention/
Status attention_prefill(const AttentionPrefillArgs& args, const Stream& stream);
Cost attention_prefill_cost(const AttentionPrefillArgs& args);
/// Which row would run this call. Shapes and types count, pointers do not.
Choice attention_prefill_explain(const AttentionPrefillArgs& args, const Stream& stream);

}  // namespace vivace
