// The client against a server that is written out in each test.

#include "src/bench/http_target.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <nlohmann/json.hpp>

#include "src/bench/load.h"
#include "src/bench/metrics.h"
#include "src/bench/openai.h"
#include "src/bench/sse.h"
#include "tests/bench/scripted_server.h"

namespace vivace::bench {
namespace {

using Peer = ScriptedServer::Peer;
using Call = ScriptedServer::Call;
using Clock = std::chrono::steady_clock;

void sleep_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

std::string token(const std::string& text, const std::string& finish = "null") {
  return R"({"choices":[{"index":0,"text":")" + text + R"(","finish_reason":)" + finish + "}]}";
}
const std::string kUsage =
    R"({"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}})";

/// A whole stream of three tokens.
const std::vector<std::string> kStream = {token("one "), token("zwei € "), token("trois", "\"length\""),
                                          kUsage, "[DONE]"};

void stream(Peer& peer, const std::vector<std::string>& events) {
  peer.begin_stream();
  for (const std::string& event : events) peer.event(event);
  peer.end_stream();
}

std::unique_ptr<HttpTarget> connect(const ScriptedServer& server, HttpTargetOptions options = {}) {
  options.url = server.url();
  Result<std::unique_ptr<HttpTarget>> target = HttpTarget::create(options);
  EXPECT_TRUE(target.ok()) << target.status().message();
  return target.ok() ? std::move(target).value() : nullptr;
}

std::vector<PlannedRequest> requests(size_t count, int64_t tokens = 3) {
  std::vector<PlannedRequest> plan(count);
  for (PlannedRequest& request : plan) {
    request.prompt.ids = {1, 2, 3};
    request.output_tokens = tokens;
  }
  return plan;
}

/// One request to a server that follows `script`.
RequestRecord one(ScriptedServer::Script script, HttpTargetOptions options = {}, int64_t tokens = 3) {
  ScriptedServer server(std::move(script));
  const auto target = connect(server, options);
  return run_load(*target, requests(1, tokens), {}).requests.front();
}

TEST(Sse, BytesMayBeCutAnywhere) {
  const std::string text =
      ": ping\n\ndata: {\"a\": \"h\xc3\xa9llo\"}\r\n\r\nevent: x\nid: 7\ndata:one\ndata: two\r\rdata\n\n:\n"
      "data: [DONE]\n\n";
  const std::vector<std::string> expected = {"{\"a\": \"h\xc3\xa9llo\"}", "one\ntwo", "", "[DONE]"};
  for (size_t a = 0; a <= text.size(); ++a) {
    for (size_t b = a; b <= text.size(); ++b) {
      SseParser parser;
      std::vector<std::string> got;
      const auto take = [&](std::string_view data) {
        got.emplace_back(data);
        return true;
      };
      for (const std::string& part : {text.substr(0, a), text.substr(a, b - a), text.substr(b)})
        ASSERT_TRUE(parser.push(part, take).ok());
      parser.finish(take);
      ASSERT_EQ(got, expected) << "cut at " << a << " and " << b;
    }
  }
}

TEST(Sse, AnEventWithoutItsEmptyLineEndsWithTheStream) {
  SseParser parser;
  std::vector<std::string> got;
  const auto take = [&](std::string_view data) {
    got.emplace_back(data);
    return true;
  };
  ASSERT_TRUE(parser.push("data: a\n\ndata: b", take).ok());
  EXPECT_EQ(got.size(), 1u);
  parser.finish(take);
  EXPECT_EQ(got, (std::vector<std::string>{"a", "b"}));
}

TEST(Sse, AnEventHasALimit) {
  SseParser parser;
  const std::string part(size_t{1} << 20, 'x');
  const auto take = [](std::string_view) { return true; };
  Status status = parser.push("data: ", take);
  int parts = 0;
  for (; status.ok() && parts < 100; ++parts) status = parser.push(part, take);
  EXPECT_EQ(status.code(), Code::resource_exhausted);
  EXPECT_LE(parts, 4);
}

TEST(OpenAi, WhatCountsAsAToken) {
  const auto counted = [](const std::string& data) { return openai::read_chunk(data)->counted; };
  EXPECT_TRUE(counted(token("a")));
  EXPECT_TRUE(counted(token(""))) << "a token may complete no character";
  EXPECT_FALSE(counted(kUsage));
  EXPECT_FALSE(counted(R"({"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]})"));
  EXPECT_TRUE(counted(R"({"choices":[{"delta":{"role":"assistant","content":"a"}}]})"));
  EXPECT_TRUE(counted(R"({"choices":[{"delta":{"content":""}}]})"));
  EXPECT_TRUE(counted(R"({"choices":[{"delta":{"reasoning_content":"hm"}}]})"));
  EXPECT_FALSE(counted(R"({"choices":[{"delta":{},"finish_reason":"length"}]})"));
  const openai::Chunk usage = *openai::read_chunk(kUsage);
  EXPECT_EQ(usage.prompt_tokens, 9);
  EXPECT_EQ(usage.completion_tokens, 3);
  EXPECT_EQ(usage.cached_tokens, 4);
  EXPECT_EQ(openai::read_chunk(R"({"error":{"message":"broke"}})")->error, "broke");
  EXPECT_EQ(openai::read_chunk(R"({"error":"broke"})")->error, "broke");
  for (const char* data : {"", "nonsense", "[1]", "\"text\"", "{\"choices\":"})
    EXPECT_FALSE(openai::read_chunk(data).ok()) << data;
  for (const char* data :
       {"{}", R"({"choices":7})", R"({"choices":[7]})", R"({"usage":{"prompt_tokens":"x"}})"})
    EXPECT_TRUE(openai::read_chunk(data).ok()) << data;
}

TEST(OpenAi, Models) {
  const std::string body = R"({"data":[{"id":"a","max_model_len":7},{"id":"b"}]})";
  EXPECT_EQ(openai::read_models(body, "")->id, "a");
  EXPECT_EQ(openai::read_models(body, "")->max_model_len, 7);
  EXPECT_EQ(openai::read_models(body, "b")->max_model_len, 0);
  EXPECT_NE(openai::read_models(body, "c").status().message().find("no model 'c', only a, b"),
            std::string::npos);
  for (const char* wrong : {"", "{}", R"({"data":[]})", R"({"data":[{}]})", "[1]"})
    EXPECT_FALSE(openai::read_models(wrong, "").ok()) << wrong;
}

TEST(HttpUrl, Parts) {
  const auto url = HttpUrl::parse("http://host.example:8000/base/v1/");
  ASSERT_TRUE(url.ok());
  EXPECT_EQ(url->host, "host.example");
  EXPECT_EQ(url->port, "8000");
  EXPECT_EQ(url->path, "/base");
  EXPECT_EQ(HttpUrl::parse("http://[::1]:81")->host, "::1");
  EXPECT_EQ(HttpUrl::parse("http://a")->port, "80");
  for (const char* wrong :
       {"", "host:80", "http://", "http://:80", "http://a:", "http://a:x", "http://a:0", "http://a:65536",
        "http://a:99999999999", "http://a b", "http://u@h", "http://[::1", "http://a?b", "ftp://a"})
    EXPECT_EQ(HttpUrl::parse(wrong).status().code(), Code::invalid_argument) << wrong;
  EXPECT_EQ(HttpUrl::parse("https://a").status().code(), Code::unsupported);
}

TEST(HttpTarget, ReadsAStreamWhoseBytesComeOneByOne) {
  const RequestRecord record = one([](Peer& peer, const Call&) {
    std::string body = ": ping\n\n";
    for (const std::string& event : kStream) body += "data: " + event + "\r\n\r\n";
    // Chunks of one and of seven bytes: the euro sign is cut by both.
    std::string bytes =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        "transfer-encoding: chunked\r\n\r\n";
    for (size_t i = 0, n = 1; i < body.size(); i += n, n = 8 - n) bytes += Peer::as_chunk(body.substr(i, n));
    bytes += "0\r\n\r\n";
    for (const char& byte : bytes) peer.send({&byte, 1});
  });
  EXPECT_EQ(record.error, "");
  EXPECT_EQ(record.text, "one zwei € trois");
  EXPECT_EQ(record.chunk_s.size(), 3u);
  EXPECT_EQ(record.completion_tokens, 3);
  EXPECT_EQ(record.prompt_tokens, 9);
  EXPECT_EQ(record.cached_tokens, 4);
  EXPECT_TRUE(record.usage_known);
}

TEST(HttpTarget, SendsWhatServersExpect) {
  std::mutex mutex;
  std::vector<Call> calls;
  ScriptedServer server([&](Peer& peer, const Call& call) {
    const std::lock_guard lock(mutex);
    calls.push_back(call);
    stream(peer, kStream);
  });
  HttpTargetOptions options;
  options.api_key = "secret";
  const auto target = connect(server, options);
  EXPECT_EQ(target->model().id, "tiny");
  EXPECT_EQ(target->model().max_model_len, 512);
  std::vector<PlannedRequest> plan = requests(3);
  plan[1].prompt = {{}, "text", ""};
  plan[2].prompt = {{}, "", R"([{"role":"user","content":"hi"}])"};
  plan[2].seed = 7;
  LoadOptions load;
  load.concurrency = 1;
  run_load(*target, {plan[0], plan[1]}, load);
  load.temperature = 0.5;
  load.ignore_eos = false;
  run_load(*target, {plan[2]}, load);
  ASSERT_EQ(calls.size(), 3u);
  using Json = nlohmann::json;
  Json expected = {{"model", "tiny"},
                   {"prompt", {1, 2, 3}},
                   {"max_tokens", 3},
                   {"temperature", 0.0},
                   {"ignore_eos", true},
                   {"stream", true},
                   {"stream_options", {{"include_usage", true}}}};
  EXPECT_EQ(Json::parse(calls[0].body), expected);
  expected["prompt"] = "text";
  EXPECT_EQ(Json::parse(calls[1].body), expected);
  for (const char* field : {"prompt", "max_tokens", "ignore_eos"}) expected.erase(field);
  expected["messages"] = Json::parse(plan[2].prompt.messages);
  expected["max_completion_tokens"] = 3;
  expected["temperature"] = 0.5;
  expected["seed"] = 7;
  EXPECT_EQ(Json::parse(calls[2].body), expected);
  EXPECT_TRUE(calls[0].head.starts_with("POST /v1/completions HTTP/1.1\r\n"));
  EXPECT_TRUE(calls[2].head.starts_with("POST /v1/chat/completions HTTP/1.1\r\n"));
  for (const Call& call : calls) {
    EXPECT_NE(call.head.find("Authorization: Bearer secret\r\n"), std::string::npos);
    EXPECT_NE(call.head.find("x-request-id: vivace-bench-"), std::string::npos);
    EXPECT_NE(call.head.find("Content-Type: application/json\r\n"), std::string::npos);
  }
  EXPECT_EQ(server.connections(), 1) << "kept alive";
}

/// The server notes when it wrote each token; the client's times must be those.
TEST(HttpTarget, TimesAreThoseOfTheServer) {
  std::mutex mutex;
  std::vector<double> ttft, tpot;  // ms, as written
  ScriptedServer server([&](Peer& peer, const Call&) {
    const auto arrived = Clock::now();
    std::vector<Clock::time_point> written;
    peer.begin_stream();
    sleep_ms(40);
    for (int i = 0; i < 5; ++i) {
      if (i > 0) sleep_ms(10 * i);
      written.push_back(Clock::now());
      peer.event(token("x", i == 4 ? "\"length\"" : "null"));
    }
    const auto ms = [](Clock::duration d) { return std::chrono::duration<double, std::milli>(d).count(); };
    {
      const std::lock_guard lock(mutex);
      ttft.push_back(ms(written[0] - arrived));
      tpot.push_back(ms(written[4] - written[0]) / 4);
    }
    peer.event(R"({"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}})");
    peer.event("[DONE]");
    peer.end_stream();
  });
  const auto target = connect(server);
  LoadOptions options;
  options.concurrency = 1;
  const Metrics m = measure(run_load(*target, requests(7, 5), options));
  EXPECT_EQ(m.failures, 0);
  const std::lock_guard lock(mutex);
  const double server_ttft = distribution_of(ttft).median, server_tpot = distribution_of(tpot).median;
  EXPECT_GE(server_ttft, 40);
  EXPECT_GE(server_tpot, 25) << "(10 + 20 + 30 + 40) / 4";
  // Two wake-ups on a busy machine lie between them; a millisecond when it is idle.
  EXPECT_GE(m.ttft_ms.median, server_ttft);
  EXPECT_NEAR(m.ttft_ms.median, server_ttft, 15);
  EXPECT_NEAR(m.tpot_ms.median, server_tpot, 5);
  ASSERT_EQ(m.itl_ms.values.size(), 7u * 4u);
  EXPECT_NEAR(m.e2e_ms.median, server_ttft + 4 * server_tpot, 25);
}

TEST(HttpTarget, MissingUsageIsSaid) {
  const RequestRecord record = one([](Peer& peer, const Call&) {
    stream(peer, {kStream[0], kStream[1], kStream[2], "[DONE]"});
  });
  EXPECT_EQ(record.error, "");
  EXPECT_FALSE(record.usage_known);
  EXPECT_EQ(record.completion_tokens, 3) << "its chunks";
  LoadResult result;
  result.requests = {record};
  EXPECT_EQ(measure(result).usage_missing, 1);
}

TEST(HttpTarget, AStreamWithoutLengthEndsWithItsConnection) {
  const RequestRecord record = one([](Peer& peer, const Call&) {
    peer.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n");
    for (size_t i = 0; i < 3; ++i) peer.send("data: " + kStream[i] + "\n\n");
    peer.close();
  });
  EXPECT_EQ(record.error, "") << "a finish_reason came";
  EXPECT_EQ(record.text, "one zwei € trois");
}

struct Wrong {
  std::string kind, message;
  ScriptedServer::Script script;
  size_t chunks = 0;
};

TEST(HttpTarget, EveryFailureHasItsKind) {
  const std::vector<Wrong> all = {
      {"HTTP 429", "HTTP 429: the queue is full",
       [](Peer& peer, const Call&) { peer.answer(429, R"({"error":{"message":"the queue is full"}})"); }},
      {"HTTP 503", "HTTP 503: no", [](Peer& peer, const Call&) { peer.answer(503, "no", "text/plain"); }},
      {"HTTP 400", "HTTP 400", [](Peer& peer, const Call&) { peer.answer(400, std::string(1 << 20, 'x')); }},
      {"server error", "out of pages",
       [](Peer& peer, const Call&) {
         stream(peer, {kStream[0], R"({"error":{"message":"out of pages"}})"});
       },
       1},
      {"disconnected", "closed the connection",
       [](Peer& peer, const Call&) {
         peer.begin_stream();
         peer.event(kStream[0]);
         peer.event(kStream[1]);
         peer.close();
       },
       2},
      {"disconnected", "closed the connection", [](Peer& peer, const Call&) { peer.close(); }},
      {"disconnected", "without a finish_reason or [DONE]",
       [](Peer& peer, const Call&) {
         stream(peer, {kStream[0], kStream[1]});
       },
       2},
      {"read timeout", "nothing came for 0.2 s",
       [](Peer& peer, const Call&) {
         peer.begin_stream();
         peer.event(kStream[0]);
         sleep_ms(500);
       },
       1},
      {"protocol", "is not HTTP/1.1",
       [](Peer& peer, const Call&) {
         peer.send("SSH-2.0-nonsense\r\n\r\n");
         peer.close();
       }},
      {"protocol", "is not HTTP/1.1",
       [](Peer& peer, const Call&) {
         peer.begin_stream();
         peer.event(kStream[0]);
         peer.send("no size\r\n");
       },
       1},
      {"protocol", "needs text/event-stream",
       [](Peer& peer, const Call&) { peer.answer(200, R"({"choices":[{"text":"all"}]})"); }},
      {"protocol", "an event is not a JSON object: {\"choices\"",
       [](Peer& peer, const Call&) {
         stream(peer, {kStream[0], "{\"choices\":["});
       },
       1},
      {"protocol", "more than 67 chunks for 3 tokens",
       [](Peer& peer, const Call&) {
         peer.begin_stream();
         for (int i = 0; i < 200; ++i) peer.event(token("x"));
       },
       67},
  };
  HttpTargetOptions options;
  options.read_timeout_s = 0.2;
  LoadResult result;
  for (const Wrong& wrong : all) {
    const RequestRecord record = one(wrong.script, options);
    EXPECT_EQ(record.error_kind, wrong.kind) << wrong.message;
    EXPECT_NE(record.error.find(wrong.message), std::string::npos) << record.error;
    EXPECT_EQ(record.chunk_s.size(), wrong.chunks) << wrong.kind << ": what came before is kept";
    EXPECT_LT(record.error.size(), 400u);
    result.requests.push_back(record);
  }
  const Metrics m = measure(result);
  EXPECT_EQ(m.failures, static_cast<int64_t>(all.size()));
  const std::vector<std::pair<std::string, int64_t>> kinds = {
      {"HTTP 400", 1}, {"HTTP 429", 1},     {"HTTP 503", 1},    {"disconnected", 3},
      {"protocol", 5}, {"read timeout", 1}, {"server error", 1}};
  EXPECT_EQ(m.failures_by_kind, kinds);
  EXPECT_TRUE(m.ttft_ms.values.empty()) << "failed requests are in no latency";
}

TEST(HttpTarget, WhereNobodyListens) {
  std::string url;
  {
    ScriptedServer server([](Peer& peer, const Call&) { stream(peer, kStream); });
    const auto target = connect(server);
    url = server.url();
    server.stop_listening();
    server.hang_up();
    const RequestRecord record = run_load(*target, requests(1), {}).requests.front();
    EXPECT_EQ(record.error_kind, "connect") << record.error;
  }
  HttpTargetOptions options;
  options.url = url;
  const auto target = HttpTarget::create(options);
  ASSERT_FALSE(target.ok());
  EXPECT_NE(target.status().message().find(url + ": /v1/models: cannot connect: "), std::string::npos)
      << target.status().message();
  options.url = "http://no-such-host.invalid";
  EXPECT_NE(HttpTarget::create(options).status().message().find("cannot find the address"),
            std::string::npos);
}

/// A listener whose queue is full drops what comes, so that a connection neither stands nor fails.
TEST(HttpTarget, AConnectionHasATimeLimit) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(listener, 0), 0);
  socklen_t size = sizeof(address);
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  std::vector<int> fillers;
  for (int i = 0; i < 4; ++i) {
    fillers.push_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    ::connect(fillers.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address));
  }
  HttpTargetOptions options;
  options.url = "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  options.connect_timeout_s = 0.2;
  const auto target = HttpTarget::create(options);
  ASSERT_FALSE(target.ok());
  EXPECT_NE(target.status().message().find("no connection within 0.2 s"), std::string::npos)
      << target.status().message();
  for (const int filler : fillers) ::close(filler);
  ::close(listener);
}

TEST(HttpTarget, AClosedKeptConnectionIsReplaced) {
  ScriptedServer server([](Peer& peer, const Call&) { stream(peer, kStream); });
  const auto target = connect(server);
  EXPECT_EQ(run_load(*target, requests(1), {}).requests.front().error, "");
  EXPECT_EQ(server.connections(), 1);
  server.hang_up();
  EXPECT_EQ(run_load(*target, requests(1), {}).requests.front().error, "");
  EXPECT_EQ(server.connections(), 2);
  EXPECT_EQ(target->reconnects(), 1);
}

TEST(HttpTarget, ManyStreamsOnOneThread) {
  constexpr int kStreams = 150;
  std::mutex mutex;
  std::condition_variable all_here;
  int here = 0;
  ScriptedServer server([&](Peer& peer, const Call&) {
    {
      std::unique_lock lock(mutex);
      ++here;
      all_here.notify_all();
      all_here.wait_for(lock, std::chrono::seconds(20), [&] { return here == kStreams; });
    }
    stream(peer, kStream);
  });
  const auto target = connect(server);
  LoadOptions options;
  options.concurrency = kStreams;
  const LoadResult result = run_load(*target, requests(kStreams), options);
  for (const RequestRecord& record : result.requests) {
    EXPECT_EQ(record.error, "");
    EXPECT_EQ(record.text, "one zwei € trois");
  }
  EXPECT_EQ(here, kStreams) << "all were open at once";
}

TEST(HttpTarget, OpenRequestsEndWithIt) {
  ScriptedServer server([](Peer& peer, const Call&) {
    peer.begin_stream();
    peer.event(kStream[0]);
    sleep_ms(300);
  });
  auto target = connect(server);
  std::mutex mutex;
  std::condition_variable changed;
  bool chunk = false;
  std::string kind;
  LoadRequest request;
  request.prompt.ids = {1};
  request.output_tokens = 3;
  ASSERT_TRUE(target
                  ->start(request,
                          [&](const LoadEvent& event) {
                            const std::lock_guard lock(mutex);
                            chunk = chunk || event.chunk;
                            if (event.last) kind = event.error_kind;
                            changed.notify_all();
                          })
                  .ok());
  {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(10), [&] { return chunk; }));
  }
  target.reset();
  EXPECT_EQ(kind, "cancelled");
}

}  // namespace
}  // namespace vivace::bench
