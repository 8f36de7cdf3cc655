#pragma once

#include <memory>
#include <string>
#include <utility>

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

inline std::unique_ptr<Runner> runner_of(std::shared_ptr<const model::Checkpoint> checkpoint,
                                         const EngineOptions& options, int64_t pages = 0) {
  auto runner = make_model_runner(std::move(checkpoint), options, pages);
  EXPECT_TRUE(runner.ok()) << runner.status().message();
  return runner.ok() ? std::move(*runner) : nullptr;
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
  ModelTraffic(const std::string& path, Load load, const std::string& device) : load_(std::move(load)) {
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
    target_ = {.make_runner = [checkpoint, options = load_.options,
                               pages] { return runner_of(checkpoint, options, pages); },
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

}  // namespace vivace::engine
