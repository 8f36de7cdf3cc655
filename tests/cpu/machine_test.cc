#include "src/cpu/machine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace vivace::cpu {
namespace {

/// A folder with the files of control groups, gone afterwards.
class Groups {
 public:
  Groups() : root_(::testing::TempDir() + "vivace_groups_" + std::to_string(::getpid())) {}
  ~Groups() { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + "/" + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  GroupLimits limits() const { return group_limits(root_ + "/fs", root_ + "/self"); }

 private:
  std::string root_;
};

TEST(Machine, LimitsOfVersion2AndOfTheGroupsAbove) {
  Groups groups;
  groups.write("self", "0::/slice/job\n");
  groups.write("fs/slice/job/cpu.max", "max 100000\n");
  groups.write("fs/slice/cpu.max", "250000 100000\n");
  groups.write("fs/slice/job/memory.max", "1000000\n");
  groups.write("fs/slice/job/memory.current", "900000\n");
  groups.write("fs/slice/job/memory.stat", "anon 100000\nfile 800000\ninactive_file 700000\n");
  groups.write("fs/slice/memory.max", "max\n");
  const GroupLimits limits = groups.limits();
  EXPECT_EQ(limits.cores, 2.5);
  EXPECT_EQ(limits.memory_bytes, 1000000);
  EXPECT_EQ(limits.memory_left, 800000) << "files in the page cache can be dropped";
}

TEST(Machine, LimitsOfVersion1InAContainer) {
  Groups groups;
  groups.write("self", "4:memory:/host/path/of/it\n1:cpu,cpuacct:/\n0::/\n");
  groups.write("fs/cpu/cpu.cfs_quota_us", "150000\n");
  groups.write("fs/cpu/cpu.cfs_period_us", "100000\n");
  groups.write("fs/memory/memory.limit_in_bytes", "5000\n");
  groups.write("fs/memory/memory.usage_in_bytes", "4000\n");
  groups.write("fs/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n");
  EXPECT_EQ(groups.limits().cores, 1.5);
  EXPECT_EQ(groups.limits().memory_bytes, 5000);
  EXPECT_EQ(groups.limits().memory_left, 1500);
}

TEST(Machine, NoLimits) {
  Groups groups;
  groups.write("self", "1:cpu:/\n0::/\n");
  groups.write("fs/cpu/cpu.cfs_quota_us", "-1\n");
  groups.write("fs/cpu/cpu.cfs_period_us", "100000\n");
  const GroupLimits limits = groups.limits();
  EXPECT_EQ(limits.cores, 0);
  EXPECT_EQ(limits.memory_bytes, 0);
  EXPECT_EQ(limits.memory_left, -1);
  EXPECT_GE(usable_cores(), 1);
  EXPECT_GT(memory_bytes(), 0);
  EXPECT_GT(available_memory_bytes(), 0);
}

}  // namespace
}  // namespace vivace::cpu
