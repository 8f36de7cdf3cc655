#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "tests/engine/scripted_runner.h"

// Random traffic through the whole engine. All submissions and cancellations happen on the engine thread, at
// moments that the seed decides, so that two runs can be compared step by step.

namespace vivace::engine {

/// What a request generates in no company.
struct Alone {
  std::vector<int32_t> ids;
  std::string text;
};

/// The engine under test, and the oracle that knows every answer.
struct TrafficTarget {
  std::function<std::unique_ptr<Runner>()> make_runner;
  TokenBytes bytes = no_text;
  std::function<Alone(const Request&)> alone;
  int64_t vocab = 0;
};

struct Load {
  int64_t requests = 10000;       ///< at most
  double seconds = 0;             ///< > 0: no request is submitted later than this
  int64_t longest_prompt = 2000;  ///< of one request in twelve; the others stop at an eighth of it
  int64_t longest_output = 400;   ///< of one request in four; the others stop at an eighth of it
  uint64_t cancel_every = 25;     ///< steps, on average
  EngineOptions options{.max_batch = 48, .token_budget = 192, .seed = 5};
};

struct Outcome {
  std::vector<uint64_t> plans;  ///< a hash of each step's plan
  EngineStats stats;
  int64_t requests = 0;
};

class Traffic {
 public:
  Traffic(uint64_t seed, const Load& load, const TrafficTarget& target)
      : load_(load), target_(target), random_(seed) {
    for (int i = 0; i < 10; ++i) {
      prefixes_.emplace_back(static_cast<size_t>(1 + below(400)));
      for (int32_t& id : prefixes_.back()) id = token();
    }
  }

  Outcome run() {
    Outcome outcome;
    EngineHooks hooks = audited();
    hooks.on_plan = [&](const StepPlan& plan) {
      outcome.plans.push_back(std::hash<std::string>()(to_string(plan)));
      for (int64_t i = below(3); i > 0 && open_.size() < 60; --i) submit_next();
      if (below(load_.cancel_every) == 0) cancel_one();
    };
    engine_ = start(target_.make_runner(), load_.options, target_.bytes, std::move(hooks));
    // One request without tokens comes from here; its end starts the rest on the engine thread.
    Request starter;
    starter.prompt_ids = {1};
    starter.max_tokens = 0;
    EXPECT_TRUE(engine_->submit(starter, [&](const TokenEvent&) { submit_next(); }).ok());
    std::unique_lock lock(mutex_);
    all_over_.wait(lock, [&] { return over_ == wanted_; });
    outcome.requests = wanted_;
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
    std::string text;
    bool cancelled = false;
  };

  int32_t token() { return static_cast<int32_t>(below(static_cast<uint64_t>(target_.vocab))); }
  int64_t below(uint64_t n) { return static_cast<int64_t>(random_() % n); }

  /// Each order of magnitude of prompt lengths comes as often as the others.
  Request next_request() {
    Request request;
    const int64_t longest = below(12) == 0 ? load_.longest_prompt : load_.longest_prompt / 8;
    const auto length = static_cast<size_t>(
        std::pow(static_cast<double>(longest + 1), static_cast<double>(below(1000)) / 1000));
    if (below(2) == 0) {
      const auto& prefix = prefixes_[static_cast<size_t>(below(prefixes_.size()))];
      request.prompt_ids.assign(prefix.begin(), prefix.begin() + std::min(prefix.size(), length));
    }
    while (request.prompt_ids.size() < length) request.prompt_ids.push_back(token());
    request.max_tokens =
        below(static_cast<uint64_t>(below(4) == 0 ? load_.longest_output : load_.longest_output / 8));
    if (*request.max_tokens > 0)
      request.min_tokens = below(3) == 0 ? below(static_cast<uint64_t>(*request.max_tokens)) : 0;
    request.ignore_eos = below(3) == 0;
    request.sampling.temperature = static_cast<double>(below(2));
    request.sampling.seed = random_();
    if (*request.sampling.seed % 3 == 0) {
      request.sampling.repetition_penalty = 1.3;
      request.sampling.presence_penalty = 0.5;
      request.sampling.frequency_penalty = 0.25;
    }
    if (below(10) == 0) request.cache_salt = "tenant";
    if (below(4) == 0) request.stop_ids = {token()};
    return request;
  }

  void submit_next() {
    if (submitted_ == wanted_) return;
    if (load_.seconds > 0 && std::chrono::steady_clock::now() > end_) return stop();
    ++submitted_;
    auto open = std::make_shared<Open>();
    open->request = next_request();
    const auto id =
        engine_->submit(open->request, [this, open](const TokenEvent& event) { receive(*open, event); });
    if (id.ok()) {
      open_.emplace(*id, open);
    } else {
      ADD_FAILURE() << id.status().message();
      count_one();
      submit_next();
    }
  }

  /// What was submitted is all.
  void stop() {
    const std::lock_guard lock(mutex_);
    wanted_ = submitted_;
    if (over_ == wanted_) all_over_.notify_all();
  }

  void cancel_one() {
    if (open_.empty()) return;
    const auto chosen = std::next(open_.begin(), below(open_.size()));
    chosen->second->cancelled = true;
    engine_->cancel(chosen->first);
  }

  void receive(Open& open, const TokenEvent& event) {
    if (event.id >= 0) {
      EXPECT_FALSE(open.cancelled) << "a token after the cancel";
      open.ids.push_back(event.id);
    }
    open.text += event.text;
    if (event.finish == FinishReason::none) return;
    check(open, event);
    open_.erase(event.request);
    if (open_.empty()) submit_next();
    count_one();
  }

  /// An end that is not what it should be fails the test, and the traffic goes on to its own.
  void check(const Open& open, const TokenEvent& event) {
    const Request& request = open.request;
    const Alone alone = target_.alone(request);
    const std::vector<int32_t>& want = alone.ids;
    ASSERT_LE(open.ids.size(), want.size());
    ASSERT_TRUE(std::equal(open.ids.begin(), open.ids.end(), want.begin()))
        << "request " << event.request << " differs from what it is alone";
    if (open.cancelled) {
      ASSERT_EQ(event.finish, FinishReason::cancelled);
    } else {
      ASSERT_EQ(open.ids.size(), want.size()) << "request " << event.request << ": " << event.error.message();
      ASSERT_EQ(open.text, alone.text) << "request " << event.request;
      ASSERT_TRUE(event.finish == FinishReason::stop || event.finish == FinishReason::length);
    }
    ASSERT_EQ(event.usage.prompt_tokens, std::ssize(request.prompt_ids));
    ASSERT_EQ(event.usage.completion_tokens, std::ssize(open.ids));
    ASSERT_LT(event.usage.cached_tokens, event.usage.prompt_tokens);
  }

  void count_one() {
    const std::lock_guard lock(mutex_);
    if (++over_ == wanted_) all_over_.notify_all();
  }

  const Load load_;
  const TrafficTarget target_;
  std::mt19937_64 random_;
  std::vector<std::vector<int32_t>> prefixes_;
  std::unique_ptr<Engine> engine_;
  std::map<RequestId, std::shared_ptr<Open>> open_;
  const std::chrono::steady_clock::time_point end_ =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<int64_t>(1e3 * load_.seconds));
  int64_t submitted_ = 0;
  std::mutex mutex_;
  std::condition_variable all_over_;
  int64_t over_ = 0, wanted_ = load_.requests;  ///< the engine thread alone writes them
};

}  // namespace vivace::engine
