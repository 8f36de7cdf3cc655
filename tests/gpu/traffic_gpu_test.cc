// The engine on the GPU, with one step in flight while the next is planned.

#include <cstdlib>

#include "src/device/runtime.h"
#include "tests/engine/model_traffic.h"
#include "tests/large.h"

namespace vivace::engine {
namespace {

const std::string kQwen = std::string(VIVACE_TEST_DATA) + "/tiny-qwen3-moe";
const std::string kHy3 = std::string(VIVACE_TEST_DATA) + "/tiny-hy3";
const std::string kDevice = "cuda";

int64_t free_bytes() {
  const auto memory = device::memory_info(0);
  EXPECT_TRUE(memory.ok()) << memory.status().message();
  return memory.ok() ? memory->first : 0;
}

/// How long the large traffic lasts per model: VIVACE_TRAFFIC_SECONDS, or five minutes over both.
double traffic_seconds() {
  const char* text = std::getenv("VIVACE_TRAFFIC_SECONDS");
  return text != nullptr ? std::atof(text) : 150;
}

TEST(EngineOnGpu, AnswersDoNotDependOnCompanyUnderPreemption) {
  const Load load{.requests = 60, .longest_prompt = 400, .longest_output = 160, .cancel_every = 40};
  for (const std::string& path : {kQwen, kHy3}) {
    SCOPED_TRACE(path);
    const ModelTraffic traffic(path, load, kDevice);
    const Outcome first = traffic.run(1);
    EXPECT_GT(first.stats.preemptions, 0);
    EXPECT_EQ(first.plans, traffic.run(1).plans);
  }
}

TEST(EngineOnGpu, BatchesInBucketsAnswerAsSingleRequests) {
  for (const std::string& path : {kQwen, kHy3}) {
    SCOPED_TRACE(path);
    expect_padded_batches_answer_as_single_requests(path, kDevice);
  }
}

TEST(EngineOnGpu, CallsAndExpertsOfReplayedGraphsAreCounted) {
  const auto engine =
      Engine::create({.model = kHy3, .device = kDevice, .max_model_len = 128, .count_experts = true});
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  const auto samplers = [&] {
    int64_t calls = 0;
    for (const RowCount& count : (*engine)->dispatch().counts())
      if (count.op == "sampler") calls += count.calls;
    return calls;
  };
  Request request{.prompt_ids = {1, 2, 3}, .max_tokens = 40, .ignore_eos = true};
  request.sampling.temperature = 0;
  Answer answer;
  ASSERT_TRUE((*engine)->submit(request, answer.sink()).ok());
  (*engine)->drain();
  EXPECT_EQ(answer.ids().size(), 40u);
  EXPECT_EQ(samplers(), 40);
  expect_experts((*engine)->stats(), 40);
}

TEST(EngineOnGpu, largeTraffic) {
  VIVACE_LARGE_TEST("five minutes of traffic, or VIVACE_TRAFFIC_SECONDS for each of two models");
  const double seconds = traffic_seconds();
  for (const std::string& path : {kQwen, kHy3}) {
    SCOPED_TRACE(path);
    const Load brief{.requests = 60, .longest_prompt = 3000, .longest_output = 80, .cancel_every = 16};
    Load load = brief;
    load.requests = INT64_MAX;
    load.seconds = seconds;
    ModelTraffic(path, brief, kDevice).run(1);  // code that is loaded with its first call takes device memory
    const int64_t at_start = free_bytes();
    const Outcome outcome = ModelTraffic(path, load, kDevice).run(2);
    const int64_t after = free_bytes();
    EXPECT_GT(outcome.stats.preemptions, 0);
    EXPECT_GT(outcome.requests, 0);
    std::printf(
        "%s: %ld requests, %ld steps, %ld preemptions, %ld cancelled, %ld prompt tokens of which %ld "
        "cached\n",
        path.c_str(), static_cast<long>(outcome.requests), static_cast<long>(outcome.stats.steps),
        static_cast<long>(outcome.stats.preemptions), static_cast<long>(outcome.stats.cancelled),
        static_cast<long>(outcome.stats.prompt_tokens), static_cast<long>(outcome.stats.cached_tokens));
    // Calls that the brief traffic did not make may have loaded more code, once; a second engine leaves nothing.
    constexpr int64_t kCode = int64_t{64} << 20;
    EXPECT_GE(after, at_start - kCode) << "device memory is lost while the engine runs";
    ModelTraffic(path, brief, kDevice).run(1);
    EXPECT_EQ(free_bytes(), after) << "an engine leaves device memory behind";
  }
}

}  // namespace
}  // namespace vivace::engine
