#include "src/server/server.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>

#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/server/routes.h"

namespace vivace::server {

namespace {

class ServerImpl final : public Server {
 public:
  ServerImpl(const ServerOptions& options, ServedModel model, Engine& engine)
      : model_(std::move(model)),
        log_(options.log),
        context_{.engine = engine,
                 .model = model_,
                 .pool = pool_,
                 .metrics = metrics_,
                 .log = log_,
                 .stream_buffer_bytes = options.stream_buffer_bytes},
        routes_(context_, options.api_keys, [this] { return http_stats(); }),
        pool_(options.workers, static_cast<size_t>(options.max_parsing)) {}

  ~ServerImpl() override { stop(Milliseconds(0)); }

  Status listen(const HttpOptions& options) {
    VIVACE_TRY_ASSIGN(http_, HttpServer::listen(
                                 options,
                                 [this](HttpRequest request, Wake wake) {
                                   return routes_.handle(std::move(request), std::move(wake));
                                 },
                                 [this](const RefusedRequest& refused) { return routes_.refuse(refused); }));
    port_ = http_->port();
    live_ = http_.get();
    return {};
  }

  int port() const override { return port_; }
  HttpStats http_stats() const override {
    const HttpServer* const live = live_;
    return live != nullptr ? live->stats() : HttpStats();
  }

  bool stop(Milliseconds limit) override {
    if (http_ == nullptr) return true;
    const Clock::time_point end = Clock::now() + limit;
    log_.write("stopping", {{"limit_ms", limit.count()}, {"in_flight", metrics_.in_flight.load()}});
    routes_.drain();
    http_->drain();
    bool idle = routes_.wait_until_idle(Milliseconds(0));
    while (!idle && !hurry_ && Clock::now() < end) {
      const auto left = std::chrono::ceil<Milliseconds>(end - Clock::now());
      idle = routes_.wait_until_idle(std::min(kTick, left));
    }
    const Clock::time_point told = Clock::now() + kToTell;
    while (!idle && !tell()) {
      if (Clock::now() > told) break;  // who does not read cannot be told
    }
    http_.reset();  // its threads may ask for its counts until they have ended
    live_ = nullptr;
    log_.write("stopped", {{"all_answered", idle}});
    return idle;
  }
  void hurry() override { hurry_ = true; }

 private:
  /// True when every request that is left has been answered. One that came just before the stop may be late to appear.
  bool tell() {
    routes_.fail_all({.status = 503,
                      .message = "the server is shutting down and did not wait longer for this request",
                      .param = {},
                      .code = "shutting_down",
                      .retry_after_s = 5});
    return routes_.wait_until_idle(kTick);
  }

  static constexpr Milliseconds kTick{50}, kToTell{2'000};
  const ServedModel model_;
  Metrics metrics_;
  Log log_;
  CallContext context_;
  Routes routes_;
  WorkerPool pool_;  ///< its jobs use all of the above
  std::unique_ptr<HttpServer> http_;
  std::atomic<const HttpServer*> live_{nullptr};
  int port_ = 0;
  std::atomic<bool> hurry_{false};
};

}  // namespace

Result<std::unique_ptr<Server>> Server::start(const ServerOptions& options, ServedModel model,
                                              Engine& engine) {
  return guarded("server", [&]() -> Result<std::unique_ptr<Server>> {
    auto server = std::make_unique<ServerImpl>(options, std::move(model), engine);
    VIVACE_TRY(server->listen(options.http));
    return Result<std::unique_ptr<Server>>(std::move(server));
  });
}

int64_t raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  rlimit raised = limit;
  raised.rlim_cur = raised.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  return limit.rlim_cur > INT32_MAX ? INT32_MAX : static_cast<int64_t>(limit.rlim_cur);
}

Result<std::vector<std::string>> parse_api_keys(std::string_view text) {
  std::vector<std::string> keys;
  int64_t line_number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++line_number;
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ' || line.back() == '\t'))
      line.remove_suffix(1);
    if (line.empty() || line.front() == '#') continue;
    if (!std::ranges::all_of(line, [](char c) { return c > 0x20 && c < 0x7f; }))
      return invalid_argument("line {} has a character that is no visible ASCII, needs one key a line",
                              line_number);
    keys.emplace_back(line);
  }
  if (keys.empty()) return invalid_argument("has no key, needs one a line");
  return keys;
}

}  // namespace vivace::server
