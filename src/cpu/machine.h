#pragma once

#include <cstdint>
#include <string>

namespace vivace::cpu {

/// What the control groups of this process allow; 0: no limit. Both versions are read, a group and those above it.
struct GroupLimits {
  double cores = 0;          ///< processor time per time
  int64_t memory_bytes = 0;  ///< the smallest limit
  int64_t memory_left = -1;  ///< under the limits, file pages that can be dropped included; -1: no limit
};
/// `root` and `self`: /sys/fs/cgroup and /proc/self/cgroup, elsewhere in tests. What cannot be read limits nothing.
GroupLimits group_limits(const std::string& root, const std::string& self);

/// Cores that this process may use: its affinity mask, or the whole cores of its quota when that is less; at least 1.
int usable_cores();

/// The machine's memory, or the container's limit when that is less; 0 when the system does not say.
int64_t memory_bytes();

/// Memory that can be taken without swapping: the system's estimate, or what a container's limit leaves when that is
/// less; 0 when the system does not say.
int64_t available_memory_bytes();

}  // namespace vivace::cpu
