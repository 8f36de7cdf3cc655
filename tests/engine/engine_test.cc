#include "src/engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <future>
#include <limits>
#include <numeric>
#include <thread>

#include "tests/engine/scripted_runner.h"

namespace vivace::engine {
namespace {

using Ids = std::vector<int32_t>;

Ids prompt_of(int64_t tokens, int32_t first = 1) {
  Ids ids(static_cast<size_t>(tokens));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>((first + 7 * i) % 1000);
  return ids;
}

Request request_of(Ids prompt, int64_t max_tokens) {
  Request request;
  request.prompt_ids = std::move(prompt);
  request.sampling.temperature = 0;
  request.max_tokens = max_tokens;
  request.ignore_eos = true;
  return request;
}

/// Submits and waits for the end.
std::unique_ptr<Answer> ask(Engine& engine, const Request& request) {
  auto answer = std::make_unique<Answer>();
  const Result<RequestId> id = engine.submit(request, answer->sink());
  EXPECT_TRUE(id.ok()) << id.status().message();
  if (id.ok()) answer->wait();
  return answer;
}

/// A door that a runner waits at.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  void wait_for_arrival() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return arrived_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int arrived_ = 0;
};

TEST_P(EngineDepths, AnswersWithTheModelsTokens) {
  auto model = std::make_unique<PseudoModel>(RunnerShape{});
  const Request request = request_of(prompt_of(100), 20);
  const Ids want = model->alone(request, 0, 20);
  auto engine = start(std::move(model), {.token_budget = 64});
  const auto answer = ask(*engine, request);
  EXPECT_EQ(answer->ids(), want);
  const std::vector<TokenEvent> events = answer->events();
  ASSERT_EQ(events.size(), 20u);
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i].finish, i + 1 < events.size() ? FinishReason::none : FinishReason::length);
    EXPECT_EQ(events[i].usage.completion_tokens, static_cast<int64_t>(i) + 1);
    EXPECT_EQ(events[i].usage.prompt_tokens, 100);
    if (i > 0) {
      EXPECT_GE(events[i].time, events[i - 1].time);
    }
  }
  engine->drain();
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.steps, 2 + 19);
  EXPECT_EQ(stats.finished, 1);
  EXPECT_EQ(stats.generated_tokens, 20);
  EXPECT_EQ(stats.prompt_tokens, 100);
  EXPECT_EQ(stats.running + stats.waiting, 0);
  EXPECT_EQ(stats.pages_free + stats.pages_cached, stats.pages_total);
}

TEST_P(EngineDepths, EnqueuesTheNextStepWhileOneIsInFlight) {
  auto model = std::make_unique<PseudoModel>(RunnerShape{});
  const PseudoModel& runner = *model;
  auto engine = start(std::move(model), {.token_budget = 64});
  ask(*engine, request_of(prompt_of(100), 20));
  engine->drain();
  EXPECT_EQ(engine->stats().steps, 21) << "an end by max_tokens is known ahead";
  EXPECT_EQ(runner.overlapped(), overlaps() ? 20 : 0) << "all but the first";
}

TEST_P(EngineDepths, WhatAStepDrewForARequestThatEndedMeanwhileIsDropped) {
  auto engine = start(forced(RunnerShape{.eos = {5}}, {{1, {7, 8, 5, 9, 9}}, {2, {6}}}), {.max_batch = 2});
  Request ends = request_of({1}, 10);
  ends.ignore_eos = false;
  Answer long_one;
  ASSERT_OK(engine->submit(request_of({2}, 40), long_one.sink()).status());
  for (int i = 0; i < 3; ++i) {
    const auto answer = ask(*engine, ends);
    EXPECT_EQ(answer->ids(), (Ids{7, 8, 5}));
    EXPECT_EQ(answer->last().usage.completion_tokens, 3);
  }
  EXPECT_EQ(ask(*engine, ends)->ids(), (Ids{7, 8, 5}));
  long_one.wait();
  EXPECT_EQ(long_one.ids(), Ids(40, 6));
  engine->drain();
  EXPECT_EQ(engine->stats().generated_tokens, 4 * 3 + 40);
  EXPECT_EQ(engine->stats().pages_free + engine->stats().pages_cached, engine->stats().pages_total);
}

// Requests that only wait for the token of the step in flight hold all pages; the next starts when that step is over.
TEST_P(EngineDepths, AFullPoolWaitsForWhatIsInFlight) {
  auto model = std::make_unique<PseudoModel>(RunnerShape{.pages = 4});
  const Request request = request_of(prompt_of(60), 4);
  const Ids want = model->alone(request, 0, 4);
  auto engine = start(std::move(model), {.prefix_cache = false});
  std::vector<Answer> answers(5);
  for (Answer& answer : answers) ASSERT_OK(engine->submit(request, answer.sink()).status());
  engine->drain();
  for (const Answer& answer : answers) EXPECT_EQ(answer.ids(), want);
  EXPECT_EQ(engine->stats().steps, 5 * 4);
}

TEST_P(EngineDepths, EndTokens) {
  const RunnerShape shape{.eos = {0, 5}};
  const std::map<int32_t, Ids> scripts = {{1, {7, 8, 5, 9}}, {2, {0, 5, 0, 5, 7}}};
  auto engine = start(forced(shape, scripts));
  Request request = request_of({1}, 10);
  request.ignore_eos = false;
  auto answer = ask(*engine, request);
  EXPECT_EQ(answer->ids(), (Ids{7, 8, 5}));
  EXPECT_EQ(answer->last().finish, FinishReason::stop);
  request.stop_ids = {8};
  EXPECT_EQ(ask(*engine, request)->ids(), (Ids{7, 8}));
  request.ignore_eos = true;
  request.stop_ids = {9};
  EXPECT_EQ(ask(*engine, request)->ids(), (Ids{7, 8, 5, 9}));
  request.stop_ids = {};
  EXPECT_EQ(ask(*engine, request)->ids().size(), 10u) << "exactly max_tokens";
  request.ignore_eos = false;
  request.max_tokens = 3;
  EXPECT_EQ(ask(*engine, request)->last().finish, FinishReason::stop) << "an end token in the last place";
  // A runner bans end tokens before min_tokens; one drawn all the same does not end the request.
  request = request_of({2}, 10);
  request.ignore_eos = false;
  request.min_tokens = 3;
  EXPECT_EQ(ask(*engine, request)->ids(), (Ids{0, 5, 0, 5}));
}

TEST_P(EngineDepths, BansEndTokensBeforeMinTokens) {
  auto model = std::make_unique<PseudoModel>(RunnerShape{.vocab = 4, .eos = {0}});
  Request request = request_of({1, 2, 3}, 40);
  request.ignore_eos = false;
  request.stop_ids = {2};
  request.min_tokens = 20;
  const Ids want = model->alone(request, 0, 40);
  ASSERT_GT(want.size(), 20u);
  auto engine = start(std::move(model));
  EXPECT_EQ(ask(*engine, request)->ids(), want);
}

TEST_P(EngineDepths, PassesLogprobsOn) {
  auto runner = std::make_unique<ScriptedRunner>(RunnerShape{});
  runner->choose = [](const StepInput&, int64_t, const SampleSlot& slot) {
    EXPECT_EQ(slot.params->logprobs, 2);
    return Sampled{.id = 3, .logprob = -0.5f, .top = {{3, -0.5f}, {4, -1.5f}}};
  };
  auto engine = start(std::move(runner));
  Request request = request_of({1}, 1);
  request.sampling.logprobs = 2;
  const TokenEvent event = ask(*engine, request)->last();
  EXPECT_EQ(event.logprob, -0.5f);
  ASSERT_EQ(event.top.size(), 2u);
  EXPECT_EQ(event.top[1].id, 4);
}

// https://github.com/vllm-project/vllm/issues/51226 - a seeded request is reproducible in any company only.
TEST_P(EngineDepths, H27SeedsDependOnNothingButSeedAndPosition) {
  Request target = request_of(prompt_of(40), 32);
  target.sampling.temperature = 1;
  target.sampling.seed = 11;
  Request unseeded = target;
  unseeded.sampling.seed.reset();
  unseeded.prompt_ids = prompt_of(30, 3);
  struct Setting {
    const char* name;
    int64_t companions, pages, budget;
  };
  for (const Setting& s :
       {Setting{"alone", 0, 256, 512}, Setting{"one unseeded", 1, 256, 512}, Setting{"seven", 7, 256, 512},
        Setting{"chunked", 3, 256, 8}, Setting{"preempted", 7, 8, 64}}) {
    SCOPED_TRACE(s.name);
    auto model = std::make_unique<PseudoModel>(RunnerShape{.pages = s.pages});
    const Ids want = model->alone(target, 11, 32);
    Gate gate;
    model->before_step = [&](const StepInput&) {
      gate.pass();
      return Status();
    };
    auto engine = start(std::move(model), {.max_batch = 8, .token_budget = s.budget});
    std::vector<Answer> others(static_cast<size_t>(s.companions));
    Answer first, second;
    for (Answer& other : others) ASSERT_OK(engine->submit(unseeded, other.sink()).status());
    ASSERT_OK(engine->submit(target, first.sink()).status());
    ASSERT_OK(engine->submit(target, second.sink()).status());
    gate.open();
    engine->drain();
    EXPECT_EQ(first.ids(), want);
    EXPECT_EQ(second.ids(), want);
    if (s.pages == 8) {
      EXPECT_GT(engine->stats().preemptions, 0);
    }
    for (size_t i = 1; i < others.size(); ++i)
      EXPECT_NE(others[i].ids(), others[0].ids()) << "unseeded requests draw differently";
  }
}

TEST_P(EngineDepths, SeedsOfUnseededRequestsFollowTheEnginesSeed) {
  Request request = request_of(prompt_of(10), 20);
  request.sampling.temperature = 1;
  std::vector<Ids> answers;
  for (const uint64_t seed : {1, 1, 2}) {
    auto engine = start(std::make_unique<PseudoModel>(RunnerShape{}), {.seed = seed});
    answers.push_back(ask(*engine, request)->ids());
  }
  EXPECT_EQ(answers[0], answers[1]);
  EXPECT_NE(answers[0], answers[2]);
}

// https://github.com/deepseek-ai/FlashMLA/issues/212 - a request's answer depends on its company. Here the
// engine's share: whatever the company, it computes the same tokens over the same keys and values.
TEST_P(EngineDepths, H28CompanyDoesNotChangeAnAnswer) {
  const Request target = request_of(prompt_of(900), 24);
  for (const int companions : {0, 1, 15, 63}) {
    SCOPED_TRACE(companions);
    auto model = std::make_unique<PseudoModel>(RunnerShape{.pages = 300});
    const Ids want = model->alone(target, 0, 24);
    auto engine = start(std::move(model));
    std::vector<Answer> others(static_cast<size_t>(companions));
    for (size_t i = 0; i < others.size(); ++i)
      ASSERT_OK(
          engine->submit(request_of(prompt_of(1 + 29 * static_cast<int64_t>(i), 5), 30), others[i].sink())
              .status());
    EXPECT_EQ(ask(*engine, target)->ids(), want);
    engine->drain();
  }
}

// https://github.com/sgl-project/sglang/issues/9599 - a prompt near the context length crashes the server.
TEST_P(EngineDepths, H30ContextLimit) {
  auto engine = start(std::make_unique<PseudoModel>(RunnerShape{.max_model_len = 64}));
  const auto refusal = [&](int64_t prompt, std::optional<int64_t> max_tokens) {
    Request request = request_of(prompt_of(prompt), 1);
    request.max_tokens = max_tokens;
    Answer answer;
    const Result<RequestId> id = engine->submit(request, answer.sink());
    if (id.ok()) answer.wait();
    return id.ok() ? std::to_string(answer.ids().size()) : id.status().message();
  };
  EXPECT_EQ(refusal(62, 1), "1");
  EXPECT_EQ(refusal(62, 2), "2");
  EXPECT_EQ(refusal(62, {}), "2");
  EXPECT_EQ(refusal(63, 1), "1");
  EXPECT_EQ(refusal(63, {}), "1");
  EXPECT_EQ(
      refusal(63, 2),
      "request: prompt_ids has 63 tokens and max_tokens is 2: the context holds 64 tokens, which leaves 1 "
      "for the answer");
  for (const int64_t prompt : {64, 65, 10000})
    for (const std::optional<int64_t> max_tokens : {std::optional<int64_t>(0), {1}, {2}, {INT64_MAX}, {}}) {
      const std::string message = refusal(prompt, max_tokens);
      EXPECT_NE(message.find("has " + std::to_string(prompt) + " tokens"), std::string::npos) << message;
      EXPECT_NE(message.find("context holds 64 tokens"), std::string::npos) << message;
    }
}

TEST_P(EngineDepths, TheContextIsWhatThePagesHold) {
  auto engine = start(std::make_unique<PseudoModel>(RunnerShape{.pages = 3, .page_tokens = 16}));
  EXPECT_EQ(engine->max_model_len(), 48);
  EXPECT_EQ(ask(*engine, request_of(prompt_of(40), 8))->ids().size(), 8u);
  auto shorter = start(std::make_unique<PseudoModel>(RunnerShape{}), {.max_model_len = 33});
  EXPECT_EQ(shorter->max_model_len(), 33);
}

// https://github.com/vllm-project/vllm/issues/6521 - max_tokens 0 takes the server down.
TEST_P(EngineDepths, H32MaxTokens) {
  auto engine = start(std::make_unique<PseudoModel>(RunnerShape{}));
  const auto none = ask(*engine, request_of(prompt_of(20), 0));
  ASSERT_EQ(none->events().size(), 1u);
  EXPECT_EQ(none->last().id, -1);
  EXPECT_EQ(none->last().finish, FinishReason::length);
  EXPECT_EQ(none->last().usage.prompt_tokens, 20);
  EXPECT_EQ(none->last().usage.completion_tokens, 0);
  EXPECT_EQ(ask(*engine, request_of(prompt_of(20), 1))->ids().size(), 1u);
  Answer answer;
  EXPECT_EQ(engine->submit(request_of(prompt_of(20), -1), answer.sink()).status().message(),
            "request: max_tokens is -1, needs at least 0");
  EXPECT_EQ(engine->submit(request_of(prompt_of(20), 2147483648), answer.sink()).status().code(),
            Code::invalid_argument);
}

/// Tokens whose bytes are given, and a request that is answered with them in order.
struct Spelling {
  std::vector<std::string> bytes;
  TokenBytes lookup() const {
    return [this](int32_t id, bool) { return std::string_view(bytes[static_cast<size_t>(id)]); };
  }
  std::unique_ptr<Answer> answer(const std::vector<std::string>& stop, int64_t min_tokens = 0) const {
    Ids script(bytes.size());
    std::iota(script.begin(), script.end(), 0);
    auto engine = start(forced(RunnerShape{.eos = {999}}, {{1, script}}), {}, lookup());
    Request request = request_of({1}, static_cast<int64_t>(bytes.size()));
    request.stop = stop;
    request.min_tokens = min_tokens;
    return ask(*engine, request);
  }
};

// https://github.com/ggml-org/llama.cpp/issues/9195 - bytes that are not UTF-8 end the process.
TEST_P(EngineDepths, H33InvalidUtf8) {
  const Spelling tokens{{"\xE6\x97", "\xA5", "\x80", "\xFF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\x41"}};
  const auto answer = tokens.answer({});
  const std::string bad = "\xEF\xBF\xBD";
  std::vector<std::string> pieces;
  for (const TokenEvent& event : answer->events()) pieces.push_back(event.text);
  // A surrogate and a code point above 10FFFF have no valid beginning: each of their bytes is replaced.
  const std::vector<std::string> want = {"", "\xE6\x97\xA5", bad, bad, bad + bad + bad, bad + bad + bad + bad,
                                         "A"};
  EXPECT_EQ(pieces, want);
  const Spelling cut{{"x", "\xE6\x97"}};
  EXPECT_EQ(cut.answer({})->text(), "x" + bad) << "half a character at the end";
}

// https://github.com/vllm-project/vllm/issues/3574 - the start of a stop string is sent before its end comes.
TEST_P(EngineDepths, H34StopStringAcrossTokens) {
  const Spelling tokens{{"ab", "c##", "#E", "ND", "x"}};
  auto answer = tokens.answer({"###END"});
  EXPECT_EQ(answer->text(), "abc");
  EXPECT_EQ(answer->last().finish, FinishReason::stop);
  EXPECT_EQ(answer->last().usage.completion_tokens, 4);
  answer = tokens.answer({"##", "###END"});
  EXPECT_EQ(answer->text(), "abc");
  EXPECT_EQ(answer->ids().size(), 2u);
  EXPECT_EQ(tokens.answer({"EN"})->text(), "abc###") << "a stop that ends inside a token";

  const Spelling near_miss{{"c##", "#EN", "Z"}};
  answer = near_miss.answer({"###END"});
  EXPECT_EQ(answer->text(), "c###ENZ");
  EXPECT_EQ(answer->last().finish, FinishReason::length);
  EXPECT_EQ(Spelling({{"a", "##"}}).answer({"###"})->text(), "a##") << "held text is flushed at the end";
  EXPECT_EQ(Spelling({{"a", "\xE6\x97",
                       "\xA5"
                       "b"}})
                .answer({"\xE6\x97\xA5"})
                ->text(),
            "a")
      << "a stop split inside a character";
  answer = tokens.answer({"c", "x"}, 2);
  EXPECT_EQ(answer->text(), "abc###END") << "the first min_tokens tokens are not searched";
}

TEST_P(EngineDepths, AnEndTokenHasNoTextAndFlushesWhatWasHeld) {
  static const std::vector<std::string> bytes = {"</s>", "a#", "b"};
  auto engine = start(forced(RunnerShape{.eos = {0}}, {{1, {2, 1, 0}}}), {},
                      [](int32_t id, bool) -> std::string_view { return bytes[static_cast<size_t>(id)]; });
  Request request = request_of({1}, 10);
  request.ignore_eos = false;
  request.stop = {"##"};
  EXPECT_EQ(ask(*engine, request)->text(), "ba#");
}

// https://github.com/vllm-project/vllm/issues/9428 - the engine goes on after the client went away.
TEST_P(EngineDepths, H35CancelledRequestsLeaveNothingBehind) {
  auto engine = start(std::make_unique<PseudoModel>(RunnerShape{.pages = 600}), {.prefix_cache = false});
  const int64_t free_pages = engine->stats().pages_free;
  for (int round = 0; round < 100; ++round) {
    std::vector<Answer> answers(16);
    std::vector<RequestId> ids;
    for (Answer& answer : answers) {
      const auto id = engine->submit(request_of(prompt_of(20, round), 4000), answer.sink());
      ASSERT_OK(id.status());
      ids.push_back(*id);
    }
    answers[round % 16].wait_for_events(3);
    std::vector<size_t> acknowledged;
    for (size_t i = 0; i < ids.size(); ++i) {
      engine->cancel(ids[i]);
      acknowledged.push_back(answers[i].ids().size());
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      answers[i].wait();
      EXPECT_EQ(answers[i].last().finish, FinishReason::cancelled);
      EXPECT_EQ(answers[i].last().id, -1);
      EXPECT_EQ(answers[i].ids().size(), acknowledged[i]) << "a token after the cancel";
      EXPECT_EQ(answers[i].last().usage.completion_tokens, static_cast<int64_t>(acknowledged[i]));
    }
    engine->drain();
    ASSERT_EQ(engine->stats().running, 0);
    ASSERT_EQ(engine->stats().pages_free, free_pages);
  }
  EXPECT_EQ(engine->stats().cancelled, 1600);
  engine->cancel(1);  // long finished
  engine->cancel(123456789);
}

// https://github.com/sgl-project/sglang/issues/34149 - an abort during the last prefill chunk still yields a
// token. Chunks of 16, 16 and 8 tokens, then decode steps; the cancel comes while the named step is held.
TEST_P(EngineDepths, H36CancelWhileAnyStepRuns) {
  const Request request = request_of(prompt_of(40), 50);
  for (int held = 1; held <= 5; ++held) {
    SCOPED_TRACE(held);
    auto model = std::make_unique<PseudoModel>(RunnerShape{.pages = 8});
    const Request next = request_of(prompt_of(90, 3), 30);  // takes the same pages: it needs all but one
    const Ids want = model->alone(next, 0, 30);
    Gate gate;
    int step = 0;
    model->before_step = [&](const StepInput&) {
      if (++step == held) gate.pass();
      return Status();
    };
    auto engine = start(std::move(model), {.max_batch = 4, .token_budget = 16});
    Answer answer;
    const auto id = engine->submit(request, answer.sink());
    ASSERT_OK(id.status());
    gate.wait_for_arrival();
    engine->cancel(*id);
    const size_t before = answer.ids().size();
    EXPECT_EQ(before, static_cast<size_t>(std::max(0, held - (overlaps() ? 4 : 3))));
    gate.open();
    answer.wait();
    EXPECT_EQ(answer.ids().size(), before);
    EXPECT_EQ(answer.last().finish, FinishReason::cancelled);
    engine->drain();
    const EngineStats stats = engine->stats();
    EXPECT_EQ(stats.pages_free + stats.pages_cached, 8);
    EXPECT_EQ(ask(*engine, next)->ids(), want);
  }
}

TEST_P(EngineDepths, CancelBeforeAnyStep) {
  Gate gate;
  auto model = std::make_unique<PseudoModel>(RunnerShape{});
  model->before_step = [&](const StepInput&) {
    gate.pass();
    return Status();
  };
  auto engine = start(std::move(model), {.max_batch = 1});
  Answer first, second;
  ASSERT_OK(engine->submit(request_of({1}, 2), first.sink()).status());
  gate.wait_for_arrival();
  const auto id = engine->submit(request_of({1}, 2), second.sink());
  EXPECT_EQ(engine->stats().waiting, 2 - engine->stats().running);
  engine->cancel(*id);
  gate.open();
  engine->drain();
  EXPECT_EQ(second.events().size(), 1u);
  EXPECT_EQ(second.last().finish, FinishReason::cancelled);
  EXPECT_EQ(first.ids().size(), 2u);
}

// https://github.com/vllm-project/vllm/pull/17999 - a prompt that is cached entirely leaves nothing to compute.
TEST_P(EngineDepths, H37CompleteHit) {
  const std::map<int64_t, int64_t> cached = {{63, 0}, {64, 0}, {65, 64}, {128, 64}, {129, 128}};
  for (const auto& [length, want] : cached) {
    SCOPED_TRACE(length);
    auto model = std::make_unique<PseudoModel>(RunnerShape{.pages = 16, .page_tokens = 64});
    Request longer = request_of(prompt_of(length), 4);
    longer.prompt_ids.push_back(5);
    const Request request = request_of(prompt_of(length), 4);
    const Ids tokens = model->alone(request, 0, 4), more = model->alone(longer, 0, 4);
    auto engine = start(std::move(model));
    for (int run = 0; run < 3; ++run) {
      const auto answer = ask(*engine, request);
      EXPECT_EQ(answer->ids(), tokens);
      EXPECT_EQ(answer->last().usage.cached_tokens, run == 0 ? 0 : want);
    }
    const auto answer = ask(*engine, longer);
    EXPECT_EQ(answer->ids(), more);
    EXPECT_EQ(answer->last().usage.cached_tokens, length / 64 * 64);
    Request other = request;
    other.cache_salt = "another tenant";
    EXPECT_EQ(ask(*engine, other)->last().usage.cached_tokens, 0);
  }
}

// https://github.com/vllm-project/vllm/issues/16832 - a preempted request returns an incomplete answer.
TEST_P(EngineDepths, H38NothingIsLostInPreemption) {
  for (const bool prefix_cache : {false, true}) {
    auto model = std::make_unique<PseudoModel>(RunnerShape{.pages = 12});
    std::vector<Request> requests;
    std::vector<Ids> want;
    for (int32_t i = 0; i < 4; ++i) {
      requests.push_back(request_of(prompt_of(20, 1 + i), 100));
      want.push_back(model->alone(requests.back(), 0, 100));
    }
    auto engine = start(std::move(model), {.prefix_cache = prefix_cache});
    std::vector<Answer> answers(4);
    for (size_t i = 0; i < 4; ++i) ASSERT_OK(engine->submit(requests[i], answers[i].sink()).status());
    engine->drain();
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(answers[i].ids(), want[i]);
      EXPECT_EQ(answers[i].events().size(), 100u);
      EXPECT_EQ(answers[i].last().usage.prompt_tokens, 20);
      EXPECT_EQ(answers[i].last().usage.completion_tokens, 100);
      EXPECT_EQ(answers[i].last().usage.cached_tokens, 0) << "its own pages, found again, are no cache hit";
    }
    EXPECT_GT(engine->stats().preemptions, 0);
    EXPECT_EQ(engine->stats().prompt_tokens, 80);
    EXPECT_EQ(engine->stats().generated_tokens, 400);
  }
}

// https://github.com/sgl-project/sglang/issues/39826 - tokens after the stop are counted when a step yields
// several.
TEST_P(EngineDepths, H39CountsUpToTheTokenThatEnds) {
  const TokenBytes bytes = [](int32_t id, bool) { return id == 7 ? "ST" : id == 8 ? "OP" : "."; };
  const std::vector<int32_t> eos = {0};
  const auto block = [](const Ids& ids) {
    std::vector<Sampled> drawn;
    for (const int32_t id : ids) drawn.push_back({.id = id});
    return drawn;
  };
  Request request = request_of({1, 2, 3}, 100);
  request.ignore_eos = false;
  request.stop = {"STOP"};
  struct Case {
    Ids second_block;
    int64_t max_tokens, completion;
    FinishReason finish;
    std::string text;
  };
  for (const Case& c : {Case{{5, 0, 5, 5}, 100, 6, FinishReason::stop, "....."},
                        Case{{7, 8, 5, 5}, 100, 6, FinishReason::stop, "...."},
                        Case{{5, 5, 5, 5}, 6, 6, FinishReason::length, "......"}}) {
    Generation generation(request, c.max_tokens, eos, bytes);
    std::vector<TokenEvent> events;
    generation.append(block({4, 4, 4, 4}), events);
    generation.append(block(c.second_block), events);
    ASSERT_EQ(std::ssize(events), c.completion);
    std::string text;
    for (const TokenEvent& event : events) text += event.text;
    EXPECT_EQ(text, c.text);
    EXPECT_EQ(events.back().finish, c.finish);
    EXPECT_EQ(events.back().usage.completion_tokens, c.completion);
    EXPECT_EQ(generation.usage().completion_tokens, c.completion);
    EXPECT_EQ(std::ssize(generation.output()), c.completion);
    EXPECT_EQ(generation.usage().prompt_tokens, 3);
    generation.append(block({4}), events);
    EXPECT_EQ(std::ssize(events), c.completion) << "nothing follows the end";
  }
}

TEST_P(EngineDepths, NanEndsOnlyItsRequest) {
  auto runner = forced(RunnerShape{}, {{1, {7}}, {2, {8}}});
  const auto inner = runner->choose;
  runner->choose = [inner](const StepInput& in, int64_t request, const SampleSlot& slot) {
    Sampled sampled = inner(in, request, slot);
    sampled.valid = !(slot.prompt_ids[0] == 2 && slot.position == 3);
    return sampled;
  };
  auto engine = start(std::move(runner));
  Answer good, bad;
  ASSERT_OK(engine->submit(request_of(Ids(20, 1), 10), good.sink()).status());
  ASSERT_OK(engine->submit(request_of(Ids(20, 2), 10), bad.sink()).status());
  engine->drain();
  EXPECT_EQ(good.ids().size(), 10u);
  EXPECT_EQ(bad.ids().size(), 3u);
  EXPECT_EQ(bad.last().id, -1);
  EXPECT_EQ(bad.last().finish, FinishReason::error);
  EXPECT_NE(bad.last().error.message().find("NaN"), std::string::npos);
  EXPECT_EQ(bad.last().usage.completion_tokens, 3);
  EXPECT_EQ(engine->stats().failed, 1);
}

TEST_P(EngineDepths, AFailedStepFailsItsRequestsAndTheEngineGoesOn) {
  auto model = std::make_unique<PseudoModel>(RunnerShape{});
  const Request request = request_of(prompt_of(40), 5);
  const Ids want = model->alone(request, 0, 5);
  int step = 0;
  model->before_step = [&](const StepInput&) {
    ++step;
    if (step == 3) return Status(Code::device_error, "the device is on fire");
    if (step == (overlaps() ? 5 : 4))
      throw std::bad_alloc();  // of the next request: one step more was in flight
    return Status();
  };
  auto engine = start(std::move(model));
  const auto burnt = ask(*engine, request);
  EXPECT_EQ(burnt->ids().size(), 2u);
  EXPECT_EQ(burnt->last().finish, FinishReason::error);
  EXPECT_EQ(burnt->last().error.message(), "the device is on fire");
  EXPECT_EQ(ask(*engine, request)->last().finish, FinishReason::error);
  const auto answer = ask(*engine, request);
  EXPECT_EQ(answer->ids(), want);
  EXPECT_EQ(answer->last().usage.cached_tokens, 32) << "what the good steps computed is still good";
}

TEST_P(EngineDepths, RefusesWhatIsOutOfRange) {
  auto engine = start(std::make_unique<PseudoModel>(RunnerShape{}));
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  struct Case {
    std::function<void(Request&)> change;
    std::string message;
  };
  const std::vector<Case> cases = {
      {[](Request& r) { r.prompt_ids.clear(); }, "prompt_ids has 0 tokens, needs at least 1"},
      {[](Request& r) { r.prompt_ids[2] = -1; }, "prompt_ids[2] is -1, needs a token id of 0..999"},
      {[](Request& r) { r.prompt_ids[2] = 1000; }, "prompt_ids[2] is 1000, needs a token id of 0..999"},
      {[](Request& r) { r.sampling.temperature = -0.1; }, "temperature is -0.1, needs a finite number"},
      {[=](Request& r) { r.sampling.temperature = nan; }, "temperature is nan, needs a finite number"},
      {[=](Request& r) { r.sampling.temperature = inf; }, "temperature is inf, needs a finite number"},
      {[](Request& r) { r.sampling.top_k = -1; }, "top_k is -1, needs at least 0"},
      {[](Request& r) { r.sampling.top_p = 0; }, "top_p is 0, needs a number above 0 and at most 1"},
      {[](Request& r) { r.sampling.top_p = 1.01; }, "top_p is 1.01, needs"},
      {[=](Request& r) { r.sampling.top_p = nan; }, "top_p is nan, needs"},
      {[](Request& r) { r.sampling.min_p = -0.01; }, "min_p is -0.01, needs a number of 0..1"},
      {[=](Request& r) { r.sampling.min_p = nan; }, "min_p is nan, needs"},
      {[](Request& r) { r.sampling.repetition_penalty = 0; }, "repetition_penalty is 0, needs"},
      {[=](Request& r) { r.sampling.repetition_penalty = inf; }, "repetition_penalty is inf, needs"},
      {[](Request& r) { r.sampling.presence_penalty = 2.5; },
       "presence_penalty is 2.5, needs a number of -2..2"},
      {[=](Request& r) { r.sampling.presence_penalty = nan; }, "presence_penalty is nan, needs"},
      {[](Request& r) { r.sampling.frequency_penalty = -3; }, "frequency_penalty is -3, needs"},
      {[](Request& r) {
         r.sampling.logit_bias = {{1000, 1.f}};
       },
       "logit_bias names token 1000, needs"},
      {[=](Request& r) {
         r.sampling.logit_bias = {{5, static_cast<float>(nan)}};
       },
       "logit_bias of token 5 is nan"},
      {[](Request& r) { r.sampling.logprobs = 21; }, "logprobs is 21, needs -1 (none) or 0..20"},
      {[](Request& r) { r.sampling.logprobs = -2; }, "logprobs is -2, needs"},
      {[](Request& r) { r.min_tokens = 9; }, "min_tokens is 9, needs 0..8 (max_tokens)"},
      {[](Request& r) { r.min_tokens = -1; }, "min_tokens is -1, needs 0..8"},
      {[](Request& r) {
         r.stop = {"a", ""};
       },
       "stop[1] has 0 bytes, needs 1..4096"},
      {[](Request& r) { r.stop.assign(65, "a"); }, "stop has 65 strings, needs at most 64"},
      {[](Request& r) { r.stop_ids = {1000}; }, "stop_ids[0] is 1000, needs a token id of 0..999"},
      {[](Request& r) { r.cache_salt.assign(5000, 'x'); }, "cache_salt has 5000 bytes, needs at most 4096"},
  };
  Answer answer;
  for (const Case& c : cases) {
    Request request = request_of({1, 2, 3}, 8);
    c.change(request);
    const Status status = engine->submit(request, answer.sink()).status();
    EXPECT_EQ(status.code(), Code::invalid_argument) << c.message;
    EXPECT_NE(status.message().find("request: " + c.message), std::string::npos)
        << status.message() << "\nwanted " << c.message;
  }
  EXPECT_EQ(engine->submit(request_of({1}, 1), {}).status().code(), Code::invalid_argument);
  EXPECT_TRUE(answer.events().empty());
  auto small = start(std::make_unique<PseudoModel>(RunnerShape{.vocab = 8}));
  Request request = request_of({1}, 1);
  request.sampling.logprobs = 9;
  EXPECT_NE(small->submit(request, answer.sink()).status().message().find("0..8"), std::string::npos);
}

TEST_P(EngineDepths, RefusesOptionsThatCannotWork) {
  const auto refusal = [](const EngineOptions& options) {
    return make_engine(std::make_unique<PseudoModel>(RunnerShape{}), no_text, options).status().message();
  };
  EXPECT_EQ(refusal({.max_batch = 0}), "engine: max_batch is 0, needs 1..1048576");
  EXPECT_EQ(
      refusal({.max_batch = 64, .token_budget = 63}),
      "engine: token_budget is 63, needs at least max_batch = 64 (every running request gets a token per "
      "step): raise token_budget or lower max_batch");
  EXPECT_EQ(refusal({.max_waiting = 0}), "engine: max_waiting is 0, needs 1..9223372036854775807");
  EXPECT_EQ(refusal({.max_model_len = -5}), "engine: max_model_len is -5, needs 0..2147483647");
  EXPECT_EQ(refusal({.threads = 1025}), "engine: threads is 1025, needs 0 (every usable core) to 1024");
  EXPECT_EQ(refusal({.page_tokens = 0}), "engine: page_tokens is 0, needs a power of two from 1 to 256");
  EXPECT_EQ(refusal({.kv_memory_bytes = -1}),
            "engine: kv_memory_bytes is -1, needs a number >= 0 (0 chooses)");
}

TEST_P(EngineDepths, AFullQueueRefuses) {
  Gate gate;
  auto model = std::make_unique<PseudoModel>(RunnerShape{});
  model->before_step = [&](const StepInput&) {
    gate.pass();
    return Status();
  };
  auto engine = start(std::move(model), {.max_batch = 1, .max_waiting = 3});
  std::vector<Answer> answers(5);
  ASSERT_OK(engine->submit(request_of({1}, 2), answers[0].sink()).status());
  gate.wait_for_arrival();  // it runs, so it does not wait
  EXPECT_EQ(engine->stats().running, 1);
  EXPECT_EQ(engine->stats().waiting, 0);
  for (int i = 1; i < 4; ++i) EXPECT_TRUE(engine->submit(request_of({1}, 2), answers[i].sink()).ok()) << i;
  EXPECT_EQ(engine->stats().waiting, 3);
  const Status status = engine->submit(request_of({1}, 2), answers[4].sink()).status();
  EXPECT_EQ(status.code(), Code::resource_exhausted);
  EXPECT_EQ(status.message(), "engine: 4 requests are open, max_batch 1 and max_waiting 3 hold no more");
  gate.open();
  engine->drain();
  EXPECT_EQ(engine->stats().finished, 4);
}

TEST_P(EngineDepths, ASinkThatSubmitsDuringShutdownIsRefused) {
  Answer first, late;
  Status refused;
  auto engine = start(std::make_unique<PseudoModel>(RunnerShape{}));
  Engine& running = *engine;
  ASSERT_OK(engine
                ->submit(request_of({1}, 4000),
                         [&, keep = first.sink()](const TokenEvent& event) {
                           if (event.finish == FinishReason::cancelled)
                             refused = running.submit(request_of({2}, 3), late.sink()).status();
                           keep(event);
                         })
                .status());
  first.wait_for_events(1);
  engine.reset();
  EXPECT_EQ(refused.code(), Code::cancelled);
  EXPECT_EQ(refused.message(), "engine: it is shutting down");
  EXPECT_TRUE(late.events().empty());
}

TEST_P(EngineDepths, AnExceptionOutsideTheModelEndsRequestsOnly) {
  const Request request = request_of(prompt_of(40), 5);
  int plans = 0, pieces = 0;
  EngineHooks hooks = audited();
  hooks.on_plan = [&](const StepPlan&) {
    if (++plans == 3) throw std::runtime_error("no plan today");
  };
  const auto bytes = [&](int32_t, bool) -> std::string_view {
    if (++pieces == 4) throw std::bad_alloc();
    return "x";
  };
  auto engine = start(std::make_unique<PseudoModel>(RunnerShape{}), {}, bytes, hooks);
  const auto planned = ask(*engine, request);
  EXPECT_EQ(planned->last().finish, FinishReason::error);
  EXPECT_EQ(planned->last().error.message(), "engine: a step failed: no plan today");
  const auto collected = ask(*engine, request);
  EXPECT_EQ(collected->last().finish, FinishReason::error);
  EXPECT_EQ(collected->last().error.code(), Code::out_of_memory);
  EXPECT_EQ(ask(*engine, request)->text(), "xxxxx");
  engine->drain();
  EXPECT_EQ(engine->stats().failed, 2);
  EXPECT_EQ(engine->stats().pages_free + engine->stats().pages_cached, engine->stats().pages_total);
}

TEST_P(EngineDepths, TheDestructorCancels) {
  std::vector<Answer> answers(20);
  {
    auto engine = start(std::make_unique<PseudoModel>(RunnerShape{}), {.max_batch = 4});
    for (Answer& answer : answers) ASSERT_OK(engine->submit(request_of({1}, 4000), answer.sink()).status());
    answers[0].wait_for_events(2);
  }
  for (const Answer& answer : answers) EXPECT_EQ(answer.last().finish, FinishReason::cancelled);
}

TEST_P(EngineDepths, SinksMaySubmitCancelAndThrow) {
  auto engine = start(std::make_unique<PseudoModel>(RunnerShape{}));
  Answer follow_up, thrown;
  std::atomic<RequestId> own{0};
  std::promise<void> ended;
  int tokens = 0;
  const auto id = engine->submit(request_of({1}, 4000), [&](const TokenEvent& event) {
    if (event.id >= 0 && ++tokens == 3) {
      EXPECT_TRUE(engine->submit(request_of({2}, 5), follow_up.sink()).ok());
      engine->drain();
      engine->cancel(event.request);
    }
    if (event.finish != FinishReason::none) {
      EXPECT_EQ(event.finish, FinishReason::cancelled);
      ended.set_value();
    }
  });
  ASSERT_OK(id.status());
  ended.get_future().wait();
  EXPECT_EQ(tokens, 3);
  int events = 0;
  ASSERT_OK(engine
                ->submit(request_of({3}, 4000),
                         [&](const TokenEvent&) {
                           ++events;
                           throw std::runtime_error("the client is gone");
                         })
                .status());
  engine->drain();
  EXPECT_EQ(follow_up.ids().size(), 5u);
  EXPECT_EQ(events, 2) << "a token and the end";
  EXPECT_EQ(engine->stats().cancelled, 2);
}

TEST_P(EngineDepths, SleepsWhenIdle) {
  auto engine = start(std::make_unique<PseudoModel>(RunnerShape{}));
  ask(*engine, request_of({1}, 3));
  engine->drain();
  const int64_t steps = engine->stats().steps;
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const double cpu_s = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  EXPECT_LT(cpu_s, 0.1) << "of this process in 0.3 s; a busy loop takes all of it";
  EXPECT_EQ(engine->stats().steps, steps);
}

TEST_P(EngineDepths, ManyThreadsSubmitAndCancel) {
  auto model = std::make_unique<PseudoModel>(RunnerShape{.pages = 64});
  const PseudoModel& oracle = *model;
  auto engine = start(std::move(model), {.max_batch = 16, .token_budget = 64});
  std::vector<std::thread> clients;
  for (int client = 0; client < 6; ++client) {
    clients.emplace_back([&, client] {
      for (int i = 0; i < 60; ++i) {
        const Request request = request_of(prompt_of(1 + (client * 60 + i) % 150, i % 5), 1 + i % 20);
        const Ids want = oracle.alone(request, 0, *request.max_tokens);
        Answer answer;
        const auto id = engine->submit(request, answer.sink());
        ASSERT_OK(id.status());
        if (i % 3 == 0) {
          if (i % 2 == 0) answer.wait_for_events(1);
          engine->cancel(*id);
          const Ids before = answer.ids();
          answer.wait();
          ASSERT_EQ(answer.ids(), before);
          ASSERT_TRUE(std::equal(before.begin(), before.end(), want.begin()));
        } else {
          answer.wait();
          ASSERT_EQ(answer.ids(), want);
        }
        engine->stats();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  engine->drain();
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.finished + stats.cancelled, 360);
  EXPECT_EQ(stats.pages_free + stats.pages_cached, 64);
}

INSTANTIATE_TEST_SUITE_P(Engine, EngineDepths, ::testing::Bool(), name_of_depth);

}  // namespace
}  // namespace vivace::engine
