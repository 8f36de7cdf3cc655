#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "src/server/generation_call.h"

namespace vivace::server {

/// Which path does what, who may, and the calls that are being answered.
class Routes {
 public:
  /// `api_keys`: empty lets everybody in.
  Routes(CallContext& context, std::vector<std::string> api_keys, std::function<HttpStats()> http_stats);

  /// For an I/O thread.
  std::shared_ptr<Call> handle(HttpRequest request, Wake wake);
  /// The answer to what is no request.
  HttpResponse refuse(const RefusedRequest& refused);

  /// From here on requests are answered 503.
  void drain() { draining_ = true; }
  /// True when every request was answered within `limit`.
  bool wait_until_idle(Milliseconds limit);
  /// Ends all that are being answered with an error that their clients get.
  void fail_all(const ApiError& error);

 private:
  class TrackedCall;
  struct Route {
    std::string_view method, path;
    bool open = false;  ///< without an API key, and while the server drains
    std::shared_ptr<Call> (Routes::*run)(HttpRequest&, const std::string& request_id, Wake&);
  };
  static const std::vector<Route>& table();

  std::shared_ptr<Call> answer(const HttpRequest& request, const std::string& request_id,
                               HttpResponse response);
  std::shared_ptr<Call> answer(const HttpRequest& request, const std::string& request_id,
                               const ApiError& error);
  std::shared_ptr<Call> generation(ApiKind kind, HttpRequest& request, const std::string& request_id,
                                   Wake& wake);
  bool authorized(std::string_view authorization) const;

  std::shared_ptr<Call> completions(HttpRequest&, const std::string&, Wake&);
  std::shared_ptr<Call> chat(HttpRequest&, const std::string&, Wake&);
  std::shared_ptr<Call> generate(HttpRequest&, const std::string&, Wake&);
  std::shared_ptr<Call> models(HttpRequest&, const std::string&, Wake&);
  std::shared_ptr<Call> model(HttpRequest&, const std::string&, Wake&);
  std::shared_ptr<Call> health(HttpRequest&, const std::string&, Wake&);
  std::shared_ptr<Call> health_generate(HttpRequest&, const std::string&, Wake&);
  std::shared_ptr<Call> server_info(HttpRequest&, const std::string&, Wake&);
  std::shared_ptr<Call> model_info(HttpRequest&, const std::string&, Wake&);
  std::shared_ptr<Call> flush_cache(HttpRequest&, const std::string&, Wake&);
  std::shared_ptr<Call> version(HttpRequest&, const std::string&, Wake&);
  std::shared_ptr<Call> metrics(HttpRequest&, const std::string&, Wake&);

  CallContext& context_;
  const std::vector<std::string> api_keys_;
  const int64_t created_;
  const std::function<HttpStats()> http_stats_;
  std::atomic<bool> draining_{false};
  std::mutex mutex_;
  std::condition_variable idle_;
  std::unordered_map<const GenerationCall*, std::weak_ptr<GenerationCall>> active_;
};

}  // namespace vivace::server
