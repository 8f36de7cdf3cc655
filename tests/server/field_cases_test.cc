#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "tests/server/rig.h"

// Faults that users of other servers reported, over HTTP. Those that are about one field or one text stand in
// api_test.cc and server_test.cc.

namespace vivace::server {
namespace {

using namespace std::chrono_literals;

std::string completions(const std::string& body) {
  return Client::post("/v1/completions", body);
}

/// "10,11,...": a prompt of its own for each `first`.
std::string ids(int64_t first, int64_t count) {
  std::string text;
  for (int64_t i = 0; i < count; ++i) text += fmt::format("{}{}", i > 0 ? "," : "", (first + i) % 4000 + 10);
  return text;
}

std::string text_of(const Reply& reply) {
  EXPECT_EQ(reply.status, 200) << reply.body;
  return reply.json()["choices"][0]["text"];
}

// https://github.com/sgl-project/sglang/issues/40076: one bad request, and every client lost its connection.
TEST(FieldCases, H29BadRequestsDoNotDisturbOthers) {
  RigOptions options;
  options.step_us = 500;
  Rig rig(std::move(options));
  Client good(rig.port());
  good.send(completions(R"({"prompt":[5],"max_tokens":300,"ignore_eos":true,"stream":true})"));
  EXPECT_EQ(good.head().status, 200);
  for (const char* field :
       {R"("logprobs":21)", R"("logprobs":4097)", R"("logprobs":2147483648)", R"("n":0)", R"("top_k":-2)",
        R"("min_p":1.5)", R"("seed":9223372036854775808)", R"("temperature":-1)", R"("prompt":[4096])",
        R"("max_tokens":4096)", R"("logit_bias":{"4096":1})", R"("stop_token_ids":[4096])",
        R"("min_tokens":17)"}) {
    const std::string prompt = std::string(field).starts_with("\"prompt\"") ? "" : R"(,"prompt":"a")";
    const Reply reply = rig.request(completions("{" + std::string(field) + prompt + "}"));
    EXPECT_EQ(reply.status, 400) << field << reply.body;
    error_in(reply);
  }
  int events = 0;
  while (good.chunk()) ++events;
  EXPECT_EQ(events, 301);
}

// https://github.com/sgl-project/sglang/issues/34149: a cancel around the last chunk of a prompt left a token behind.
TEST(FieldCases, H36DisconnectAroundTheLastChunkOfAPrompt) {
  const std::string body =
      R"({"prompt":[)" + ids(50, 40) + R"(],"max_tokens":20,"ignore_eos":true,"temperature":0})";
  std::string cold;
  {
    RigOptions options;
    options.engine.token_budget = 16;
    options.engine.max_batch = 16;
    Rig rig(std::move(options));
    cold = text_of(rig.request(completions(body)));
  }
  for (int step = 1; step <= 5; ++step) {  // three chunks, then tokens
    SCOPED_TRACE(step);
    RigOptions options;
    options.engine.token_budget = 16;
    options.engine.max_batch = 16;
    Rig rig(std::move(options));
    rig.hold_at(step);
    Client client(rig.port());
    client.send(completions(body));
    EXPECT_TRUE(rig.eventually([&] { return rig.steps() == step; }));
    client.close();
    EXPECT_TRUE(rig.eventually([&] { return rig.server().http_stats().open == 0; }));
    rig.hold(false);
    EXPECT_TRUE(rig.eventually([&] { return rig.idle(); }));
    EXPECT_EQ(rig.engine().stats().cancelled, 1);
    EXPECT_EQ(rig.engine().stats().generated_tokens, std::max(0, step - 3)) << "none after the cancel";
    EXPECT_EQ(text_of(rig.request(completions(body))), cold);
  }
}

// https://github.com/vllm-project/vllm/pull/17999: a prompt that was cached as a whole left nothing to sample from.
TEST(FieldCases, H37PromptsThatAreCachedAsAWhole) {
  RigOptions options;
  options.shape.page_tokens = 64;
  Rig rig(std::move(options));
  for (const auto& [length, cached] :
       std::vector<std::pair<int64_t, int>>{{63, 0}, {64, 0}, {65, 64}, {128, 64}, {129, 128}}) {
    SCOPED_TRACE(length);
    const std::string body =
        R"({"prompt":[)" + ids(length * 7, length) + R"(],"max_tokens":5,"ignore_eos":true,"temperature":0})";
    const Reply first = rig.request(completions(body));
    for (int again = 0; again < 2; ++again) {
      const Reply reply = rig.request(completions(body));
      EXPECT_EQ(text_of(reply), text_of(first));
      EXPECT_EQ(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"], cached);
    }
  }
}

// https://github.com/vllm-project/vllm/issues/16832: a preempted request returned an incomplete answer.
TEST(FieldCases, H38PreemptedRequestsLoseNothing) {
  const auto body = [](int i) {
    return R"({"prompt":[)" + ids(i * 100, 20) + R"(],"max_tokens":100,"ignore_eos":true,"temperature":0})";
  };
  std::vector<std::string> alone;
  {
    Rig rig;
    for (int i = 0; i < 4; ++i) alone.push_back(text_of(rig.request(completions(body(i)))));
  }
  RigOptions options;
  options.shape.pages = 12;
  options.engine.prefix_cache = false;
  Rig rig(std::move(options));
  rig.hold(true);
  std::vector<Client> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back(rig.port());
    clients.back().send(completions(body(i)));
  }
  EXPECT_TRUE(
      rig.eventually([&] { return rig.engine().stats().running + rig.engine().stats().waiting == 4; }));
  rig.hold(false);
  for (int i = 0; i < 4; ++i) {
    const Reply reply = clients[static_cast<size_t>(i)].read();
    EXPECT_EQ(text_of(reply), alone[static_cast<size_t>(i)]);
    EXPECT_EQ(reply.json()["usage"]["prompt_tokens"], 20);
    EXPECT_EQ(reply.json()["usage"]["completion_tokens"], 100);
  }
  EXPECT_GT(rig.engine().stats().preemptions, 0);
  EXPECT_NE(rig.get("/metrics")
                .body.find(fmt::format("vivace_preemptions_total {}\n", rig.engine().stats().preemptions)),
            std::string::npos);
}

// https://github.com/sgl-project/sglang/issues/7551: with many connections requests failed as descriptors ran out.
TEST(FieldCases, H44DescriptorsThatRunOutComeBack) {
  RigOptions options;
  options.server.http.header_timeout = 400ms;
  Rig rig(std::move(options));
  Client running(rig.port());
  running.send(completions(R"({"prompt":[5],"max_tokens":4000,"ignore_eos":true,"stream":true})"));
  EXPECT_EQ(running.head().status, 200);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit low{.rlim_cur = 256, .rlim_max = limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  {
    std::vector<Client> idle;  // client and server share the limit, so that the server's accept fails too
    for (int i = 0; i < 300; ++i) idle.emplace_back(rig.port());
    EXPECT_TRUE(std::ranges::any_of(idle, [](const Client& c) { return !c.connected(); }));
    int events = 0;
    while (running.chunk()) ++events;
    EXPECT_EQ(events, 4001) << "what runs goes on";
  }
  EXPECT_TRUE(rig.eventually([&] { return rig.server().http_stats().open <= 1; }));
  EXPECT_EQ(rig.get("/health").status, 200);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

}  // namespace
}  // namespace vivace::server
