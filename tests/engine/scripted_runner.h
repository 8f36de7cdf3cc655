#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "src/engine/engine.h"

// What the tests of the engine share: runners without a model, and a place where events are collected.

namespace vivace::engine {

#define ASSERT_OK(expression)                       \
  do {                                              \
    const ::vivace::Status status_ = (expression);  \
    ASSERT_TRUE(status_.ok()) << status_.message(); \
  } while (0)

/// Whether the runners that a test makes let the engine enqueue a step while one is in flight.
inline bool& runners_overlap() {
  static bool value = false;
  return value;
}

struct RunnerShape {
  int64_t vocab = 1000, max_model_len = 4096, pages = 256, page_tokens = 16;
  std::vector<int32_t> eos = {0};
  bool overlaps = runners_overlap();
};

/// Tests that run with both.
class EngineDepths : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { runners_overlap() = GetParam(); }
  void TearDown() override { runners_overlap() = false; }
  bool overlaps() const { return GetParam(); }
};
inline std::string name_of_depth(const ::testing::TestParamInfo<bool>& info) {
  return info.param ? "OneInFlight" : "Alone";
}

/// A runner whose `choose` and `before_step` a test sets before the engine starts. A step is computed when it
/// is enqueued; what it drew and whether it failed is kept back until it is finished.
class ScriptedRunner : public Runner {
 public:
  explicit ScriptedRunner(const RunnerShape& shape) : shape_(shape) {}

  /// Runs first in each step, on the engine thread; an error fails the step when it is finished.
  std::function<Status(const StepInput&)> before_step;
  /// The token of a sample slot; FORCED scripts and the pseudo-model set it.
  std::function<Sampled(const StepInput&, int64_t request, const SampleSlot&)> choose;

  /// Steps that were enqueued while one was in flight.
  int64_t overlapped() const { return overlapped_; }

  Status enqueue(const StepInput& given) override {
    EXPECT_LT(in_flight_.size(), shape_.overlaps ? 2u : 1u);
    overlapped_ += !in_flight_.empty();
    StepInput input = given;
    const std::vector<int32_t> ids = known_ids(given);
    input.token_ids = ids;
    Result result;
    if (before_step) result.status = before_step(input);
    if (result.status.ok()) {
      check(input);
      write(input);
      int64_t request = 0;
      for (const SampleSlot& slot : input.samples) {
        while (input.query_start[static_cast<size_t>(request + 1)] <= slot.row) ++request;
        EXPECT_EQ(slot.row, input.query_start[static_cast<size_t>(request + 1)] - 1);
        result.sampled.push_back(choose(input, request, slot));
      }
    }
    in_flight_.push_back(std::move(result));
    return {};
  }
  Status finish(std::vector<Sampled>& sampled) override {
    if (in_flight_.empty()) return Status(Code::internal, "nothing is in flight");
    Result result = std::move(in_flight_.front());
    in_flight_.pop_front();
    sampled = std::move(result.sampled);
    return result.status;
  }
  bool overlaps() const override { return shape_.overlaps; }
  int64_t vocab() const override { return shape_.vocab; }
  int64_t max_model_len() const override { return shape_.max_model_len; }
  int64_t pages() const override { return shape_.pages; }
  int64_t page_tokens() const override { return shape_.page_tokens; }
  std::span<const int32_t> eos_ids() const override { return shape_.eos; }
  Dispatch& dispatch() override { return dispatch_; }

 protected:
  virtual void write(const StepInput&) {}

  /// The promises of StepInput.
  void check(const StepInput& in) {
    ASSERT_EQ(std::ssize(in.query_start), in.requests() + 1);
    ASSERT_EQ(std::ssize(in.page_table), in.requests() * in.max_pages);
    ASSERT_EQ(in.query_start.back(), in.tokens());
    std::set<int64_t> slots(in.slots.begin(), in.slots.end());
    ASSERT_EQ(std::ssize(slots), in.tokens()) << "two tokens in one slot";
    for (int64_t r = 0; r < in.requests(); ++r) {
      const int64_t begin = in.query_start[r], end = in.query_start[r + 1];
      ASSERT_LT(begin, end);
      if (r < in.decode_requests) {
        ASSERT_EQ(end - begin, 1);
      }
      ASSERT_EQ(in.positions[end - 1] + 1, in.kv_lengths[r]);
      for (int64_t t = begin; t < end; ++t) {
        ASSERT_EQ(in.positions[t], in.kv_lengths[r] - (end - t));
        ASSERT_EQ(in.slots[t], slot_of(in, r, in.positions[t]));
        ASSERT_TRUE(in.token_ids[t] >= 0 && in.token_ids[t] < shape_.vocab);
      }
    }
  }

  int64_t slot_of(const StepInput& in, int64_t request, int64_t position) const {
    const int64_t page = in.page_table[request * in.max_pages + position / shape_.page_tokens];
    EXPECT_TRUE(page >= 0 && page < shape_.pages) << "page " << page << " at position " << position;
    return page * shape_.page_tokens + position % shape_.page_tokens;
  }

  const RunnerShape shape_;

 private:
  struct Result {
    Status status;
    std::vector<Sampled> sampled;
  };

  /// With what the step in flight drew in the places that name it.
  std::vector<int32_t> known_ids(const StepInput& input) {
    std::vector<int32_t> ids(input.token_ids.begin(), input.token_ids.end());
    for (int32_t& id : ids) {
      if (id >= 0) continue;
      if (in_flight_.empty()) {
        ADD_FAILURE() << "token " << id << " names a step that is over";
      } else if (const Result& last = in_flight_.back(); last.status.ok()) {
        EXPECT_LT(-1 - id, std::ssize(last.sampled));
        id = last.sampled[static_cast<size_t>(-1 - id)].id;
      } else {
        id = 0;  // of a failed step: as good as any
      }
    }
    return ids;
  }

  Dispatch dispatch_;
  std::deque<Result> in_flight_;
  std::atomic<int64_t> overlapped_{0};
};

inline uint64_t fold(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
  return hash ^ hash >> 29;
}

/// A model of one operation: the next token is a function of all tokens so far, and of (seed, position) when
/// the temperature is above 0. It knows those tokens only from its KV memory: it stores each where its slot
/// says and reads them back through the page table, so a wrong page, slot or length changes the text.
class PseudoModel : public ScriptedRunner {
 public:
  explicit PseudoModel(const RunnerShape& shape)
      : ScriptedRunner(shape), memory_(static_cast<size_t>(shape.pages * shape.page_tokens), -1) {
    choose = [this](const StepInput& in, int64_t request, const SampleSlot& slot) {
      uint64_t hash = 0;
      for (int64_t position = 0; position < in.kv_lengths[request]; ++position)
        hash = fold(hash, static_cast<uint64_t>(memory_[slot_of(in, request, position)]));
      return Sampled{.id = next(hash, *slot.params, slot.seed, slot.position, slot.banned_ids)};
    };
  }

  /// What a request generates in no company: the definition, without pages.
  std::vector<int32_t> alone(const Request& request, uint64_t seed, int64_t max_tokens) const {
    uint64_t hash = 0;
    for (const int32_t id : request.prompt_ids) hash = fold(hash, static_cast<uint64_t>(id));
    std::vector<int32_t> ends = request.stop_ids, output;
    if (!request.ignore_eos) ends.insert(ends.end(), shape_.eos.begin(), shape_.eos.end());
    while (std::ssize(output) < max_tokens) {
      const int64_t position = std::ssize(output);
      const bool banned = position < request.min_tokens;
      output.push_back(next(hash, request.sampling, seed, position, banned ? ends : std::vector<int32_t>{}));
      hash = fold(hash, static_cast<uint64_t>(output.back()));
      if (std::ranges::find(ends, output.back()) != ends.end()) break;
    }
    return output;
  }

 private:
  int32_t next(uint64_t hash, const SamplingParams& params, uint64_t seed, int64_t position,
               std::span<const int32_t> banned) const {
    if (params.temperature > 0) hash = fold(fold(hash, seed), static_cast<uint64_t>(position));
    while (true) {
      const int32_t id = static_cast<int32_t>((hash >> 20) % static_cast<uint64_t>(shape_.vocab));
      if (std::ranges::find(banned, id) == banned.end()) return id;
      hash = fold(hash, 1);
    }
  }
  void write(const StepInput& in) override {
    for (int64_t t = 0; t < in.tokens(); ++t) memory_[static_cast<size_t>(in.slots[t])] = in.token_ids[t];
  }

  std::vector<int32_t> memory_;  ///< the token of each slot; old ones stay, as in real memory
};

/// A runner that answers each prompt with the script its first token names, whatever happened before.
inline std::unique_ptr<ScriptedRunner> forced(const RunnerShape& shape,
                                              std::map<int32_t, std::vector<int32_t>> scripts) {
  auto runner = std::make_unique<ScriptedRunner>(shape);
  runner->choose = [scripts = std::move(scripts)](const StepInput&, int64_t, const SampleSlot& slot) {
    const std::vector<int32_t>& script = scripts.at(slot.prompt_ids[0]);
    return Sampled{.id = script[static_cast<size_t>(slot.position) % script.size()]};
  };
  return runner;
}

/// The events of one request.
class Answer {
 public:
  Engine::Sink sink() {
    return [this](const TokenEvent& event) {
      const std::lock_guard lock(mutex_);
      events_.push_back(event);
      changed_.notify_all();
    };
  }
  void wait() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !events_.empty() && events_.back().finish != FinishReason::none; });
  }
  void wait_for_events(size_t count) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return events_.size() >= count; });
  }
  std::vector<TokenEvent> events() const {
    const std::lock_guard lock(mutex_);
    return events_;
  }
  TokenEvent last() const {
    const std::lock_guard lock(mutex_);
    return events_.empty() ? TokenEvent{} : events_.back();
  }
  std::vector<int32_t> ids() const {
    std::vector<int32_t> ids;
    for (const TokenEvent& event : events())
      if (event.id >= 0) ids.push_back(event.id);
    return ids;
  }
  std::string text() const {
    std::string text;
    for (const TokenEvent& event : events()) text += event.text;
    return text;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<TokenEvent> events_;
};

inline std::string_view no_text(int32_t, bool) {
  return {};
}

/// Reports every failed audit.
inline EngineHooks audited() {
  return {.on_audit = [](const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }};
}

inline std::unique_ptr<Engine> start(std::unique_ptr<Runner> runner, const EngineOptions& options = {},
                                     TokenBytes bytes = no_text, EngineHooks hooks = audited()) {
  auto engine = make_engine(std::move(runner), std::move(bytes), options, std::move(hooks));
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return engine.ok() ? std::move(engine).value() : nullptr;
}

}  // namespace vivace::engine
