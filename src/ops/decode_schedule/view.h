#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <string_view>

#include "src/core/checks.h"
#include "src/core/host_device.h"
#include "vivace/decode_schedule.h"

// Reads the map of decode_schedule: the layout in names, and the walk that turns two starts into pieces. Kernels read it
// with the same functions.

namespace vivace {

namespace internal {
/// a / b of numbers that are not negative. Most b are powers of two, and most numbers fit 32 bits, for which a GPU takes a tenth and
/// a fifth of the time.
VIVACE_HOST_DEVICE constexpr int64_t quotient(int64_t a, int64_t b) {
#ifdef __CUDA_ARCH__
  if ((b & (b - 1)) == 0) return a >> (63 - __clzll(b));
#endif
  return ((a | b) >> 32) == 0 ? int64_t{static_cast<uint32_t>(a) / static_cast<uint32_t>(b)} : a / b;
}
VIVACE_HOST_DEVICE constexpr int64_t div_up(int64_t a, int64_t b) {
  return quotient(a + b - 1, b);
}
/// Of a positive number, rounded down.
VIVACE_HOST_DEVICE inline int64_t log2_of(int64_t v) {
#ifdef __CUDA_ARCH__
  return 63 - __clzll(v);
#else
  return std::bit_width(static_cast<uint64_t>(v)) - 1;
#endif
}
}  // namespace internal

namespace schedule_map {
inline constexpr int64_t kHeaderInts = 16, kStartInts = 4, kRecordInts = 4;
enum Header {
  kRequests,
  kHeadsKv,
  kTileTokens,
  kWorkers,
  kActive,
  kPieceTiles,
  kRequestCost,
  kWindow,
  kMinTiles,
  kUnitWeight,
  kPerUnitLog2
};
/// Where the parts behind the starts begin.
VIVACE_HOST_DEVICE constexpr int64_t arrivals_at(int64_t workers) {
  return kHeaderInts + kStartInts * (workers + 1);
}
VIVACE_HOST_DEVICE constexpr int64_t records_at(int64_t workers) {
  return arrivals_at(workers) + decode_schedule_arrivals(workers);
}
}  // namespace schedule_map

/// A stretch of tiles of one (request, KV head) that one worker does in one go.
struct SchedulePiece {
  int64_t request, head_kv;
  int64_t first_tile, tiles;  ///< in tiles of the request from key 0; tiles is 0 for a request without keys
  int64_t slot;               ///< where its partial goes; -1: it is its whole unit and writes the output
};

/// A unit that was cut: its i-th piece, in order of tiles, left its partial in slot(i).
struct ScheduleSplit {
  int64_t request, head_kv;
  int64_t pieces;
  int64_t first_slot, next_slot, slot_step;
  VIVACE_HOST_DEVICE int64_t slot(int64_t i) const {
    return i == 0 ? first_slot : next_slot + (i - 1) * slot_step;
  }
};

/// Tiles [first_tile, first_tile + tiles) that the `rows` last tokens of a request of `keys` keys look at.
struct TileRange {
  int64_t first_tile, tiles;
};
VIVACE_HOST_DEVICE inline TileRange tiles_of(int64_t keys, int64_t rows, int64_t tile_tokens,
                                             int64_t window) {
  if (rows == 0 || keys == 0) return {0, 0};
  // The first row, at position keys - rows, sees the keys above keys - rows - window.
  const int64_t first_key = window > 0 ? std::max<int64_t>(0, keys - rows + 1 - window) : 0;
  const int64_t first_tile = internal::quotient(std::min(first_key, keys), tile_tokens);
  return {first_tile, internal::div_up(keys, tile_tokens) - first_tile};
}
/// Groups that a unit with these tiles is cut into with `piece_tiles`; at least 1.
VIVACE_HOST_DEVICE inline int64_t groups_of(const TileRange& range, int64_t piece_tiles) {
  if (piece_tiles == 0 || range.tiles == 0) return 1;
  return internal::div_up(range.first_tile + range.tiles, piece_tiles) - range.first_tile / piece_tiles;
}

/// What one head of a request with query rows weighs.
VIVACE_HOST_DEVICE inline int64_t weight_of(const DecodeScheduleParams& params, const TileRange& range) {
  return params.request_cost + std::max<int64_t>(1, range.tiles);
}
/// What all requests weigh, of one head.
struct RequestWeights {
  int64_t sum = 0, requests = 0;  ///< requests: those of any weight
  bool all_alike = true;

  void add(int64_t weight) {
    all_alike = all_alike && weight * requests == sum;
    sum += weight;
    ++requests;
  }
};

/// n of the rule. Where each unit has workers for itself, a power of two of them, also what each weighs; else 0.
struct BusyWorkers {
  int64_t count, unit_weight, per_unit_log2;
};
VIVACE_HOST_DEVICE inline BusyWorkers busy_workers_of(const DecodeScheduleParams& params,
                                                      const RequestWeights& weights) {
  if (weights.sum == 0) return {0, 0, 0};
  const int64_t n = std::clamp<int64_t>(internal::quotient(weights.sum * params.heads_kv, params.min_tiles),
                                        1, params.workers);
  const int64_t units = weights.requests * params.heads_kv;
  if (!weights.all_alike || units > n || params.piece_tiles > 0) return {n, 0, 0};
  const int64_t each = internal::quotient(weights.sum, weights.requests), tiles = each - params.request_cost;
  const int64_t log2 = internal::log2_of(std::min(internal::quotient(n, units), tiles));
  const int64_t even = units << log2;
  if (8 * even < 7 * std::min(n, units * tiles)) return {n, 0, 0};  // too many would idle
  return {even, each, log2};
}

/// What a cut follows from, beside the records.
struct CutRule {
  int64_t requests, heads_kv, piece_tiles, request_cost;
  int64_t active, unit_weight, per_unit_log2;
  int64_t weight, share;  ///< of all units; of a worker, rounded down
};

VIVACE_HOST_DEVICE inline CutRule cut_rule(const DecodeScheduleParams& params, const BusyWorkers& busy,
                                           int64_t requests, int64_t weight_of_one_head) {
  const int64_t weight = weight_of_one_head * params.heads_kv;
  return {.requests = requests,
          .heads_kv = params.heads_kv,
          .piece_tiles = params.piece_tiles,
          .request_cost = params.request_cost,
          .active = busy.count,
          .unit_weight = busy.unit_weight,
          .per_unit_log2 = busy.per_unit_log2,
          .weight = weight,
          .share = busy.count > 0 ? internal::quotient(weight, busy.count) : 0};
}

class ScheduleView {
 public:
  struct Start {
    int32_t request, head_kv, tile, unused;
    bool operator==(const Start&) const = default;
  };
  struct Record {
    int32_t first_tile, tiles, weight_before, groups_before;
    bool operator==(const Record&) const = default;
  };

  VIVACE_HOST_DEVICE explicit ScheduleView(const int32_t* map) : map_(map) {}

  VIVACE_HOST_DEVICE int64_t header(schedule_map::Header field) const { return map_[field]; }
  VIVACE_HOST_DEVICE int64_t requests() const { return header(schedule_map::kRequests); }
  VIVACE_HOST_DEVICE int64_t heads_kv() const { return header(schedule_map::kHeadsKv); }
  VIVACE_HOST_DEVICE int64_t workers() const { return header(schedule_map::kWorkers); }
  VIVACE_HOST_DEVICE int64_t active_workers() const { return header(schedule_map::kActive); }
  VIVACE_HOST_DEVICE int64_t tile_tokens() const { return header(schedule_map::kTileTokens); }
  VIVACE_HOST_DEVICE int64_t piece_tiles() const { return header(schedule_map::kPieceTiles); }

  VIVACE_HOST_DEVICE const Start& start(int64_t worker) const { return starts()[worker]; }
  VIVACE_HOST_DEVICE const Record& record(int64_t request) const { return records()[request]; }
  /// False for a request without query rows, which no worker visits.
  VIVACE_HOST_DEVICE bool scheduled(int64_t request) const {
    return record(request + 1).weight_before > record(request).weight_before;
  }

  /// Where the rule puts start(worker), from the header and the records alone.
  VIVACE_HOST_DEVICE Start cut(int64_t worker) const;
  VIVACE_HOST_DEVICE static Start cut(int64_t worker, const CutRule& rule, const Record* records);

  /// Groups that a unit of this request is cut into with piece_tiles; at least 1.
  VIVACE_HOST_DEVICE int64_t groups(int64_t request) const;

  /// Calls body(SchedulePiece) for each piece of `worker`, in order.
  template <class Body>
  VIVACE_HOST_DEVICE void for_each_piece(int64_t worker, Body&& body) const {
    Start at = start(worker);
    const Start end = start(worker + 1);
    while (at.request < end.request ||
           (at.request == end.request &&
            (at.head_kv < end.head_kv || (at.head_kv == end.head_kv && at.tile < end.tile)))) {
      if (!scheduled(at.request)) {
        at = {at.request + 1, 0, 0, 0};
        continue;
      }
      const bool ends_inside = at.request == end.request && at.head_kv == end.head_kv;
      const int64_t tiles = record(at.request).tiles;
      int64_t until = ends_inside ? end.tile : tiles;
      const int64_t group_end = end_of_group(at.request, at.tile);
      if (group_end < until) until = group_end;
      body(piece(worker, at, until));
      if (until >= tiles) {
        at = at.head_kv + 1 < heads_kv() ? Start{at.request, at.head_kv + 1, 0, 0}
                                         : Start{at.request + 1, 0, 0, 0};
      } else {
        at.tile = static_cast<int32_t>(until);
      }
    }
  }

  /// Tasks of the merge: task i may have a unit to put together, see split_at. 0 when nothing was cut.
  VIVACE_HOST_DEVICE int64_t merge_tasks() const;
  /// Whether merge task `task` has a unit that was cut, and which.
  VIVACE_HOST_DEVICE bool split_at(int64_t task, ScheduleSplit& split) const;

 private:
  VIVACE_HOST_DEVICE const Start* starts() const {
    return reinterpret_cast<const Start*>(map_ + schedule_map::kHeaderInts);
  }
  VIVACE_HOST_DEVICE const Record* records() const {
    return reinterpret_cast<const Record*>(map_ + schedule_map::records_at(workers()));
  }
  VIVACE_HOST_DEVICE int64_t end_of_group(int64_t request, int64_t tile) const;
  VIVACE_HOST_DEVICE SchedulePiece piece(int64_t worker, const Start& at, int64_t until) const;

  const int32_t* map_;
};

VIVACE_HOST_DEVICE inline int64_t ScheduleView::groups(int64_t request) const {
  const Record& r = record(request);
  return groups_of({r.first_tile, r.tiles}, piece_tiles());
}

VIVACE_HOST_DEVICE inline int64_t ScheduleView::end_of_group(int64_t request, int64_t tile) const {
  if (piece_tiles() == 0) return std::numeric_limits<int64_t>::max();
  const int64_t absolute = record(request).first_tile + tile;
  return (absolute / piece_tiles() + 1) * piece_tiles() - record(request).first_tile;
}

VIVACE_HOST_DEVICE inline SchedulePiece ScheduleView::piece(int64_t worker, const Start& at,
                                                            int64_t until) const {
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

VIVACE_HOST_DEVICE inline ScheduleView::Start ScheduleView::cut(int64_t worker) const {
  using namespace schedule_map;
  const DecodeScheduleParams params = {
      .heads_kv = heads_kv(), .request_cost = header(kRequestCost), .piece_tiles = piece_tiles()};
  const BusyWorkers busy = {active_workers(), header(kUnitWeight), header(kPerUnitLog2)};
  return cut(worker, cut_rule(params, busy, requests(), record(requests()).weight_before), records());
}

VIVACE_HOST_DEVICE inline ScheduleView::Start ScheduleView::cut(int64_t worker, const CutRule& rule,
                                                                const Record* records) {
  using internal::quotient;
  const auto& [requests, heads_kv, piece_tiles, request_cost, active, unit_weight, log2, weight, share] =
      rule;
  if (worker >= active) return {static_cast<int32_t>(requests), 0, 0, 0};
  const int64_t position = unit_weight > 0 ? (worker >> log2) * unit_weight
                                           : worker * share + std::min(worker, weight - share * active);
  // The last request that begins at or before `position`. One of no weight begins where the next one does,
  // so the last of them is the one that has weight.
  const auto of_one_head = static_cast<int32_t>(heads_kv == 1 ? position : quotient(position, heads_kv));
  int32_t b = 0;
  for (auto end = static_cast<int32_t>(requests); b + 1 < end;) {
    const int32_t middle = static_cast<int32_t>(static_cast<uint32_t>(b + end) / 2);
    (records[middle].weight_before <= of_one_head ? b : end) = middle;
  }
  const int64_t inside = position - records[b].weight_before * heads_kv;
  const int64_t unit = records[b + 1].weight_before - records[b].weight_before;
  int64_t h = quotient(inside, unit);
  int64_t tile = unit_weight > 0 ? records[b].tiles * (worker & ((int64_t{1} << log2) - 1)) >> log2
                                 : std::max<int64_t>(0, inside - h * unit - request_cost);
  if (piece_tiles > 0 && tile > 0) {
    const int64_t first = records[b].first_tile;
    tile = internal::div_up(first + tile, piece_tiles) * piece_tiles - first;
    if (tile >= records[b].tiles) {  // no group begins between here and the unit's end
      tile = 0;
      if (++h == heads_kv) {
        h = 0;
        do ++b;
        while (b < requests && records[b + 1].weight_before == records[b].weight_before);
      }
    }
  }
  return {b, static_cast<int32_t>(h), static_cast<int32_t>(tile), 0};
}

VIVACE_HOST_DEVICE inline int64_t ScheduleView::merge_tasks() const {
  if (piece_tiles() > 0) return record(requests()).groups_before > 0 ? requests() * heads_kv() : 0;
  for (int64_t worker = 1; worker < active_workers(); ++worker)
    if (start(worker).tile > 0) return active_workers();
  return 0;
}

VIVACE_HOST_DEVICE inline bool ScheduleView::split_at(int64_t task, ScheduleSplit& split) const {
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

void check_schedule_params(Checker& check, const DecodeScheduleParams& params);

/// Slots that the partials of a call need at most, over all maps for `requests` requests of `max_keys` keys.
int64_t max_partial_slots(const DecodeScheduleParams& params, int64_t requests, int64_t max_keys);

/// On the CPU: that `map` is the one that `params` and these lengths give.
Status check_schedule(std::string_view op, const int32_t* map, const DecodeScheduleParams& params,
                      const Tensor& kv_lengths, const Tensor& query_start);

}  // namespace vivace
