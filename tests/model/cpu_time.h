#pragma once

#include <ctime>

namespace vivace::testing {

/// CPU seconds of the calling thread: unlike the clock on the wall, other programs do not move it.
inline double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace vivace::testing
