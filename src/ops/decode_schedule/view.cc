#include "src/ops/decode_schedule/view.h"

#include <algorithm>
#include <limits>

#include "src/core/error.h"

namespace vivace {

using internal::div_up;

void check_schedule_params(Checker& check, const DecodeScheduleParams& params) {
  constexpr int64_t kMax = int64_t{1} << 30;
  const auto in_range = [&](std::string_view name, int64_t value, int64_t least) {
    check.that(value >= least && value <= kMax, name, static_cast<double>(value),
               least > 0 ? "1 .. 2^30" : "0 .. 2^30");
  };
  in_range("params.heads_kv", params.heads_kv, 1);
  in_range("params.tile_tokens", params.tile_tokens, 1);
  in_range("params.workers", params.workers, 1);
  in_range("params.min_tiles", params.min_tiles, 1);
  in_range("params.request_cost", params.request_cost, 0);
  in_range("params.piece_tiles", params.piece_tiles, 0);
  check.that(params.window >= 0 && params.window <= std::numeric_limits<int32_t>::max(), "params.window",
             static_cast<double>(params.window), "0 .. 2^31 - 1");
}

int64_t max_partial_slots(const DecodeScheduleParams& params, int64_t requests, int64_t max_keys) {
  if (params.piece_tiles == 0) return params.workers > 1 ? 2 * params.workers : 0;
  const int64_t groups = div_up(max_keys, params.tile_tokens * params.piece_tiles);
  return groups > 1 ? requests * params.heads_kv * groups : 0;
}

Status check_schedule(std::string_view op, const int32_t* map, const DecodeScheduleParams& params,
                      const Tensor& kv_lengths, const Tensor& query_start) {
  using namespace schedule_map;
  const ScheduleView view(map);
  const int64_t requests = kv_lengths.shape[0];
  const struct {
    const char* name;
    Header field;
    int64_t want;
  } fields[] = {
      {"requests", kRequests, requests},
      {"heads_kv", kHeadsKv, params.heads_kv},
      {"tile_tokens", kTileTokens, params.tile_tokens},
      {"workers", kWorkers, params.workers},
      {"piece_tiles", kPieceTiles, params.piece_tiles},
      {"request_cost", kRequestCost, params.request_cost},
      {"window", kWindow, params.window},
      {"min_tiles", kMinTiles, params.min_tiles},
  };
  for (const auto& field : fields) {
    if (view.header(field.field) == field.want) continue;
    return invalid_argument("{}: schedule was made for {} = {}, needs {}", op, field.name,
                            view.header(field.field), field.want);
  }
  for (int64_t i = 0; i < decode_schedule_arrivals(params.workers); ++i) {
    const int32_t arrivals = map[arrivals_at(params.workers) + i];
    if (arrivals != 0)
      return invalid_argument("{}: schedule has {} arrivals at {}, needs 0", op, arrivals, i);
  }
  const int32_t* lengths = kv_lengths.as<const int32_t>();
  const int32_t* rows = query_start.as<const int32_t>();
  RequestWeights weights;
  int64_t slots = 0;
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t n = rows[b + 1] - rows[b];
    const TileRange range = tiles_of(lengths[b], n, params.tile_tokens, params.window);
    const ScheduleView::Record& record = view.record(b);
    if (record.first_tile != range.first_tile || record.tiles != range.tiles ||
        record.weight_before != weights.sum || record.groups_before != slots) {
      return invalid_argument(
          "{}: schedule was made for other lengths: request {} has kv_lengths = {} with {} query tokens", op,
          b, lengths[b], n);
    }
    if (n > 0) weights.add(weight_of(params, range));
    if (n > 0 && view.groups(b) > 1) slots += view.groups(b) * params.heads_kv;
  }
  if (view.record(requests).weight_before != weights.sum || view.record(requests).groups_before != slots) {
    return invalid_argument("{}: schedule was made for other lengths: its sums disagree", op);
  }
  const BusyWorkers busy = busy_workers_of(params, weights);
  if (view.active_workers() != busy.count || view.header(kUnitWeight) != busy.unit_weight ||
      view.header(kPerUnitLog2) != busy.per_unit_log2) {
    return invalid_argument(
        "{}: schedule names {} busy workers, 2^{} for each unit of weight {}, needs {}, 2^{}, {}", op,
        view.active_workers(), view.header(kPerUnitLog2), view.header(kUnitWeight), busy.count,
        busy.per_unit_log2, busy.unit_weight);
  }
  for (int64_t i = 0; i <= params.workers; ++i) {
    if (view.start(i) == view.cut(i)) continue;
    const ScheduleView::Start &got = view.start(i), want = view.cut(i);
    return invalid_argument("{}: schedule start {} is request {}, head {}, tile {}, needs {}, {}, {}", op, i,
                            got.request, got.head_kv, got.tile, want.request, want.head_kv, want.tile);
  }
  return {};
}

}  // namespace vivace
