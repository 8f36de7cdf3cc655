#pragma once

#include <cstdint>

namespace vivace {

/// What a call must move and compute at least: the floor that a measured time stands beside.
struct Cost {
  int64_t bytes = 0;  ///< read and written once each, caches ignored
  int64_t flops = 0;
};

}  // namespace vivace
