// Memory that runs out anywhere on the engine thread ends requests and never the engine. This program replaces the
// global allocation functions, so it is one of its own.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/engine/scripted_runner.h"

namespace {

// Of the calling thread: allocations [begin, begin + count) from now on fail.
thread_local int64_t fail_begin = -1, fail_count = 0;

void* allocate(size_t bytes) {
  if (fail_begin >= 0) {
    if (fail_begin-- == 0) {
      fail_begin = --fail_count > 0 ? 0 : -1;
      throw std::bad_alloc();
    }
  }
  void* memory = std::malloc(std::max<size_t>(bytes, 1));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) {
  return allocate(bytes);
}
void* operator new[](size_t bytes) {
  return allocate(bytes);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, size_t) noexcept {
  std::free(memory);
}

namespace vivace::engine {
namespace {

/// The pseudo-model of the other tests, without their checks: its own allocations would be most of a step's.
class Plain : public ScriptedRunner {
 public:
  using ScriptedRunner::ScriptedRunner;
  Status enqueue(const StepInput& input) override {
    std::vector<Sampled> sampled;
    for (const SampleSlot& slot : input.samples)
      sampled.push_back({.id = static_cast<int32_t>(slot.position + 1)});
    in_flight_.push_back(std::move(sampled));
    return {};
  }
  Status finish(std::vector<Sampled>& sampled) override {
    sampled = std::move(in_flight_.front());
    in_flight_.pop_front();
    return {};
  }

 private:
  std::deque<std::vector<Sampled>> in_flight_;
};

struct After {
  int64_t failed = 0, finished = 0;
  bool reached = false;  ///< the failure happened
};

/// Six requests with a common prefix and too few pages for all, while `count` allocations fail from the `begin`th of
/// step `at_step` on; then one more request.
After run_with_failure(int64_t at_step, int64_t begin, int64_t count) {
  After run;
  int64_t steps = 0;
  EngineHooks hooks{.on_plan =
                        [&](const StepPlan&) {
                          if (++steps == at_step) fail_begin = begin, fail_count = count;
                        },
                    .on_audit =
                        [&](const Status& status) {
                          const int64_t armed = fail_begin;
                          fail_begin = -1;
                          EXPECT_TRUE(status.ok()) << status.message();
                          fail_begin = armed;
                        }};
  auto engine = start(std::make_unique<Plain>(RunnerShape{.pages = 12, .page_tokens = 4}), {.max_batch = 4},
                      no_text, hooks);
  std::atomic<int64_t> ends{0}, answered{0};
  const auto sink = [&](const TokenEvent& event) {
    if (event.finish != FinishReason::none) ++ends;
    if (event.finish == FinishReason::length) ++answered;
  };
  Request request;
  request.prompt_ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  request.max_tokens = 12;
  request.ignore_eos = true;
  request.stop = {"never"};
  for (int i = 0; i < 6; ++i) {
    request.prompt_ids.back() = 20 + i;
    EXPECT_TRUE(engine->submit(request, sink).ok());
  }
  engine->drain();
  EXPECT_EQ(ends, 6);
  const EngineStats stats = engine->stats();
  run.failed = stats.failed;
  run.finished = stats.finished;
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.pages_free + stats.pages_cached, stats.pages_total);

  // What is left of the failure must not hit the next request: it is armed on the engine thread until used up.
  Answer next;
  std::atomic<bool> disarmed{false};
  EXPECT_TRUE(engine
                  ->submit({.prompt_ids = {1}, .max_tokens = 0},
                           [&](const TokenEvent&) {
                             run.reached = fail_begin < 0;
                             fail_begin = -1;
                             disarmed = true;
                           })
                  .ok());
  engine->drain();
  EXPECT_TRUE(disarmed);
  const int64_t before = answered;
  EXPECT_TRUE(engine->submit(request, sink).ok());
  engine->drain();
  EXPECT_EQ(answered, before + 1) << "the engine goes on";
  return run;
}

TEST_P(EngineDepths, AllocationFailureEndsRequestsAndNeverTheEngine) {
  for (const int64_t count : {1, 4}) {
    for (const int64_t step : {1, 2, 6}) {
      int64_t hit = 0;
      for (int64_t begin = 0; begin < 400; ++begin) {
        SCOPED_TRACE(::testing::Message()
                     << "step " << step << ", allocation " << begin << ", " << count << " fail");
        const After run = run_with_failure(step, begin, count);
        if (!run.reached) break;
        EXPECT_EQ(run.failed + run.finished, 6);
        hit += run.failed > 0;
        if (::testing::Test::HasFailure()) return;
      }
      EXPECT_GT(hit, 3) << "few allocations were reached";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllocationFailure, EngineDepths, ::testing::Bool(), name_of_depth);

}  // namespace
}  // namespace vivace::engine
