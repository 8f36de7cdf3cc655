#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <future>
#include <memory>
#include <sstream>

#include "apps/vivace/commands.h"
#include "apps/vivace/model_files.h"
#include "apps/vivace/output.h"
#include "src/core/error.h"
#include "src/model/chat_template.h"
#include "src/model/synthetic.h"
#include "src/server/server.h"

namespace vivace::cli {

namespace {

constexpr int64_t kFilesOfTheRest = 64;  ///< model, log, libraries of a GPU

Result<std::string> read_text(const std::string& flag, const std::string& path) {
  constexpr std::streamsize kMost = 1 << 20;
  std::ifstream file(path, std::ios::binary);
  std::string text(static_cast<size_t>(kMost) + 1, '\0');
  if (!file || (!file.read(text.data(), std::ssize(text)) && !file.eof()) || file.bad())
    return io_error("{} '{}': cannot be read", flag, path);
  if (file.gcount() > kMost) return invalid_argument("{} '{}': has more than {} bytes", flag, path, kMost);
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

/// The text of --chat-template; empty without one.
Result<std::string> given_template(const ServeArgs& args) {
  if (args.chat_template_file.empty()) return std::string();
  VIVACE_TRY_ASSIGN(std::string text, read_text("--chat-template", args.chat_template_file));
  if (text.find_first_not_of(" \t\r\n") != std::string::npos) return text;
  return invalid_argument("--chat-template '{}' has nothing in it, needs a Jinja template",
                          args.chat_template_file);
}

Result<server::ServedModel> served_model(const ServeArgs& args, const std::string& given) {
  server::ServedModel model;
  model.path = args.engine.model;
  model.name = args.served_model_name.empty() ? args.engine.model : args.served_model_name;
  if (model::is_synthetic(args.engine.model)) return model;
  VIVACE_TRY_ASSIGN(ModelFiles files, open_model_files(args.engine.model));
  std::string chat_template = files.checkpoint->tokenizer().chat_template;
  std::string place = args.engine.model;
  if (!given.empty()) {
    chat_template = given;
    place = fmt::format("--chat-template '{}'", args.chat_template_file);
  }
  if (!chat_template.empty()) {
    Result<std::unique_ptr<model::ChatTemplate>> compiled = model::ChatTemplate::compile(chat_template);
    if (!compiled.ok()) return compiled.status().at(place);
    model.chat_template = std::move(*compiled);
  }
  model.source.bos_token = files.checkpoint->tokenizer().bos_token;
  model.source.eos_token = files.checkpoint->tokenizer().eos_token;
  if (files.tokenizer != nullptr) {
    model.tokenizer = std::move(files.tokenizer);
    model.bytes_of = [tokenizer = model.tokenizer](int32_t id) { return tokenizer->bytes_of(id); };
  }
  return model;
}

Status check_keys(const ServeArgs& args, std::vector<std::string>& keys) {
  if (args.api_key_file.empty()) return {};
  VIVACE_TRY_ASSIGN(const std::string text, read_text("--api-key-file", args.api_key_file));
  Result<std::vector<std::string>> parsed = server::parse_api_keys(text);
  if (!parsed.ok())
    return invalid_argument("--api-key-file '{}' {}", args.api_key_file, parsed.status().message());
  keys = std::move(*parsed);
  return {};
}

/// Signals that end the server; blocked in every thread, so that the main thread can wait for them.
sigset_t end_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  struct sigaction hangup {};
  if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN)
    sigaddset(&set, SIGHUP);  // not under nohup
  return set;
}

/// True when such a signal came within 100 ms.
bool signalled(const sigset_t& set) {
  const timespec wait{.tv_sec = 0, .tv_nsec = 100'000'000};
  return sigtimedwait(&set, nullptr, &wait) > 0;
}

Status run_serve(const ServeArgs& args) {
  const sigset_t signals = end_signals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);  // a reader of the log that goes away

  server::ServerOptions options = args.server;
  VIVACE_TRY(check_keys(args, options.api_keys));
  VIVACE_TRY_ASSIGN(const std::string given, given_template(args));
  const int64_t files = server::raise_file_limit();
  options.http.max_connections =
      std::min(options.http.max_connections, std::max<int64_t>(1, files - kFilesOfTheRest));

  // The tokenizer is made while the engine loads the weights.
  std::future<Result<server::ServedModel>> pending =
      std::async(std::launch::async, [&] { return served_model(args, given); });
  EngineOptions engine_options = args.engine;
  engine_options.log = note;
  const Result<std::unique_ptr<Engine>> engine = Engine::create(engine_options);
  Result<server::ServedModel> model = pending.get();
  if (!engine.ok()) return engine.status();
  if (!model.ok()) return model.status();

  const std::string name = model->name;
  VIVACE_TRY_ASSIGN(const auto server, server::Server::start(options, std::move(*model), **engine));
  const bool v6 = options.http.host.find(':') != std::string::npos;
  note(fmt::format("serving {} at http://{}{}{}:{}, at most {} connections", name, v6 ? "[" : "",
                   options.http.host, v6 ? "]" : "", server->port(), options.http.max_connections));
  while (!signalled(signals)) {
  }
  note(fmt::format("shutting down: running requests have {} s; a second signal ends them now",
                   static_cast<double>(args.shutdown_timeout.count()) / 1000));
  std::future<bool> stopped =
      std::async(std::launch::async, [&] { return server->stop(args.shutdown_timeout); });
  while (stopped.wait_for(std::chrono::seconds(0)) != std::future_status::ready)
    if (signalled(signals)) server->hurry();
  note(stopped.get() ? "all requests were answered"
                     : "requests that were not finished were ended with an error");
  return {};
}

}  // namespace

int run(const ServeArgs& args) {
  const Status status = run_serve(args);
  return status.ok() ? 0 : fail(status);
}

}  // namespace vivace::cli
