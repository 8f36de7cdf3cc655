#pragma once

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

/// How the work of a decode step is cut; the same for decode_schedule and the attention_decode calls that use
/// its map.
struct DecodeScheduleParams {
  int64_t heads_kv = 1;
  int64_t tile_tokens = 64;  ///< keys per tile; tile i of a request holds keys [i, i + 1) * tile_tokens
  int64_t workers = 1;       ///< who share the work: threads, resident CTAs or their warps
  int64_t min_tiles = 1;     ///< below this many tiles a worker, fewer workers get any
  int64_t request_cost = 0;  ///< what starting a (request, head) costs, in tiles
  int64_t window = 0;        ///< as in AttentionArgs; one schedule per distinct window
  /// 0: cut wherever balance wants. N: cut a request only at multiples of N tiles from its start, and merge
  /// all of these groups in order, so that a request's bits do not depend on its company.
  int64_t piece_tiles = 0;
};

struct DecodeScheduleArgs {
  Tensor kv_lengths;   ///< i32 [requests]
  Tensor query_start;  ///< i32 [requests + 1]
  DecodeScheduleParams params;
  Tensor schedule;  ///< i32, contiguous, at least decode_schedule_ints(requests, workers) long
};

/// Cuts the key tiles of all requests and KV heads into one contiguous run per worker. Once per step and
/// distinct window; all layers share the map.
///
/// Rule     The (request, KV head) units lie end to end, requests outer, heads inner. A unit of t tiles weighs
///          request_cost + max(t, 1), its cost first; a request without query rows weighs nothing. With W the
///          sum and n = clamp(W / min_tiles, 1, workers), worker i < n starts at i * (W / n) + min(i, W % n) and
///          ends where the next one starts; workers n and above get nothing. A start inside the cost moves to
///          tile 0; with piece_tiles it moves up to the next multiple, or to the next unit. Every start follows
///          from a prefix sum over the requests alone: no worker waits for another.
/// Alike    Where all u units weigh the same, t = max(tiles, 1) of each, u <= n, and piece_tiles is 0: let 2^k be the
///          largest power of two that is at most min(n / u, t). If 8 u 2^k >= 7 min(n, u t), then n becomes u 2^k,
///          each unit has 2^k workers for itself, and the i-th of them starts at its tile floor(tiles i / 2^k).
/// Map      int32, four parts in this order:
///            header  16   requests, heads_kv, tile_tokens, workers, n, piece_tiles, request_cost, window,
///                         min_tiles, then for units that are alike what one weighs and k, 0 ...
///            starts  4 (workers + 1)   request, head, tile (counted from the request's first tile), 0;
///                                      where a list ends, and from n on: (requests, 0, 0, 0)
///            arrivals  workers, up to a multiple of 8   0: counters that some rows of attention_decode use
///                                      and leave at 0
///            records 4 (requests + 1)  first tile, tiles, weight before (of one head), groups before; the
///                                      last record holds the sums
///          "groups before" counts the partial slots of requests before this one, all heads: a request of
///          more than one group has groups * heads_kv of them, others none. It is 0 without piece_tiles.
/// Pieces   (of cpu.schedule, cuda.mma and sm90.few; sm90.warps keeps fewer and has places of its own)
///          Worker i walks from starts[i] to starts[i + 1]. What it takes of one unit is one piece, with
///          piece_tiles one piece per group. A piece that is its whole unit writes the output directly,
///          others a partial: slot 2 i + 1 when it begins with its unit, else 2 i; with piece_tiles the slot
///          is groups before + head * groups + group. Partials of a unit are merged in order of their tiles.
/// Balance  no worker has more than ceil(W / n) weight, with the n of the map, plus at most request_cost (a start inside a cost hands
///          all of it to the worker of tile 0) and, with piece_tiles, piece_tiles - 1.
/// Cost     O(requests + workers log requests); on a GPU each of workers / 256 + 1 blocks reads all requests.
/// Runs     on `stream`; allocates nothing.
/// Fails    invalid_argument: a shape, type or parameter disagrees, or the weights or slots exceed int32;
///          on the CPU also when a length or a row range is negative. unsupported: no row fits.
/// Source   src/ops/decode_schedule/; view.h there walks the map.
Status decode_schedule(const DecodeScheduleArgs& args, const Stream& stream);
Cost decode_schedule_cost(const DecodeScheduleArgs& args);
/// Which row would run this call. Shapes and types count, pointers do not.
Choice decode_schedule_explain(const DecodeScheduleArgs& args, const Stream& stream);

/// int32 values of a map's arrivals.
constexpr int64_t decode_schedule_arrivals(int64_t workers) {
  return (workers + 7) / 8 * 8;
}
/// int32 values of a map for at most this many requests. Counts beyond 2^59, which no memory holds, are taken as that.
constexpr int64_t decode_schedule_ints(int64_t max_requests, int64_t workers) {
  constexpr int64_t kMost = int64_t{1} << 59;
  max_requests = max_requests < kMost ? max_requests : kMost;
  workers = workers < kMost ? workers : kMost;
  return 16 + 4 * (workers + 1) + decode_schedule_arrivals(workers) + 4 * (max_requests + 1);
}

}  // namespace vivace
