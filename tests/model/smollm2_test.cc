#include <filesystem>

#include "tests/model/model_harness.h"
#include "tests/model/sanitizer.h"

// The real model: SmolLM2-135M-Instruct in Q4_1. `./run` fetches the file before it runs the tests.

namespace vivace::testing {
namespace {

class SmolLm2 : public ::testing::TestWithParam<bool> {};

TEST_P(SmolLm2, FollowsTheFloat32References) {
  const bool exact = GetParam();
  const std::string path = std::string(VIVACE_SOURCE_DIR) + "/build/models/SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!std::filesystem::exists(path))
    GTEST_SKIP() << "no " << path << ": `./run demo` or `./run test` fetches it";
  auto references = read_json(std::string(VIVACE_TEST_DATA) + "/smollm2/references.json");
  LoadedModel loaded(open_checkpoint(path), {.exact = exact, .max_model_len = 512}, 128);
  ASSERT_TRUE(loaded.ok());
  // Exact: both are float32 on the same weights. Otherwise activations are rounded to 8 bits in groups of 32 in 210
  // matrices: a group with one large activation loses the small ones, and log-probabilities move by up to half a unit.
  const Closeness closeness = exact ? Closeness{.smallest_gap = 0.02, .log_probability = 0.01}
                                    : Closeness{.smallest_gap = 0.3, .log_probability = 0.6};
  if (kSanitized) {  // the same code in a fraction of the time
    auto& cases = references.at("cases");
    cases.erase(cases.begin() + 1, cases.end());
    EXPECT_GT(expect_references(loaded, references, closeness), 0);
    return;
  }
  // Of 320 greedy ids, those before the first gap of their case that is too small.
  EXPECT_EQ(expect_references(loaded, references, closeness), exact ? 262 : 83);
}

INSTANTIATE_TEST_SUITE_P(Modes, SmolLm2, ::testing::Values(false, true),
                         [](const auto& mode) { return mode.param ? "exact" : "quantised"; });

}  // namespace
}  // namespace vivace::testing
