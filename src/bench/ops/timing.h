#pragma once

#include <cstdint>

#include "src/bench/ops/suite.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::bench {

/// Microseconds per call.
struct Timing {
  double median_us = 0, p10_us = 0, p90_us = 0;
};

/// One graph holds one call per set; it is replayed `replays` times after three warm-up replays, events around each. A
/// figure is a replay's time over the number of sets.
Result<Timing> time_graph(PreparedOp& op, int64_t replays, const Stream& stream);

}  // namespace vivace::bench
