#pragma once

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "src/engine/model_runner.h"
#include "tests/engine/traffic.h"

// Random traffic through the engine over a real model, on any device; the oracle is the same model with one
// request at a time.

namespace vivace::engine {

inline std::shared_ptr<const model::Checkpoint> open_model(const std::string& path) {
  auto opened = model::Checkpoint::open(path);
  EXPECT_TRUE(opened.ok()) << opened.status().message();
  return opened.ok() ? std::shared_ptr<const model::Checkpoint>(std::move(*opened)) : nullptr;
}

/// The text of a model's tokens; of none when it has no tokenizer.
inline TokenBytes bytes_of(const model::Checkpoint& checkpoint) {
  if (!checkpoint.tokenizer().present()) return no_text;
  auto made = model::Tokenizer::create(checkpoint.tokenizer());
  EXPECT_TRUE(made.ok()) << made.status().message();
  if (!made.ok()) return no_text;
  return [tokenizer = std::shared_ptr<const model::Tokenizer>(std::move(*made))](
             int32_t id, bool skip_special) { return tokenizer->bytes_of(id, skip_special); };
}

/// A request alone touches its four experts in each of tiny-hy3's two MoE layers, in every step after its prompt.
inline void expect_experts(const EngineStats& stats, int64_t output_tokens) {
  EXPECT_EQ(stats.moe_layers, 2 * (output_tokens - 1));
  EXPECT_EQ(stats.touched_experts, 4 * stats.moe_layers);
}

/// Whether decode steps have the rows of their bucket on a CPU too.
enum class Steps { as_usual, padded };

inline std::unique_ptr<Runner> runner_of(std::shared_ptr<const model::Checkpoint> checkpoint,
                                         const EngineOptions& options, int64_t pages = 0,
                                         Steps steps = Steps::as_usual) {
  auto runner = make_model_runner(std::move(checkpoint), options, pages);
  EXPECT_TRUE(runner.ok()) << runner.status().message();
  if (!runner.ok()) return nullptr;
  if (steps == Steps::padded) (*runner)->pad_decodes();
  return std::move(*runner);
}

/// An engine that answers one request at a time, with room for all of it and no prefix cache.
class Hermit {
 public:
  Hermit(std::shared_ptr<const model::Checkpoint> checkpoint, const TokenBytes& bytes,
         EngineOptions options) {
    options.max_batch = 1;
    options.token_budget = 512;
    options.prefix_cache = false;
    engine_ = start(runner_of(std::move(checkpoint), options), options, bytes);
  }
  /// Asked twice, it answers from memory: the seeds of requests differ.
  Alone answer(const Request& request) {
    const auto [known, added] = answers_.try_emplace(*request.sampling.seed);
    if (added) {
      Answer answer;
      EXPECT_TRUE(engine_->submit(request, answer.sink()).ok());
      answer.wait();
      engine_->drain();
      known->second = {answer.ids(), answer.text()};
    }
    return known->second;
  }

 private:
  std::unique_ptr<Engine> engine_;
  std::map<uint64_t, Alone> answers_;
};

/// Traffic over one model in deterministic mode, under a KV pool of one page more than one request of full length.
class ModelTraffic {
 public:
  ModelTraffic(const std::string& path, Load load, const std::string& device, Steps steps = Steps::as_usual)
      : load_(std::move(load)) {
    load_.options = {.model = path,
                     .device = device,
                     .threads = 2,
                     .deterministic = true,
                     .max_model_len = load_.longest_prompt + load_.longest_output,
                     .max_batch = 32,
                     .token_budget = 256,
                     .page_tokens = 4,
                     .seed = 5};
    const std::shared_ptr<const model::Checkpoint> checkpoint = open_model(path);
    const TokenBytes bytes = bytes_of(*checkpoint);
    const auto hermit = std::make_shared<Hermit>(checkpoint, bytes, load_.options);
    const int64_t pages = pages_for(load_.options.max_model_len, load_.options.page_tokens) + 1;
    target_ = {.make_runner = [checkpoint, options = load_.options, pages,
                               steps] { return runner_of(checkpoint, options, pages, steps); },
               .bytes = bytes,
               .alone = [hermit](const Request& request) { return hermit->answer(request); },
               .vocab = checkpoint->config().vocab};
  }

  /// Every answer is what it is alone, or the test fails.
  Outcome run(uint64_t seed) const {
    const Outcome outcome = Traffic(seed, load_, target_).run();
    EXPECT_EQ(outcome.stats.finished + outcome.stats.cancelled, outcome.requests + 1);
    EXPECT_EQ(outcome.stats.failed, 0);
    EXPECT_EQ(outcome.stats.pages_free + outcome.stats.pages_cached, outcome.stats.pages_total);
    EXPECT_GT(outcome.stats.cancelled, 0);
    EXPECT_GT(outcome.stats.cached_tokens, 0);
    return outcome;
  }

 private:
  Load load_;
  TrafficTarget target_;
};

/// Requests of several lengths and ways to sample, which decode together and end one after the other.
inline std::vector<Request> company(int64_t count, int64_t vocab) {
  std::mt19937 random(static_cast<uint32_t>(count));
  std::vector<Request> requests;
  for (int64_t i = 0; i < count; ++i) {
    Request request{.max_tokens = 24 + 3 * (i % 5), .min_tokens = i % 2 == 0 ? 8 : 0, .ignore_eos = true};
    for (int64_t t = 0; t < 1 + 11 * i; ++t)
      request.prompt_ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(vocab)));
    SamplingParams& sampling = request.sampling;
    sampling.seed = static_cast<uint64_t>(100 * count + i);
    if (i % 3 == 0) sampling.temperature = 0;
    if (i % 3 == 1) {
      sampling.repetition_penalty = 1.3;
      sampling.presence_penalty = 0.5;
    }
    if (i % 4 == 2) sampling.logit_bias = {{5, 4.f}, {6, -4.f}};
    if (i % 2 == 0) sampling.logprobs = 3;
    requests.push_back(std::move(request));
  }
  return requests;
}

/// Batches that fill no bucket, one after the other over one engine: every event of a request is what it is alone.
inline void expect_padded_batches_answer_as_single_requests(const std::string& path,
                                                            const std::string& device) {
  const std::shared_ptr<const model::Checkpoint> checkpoint = open_model(path);
  const TokenBytes bytes = bytes_of(*checkpoint);
  EngineOptions options{.model = path,
                        .device = device,
                        .threads = 2,
                        .deterministic = true,
                        .max_model_len = 256,
                        .max_batch = 16,
                        .page_tokens = 4,
                        .prefix_cache = false};
  std::atomic<int64_t> most = 0;  // decodes in a step of nothing else
  EngineHooks hooks = audited();
  hooks.on_plan = [&](const StepPlan& plan) {
    if (plan.decodes == std::ssize(plan.work)) most = std::max<int64_t>(most, plan.decodes);
  };
  const auto engine = start(runner_of(checkpoint, options, 0, Steps::padded), options, bytes, hooks);
  options.max_batch = 1;
  const auto lonely = start(runner_of(checkpoint, options), options, bytes);
  ASSERT_TRUE(engine != nullptr && lonely != nullptr);
  for (const int64_t count : {1, 3, 5, 9}) {
    SCOPED_TRACE(std::to_string(count) + " requests");
    const std::vector<Request> requests = company(count, checkpoint->config().vocab);
    std::vector<Answer> together(requests.size()), alone(requests.size());
    most = 0;
    // The end of a request without tokens starts them on the engine thread, so that all are there for its next plan.
    const Request starter{.prompt_ids = {1}, .max_tokens = 0};
    ASSERT_TRUE(engine
                    ->submit(starter,
                             [&](const TokenEvent&) {
                               for (size_t i = 0; i < requests.size(); ++i)
                                 EXPECT_TRUE(engine->submit(requests[i], together[i].sink()).ok());
                             })
                    .ok());
    engine->drain();
    for (size_t i = 0; i < requests.size(); ++i)
      ASSERT_TRUE(lonely->submit(requests[i], alone[i].sink()).ok());
    lonely->drain();
    EXPECT_EQ(most, count);
    for (size_t i = 0; i < requests.size(); ++i) {
      const std::vector<TokenEvent> got = together[i].events(), want = alone[i].events();
      ASSERT_EQ(got.size(), want.size());
      EXPECT_EQ(std::ssize(want), *requests[i].max_tokens);
      for (size_t t = 0; t < want.size(); ++t) {
        ASSERT_EQ(got[t].id, want[t].id) << "token " << t << " of request " << i;
        ASSERT_EQ(got[t].text, want[t].text);
        ASSERT_EQ(got[t].logprob, want[t].logprob);
        ASSERT_EQ(got[t].top.size(), want[t].top.size());
        for (size_t a = 0; a < want[t].top.size(); ++a) {
          ASSERT_EQ(got[t].top[a].id, want[t].top[a].id);
          ASSERT_EQ(got[t].top[a].logprob, want[t].top[a].logprob);
        }
      }
    }
  }
}

}  // namespace vivace::engine
