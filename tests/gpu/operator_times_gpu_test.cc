// Operator calls of decode steps on the GPU, timed by events inside the steps' graphs.

#include "tests/engine/operator_steps.h"

namespace vivace::engine {
namespace {

TEST(OperatorTimesOnGpu, ChangeNothing) {
  for (const char* model : {"/tiny-qwen3-moe", "/tiny-hy3"}) {
    SCOPED_TRACE(model);
    expect_timing_changes_nothing(VIVACE_TEST_DATA + std::string(model), "cuda");
  }
}

TEST(OperatorTimesOnGpu, AStepWithoutAGraphIsNotTimed) {
  const std::unique_ptr<ModelRunner> runner =
      decoding_runner(VIVACE_TEST_DATA + std::string("/tiny-qwen3-moe"), "cuda");
  ASSERT_NE(runner, nullptr);
  DecodingRequests requests(*runner);
  for (int i = 0; i < 3; ++i) ASSERT_FALSE(requests.step().empty()) << requests.failure().message();
  const auto times = OperatorTimes::create(2, runner->stream());  // too few for a step, so its capture fails
  ASSERT_TRUE(times.ok()) << times.status().message();
  runner->time_operators(times->get());
  EXPECT_TRUE(requests.step().empty());
  EXPECT_NE(requests.failure().message().find(" requests have no graph to be timed in: operator times: "),
            std::string::npos)
      << requests.failure().message();
  runner->time_operators(nullptr);
  EXPECT_FALSE(requests.step().empty()) << requests.failure().message();
}

}  // namespace
}  // namespace vivace::engine
