#include "src/engine/operator_times.h"

#include "tests/engine/operator_steps.h"

namespace vivace::engine {
namespace {

const std::string kQwen = std::string(VIVACE_TEST_DATA) + "/tiny-qwen3-moe";
const std::string kHy3 = std::string(VIVACE_TEST_DATA) + "/tiny-hy3";

TEST(OperatorTimes, ChangeNothing) {
  for (const std::string& path : {kQwen, kHy3}) {
    SCOPED_TRACE(path);
    expect_timing_changes_nothing(path, "cpu");
  }
}

/// Calls as their order has them: begin_step(), two calls of one kind and one of another, end_step().
TEST(OperatorTimes, AreMediansOfTheCallsOfAKind) {
  const Stream stream;
  const auto times = OperatorTimes::create(3, stream);
  ASSERT_TRUE(times.ok());
  const auto call = [&](int row, Cost cost) {
    EXPECT_TRUE((*times)->before(0, row, cost, stream).ok());
    EXPECT_TRUE((*times)->after(stream).ok());
  };
  for (const int64_t bytes : {100, 200, 600}) {
    (*times)->begin_step();
    call(0, {.bytes = 7, .flops = 7});
    (*times)->begin_step();  // voids the call before
    call(0, {.bytes = bytes, .flops = 5});
    call(1, {.bytes = 10, .flops = 5});
    call(0, {.bytes = bytes, .flops = 5});
    EXPECT_TRUE((*times)->end_step().ok());
  }
  const std::vector<OperatorTime> medians = (*times)->medians();
  ASSERT_EQ(medians.size(), 2u);
  EXPECT_EQ(medians[0].op, operators()[0].name);
  EXPECT_EQ(medians[0].row, operators()[0].rows[0].name);
  EXPECT_EQ(medians[0].calls, 2);
  EXPECT_EQ(medians[0].flops, 5);
  EXPECT_EQ(medians[0].bytes, 600);  // two calls, the mean over three steps
  EXPECT_EQ(medians[1].row, operators()[0].rows[1].name);
  EXPECT_EQ(medians[1].calls, 1);
  EXPECT_EQ(medians[1].bytes, 10);
}

TEST(OperatorTimes, AStepWithMoreCallsFailsAndTheNextDoesNot) {
  const std::unique_ptr<ModelRunner> runner = decoding_runner(kQwen, "cpu");
  ASSERT_NE(runner, nullptr);
  DecodingRequests requests(*runner);
  ASSERT_FALSE(requests.step().empty()) << requests.failure().message();
  const auto times = OperatorTimes::create(2, runner->stream());
  ASSERT_TRUE(times.ok());
  runner->time_operators(times->get());
  EXPECT_TRUE(requests.step().empty());
  EXPECT_EQ(requests.failure().code(), Code::internal);
  EXPECT_NE(requests.failure().message().find("more than the 2 calls"), std::string::npos)
      << requests.failure().message();
  runner->time_operators(nullptr);
  EXPECT_FALSE(requests.step().empty()) << requests.failure().message();
}

}  // namespace
}  // namespace vivace::engine
