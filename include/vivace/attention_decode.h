#pragma once

#include "vivace/attention.h"
#include "vivace/cost.h"
#include "vivace/decode_schedule.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace {

struct AttentionDecodeArgs {
  AttentionArgs attention;
  int64_t max_query_tokens = 1;  ///< no request has more query rows; 1 .. 8
  DecodeScheduleParams params;   ///< those that `schedule` was made with
  Tensor schedule;               ///< the map that decode_schedule wrote for these lengths and row ranges
  /// The caller's word that keys, values, page table, lengths, row ranges and schedule, but for this step's tokens, were written before the
  /// last kernel ahead began that is not rms_norm's, silu_mul's, quantize_fp8's or attention_prologue's: these let the next one begin at
  /// once, and some rows then load before those kernels and that one have ended. Wrong where decode_schedule or copies of pages come after it.
  bool old_keys_ready = false;
  Tensor workspace;  ///< u8 [>= attention_decode_workspace_bytes()]; absent when that is 0
};

/// Attention of one decode step: 1 to 8 query tokens per request, causal among them, over the paged cache,
/// which already holds the keys and values of these tokens.
///
/// Shapes   see AttentionArgs. Any head_dim (beyond 512 `reference` alone), any page_tokens, any ratio heads_q / heads_kv.
/// Writes   output, lse and the workspace, whose content before and after the call means nothing.
/// Cost     attention_decode_cost(): every cached key and value of the batch once, if max_pages is full.
/// Runs     on `stream`; allocates nothing on a device. K and V are read once for all query heads of a group.
///          A row may count in the schedule while it runs, and leaves it as it was: calls that share a schedule follow
///          one another on one stream.
/// Repeats  bit for bit. With params.piece_tiles a row's bits do not depend on the other requests, and equal
///          those of attention_prefill with split_tokens = piece_tiles * tile_tokens; without it another
///          company may cut a request elsewhere, which changes roundings: on the CPU a few 2^-24 of sum p|v|, on a GPU,
///          whose weights have 8 or 11 bits against a maximum of their own piece, up to 2^-8 of it.
/// Fails    invalid_argument: a shape, stride, type or option disagrees, or the workspace is too small; on
///          the CPU also when a length, row range or page id is out of range, or when the map was made for
///          other lengths or parameters. unsupported: no row fits.
/// Source   src/ops/attention_decode/, src/ops/attention/
Status attention_decode(const AttentionDecodeArgs& args, const Stream& stream);

/// Workspace of any call whose shapes, params and max_query_tokens are at most these: extents of q,
/// page_table and k count, pointers do not. Without params.piece_tiles it does not grow with the batch or its
/// lengths; with it, it holds every group of requests * max_pages pages.
/// Fails  invalid_argument: q or k has no shape. unsupported: no row fits.
Result<int64_t> attention_decode_workspace_bytes(const AttentionDecodeArgs& args, const Stream& stream);
/// How to cut the schedule of such calls for the row that runs them: shapes, types and max_query_tokens of `args` count, and
/// piece_tiles and window of its params, which are kept, on the CPU tile_tokens too. With more query tokens another row may run.
/// Fails  invalid_argument: q or k has no shape. device_error: the stream's device does not answer.
Result<DecodeScheduleParams> attention_decode_schedule_params(const AttentionDecodeArgs& args, const Stream& stream);
Cost attention_decode_cost(const AttentionDecodeArgs& args);
/// Which row would run this call. Shapes and types count, and the alignment of pointers that are there.
Choice attention_decode_explain(const AttentionDecodeArgs& args, const Stream& stream);

}  // namespace vivace
