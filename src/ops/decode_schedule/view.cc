#include "src/ops/decode_schedule/view.h"

#include <algorithm>
#include <limits>

#include "src/core/error.h"

namespace vivace {

namespace {

int64_t div_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

int64_t ScheduleView::groups(int64_t request) const {
  const Record& r = record(request);
  if (piece_tiles() == 0 || r.tiles == 0) return 1;
  return div_up(r.first_tile + r.tiles, piece_tiles()) - r.first_tile / piece_tiles();
}

int64_t ScheduleView::end_of_group(int64_t request, int64_t tile) const {
  if (piece_tiles() == 0) return std::numeric_limits<int64_t>::max();
  const int64_t absolute = record(request).first_tile + tile;
  return (absolute / piece_tiles() + 1) * piece_tiles() - record(request).first_tile;
}

SchedulePiece ScheduleView::piece(int64_t worker, const Start& at, int64_t until) const {
  const Record& r = record(at.request);
  SchedulePiece piece{at.request, at.head_kv, int64_t{r.first_tile} + at.tile, until - at.tile, -1};
  if (at.tile == 0 && until >= r.tiles) return piece;
  if (piece_tiles() > 0) {
    const int64_t group = piece.first_tile / piece_tiles() - r.first_tile / piece_tiles();
    piece.slot = r.groups_before + at.head_kv * groups(at.request) + group;
  } else {
    piece.slot = 2 * worker + (at.tile == 0 ? 1 : 0);
  }
  return piece;
}

ScheduleView::Start ScheduleView::cut(int64_t worker) const {
  const int64_t active = active_workers();
  if (worker >= active) return {static_cast<int32_t>(requests()), 0, 0, 0};
  const int64_t weight = record(requests()).weight_before * heads_kv();
  const int64_t position = worker * (weight / active) + std::min(worker, weight % active);
  // The last request that begins at or before `position`. One of no weight begins where the next one does,
  // so the last of them is the one that has weight.
  const Record* after = std::upper_bound(
      &record(0), &record(requests()), position,
      [&](int64_t p, const Record& record) { return p < record.weight_before * heads_kv(); });
  int64_t b = after - &record(0) - 1;
  const int64_t inside = position - record(b).weight_before * heads_kv();
  const int64_t unit = record(b + 1).weight_before - record(b).weight_before;
  int64_t h = inside / unit, tile = std::max<int64_t>(0, inside % unit - header(schedule_map::kRequestCost));
  if (piece_tiles() > 0 && tile > 0) {
    const int64_t first = record(b).first_tile;
    tile = div_up(first + tile, piece_tiles()) * piece_tiles() - first;
    if (tile >= record(b).tiles) {  // no group begins between here and the unit's end
      tile = 0;
      if (++h == heads_kv()) {
        h = 0;
        do ++b;
        while (b < requests() && !scheduled(b));
      }
    }
  }
  return {static_cast<int32_t>(b), static_cast<int32_t>(h), static_cast<int32_t>(tile), 0};
}

int64_t ScheduleView::merge_tasks() const {
  if (piece_tiles() > 0) return record(requests()).groups_before > 0 ? requests() * heads_kv() : 0;
  for (int64_t worker = 1; worker < active_workers(); ++worker)
    if (start(worker).tile > 0) return active_workers();
  return 0;
}

bool ScheduleView::split_at(int64_t task, ScheduleSplit& split) const {
  if (piece_tiles() > 0) {
    const int64_t b = task / heads_kv(), h = task % heads_kv(), pieces = groups(b);
    if (pieces <= 1) return false;
    const int64_t first = record(b).groups_before + h * pieces;
    split = {b, h, pieces, first, first + 1, 1};
    return true;
  }
  // The task of a cut unit is the first worker that begins inside it; the one before has its first piece.
  const auto inside = [&](int64_t worker, const Start& unit) {
    const Start& at = start(worker);
    return at.tile > 0 && at.request == unit.request && at.head_kv == unit.head_kv;
  };
  const Start& unit = start(task);
  if (task == 0 || unit.tile == 0 || inside(task - 1, unit)) return false;
  int64_t end = task + 1;
  while (end < active_workers() && inside(end, unit)) ++end;
  split = {unit.request, unit.head_kv, end - task + 1, 2 * (task - 1) + 1, 2 * task, 2};
  return true;
}

TileRange tiles_of(int64_t keys, int64_t rows, int64_t tile_tokens, int64_t window) {
  if (rows == 0 || keys == 0) return {0, 0};
  // The first row, at position keys - rows, sees the keys above keys - rows - window.
  const int64_t first_key = window > 0 ? std::max<int64_t>(0, keys - rows + 1 - window) : 0;
  const int64_t first_tile = std::min(first_key, keys) / tile_tokens;
  return {first_tile, div_up(keys, tile_tokens) - first_tile};
}

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

int64_t active_workers_of(const DecodeScheduleParams& params, int64_t weight_of_one_head) {
  const int64_t weight = weight_of_one_head * params.heads_kv;
  return weight == 0 ? 0 : std::clamp<int64_t>(weight / params.min_tiles, 1, params.workers);
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
  const int32_t* lengths = kv_lengths.as<const int32_t>();
  const int32_t* rows = query_start.as<const int32_t>();
  int64_t weight = 0, slots = 0;
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t n = rows[b + 1] - rows[b];
    const TileRange range = tiles_of(lengths[b], n, params.tile_tokens, params.window);
    const ScheduleView::Record& record = view.record(b);
    if (record.first_tile != range.first_tile || record.tiles != range.tiles ||
        record.weight_before != weight || record.groups_before != slots) {
      return invalid_argument(
          "{}: schedule was made for other lengths: request {} has kv_lengths = {} with {} query tokens", op,
          b, lengths[b], n);
    }
    if (n > 0) weight += params.request_cost + std::max<int64_t>(1, range.tiles);
    if (n > 0 && view.groups(b) > 1) slots += view.groups(b) * params.heads_kv;
  }
  if (view.record(requests).weight_before != weight || view.record(requests).groups_before != slots) {
    return invalid_argument("{}: schedule was made for other lengths: its sums disagree", op);
  }
  const int64_t active = active_workers_of(params, weight);
  if (view.active_workers() != active) {
    return invalid_argument("{}: schedule names {} busy workers, needs {}", op, view.active_workers(),
                            active);
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
