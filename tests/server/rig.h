#pragma once

#include <atomic>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>

#include "src/server/server.h"
#include "tests/engine/scripted_runner.h"
#include "tests/server/client.h"

// A server over an engine without a model: the text of its tokens is that of a real tokenizer.

namespace vivace::server {

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct RigOptions {
  ServerOptions server;
  EngineOptions engine;
  engine::RunnerShape shape{
      .vocab = 4096, .max_model_len = 4096, .pages = 1024, .page_tokens = 16, .eos = {2}};
  int step_us = 0;                                 ///< how long each step sleeps
  std::unique_ptr<engine::ScriptedRunner> runner;  ///< instead of the pseudo-model
  engine::TokenBytes bytes;                        ///< instead of the tokenizer's
  bool tokenizer = true;
};

class Rig {
 public:
  explicit Rig(RigOptions options = {}) {
    model_.name = "pseudo";
    model_.path = "/models/pseudo";
    const std::string data = VIVACE_TEST_DATA;
    if (options.tokenizer) {
      model::TokenizerSource source;
      source.tokenizer_json = read_file(data + "/tiny-qwen3-moe/tokenizer.json");
      auto tokenizer = model::Tokenizer::create(source);
      EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
      model_.tokenizer = std::move(*tokenizer);
      auto compiled = model::ChatTemplate::compile(read_file(data + "/chat_templates/smollm2.jinja"));
      EXPECT_TRUE(compiled.ok()) << compiled.status().message();
      model_.chat_template = std::move(*compiled);
    }
    engine::TokenBytes bytes = options.bytes;
    if (!bytes) {
      bytes = [tokenizer = model_.tokenizer](int32_t id, bool skip) {
        return tokenizer ? tokenizer->bytes_of(id, skip) : std::string_view();
      };
    }
    model_.bytes_of = [bytes](int32_t id) { return bytes(id, false); };
    std::unique_ptr<engine::ScriptedRunner> runner = std::move(options.runner);
    if (!runner) runner = std::make_unique<engine::PseudoModel>(options.shape);
    runner->before_step = [this, us = options.step_us](const engine::StepInput&) {
      ++steps_;
      if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
      while (held_ || hold_at_ == steps_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return Status();
    };
    engine_ = engine::start(std::move(runner), options.engine, bytes);
    options.server.http.port = 0;
    if (options.server.log == LogLevel::all) options.server.log = LogLevel::off;
    auto server = Server::start(options.server, model_, *engine_);
    EXPECT_TRUE(server.ok()) << server.status().message();
    server_ = std::move(*server);
    port_ = server_->port();
  }
  ~Rig() {
    hold(false);
    server_.reset();
  }

  int port() const { return port_; }
  Server& server() { return *server_; }
  Engine& engine() { return *engine_; }
  const ServedModel& model() const { return model_; }
  int64_t steps() const { return steps_; }
  /// Keeps the engine from finishing a step, so that what is sent meanwhile meets a busy server.
  void hold(bool on) {
    held_ = on;
    if (!on) hold_at_ = -1;
  }
  /// Keeps it from finishing the step that is this many after those that were.
  void hold_at(int64_t next) { hold_at_ = steps_ + next; }

  Reply request(const std::string& bytes) { return Client(port_).request(bytes); }
  Reply post(const std::string& path, const Json& body) { return request(Client::post(path, body.dump())); }
  Reply get(const std::string& path) { return request(Client::get(path)); }

  /// Polls until `done`, for at most this long.
  template <class Done>
  bool eventually(Done done, int ms = 5000) {
    for (int waited = 0; waited < ms; waited += 2) {
      if (done()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return done();
  }
  bool idle() {
    const EngineStats s = engine_->stats();
    return s.running == 0 && s.waiting == 0 && s.pages_free + s.pages_cached == s.pages_total;
  }
  /// What the engine answers when it is asked directly.
  TokenEvent direct(Request request, std::string& text) {
    engine::Answer answer;
    const auto id = engine_->submit(std::move(request), answer.sink());
    EXPECT_TRUE(id.ok()) << id.status().message();
    if (!id.ok()) return {};
    answer.wait();
    engine_->drain();
    text = answer.text();
    return answer.last();
  }

 private:
  ServedModel model_;
  std::atomic<int64_t> steps_{0};
  std::atomic<bool> held_{false};
  std::atomic<int64_t> hold_at_{-1};
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Server> server_;
  int port_ = 0;
};

/// The error object of a refusal, checked for its shape.
inline Json error_in(const Reply& reply) {
  const Json body = reply.json();
  EXPECT_TRUE(body.contains("error")) << body;
  const Json error = body.value("error", Json::object());
  for (const char* key : {"message", "type", "param", "code"})
    EXPECT_TRUE(error.contains(key)) << key << " " << body;
  return error;
}

}  // namespace vivace::server
