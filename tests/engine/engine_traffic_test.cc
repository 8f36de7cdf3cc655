#include "tests/engine/traffic.h"

namespace vivace::engine {
namespace {

RunnerShape small_shape() {
  return {.vocab = 499, .max_model_len = 2500, .pages = 180, .page_tokens = 16, .eos = {0}};
}

TrafficTarget pseudo_model(const RunnerShape& shape) {
  return {.make_runner = [shape] { return std::make_unique<PseudoModel>(shape); },
          .alone =
              [model = std::make_shared<PseudoModel>(shape)](const Request& request) {
                return Alone{model->alone(request, *request.sampling.seed, *request.max_tokens), {}};
              },
          .vocab = shape.vocab};
}

TEST_P(EngineDepths, EveryAnswerIsWhatItIsAloneAndPlansRepeat) {
  const Load load;
  const Outcome first = Traffic(1, load, pseudo_model(small_shape())).run();
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(first.stats.finished + first.stats.cancelled, load.requests + 1);
  EXPECT_EQ(first.stats.failed, 0);
  EXPECT_EQ(first.stats.pages_free + first.stats.pages_cached, first.stats.pages_total);
  // The traffic is what it is meant to be.
  EXPECT_GT(first.stats.preemptions, 100);
  EXPECT_GT(first.stats.cancelled, 500);
  EXPECT_GT(first.stats.cached_tokens, first.stats.prompt_tokens / 30);
  RecordProperty("steps", static_cast<int>(first.stats.steps));

  const Outcome second = Traffic(1, load, pseudo_model(small_shape())).run();
  ASSERT_EQ(first.plans.size(), second.plans.size());
  const auto differs = std::ranges::mismatch(first.plans, second.plans);
  EXPECT_TRUE(differs.in1 == first.plans.end())
      << "plans differ at step " << differs.in1 - first.plans.begin();
}

TEST_P(EngineDepths, OtherShapes) {
  for (uint64_t seed = 2; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    Load load{.requests = 300};
    RunnerShape shape = small_shape();
    shape.page_tokens = int64_t{1} << (seed % 9);
    shape.pages = 2500 / shape.page_tokens + 1 + static_cast<int64_t>(seed);
    load.options.max_batch = 1 + static_cast<int64_t>(seed * seed % 30);
    load.options.token_budget = load.options.max_batch + static_cast<int64_t>(seed * 37 % 200);
    load.options.prefix_cache = seed % 3 != 0;
    const Outcome outcome = Traffic(seed, load, pseudo_model(shape)).run();
    ASSERT_FALSE(HasFailure());
    EXPECT_EQ(outcome.stats.finished + outcome.stats.cancelled, load.requests + 1);
  }
}

INSTANTIATE_TEST_SUITE_P(EngineTraffic, EngineDepths, ::testing::Bool(), name_of_depth);

}  // namespace
}  // namespace vivace::engine
