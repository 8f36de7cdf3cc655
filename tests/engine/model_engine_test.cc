#include "tests/engine/model_traffic.h"
#include "tests/large.h"
#include "tests/memory_limit.h"

// The engine over real models.

namespace vivace::engine {
namespace {

const std::string kQwen = std::string(VIVACE_TEST_DATA) + "/tiny-qwen3-moe";
const std::string kHy3 = std::string(VIVACE_TEST_DATA) + "/tiny-hy3";

/// Returns the statistics of the traffic.
EngineStats expect_answers_do_not_depend_on_company(const std::string& path, const Load& load) {
  const ModelTraffic traffic(path, load, "cpu");
  const Outcome first = traffic.run(1);
  EXPECT_EQ(first.plans, traffic.run(1).plans);
  return first.stats;
}

TEST(ModelEngine, TrafficOfLongPrompts) {
  for (const std::string& path : {kQwen, kHy3}) {
    SCOPED_TRACE(path);
    expect_answers_do_not_depend_on_company(path, {.requests = 60, .longest_output = 40, .cancel_every = 10});
  }
}

TEST(ModelEngine, TrafficUnderPreemption) {
  const Load load{.requests = 50, .longest_prompt = 400, .longest_output = 160, .cancel_every = 40};
  for (const std::string& path : {kQwen, kHy3}) {
    SCOPED_TRACE(path);
    EXPECT_GT(expect_answers_do_not_depend_on_company(path, load).preemptions, 0);
  }
}

// What runs in graphs on a GPU, without them.
TEST(ModelEngine, TrafficInPaddedSteps) {
  const Load load{.requests = 40, .longest_prompt = 300, .longest_output = 80, .cancel_every = 10};
  for (const std::string& path : {kQwen, kHy3}) {
    SCOPED_TRACE(path);
    const ModelTraffic traffic(path, load, "cpu", Steps::padded);
    EXPECT_EQ(traffic.run(1).plans, ModelTraffic(path, load, "cpu").run(1).plans);
  }
}

TEST(ModelEngine, PaddedBatchesAnswerAsSingleRequests) {
  for (const std::string& path : {kQwen, kHy3}) {
    SCOPED_TRACE(path);
    expect_padded_batches_answer_as_single_requests(path, "cpu");
  }
}

TEST(ModelEngine, largeTraffic) {
  VIVACE_LARGE_TEST("10^4 requests take about an hour");
  const Load load{.requests = 5000, .longest_output = 80, .cancel_every = 16};
  for (const std::string& path : {kQwen, kHy3}) {
    SCOPED_TRACE(path);
    EXPECT_GT(expect_answers_do_not_depend_on_company(path, load).preemptions, 0);
  }
}

TEST(ModelEngine, LogProbabilitiesAndAlternatives) {
  EngineOptions options{.model = kHy3, .threads = 1, .max_model_len = 128};
  auto engine = Engine::create(options);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  Request request{.prompt_ids = {234}, .max_tokens = 3, .ignore_eos = true};
  request.sampling.temperature = 0;
  request.sampling.logprobs = 4;
  Request silent = request;
  silent.sampling.logprobs = -1;
  Answer with, without;
  ASSERT_TRUE((*engine)->submit(request, with.sink()).ok());
  ASSERT_TRUE((*engine)->submit(silent, without.sink()).ok());
  with.wait();
  without.wait();
  EXPECT_EQ(with.ids(), without.ids());
  EXPECT_EQ(with.text(), "") << "this model has no tokenizer";
  const TokenEvent first = with.events().front();
  // tests/data/tiny-hy3/references.json, first case.
  ASSERT_EQ(first.top.size(), 4u);
  const std::vector<int32_t> ids = {351, 509, 484, 87};
  const std::vector<double> logprobs = {-4.416545, -4.41703, -4.515518, -4.624217};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(first.top[i].id, ids[i]);
    EXPECT_NEAR(first.top[i].logprob, logprobs[i], 0.01);
  }
  EXPECT_EQ(first.id, ids[0]);
  EXPECT_EQ(first.logprob, first.top[0].logprob);
  EXPECT_TRUE(without.events().front().top.empty());
}

TEST(ModelEngine, CountsExpertsWhenAsked) {
  for (const bool counts : {false, true}) {
    const auto engine = Engine::create({.model = kHy3, .max_model_len = 128, .count_experts = counts});
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    Answer answer;
    const Request request{.prompt_ids = {1, 2, 3}, .max_tokens = 40, .ignore_eos = true};
    ASSERT_TRUE((*engine)->submit(request, answer.sink()).ok());
    (*engine)->drain();
    if (counts) {
      expect_experts((*engine)->stats(), 40);
    } else {
      EXPECT_EQ((*engine)->stats().moe_layers, 0);
    }
  }
}

TEST(ModelEngine, RefusesOptionsThatDoNotFit) {
  const auto refused = [](const EngineOptions& options, Code code, std::initializer_list<const char*> texts) {
    const auto engine = Engine::create(options);
    ASSERT_FALSE(engine.ok());
    EXPECT_EQ(engine.status().code(), code) << engine.status().message();
    for (const char* text : texts) {
      EXPECT_NE(engine.status().message().find(text), std::string::npos) << engine.status().message();
    }
  };
  refused({.model = "/nowhere/model.gguf"}, Code::not_found, {"/nowhere/model.gguf"});
  refused({.model = kHy3, .device = "cuda:0"}, Code::unsupported, {"device is 'cuda:0'"});
  refused({.model = kHy3, .device = "tpu"}, Code::invalid_argument, {"device is 'tpu'"});
  refused({.model = kHy3, .threads = -1}, Code::invalid_argument, {"threads is -1"});
  refused({.model = kHy3, .prefer = "linear=warp"}, Code::not_found, {"warp"});
  refused({.model = kHy3, .max_model_len = 5000}, Code::invalid_argument, {"max_model_len is 5000", "4096"});
  refused({.model = kHy3, .max_batch = 0}, Code::invalid_argument, {"max_batch is 0"});
  refused({.model = kHy3, .token_budget = 0}, Code::invalid_argument, {"token_budget is 0"});
  refused({.model = kHy3, .page_tokens = 24}, Code::invalid_argument, {"page_tokens is 24", "power of two"});
  refused({.model = kHy3, .kv_memory_bytes = -1}, Code::invalid_argument, {"kv_memory_bytes is -1"});
  refused({.model = kHy3, .max_waiting = 0}, Code::invalid_argument, {"max_waiting is 0"});
  refused({.model = kHy3, .kv_memory_bytes = int64_t{1} << 60}, Code::out_of_memory,
          {"kv_memory_bytes is 1152921504606846976", "available", "--kv-memory"});
  // One page of 16 tokens is 3 layers * 2 * 16 * 128 * 4 bytes = 49152; 4096 tokens are 256 pages.
  refused({.model = kHy3, .kv_memory_bytes = 1 << 20}, Code::invalid_argument,
          {"kv_memory_bytes is 1048576", "12582912", "--kv-memory", "--max-model-len"});
}

TEST(ModelEngine, AFallbackOnAGpuIsALine) {
  const model::OpUse slow{
      .layer = 0,
      .op = "linear",
      .phase = model::Phase::decode,
      .batch = 4,
      .choice = {.row = "cuda.mma", .refused = {{"sm90.fp8", "needs x of type fp8, got bf16"}}}};
  const model::OpUse other_device{.layer = 1,
                                  .op = "linear",
                                  .phase = model::Phase::decode,
                                  .batch = 4,
                                  .choice = {.row = "cpu.f32", .refused = {{"cuda.mma", "runs on cuda"}}}};
  const model::OpUse variant{.layer = 2,
                             .op = "linear",
                             .phase = model::Phase::decode,
                             .batch = 4,
                             .choice = {.row = "cuda.cublaslt.fp8",
                                        .refused = {{"cuda.cublaslt", "needs x of type bf16, got fp8"}}}};
  EXPECT_EQ(fallback_lines({slow, other_device, variant, slow}),
            std::vector<std::string>{
                "linear: cuda.mma runs instead of sm90.fp8, which needs x of type fp8, got bf16"});
  model::OpUse both = slow;  // only the row for this type has a reason that says something
  both.choice.refused = {{"cuda.cublaslt", "needs batch_invariant = 0, got 1"},
                         {"cuda.cublaslt.fp8", "needs x of type fp8, got bf16"}};
  EXPECT_EQ(fallback_lines({both}),
            std::vector<std::string>{
                "linear: cuda.mma runs instead of cuda.cublaslt, which needs batch_invariant = 0, got 1"});
  both.choice.refused = {{"cuda.cublaslt", "needs x of type bf16, got fp8"},
                         {"cuda.cublaslt.fp8", "needs x_scaling = 0, got 2"}};
  EXPECT_EQ(fallback_lines({both}),
            std::vector<std::string>{
                "linear: cuda.mma runs instead of cuda.cublaslt.fp8, which needs x_scaling = 0, got 2"});
}

TEST(ModelEngine, ThreadsThatDoNotStartAreAStatus) {
  const EngineOptions options{.model = kHy3, .threads = 1000, .max_model_len = 64};
  const testing::MemoryLimit limit(int64_t{512} << 20);
  if (!limit.holds()) GTEST_SKIP() << "no limit of the address space here (sanitizers reserve it)";
  const auto engine = Engine::create(options);
  ASSERT_FALSE(engine.ok()) << "1000 stacks do not fit into the limit";
  EXPECT_NE(engine.status().message().find("threads is 1000"), std::string::npos)
      << engine.status().message();
}

TEST(PagesOf, HoldsAFewFullRequestsInAQuarterOfTheMemory) {
  const PoolSize size{
      .page_bytes = 1000, .pages_per_request = 10, .max_batch = 64, .available_bytes = 1'000'000};
  const auto with = [&](auto change) {
    PoolSize changed = size;
    change(changed);
    const auto pages = pages_of(changed);
    return pages.ok() ? *pages : -1;
  };
  EXPECT_EQ(with([](PoolSize&) {}), 80) << "eight requests";
  EXPECT_EQ(with([](PoolSize& s) { s.max_batch = 3; }), 30);
  EXPECT_EQ(with([](PoolSize& s) { s.available_bytes = 200'000; }), 50) << "a quarter of the memory";
  EXPECT_EQ(with([](PoolSize& s) { s.available_bytes = 20'000; }), 10) << "at least one request";
  EXPECT_EQ(with([](PoolSize& s) { s.available_bytes = 9'999; }), -1);
  EXPECT_EQ(with([](PoolSize& s) { s.available_bytes = 0; }), 80) << "unknown memory";
  EXPECT_EQ(with([](PoolSize& s) { s.kv_memory_bytes = 10'000; }), 10);
  EXPECT_EQ(with([](PoolSize& s) { s.kv_memory_bytes = 9'999; }), -1);
  EXPECT_EQ(with([](PoolSize& s) { s.kv_memory_bytes = 500'500; }), 500);
  EXPECT_EQ(with([](PoolSize& s) { s.kv_memory_bytes = 1'000'001; }), -1) << "more than is available";
  EXPECT_EQ(with([](PoolSize& s) { s.kv_memory_bytes = -1; }), -1);
}

TEST(PagesOf, IsBoundedByWhatRequestsCanUse) {
  const PoolSize huge{.page_bytes = 1,
                      .pages_per_request = 10,
                      .kv_memory_bytes = INT64_MAX,
                      .max_batch = 4,
                      .available_bytes = 0};
  const auto pages = pages_of(huge);
  ASSERT_TRUE(pages.ok()) << pages.status().message();
  EXPECT_EQ(*pages, 680) << "4 that run and 64 in the cache";
  PoolSize overflows = huge;
  overflows.pages_per_request = int64_t{1} << 40;
  overflows.page_bytes = int64_t{1} << 40;
  EXPECT_EQ(pages_of(overflows).status().code(), Code::out_of_memory);
  overflows.kv_memory_bytes = 0;
  EXPECT_EQ(pages_of(overflows).status().code(), Code::out_of_memory);
}

}  // namespace
}  // namespace vivace::engine
