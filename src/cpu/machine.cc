#include "src/cpu/machine.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>
#include <thread>

namespace vivace::cpu {

namespace {

/// The number after `key` at the start of a line of `path`; -1 if there is none ("max" included).
int64_t number_in(const char* path, std::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (!line.starts_with(key)) continue;
    const size_t begin = line.find_first_not_of(" \t:", key.size());
    int64_t value = -1;
    if (begin != std::string::npos) std::from_chars(line.data() + begin, line.data() + line.size(), value);
    return value;
  }
  return -1;
}

}  // namespace

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, static_cast<int>(CPU_COUNT(&set)));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int64_t available_memory_bytes() {
  const int64_t kib = number_in("/proc/meminfo", "MemAvailable");
  int64_t available = kib > 0 ? kib * 1024 : 0;
  const int64_t limit = number_in("/sys/fs/cgroup/memory.max", ""),
                used = number_in("/sys/fs/cgroup/memory.current", "");
  if (limit > 0 && used >= 0) {
    const int64_t left = std::max<int64_t>(0, limit - used);
    available = available > 0 ? std::min(available, left) : left;
  }
  return available;
}

}  // namespace vivace::cpu
