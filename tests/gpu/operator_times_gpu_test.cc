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

}  // namespace
}  // namespace vivace::engine
