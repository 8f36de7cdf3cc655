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

constexpr const char *kGroups = "/sys/fs/cgroup", *kSelf = "/proc/self/cgroup";

/// The number after `key` at the start of a line of `path`; -1 if there is none ("max" included).
int64_t number_in(const std::string& path, std::string_view key) {
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

/// The names of a version's files, and of a line of its memory.stat.
struct GroupFiles {
  const char *memory_limit, *memory_used, *inactive_file;
};
constexpr GroupFiles kVersion1{"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file "};
constexpr GroupFiles kVersion2{"/memory.max", "/memory.current", "inactive_file "};

void add_memory(const std::string& folder, const GroupFiles& files, GroupLimits& limits) {
  const int64_t limit = number_in(folder + files.memory_limit, "");
  if (limit <= 0) return;
  limits.memory_bytes = limits.memory_bytes > 0 ? std::min(limits.memory_bytes, limit) : limit;
  const int64_t used = number_in(folder + files.memory_used, "");
  if (used < 0) return;
  const int64_t droppable = std::max<int64_t>(0, number_in(folder + "/memory.stat", files.inactive_file));
  const int64_t left = std::max<int64_t>(0, limit - std::max<int64_t>(0, used - droppable));
  limits.memory_left = limits.memory_left < 0 ? left : std::min(limits.memory_left, left);
}

void add_cores(int64_t quota, int64_t period, GroupLimits& limits) {
  if (quota <= 0 || period <= 0) return;
  const double cores = static_cast<double>(quota) / static_cast<double>(period);
  limits.cores = limits.cores > 0 ? std::min(limits.cores, cores) : cores;
}

void add_cores_of_version_2(const std::string& folder, GroupLimits& limits) {
  std::ifstream file(folder + "/cpu.max");
  int64_t quota = 0, period = 0;
  if (file >> quota >> period) add_cores(quota, period, limits);  // "max 100000" is no number
}

/// Calls visit(folder) for the group and all above it. In a container the path may be the host's and missing; its root
/// is then the group.
template <class Visit>
void for_group_and_above(const std::string& root, std::string group, Visit&& visit) {
  while (!group.empty() && group != "/") {
    visit(root + group);
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
  visit(root);
}

}  // namespace

GroupLimits group_limits(const std::string& root, const std::string& self) {
  GroupLimits limits;
  std::ifstream groups(self);
  std::string line;  // "4:memory:/path" of version 1, "0::/path" of version 2
  while (std::getline(groups, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      for_group_and_above(root, group, [&](const std::string& folder) {
        add_memory(folder, kVersion2, limits);
        add_cores_of_version_2(folder, limits);
      });
    }
    if (controllers.find(",memory,") != std::string::npos) {
      for_group_and_above(root + "/memory", group,
                          [&](const std::string& folder) { add_memory(folder, kVersion1, limits); });
    }
    if (controllers.find(",cpu,") != std::string::npos) {
      for_group_and_above(root + "/cpu", group, [&](const std::string& folder) {
        add_cores(number_in(folder + "/cpu.cfs_quota_us", ""), number_in(folder + "/cpu.cfs_period_us", ""),
                  limits);
      });
    }
  }
  return limits;
}

int usable_cores() {
  cpu_set_t set;
  int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  const double quota = group_limits(kGroups, kSelf).cores;
  if (quota > 0 && quota < cores) cores = static_cast<int>(quota);
  return std::max(1, cores);
}

int64_t memory_bytes() {
  const int64_t kib = number_in("/proc/meminfo", "MemTotal");
  const int64_t total = kib > 0 ? kib * 1024 : 0, limit = group_limits(kGroups, kSelf).memory_bytes;
  return limit > 0 && (total == 0 || limit < total) ? limit : total;
}

int64_t available_memory_bytes() {
  const int64_t kib = number_in("/proc/meminfo", "MemAvailable");
  const int64_t available = kib > 0 ? kib * 1024 : 0, left = group_limits(kGroups, kSelf).memory_left;
  return left >= 0 && (available == 0 || left < available) ? left : available;
}

}  // namespace vivace::cpu
