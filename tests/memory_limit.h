#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace vivace::testing {

/// While it lives, this process may map `room` bytes more than it has. Not under sanitizers: they map terabytes.
class MemoryLimit {
 public:
  explicit MemoryLimit(int64_t room) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void)room;
#else
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    if (pages <= 0 || getrlimit(RLIMIT_AS, &before_) != 0) return;
    rlimit tight = before_;
    tight.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + room);
    holds_ = setrlimit(RLIMIT_AS, &tight) == 0;
#endif
  }
  ~MemoryLimit() {
    if (holds_) setrlimit(RLIMIT_AS, &before_);
  }
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

  bool holds() const {
    return holds_;
  }

 private:
  rlimit before_{};
  bool holds_ = false;
};

}  // namespace vivace::testing
