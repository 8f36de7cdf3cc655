#pragma once

#include <cstdlib>
#include <string_view>

namespace vivace {

/// Whether tests that need gigabytes or minutes run: VIVACE_LARGE_TESTS is 1.
inline bool large_tests() {
  const char* value = std::getenv("VIVACE_LARGE_TESTS");
  return value != nullptr && std::string_view(value) == "1";
}

}  // namespace vivace

/// First line of such a test; `needs` says what it takes.
#define VIVACE_LARGE_TEST(needs) \
  if (!::vivace::large_tests()) GTEST_SKIP() << needs << ": VIVACE_LARGE_TESTS=1 runs it"
