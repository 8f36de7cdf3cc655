#include "src/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <system_error>

#include "tests/memory_limit.h"

namespace vivace::cpu {
namespace {

TEST(ThreadPool, EndsTheThreadsThatStartedWhenOneDoesNot) {
  {
    const testing::MemoryLimit limit(int64_t{128} << 20);
    if (!limit.holds()) GTEST_SKIP() << "no limit of the address space here (sanitizers reserve it)";
    EXPECT_THROW(ThreadPool(1000), std::system_error) << "1000 stacks do not fit into the limit";
  }
  ThreadPool pool(4);
  std::atomic<int64_t> sum{0};
  pool.parallel_for(100, [&](int64_t task, int) { sum += task; });
  EXPECT_EQ(sum, 4950);
}

}  // namespace
}  // namespace vivace::cpu
