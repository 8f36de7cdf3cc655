#pragma once

#include <cstdint>
#include <string_view>

#include "src/core/checks.h"
#include "vivace/decode_schedule.h"

// Reads the map of decode_schedule: the layout in names, and the walk that turns two starts into pieces.

namespace vivace {

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
  kMinTiles
};
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
  int64_t slot(int64_t i) const { return i == 0 ? first_slot : next_slot + (i - 1) * slot_step; }
};

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

  explicit ScheduleView(const int32_t* map) : map_(map) {}

  int64_t header(schedule_map::Header field) const { return map_[field]; }
  int64_t requests() const { return header(schedule_map::kRequests); }
  int64_t heads_kv() const { return header(schedule_map::kHeadsKv); }
  int64_t workers() const { return header(schedule_map::kWorkers); }
  int64_t active_workers() const { return header(schedule_map::kActive); }
  int64_t tile_tokens() const { return header(schedule_map::kTileTokens); }
  int64_t piece_tiles() const { return header(schedule_map::kPieceTiles); }

  const Start& start(int64_t worker) const { return starts()[worker]; }
  const Record& record(int64_t request) const { return records()[request]; }
  /// False for a request without query rows, which no worker visits.
  bool scheduled(int64_t request) const {
    return record(request + 1).weight_before > record(request).weight_before;
  }

  /// Where the rule puts start(worker), from the header and the records alone.
  Start cut(int64_t worker) const;

  /// Groups that a unit of this request is cut into with piece_tiles; at least 1.
  int64_t groups(int64_t request) const;

  /// Calls body(SchedulePiece) for each piece of `worker`, in order.
  template <class Body>
  void for_each_piece(int64_t worker, Body&& body) const {
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
  int64_t merge_tasks() const;
  /// Whether merge task `task` has a unit that was cut, and which.
  bool split_at(int64_t task, ScheduleSplit& split) const;

 private:
  const Start* starts() const { return reinterpret_cast<const Start*>(map_ + schedule_map::kHeaderInts); }
  const Record* records() const {
    return reinterpret_cast<const Record*>(map_ + schedule_map::kHeaderInts +
                                           schedule_map::kStartInts * (workers() + 1));
  }
  int64_t end_of_group(int64_t request, int64_t tile) const;
  SchedulePiece piece(int64_t worker, const Start& at, int64_t until) const;

  const int32_t* map_;
};

/// Tiles [first_tile, first_tile + tiles) that the `rows` last tokens of a request of `keys` keys look at.
struct TileRange {
  int64_t first_tile, tiles;
};
TileRange tiles_of(int64_t keys, int64_t rows, int64_t tile_tokens, int64_t window);

void check_schedule_params(Checker& check, const DecodeScheduleParams& params);

/// n of the rule.
int64_t active_workers_of(const DecodeScheduleParams& params, int64_t weight_of_one_head);

/// Slots that the partials of a call need at most, over all maps for `requests` requests of `max_keys` keys.
int64_t max_partial_slots(const DecodeScheduleParams& params, int64_t requests, int64_t max_keys);

/// On the CPU: that `map` is the one that `params` and these lengths give.
Status check_schedule(std::string_view op, const int32_t* map, const DecodeScheduleParams& params,
                      const Tensor& kv_lengths, const Tensor& query_start);

}  // namespace vivace
