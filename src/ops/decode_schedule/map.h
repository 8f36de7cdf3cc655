#pragma once

#include "src/ops/decode_schedule/view.h"

// What both rows write in the same way: the header and the records, whose sums the cuts follow from.

namespace vivace {

struct ScheduleMap {
  ScheduleView::Start* starts;    ///< workers + 1
  ScheduleView::Record* records;  ///< requests + 1
  int64_t weight;                 ///< of all units
  BusyWorkers busy;               ///< workers that get work
};

/// Writes header and records. Fails when a length or row range is negative, or a sum exceeds int32.
Result<ScheduleMap> write_records(const DecodeScheduleArgs& args);

}  // namespace vivace
