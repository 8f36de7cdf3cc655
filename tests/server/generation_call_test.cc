#include "src/server/generation_call.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

// A call between a connection and an engine that both do what a test says, in the order that it says.

namespace vivace::server {
namespace {

using namespace std::chrono_literals;
using Json = nlohmann::json;

class EngineByHand final : public Engine {
 public:
  Result<RequestId> submit(Request, Sink sink) override {
    const std::lock_guard lock(mutex_);
    if (std::ssize(sinks_) == room) return Status(Code::resource_exhausted, "engine: full");
    sinks_.push_back(std::move(sink));
    return std::ssize(sinks_) - 1;
  }
  void cancel(RequestId id) override {
    cancelled.push_back(id);
    if (on_cancel) on_cancel();
  }
  void drain() override {}
  void clear_prefix_cache() override {}
  EngineStats stats() const override { return {}; }
  const EngineOptions& options() const override { return options_; }
  int64_t max_model_len() const override { return 64; }
  int64_t vocab() const override { return 100; }
  const Dispatch& dispatch() const override { return dispatch_; }

  /// As the engine does: a sink that throws cancels its request, which is said unless this was the last event.
  void deliver(RequestId id, const TokenEvent& event) {
    try {
      sinks_[static_cast<size_t>(id)](event);
    } catch (...) {
      cancel(id);
      if (event.finish == FinishReason::none) deliver(id, {.finish = FinishReason::cancelled});
    }
  }

  int64_t room = 1000;
  std::function<void()> on_cancel;
  std::vector<RequestId> cancelled;

 private:
  std::mutex mutex_;
  std::vector<Sink> sinks_;
  const EngineOptions options_;
  const Dispatch dispatch_;
};

struct Bench {
  EngineByHand engine, other;
  ServedModel model{.name = "m", .path = "m"};
  Metrics metrics;
  std::FILE* const file = std::tmpfile();
  std::optional<Log> log{std::in_place, LogLevel::all, file};
  int64_t stream_buffer_bytes = 1 << 20;
  std::optional<CallContext> context;
  int wakes = 0;
  std::atomic<int> failing_wakes{0};  ///< as when no memory is left
  std::shared_ptr<GenerationCall> call;
  std::optional<WorkerPool> pool{std::in_place, 1, 16};

  Bench() { connect_to(engine); }
  ~Bench() {
    pool.reset();
    call.reset();
    log.reset();  // its thread writes to the file
    std::fclose(file);
  }

  void connect_to(Engine& to) {
    context.emplace(CallContext{.engine = to,
                                .model = model,
                                .pool = *pool,
                                .metrics = metrics,
                                .log = *log,
                                .stream_buffer_bytes = stream_buffer_bytes});
  }
  void ask(const std::string& body) {
    HttpRequest request;
    request.path = "/v1/completions";
    request.body = body;
    request.received = Clock::now();
    call = std::make_shared<GenerationCall>(*context, ApiKind::completions, std::move(request), "id", [this] {
      if (failing_wakes > 0) {
        --failing_wakes;
        throw std::bad_alloc();
      }
      ++wakes;
    });
    EXPECT_TRUE(call->start());
  }
  /// The next step that is none of waiting; after 5 s one that is.
  CallStep step() {
    for (int waited = 0; waited < 5000; ++waited) {
      CallStep step = call->next();
      if (step.kind != CallStep::wait) return step;
      std::this_thread::sleep_for(1ms);
    }
    return {};
  }
  /// A stream of so many answers of which nothing has come.
  void begin_stream(int n) {
    ask(fmt::format(R"({{"prompt":[5,6,7],"n":{},"max_tokens":9,"stream":true}})", n));
    EXPECT_EQ(step().kind, CallStep::begin);
    wakes = 0;
  }
  /// The line that the log has of the call.
  Json logged() {
    log.reset();
    std::rewind(file);
    std::string text;
    for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) text += static_cast<char>(c);
    return Json::parse(text, nullptr, false);
  }
};

TokenEvent token_at(std::chrono::milliseconds time, FinishReason finish = FinishReason::none) {
  TokenEvent event{.id = 9, .text = "x", .finish = finish};
  event.time = Clock::time_point(1h) + time;
  return event;
}

// The first cancellation stands for the end of the server in another thread: what the call was given is another by then.
TEST(GenerationCall, WhatTheEngineCancelsItAlsoCancelsWhenTheServerIsGone) {
  for (const bool overflow : {false, true}) {
    SCOPED_TRACE(overflow);
    Bench bench;
    if (overflow) bench.stream_buffer_bytes = 1;
    bench.connect_to(bench.engine);
    bench.begin_stream(3);
    bench.engine.on_cancel = [&] {
      if (bench.engine.cancelled.size() > 1) return;
      bench.call->detach(Call::End::stopped);
      bench.connect_to(bench.other);
    };
    if (overflow)
      bench.engine.deliver(1, token_at(0ms));
    else
      bench.engine.deliver(1,
                           {.finish = FinishReason::error, .error = Status(Code::internal, "engine: NaN")});
    EXPECT_EQ(bench.engine.cancelled, (std::vector<RequestId>{0, 1, 2}));
    EXPECT_TRUE(bench.other.cancelled.empty());
  }
}

TEST(GenerationCall, CancellationsThatNobodyAskedForAreErrorsOfTheEngine) {
  Bench bench;
  bench.begin_stream(1);
  bench.engine.deliver(0, {.finish = FinishReason::cancelled});
  const CallStep step = bench.step();
  EXPECT_TRUE(step.last);
  EXPECT_NE(step.payload.find("engine_error"), std::string::npos) << step.payload;
}

// The connection asked, and sleeps until it is woken.
TEST(GenerationCall, TokensThatFindNoMemoryEndTheRequestWithAnError) {
  for (const FinishReason finish : {FinishReason::none, FinishReason::length}) {
    SCOPED_TRACE(name_of(finish));
    Bench bench;
    bench.begin_stream(2);
    EXPECT_EQ(bench.call->next().kind, CallStep::wait);
    bench.failing_wakes = 1;
    bench.engine.deliver(0, token_at(0ms, finish));
    EXPECT_EQ(bench.wakes, 1);
    EXPECT_EQ(bench.step().kind, CallStep::event) << "the token is there";
    const CallStep step = bench.step();
    EXPECT_TRUE(step.last);
    EXPECT_NE(step.payload.find("engine_error"), std::string::npos) << step.payload;
    EXPECT_EQ(bench.engine.cancelled, (std::vector<RequestId>{0, 1}));
  }
}

TEST(GenerationCall, PromptsThatTheEngineRefusesAreNotCounted) {
  Bench bench;
  bench.engine.room = 1;
  bench.ask(R"({"prompt":[[5,6,7],[5]],"max_tokens":9})");
  EXPECT_EQ(bench.step().response.status, 429);
  EXPECT_EQ(bench.metrics.prompt_tokens, 0);
  bench.engine.room = 9;
  bench.ask(R"({"prompt":[[5,6,7],[5]],"n":2,"max_tokens":9,"stream":true})");
  EXPECT_EQ(bench.step().kind, CallStep::begin);
  EXPECT_EQ(bench.metrics.prompt_tokens, 4);
}

TEST(GenerationCall, TheLogCountsPromptsOnceAndTheLongestAnswersGaps) {
  Bench bench;
  bench.begin_stream(2);
  const auto deliver = [&](RequestId id, std::chrono::milliseconds time) {
    TokenEvent event = token_at(time);
    event.usage = {.prompt_tokens = 3, .completion_tokens = 1, .cached_tokens = 2};
    bench.engine.deliver(id, event);
  };
  deliver(0, 0ms);
  deliver(1, 1ms);
  deliver(1, 11ms);
  deliver(1, 21ms);
  bench.call->detach(Call::End::client_gone);
  const Json line = bench.logged();
  EXPECT_EQ(line["end"], "client_gone") << line;
  EXPECT_EQ(line["prompt_tokens"], 3);
  EXPECT_EQ(line["cached_tokens"], 2) << "though no answer came to its end";
  EXPECT_EQ(line["completion_tokens"], 4);
  EXPECT_EQ(line["tpot_ms"], 10);
}

}  // namespace
}  // namespace vivace::server
