// Conversations, data sets, bounds and the order in which a load is sent.

#include "src/bench/workload.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "src/bench/load.h"
#include "src/bench/metrics.h"
#include "tests/bench/fake_target.h"

namespace vivace::bench {
namespace {

WorkloadOptions multi_turn(int64_t requests) {
  WorkloadOptions options;
  options.workload = Workload::multi_turn;
  options.requests = requests;
  options.max_model_len = 4096;
  options.vocab = 1000;
  options.seed = 5;
  return options;
}

TEST(MultiTurn, ConversationsShareTheirBeginningAndGrow) {
  const auto plan = plan_workload(multi_turn(20));
  ASSERT_TRUE(plan.ok());
  ASSERT_EQ(plan->size(), 20u);
  const std::vector<int32_t>& first = plan->front().prompt.ids;
  for (size_t i = 0; i < 20; ++i) {
    const PlannedRequest& request = (*plan)[i];
    const std::vector<int32_t>& ids = request.prompt.ids;
    ASSERT_GT(ids.size(), 192u);
    EXPECT_TRUE(std::equal(ids.begin(), ids.begin() + 192, first.begin())) << i;
    EXPECT_EQ(request.after, i % 4 == 0 ? -1 : static_cast<int64_t>(i) - 1) << "four turns each";
    if (i % 4 == 0) continue;
    const PlannedRequest& before = (*plan)[i - 1];
    EXPECT_TRUE(std::equal(before.prompt.ids.begin(), before.prompt.ids.end(), ids.begin()))
        << "what was said before";
    EXPECT_GT(static_cast<int64_t>(ids.size()),
              static_cast<int64_t>(before.prompt.ids.size()) + before.output_tokens)
        << "a reply and a text";
  }
  EXPECT_NE((*plan)[0].prompt.ids, (*plan)[4].prompt.ids);
}

TEST(MultiTurn, StaysInTheContext) {
  WorkloadOptions options = multi_turn(300);
  options.max_model_len = 300;
  const auto plan = plan_workload(options);
  ASSERT_TRUE(plan.ok());
  int64_t cut = 0;
  for (const PlannedRequest& request : *plan) {
    EXPECT_LE(static_cast<int64_t>(request.prompt.ids.size()) + request.output_tokens, 300);
    EXPECT_GE(request.output_tokens, 1);
    EXPECT_TRUE(!request.cut || request.after < 0) << "a turn that does not fit begins a conversation";
    cut += request.cut;
  }
  EXPECT_GT(cut, 0);
  options.max_model_len = 193;
  EXPECT_NE(plan_workload(options).status().message().find("max_model_len is 193, needs at least 194"),
            std::string::npos);
}

TEST(Workload, TextHasTheLengthOfItsTokens) {
  WorkloadOptions options;
  options.workload = Workload::uniform;
  options.requests = 3;
  options.max_model_len = 512;
  options.bytes_per_token = 4.5;
  const auto text = plan_workload(options);
  ASSERT_TRUE(text.ok());
  for (const PlannedRequest& request : *text) {
    EXPECT_TRUE(request.prompt.ids.empty());
    EXPECT_EQ(request.prompt.text.size(), 576u) << "128 * 4.5";
  }
  options.chat = true;
  const auto chat = plan_workload(options);
  const auto messages = nlohmann::json::parse(chat->front().prompt.messages);
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(messages[0]["role"], "user");
  EXPECT_EQ(messages[0]["content"], text->front().prompt.text);
}

TEST(Load, ATurnWaitsForTheOneBefore) {
  for (const bool open_loop : {false, true}) {
    FakeTarget target;
    LoadOptions options;
    options.concurrency = 3;
    options.open_loop = open_loop;
    WorkloadOptions workload = multi_turn(24);
    workload.rate = open_loop ? 500 : 0;
    const auto plan = plan_workload(workload);
    const LoadResult result = run_load(target, *plan, options);
    for (size_t i = 0; i < plan->size(); ++i) {
      EXPECT_EQ(result.requests[i].error, "");
      EXPECT_GT(result.requests[i].chunk_s.size(), 0u);
      const int64_t after = (*plan)[i].after;
      if (after >= 0)
        EXPECT_GE(result.requests[i].start_s, result.requests[static_cast<size_t>(after)].end_s) << i;
    }
    if (!open_loop) EXPECT_LE(target.most_open(), 3);
  }
}

TEST(Load, ATurnAfterAFailureIsSentToo) {
  FakeTarget target;
  std::vector<PlannedRequest> plan = {{{{FakeTarget::kRefusedId}}, 2}, {{{1}}, 2}, {{{1}}, 2}};
  plan[1].after = 0;
  plan[2].after = 1;
  const LoadResult result = run_load(target, plan, {});
  EXPECT_EQ(result.requests[0].error_kind, "resource_exhausted");
  EXPECT_EQ(result.requests[2].completion_tokens, 2);
}

TEST(Load, RoundsFollowEachOther) {
  LoadResult all, round;
  round.requests.resize(1);
  round.requests[0].start_s = 0.5;
  round.requests[0].end_s = 2;
  round.requests[0].chunk_s = {1, 2};
  round.duration_s = 1.5;
  append_round(all, round);
  append_round(all, round);
  ASSERT_EQ(all.requests.size(), 2u);
  EXPECT_DOUBLE_EQ(all.duration_s, 3);
  EXPECT_EQ(all.requests[1].round, 1);
  EXPECT_DOUBLE_EQ(all.requests[1].start_s, 2);
  EXPECT_EQ(all.requests[1].chunk_s, (std::vector<double>{2.5, 3.5}));
}

TEST(Slo, Parses) {
  const auto slo = Slo::parse("ttft=500ms,tpot=0.05s,e2e=3s");
  ASSERT_TRUE(slo.ok()) << slo.status().message();
  EXPECT_EQ(slo->ttft_ms, 500);
  EXPECT_EQ(slo->tpot_ms, 50);
  EXPECT_EQ(slo->e2e_ms, 3000);
  EXPECT_EQ(slo->text(), "ttft=500ms,tpot=50ms,e2e=3000ms");
  for (const char* wrong : {"", ",", "ttft", "ttft=", "ttft=5", "ttft=5ms,", "ttft=-1s", "ttft=0ms",
                            "ttft=nans", "ttft=5m s", "ttft=5m", "ttft=5sms", "ttft=5mss", "ttft=s",
                            "ttft=5x", "itl=5ms", "ttft=1s,ttft=2s", "ttft=1s1", "ttft=infs"}) {
    const Status status = Slo::parse(wrong).status();
    EXPECT_EQ(status.code(), Code::invalid_argument) << wrong;
    EXPECT_NE(status.message().find(std::string("is '") + wrong + "'"), std::string::npos)
        << status.message();
  }
}

RequestRecord record(double ttft_s, double gap_s, int64_t tokens) {
  RequestRecord r;
  r.wanted_tokens = r.completion_tokens = tokens;
  r.usage_known = true;
  for (int64_t i = 0; i < tokens; ++i) r.chunk_s.push_back(ttft_s + gap_s * static_cast<double>(i));
  r.end_s = r.chunk_s.back();
  return r;
}

TEST(Metrics, Goodput) {
  LoadResult result;
  result.requests = {record(0.1, 0.01, 5), record(0.3, 0.01, 5), record(0.1, 0.03, 5), record(0.1, 0, 1),
                     record(0.1, 0.01, 5)};
  result.requests.back().error = "failed";
  result.duration_s = 2;
  EXPECT_EQ(measure(result).good, 0) << "no bounds, no goodput";
  Slo slo;
  slo.ttft_ms = 200;
  EXPECT_EQ(measure(result, slo).good, 3);
  slo.tpot_ms = 20;
  const Metrics m = measure(result, slo);
  EXPECT_EQ(m.good, 2) << "one of a single token has no TPOT to be late with";
  EXPECT_DOUBLE_EQ(m.goodput_s, 1);
  slo.e2e_ms = 120;
  EXPECT_EQ(measure(result, slo).good, 1);
  ASSERT_EQ(m.failures_by_kind.size(), 1u);
  EXPECT_EQ(m.failures_by_kind[0], (std::pair<std::string, int64_t>("other", 1)));
}

TEST(Metrics, ShortOutputsAndTimeOverTime) {
  LoadResult result;
  result.requests = {record(0, 1, 3)};  // tokens at 0, 1 and 2
  result.requests[0].wanted_tokens = 4;
  const Metrics m = measure(result);
  EXPECT_EQ(m.short_outputs, 1);
  int64_t with_gaps = 0;
  for (const TimelineBin& bin : m.timeline) {
    if (!std::isfinite(bin.itl_median_ms)) continue;
    ++with_gaps;
    EXPECT_NEAR(bin.itl_median_ms, 1000, 1e-9);
  }
  EXPECT_EQ(with_gaps, 2) << "a gap counts where it ends";
  EXPECT_EQ(m.itl_ms.max, 1000);
}

class Dataset : public testing::Test {
 protected:
  Dataset() : path_(std::filesystem::temp_directory_path() / ("dataset." + std::to_string(::getpid()))) {}
  ~Dataset() override { std::filesystem::remove(path_); }

  Result<std::vector<PlannedRequest>> plan(const std::string& text, DatasetOptions options = {}) {
    std::ofstream(path_, std::ios::binary) << text;
    options.path = path_;
    return plan_dataset(options);
  }
  const std::filesystem::path path_;
};

TEST_F(Dataset, LinesBecomeRequests) {
  const std::string text =
      "{\"prompt\": \"h\\u00e9llo\", \"max_tokens\": 7, \"id\": 3}\n\n"
      "{\"prompt\": [5, 6]}\r\n"
      "{\"messages\": [{\"role\": \"system\", \"content\": \"x\"}, {\"role\": \"user\", \"content\": "
      "[{\"type\": \"text\", \"text\": \"y\"}]}], \"max_tokens\": null}";
  const auto plan = this->plan(text);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  ASSERT_EQ(plan->size(), 3u);
  EXPECT_EQ((*plan)[0].prompt.text, "h\xc3\xa9llo");
  EXPECT_EQ((*plan)[0].output_tokens, 7);
  EXPECT_EQ((*plan)[1].prompt.ids, (std::vector<int32_t>{5, 6}));
  EXPECT_EQ((*plan)[1].output_tokens, 128);
  EXPECT_EQ(nlohmann::json::parse((*plan)[2].prompt.messages).size(), 2u);
  DatasetOptions options;
  options.requests = 5;
  options.first = 2;
  options.rate = 3;
  const auto more = this->plan(text, options);
  ASSERT_EQ(more->size(), 5u);
  EXPECT_FALSE((*more)[0].prompt.messages.empty()) << "from the third line on";
  EXPECT_EQ((*more)[1].prompt.text, "h\xc3\xa9llo") << "and from the beginning again";
  EXPECT_GT((*more)[4].arrival_s, (*more)[1].arrival_s);
  EXPECT_NE(fingerprint(*plan), fingerprint(*more));
  EXPECT_EQ(fingerprint(*more), fingerprint(*this->plan(text, options)));
}

TEST_F(Dataset, MistakesNameTheLineAndTheField) {
  const std::string good = "{\"prompt\": \"a\"}\n";
  for (const auto& [line, says] : std::vector<std::pair<std::string, std::string>>{
           {"{\"prompt\": \"a\"", ":2: "},
           {"[1]", ":2: is array, needs a JSON object"},
           {"{}", ":2: needs one of prompt and messages, has neither"},
           {"{\"prompt\": \"a\", \"messages\": []}", ":2: needs one of prompt and messages, has both"},
           {"{\"prompt\": \"\"}", ":2: prompt is \"\", needs a text that is not empty"},
           {"{\"prompt\": 7}", ":2: prompt is 7, needs a text"},
           {"{\"prompt\": [1, -2]}", ":2: prompt[1] is -2, needs a token id from 0 to 2147483647"},
           {"{\"prompt\": [1, 4294967296]}", ":2: prompt[1] is 4294967296, needs a token id"},
           {"{\"prompt\": [\"x\"]}", ":2: prompt[0] is \"x\", needs a token id"},
           {"{\"prompt\": \"a\", \"max_tokens\": 0}", "max_tokens"},
           {"{\"prompt\": \"a\", \"max_tokens\": 1.5}", "max_tokens"},
           {"{\"prompt\": \"a\", \"max_tokens\": \"9\"}", "max_tokens"},
           {"{\"messages\": []}", ":2: messages is a list with 0 elements, needs a list"},
           {"{\"messages\": [\"x\"]}", ":2: messages[0].role is absent, needs a text"},
           {"{\"messages\": [{\"role\": \"user\"}]}", ":2: messages[0].content is absent, needs a text"},
           {"{\"messages\": [{\"role\": 5, \"content\": \"\"}]}",
            ":2: messages[0].role is 5, needs a text"}}) {
    const auto plan = this->plan(good + line + "\n" + good);
    ASSERT_FALSE(plan.ok()) << line;
    EXPECT_NE(plan.status().message().find(says), std::string::npos) << plan.status().message();
    EXPECT_NE(plan.status().message().find(path_.string() + ":2"), std::string::npos)
        << plan.status().message();
  }
  EXPECT_NE(plan("\n \n").status().message().find("has no request"), std::string::npos);
  DatasetOptions chat;
  chat.chat = true;
  EXPECT_NE(plan("{\"prompt\": [1]}", chat)
                .status()
                .message()
                .find(":1: prompt is a list with 1 elements, needs a text"),
            std::string::npos);
  std::filesystem::remove(path_);
  DatasetOptions options;
  options.path = path_;
  EXPECT_EQ(plan_dataset(options).status().code(), Code::io_error);
}

}  // namespace
}  // namespace vivace::bench
