#include "src/ops/decode_schedule/map.h"

#include "src/core/error.h"
#include "src/ops/decode_schedule/table.h"

namespace vivace {

Status decode_schedule_reference(const DecodeScheduleArgs& args, const Stream&) {
  VIVACE_TRY_ASSIGN(const ScheduleMap map, write_records(args));
  const int64_t requests = args.kv_lengths.shape[0], piece = args.params.piece_tiles;
  const ScheduleView::Start end{static_cast<int32_t>(requests), 0, 0, 0};
  int64_t worker = 0, position = 0;
  // The next worker's start, once the walk has reached it.
  const auto start_of = [&](int64_t i) {
    return i * (map.weight / map.busy.count) + std::min(i, map.weight % map.busy.count);
  };
  for (int64_t b = 0; b < requests && map.busy.count > 0; ++b) {
    const ScheduleView::Record& record = map.records[b];
    const int64_t weight = map.records[b + 1].weight_before - record.weight_before;
    for (int64_t h = 0; h < args.params.heads_kv; ++h) {
      if (map.busy.unit_weight > 0) {  // workers of its own
        const int64_t n = weight > 0 ? int64_t{1} << map.busy.per_unit_log2 : 0;
        for (int64_t i = 0; i < n; ++i) {
          map.starts[worker++] = {static_cast<int32_t>(b), static_cast<int32_t>(h),
                                  static_cast<int32_t>(record.tiles * i / n), 0};
        }
        continue;
      }
      for (int64_t o = 0; o < weight; ++o, ++position) {
        // Offsets up to request_cost are tile 0; with pieces only their first tiles may begin a list.
        const int64_t tile = std::max<int64_t>(0, o - args.params.request_cost);
        if (piece > 0 && tile > 0 && (record.first_tile + tile) % piece != 0) continue;
        while (worker < map.busy.count && start_of(worker) <= position) {
          map.starts[worker++] = {static_cast<int32_t>(b), static_cast<int32_t>(h),
                                  static_cast<int32_t>(tile), 0};
        }
      }
    }
  }
  while (worker <= args.params.workers) map.starts[worker++] = end;
  return {};
}

}  // namespace vivace
