#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "tests/engine/scripted_runner.h"

// Random traffic through the whole engine. All submissions and cancellations happen on the engine thread, at
// moments that the seed decides, so that two runs can be compared step by step.

namespace vivace::engine {
namespace {

struct Load {
  int64_t requests = 10000;
  RunnerShape shape{.vocab = 499, .max_model_len = 2500, .pages = 180, .page_tokens = 16, .eos = {0}};
  EngineOptions options{.max_batch = 48, .token_budget = 192, .seed = 5};
};

struct Outcome {
  std::vector<uint64_t> plans;  ///< a hash of each step's plan
  EngineStats stats;
};

class Traffic {
 public:
  Traffic(uint64_t seed, const Load& load) : load_(load), random_(seed) {
    for (int i = 0; i < 10; ++i) {
      prefixes_.emplace_back(static_cast<size_t>(1 + below(400)));
      for (int32_t& id : prefixes_.back()) id = static_cast<int32_t>(below(499));
    }
  }

  Outcome run() {
    auto model = std::make_unique<PseudoModel>(load_.shape);
    model_ = model.get();
    Outcome outcome;
    EngineHooks hooks = audited();
    hooks.on_plan = [&](const StepPlan& plan) {
      outcome.plans.push_back(std::hash<std::string>()(to_string(plan)));
      for (int64_t i = below(3); i > 0 && open_.size() < 60; --i) submit_next();
      if (below(25) == 0) cancel_one();
    };
    engine_ = start(std::move(model), load_.options, no_text, std::move(hooks));
    // One request without tokens comes from here; its end starts the rest on the engine thread.
    Request starter;
    starter.prompt_ids = {1};
    starter.max_tokens = 0;
    EXPECT_TRUE(engine_->submit(starter, [&](const TokenEvent&) { submit_next(); }).ok());
    std::unique_lock lock(mutex_);
    all_over_.wait(lock, [&] { return over_ == load_.requests; });
    lock.unlock();
    engine_->drain();
    outcome.stats = engine_->stats();
    engine_.reset();
    return outcome;
  }

 private:
  struct Open {
    Request request;
    std::vector<int32_t> ids;
    bool cancelled = false;
  };

  int64_t below(uint64_t n) { return static_cast<int64_t>(random_() % n); }

  /// Prompts of 1..2000 tokens, most below 250, each order of magnitude as often as the others.
  Request next_request() {
    Request request;
    const double longest = below(12) == 0 ? 2000 : 250;
    const auto length = static_cast<size_t>(std::pow(longest + 1, static_cast<double>(below(1000)) / 1000));
    if (below(2) == 0) {
      const auto& prefix = prefixes_[static_cast<size_t>(below(prefixes_.size()))];
      request.prompt_ids.assign(prefix.begin(), prefix.begin() + std::min(prefix.size(), length));
    }
    while (request.prompt_ids.size() < length) request.prompt_ids.push_back(static_cast<int32_t>(below(499)));
    request.max_tokens = below(below(4) == 0 ? 400 : 50);
    if (*request.max_tokens > 0)
      request.min_tokens = below(3) == 0 ? below(static_cast<uint64_t>(*request.max_tokens)) : 0;
    request.ignore_eos = below(3) == 0;
    request.sampling.temperature = static_cast<double>(below(2));
    request.sampling.seed = random_();
    if (below(10) == 0) request.cache_salt = "tenant";
    if (below(4) == 0) request.stop_ids = {static_cast<int32_t>(below(499))};
    return request;
  }

  void submit_next() {
    if (submitted_ == load_.requests) return;
    ++submitted_;
    auto open = std::make_shared<Open>();
    open->request = next_request();
    const auto id =
        engine_->submit(open->request, [this, open](const TokenEvent& event) { receive(*open, event); });
    ASSERT_TRUE(id.ok()) << id.status().message();
    open_.emplace(*id, open);
  }

  void cancel_one() {
    if (open_.empty()) return;
    const auto chosen = std::next(open_.begin(), below(open_.size()));
    chosen->second->cancelled = true;
    engine_->cancel(chosen->first);
  }

  void receive(Open& open, const TokenEvent& event) {
    if (event.id >= 0) {
      ASSERT_FALSE(open.cancelled) << "a token after the cancel";
      open.ids.push_back(event.id);
    }
    if (event.finish == FinishReason::none) return;
    const Request& request = open.request;
    const std::vector<int32_t> want = model_->alone(request, *request.sampling.seed, *request.max_tokens);
    ASSERT_LE(open.ids.size(), want.size());
    ASSERT_TRUE(std::equal(open.ids.begin(), open.ids.end(), want.begin()))
        << "request " << event.request << " differs from what it is alone";
    if (open.cancelled) {
      ASSERT_EQ(event.finish, FinishReason::cancelled);
    } else {
      ASSERT_EQ(open.ids.size(), want.size()) << "request " << event.request;
      ASSERT_TRUE(event.finish == FinishReason::stop || event.finish == FinishReason::length);
    }
    ASSERT_EQ(event.usage.prompt_tokens, std::ssize(request.prompt_ids));
    ASSERT_EQ(event.usage.completion_tokens, std::ssize(open.ids));
    ASSERT_LT(event.usage.cached_tokens, event.usage.prompt_tokens);
    open_.erase(event.request);
    if (open_.empty()) submit_next();
    const std::lock_guard lock(mutex_);
    if (++over_ == load_.requests) all_over_.notify_all();
  }

  const Load load_;
  std::mt19937_64 random_;
  std::vector<std::vector<int32_t>> prefixes_;
  PseudoModel* model_ = nullptr;
  std::unique_ptr<Engine> engine_;
  std::map<RequestId, std::shared_ptr<Open>> open_;
  int64_t submitted_ = 0;
  std::mutex mutex_;
  std::condition_variable all_over_;
  int64_t over_ = 0;
};

TEST(EngineTraffic, EveryAnswerIsWhatItIsAloneAndPlansRepeat) {
  const Load load;
  const Outcome first = Traffic(1, load).run();
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(first.stats.finished + first.stats.cancelled, load.requests + 1);
  EXPECT_EQ(first.stats.failed, 0);
  EXPECT_EQ(first.stats.pages_free + first.stats.pages_cached, first.stats.pages_total);
  // The traffic is what it is meant to be.
  EXPECT_GT(first.stats.preemptions, 100);
  EXPECT_GT(first.stats.cancelled, 500);
  EXPECT_GT(first.stats.cached_tokens, first.stats.prompt_tokens / 30);
  RecordProperty("steps", static_cast<int>(first.stats.steps));

  const Outcome second = Traffic(1, load).run();
  ASSERT_EQ(first.plans.size(), second.plans.size());
  const auto differs = std::ranges::mismatch(first.plans, second.plans);
  EXPECT_TRUE(differs.in1 == first.plans.end())
      << "plans differ at step " << differs.in1 - first.plans.begin();
}

TEST(EngineTraffic, OtherShapes) {
  for (uint64_t seed = 2; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    Load load{.requests = 300};
    load.shape.page_tokens = int64_t{1} << (seed % 9);
    load.shape.pages = 2500 / load.shape.page_tokens + 1 + static_cast<int64_t>(seed);
    load.options.max_batch = 1 + static_cast<int64_t>(seed * seed % 30);
    load.options.token_budget = load.options.max_batch + static_cast<int64_t>(seed * 37 % 200);
    load.options.prefix_cache = seed % 3 != 0;
    const Outcome outcome = Traffic(seed, load).run();
    ASSERT_FALSE(HasFailure());
    EXPECT_EQ(outcome.stats.finished + outcome.stats.cancelled, load.requests + 1);
  }
}

}  // namespace
}  // namespace vivace::engine
