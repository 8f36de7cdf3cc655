#include "src/ops/decode_schedule/map.h"

#include <algorithm>
#include <limits>

#include "src/core/error.h"

namespace vivace {

Result<ScheduleMap> write_records(const DecodeScheduleArgs& args) {
  using namespace schedule_map;
  const DecodeScheduleParams& params = args.params;
  const int64_t requests = args.kv_lengths.shape[0];
  int32_t* map = args.schedule.as<int32_t>();
  std::fill(map, map + kHeaderInts, 0);
  map[kRequests] = static_cast<int32_t>(requests);
  map[kHeadsKv] = static_cast<int32_t>(params.heads_kv);
  map[kTileTokens] = static_cast<int32_t>(params.tile_tokens);
  map[kWorkers] = static_cast<int32_t>(params.workers);
  map[kPieceTiles] = static_cast<int32_t>(params.piece_tiles);
  map[kRequestCost] = static_cast<int32_t>(params.request_cost);
  map[kWindow] = static_cast<int32_t>(params.window);
  map[kMinTiles] = static_cast<int32_t>(params.min_tiles);

  ScheduleMap result;
  result.starts = reinterpret_cast<ScheduleView::Start*>(map + kHeaderInts);
  result.records = reinterpret_cast<ScheduleView::Record*>(map + records_at(params.workers));
  std::fill_n(map + arrivals_at(params.workers), decode_schedule_arrivals(params.workers), 0);
  const ScheduleView view(map);
  const int32_t* lengths = args.kv_lengths.as<const int32_t>();
  const int32_t* rows = args.query_start.as<const int32_t>();
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  RequestWeights weights;
  int64_t slots = 0;
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t n = int64_t{rows[b + 1]} - rows[b];
    if (lengths[b] < 0) {
      return invalid_argument("decode_schedule: kv_lengths[{}] is {}, needs at least 0", b, lengths[b]);
    }
    if (n < 0) {
      return invalid_argument("decode_schedule: query_start[{}] is {}, needs at least {}", b + 1, rows[b + 1],
                              rows[b]);
    }
    const TileRange range = tiles_of(lengths[b], n, params.tile_tokens, params.window);
    result.records[b] = {static_cast<int32_t>(range.first_tile), static_cast<int32_t>(range.tiles),
                         static_cast<int32_t>(weights.sum), static_cast<int32_t>(slots)};
    if (n > 0) weights.add(weight_of(params, range));
    if (n > 0 && view.groups(b) > 1) slots += view.groups(b) * params.heads_kv;
    if (weights.sum > kMax || slots > kMax) {
      return invalid_argument(
          "decode_schedule: the tiles up to request {} exceed 2^31 - 1, needs larger tiles", b);
    }
  }
  result.records[requests] = {0, 0, static_cast<int32_t>(weights.sum), static_cast<int32_t>(slots)};
  result.weight = weights.sum * params.heads_kv;
  result.busy = busy_workers_of(params, weights);
  map[kActive] = static_cast<int32_t>(result.busy.count);
  map[kUnitWeight] = static_cast<int32_t>(result.busy.unit_weight);
  map[kPerUnitLog2] = static_cast<int32_t>(result.busy.per_unit_log2);
  return result;
}

}  // namespace vivace
