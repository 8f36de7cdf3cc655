#pragma once

#include <cstdint>
#include <span>

#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::testing {

struct CopyTask {
  uint8_t* to;
  const uint8_t* from;
  int64_t bytes;
};

/// A kernel that lets the next one start at once and copies only after a while: whatever of `to` the next kernel reads
/// before it has waited is what was there before. `tasks` is memory of the device.
Status late_copy(std::span<const CopyTask> tasks, const Stream& stream);

}  // namespace vivace::testing
