#include "src/server/routes.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <random>

namespace vivace::server {

namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr size_t kLongestRequestId = 128;
constexpr std::string_view kModels = "/v1/models";

/// The client's own, if it can stand in a header and a log; else one that nobody else has.
std::string request_id_of(const std::string& given) {
  const bool plain = std::ranges::all_of(given, [](char c) { return c > 0x20 && c < 0x7f; });
  if (!given.empty() && given.size() <= kLongestRequestId && plain) return given;
  static thread_local std::mt19937_64 random{std::random_device{}()};
  return fmt::format("{:016x}{:016x}", random(), random());
}

/// Takes as long for any two texts of the same length.
bool equal_in_constant_time(std::string_view a, std::string_view b) {
  size_t difference = a.size() ^ b.size();
  for (size_t i = 0; i < a.size(); ++i)
    difference |=
        static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b.empty() ? 0 : b[i % b.size()]);
  return difference == 0;
}

std::string json_text(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

OrderedJson model_card(const CallContext& context, int64_t created) {
  return {{"id", context.model.name},   {"object", "model"},
          {"created", created},         {"owned_by", "vivace"},
          {"root", context.model.path}, {"max_model_len", context.engine.max_model_len()}};
}

/// %2F and the like as the bytes they stand for.
std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    int byte = 0;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(text.data() + i + 1, text.data() + i + 3, byte, 16).ptr == text.data() + i + 3) {
      out += static_cast<char>(byte);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

/// An answer that is there already.
class ReplyCall final : public Call {
 public:
  explicit ReplyCall(HttpResponse response, bool close = false) {
    step_.kind = CallStep::reply;
    step_.response = std::move(response);
    step_.close = close;
  }
  CallStep next() override { return std::move(step_); }
  void detach(End) override {}

 private:
  CallStep step_;
};

}  // namespace

/// Leaves the list of active calls when the connection is done with it.
class Routes::TrackedCall final : public Call {
 public:
  TrackedCall(Routes& routes, std::shared_ptr<GenerationCall> call)
      : routes_(routes), call_(std::move(call)) {
    const std::lock_guard lock(routes_.mutex_);
    routes_.active_.emplace(call_.get(), call_);
  }
  CallStep next() override { return call_->next(); }
  ~TrackedCall() override {
    if (!detached_) detach(End::stopped);
  }
  void detach(End end) override {
    detached_ = true;
    call_->detach(end);
    const std::lock_guard lock(routes_.mutex_);
    routes_.active_.erase(call_.get());
    if (routes_.active_.empty()) routes_.idle_.notify_all();
  }

 private:
  Routes& routes_;
  const std::shared_ptr<GenerationCall> call_;
  bool detached_ = false;
};

Routes::Routes(CallContext& context, std::vector<std::string> api_keys, std::function<HttpStats()> http_stats)
    : context_(context),
      api_keys_(std::move(api_keys)),
      created_(std::chrono::duration_cast<std::chrono::seconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count()),
      http_stats_(std::move(http_stats)) {}

const std::vector<Routes::Route>& Routes::table() {
  static const std::vector<Route> routes = {
      {"POST", "/v1/completions", false, &Routes::completions},
      {"POST", "/v1/chat/completions", false, &Routes::chat},
      {"POST", "/generate", false, &Routes::generate},
      {"GET", kModels, false, &Routes::models},
      {"GET", "/health", true, &Routes::health},
      {"GET", "/health_generate", false, &Routes::health_generate},
      {"GET", "/get_server_info", false, &Routes::server_info},
      {"GET", "/server_info", false, &Routes::server_info},
      {"GET", "/get_model_info", false, &Routes::model_info},
      {"GET", "/model_info", false, &Routes::model_info},
      {"POST", "/flush_cache", false, &Routes::flush_cache},
      {"GET", "/flush_cache", false, &Routes::flush_cache},
      {"GET", "/version", true, &Routes::version},
      {"GET", "/metrics", true, &Routes::metrics},
  };
  return routes;
}

std::shared_ptr<Call> Routes::handle(HttpRequest request, Wake wake) {
  const std::string request_id = request_id_of(request.request_id);
  const Route* route = nullptr;
  std::string allowed;
  for (const Route& candidate : table()) {
    if (candidate.path != request.path) continue;
    if (candidate.method == request.method) route = &candidate;
    allowed += (allowed.empty() ? "" : ", ") + std::string(candidate.method);
  }
  const bool one_model = allowed.empty() && request.path.starts_with(std::string(kModels) + "/");
  if (one_model) {
    static constexpr Route kOneModel{"GET", kModels, false, &Routes::model};
    allowed = kOneModel.method;
    if (request.method == kOneModel.method) route = &kOneModel;
  }
  const bool open = route != nullptr && route->open;
  if (!open && !authorized(request.authorization))
    return answer(
        request, request_id,
        ApiError{.status = 401,
                 .message = "Authorization is missing or has no key of this server, needs \"Bearer KEY\"",
                 .param = {},
                 .code = "invalid_api_key"});
  if (allowed.empty())
    return answer(request, request_id,
                  ApiError{.status = 404,
                           .message = fmt::format("there is no {}", request.path.substr(0, 200)),
                           .param = {},
                           .code = "not_found"});
  if (route == nullptr) {
    HttpResponse response =
        error_response({.status = 405,
                        .message = fmt::format("method is {}, needs {} for {}", request.method.substr(0, 20),
                                               allowed, request.path.substr(0, 200)),
                        .param = {},
                        .code = "method_not_allowed"});
    response.headers.emplace_back("Allow", allowed);
    return answer(request, request_id, std::move(response));
  }
  if (draining_ && !open)
    return answer(request, request_id,
                  ApiError{.status = 503,
                           .message = "the server is shutting down",
                           .param = {},
                           .code = "shutting_down",
                           .retry_after_s = 5});
  return (this->*route->run)(request, request_id, wake);
}

bool Routes::authorized(std::string_view authorization) const {
  if (api_keys_.empty()) return true;
  static constexpr std::string_view kBearer = "bearer ";  // in upper or lower case
  const auto is = [](char given, char wanted) {
    return (given | ('A' <= given && given <= 'Z' ? 32 : 0)) == wanted;
  };
  if (!std::ranges::equal(authorization.substr(0, kBearer.size()), kBearer, is)) return false;
  bool found = false;
  for (const std::string& key : api_keys_)
    found |= equal_in_constant_time(authorization.substr(kBearer.size()), key);
  return found;
}

namespace {

/// What begins the line of a log about an answer.
OrderedJson line_of(const std::string& request_id, const std::string& peer, const std::string& method,
                    const std::string& path, int status) {
  return {{"request_id", request_id},
          {"peer", peer},
          {"method", method.substr(0, 20)},
          {"path", path.substr(0, 200)},
          {"status", status}};
}

}  // namespace

std::shared_ptr<Call> Routes::answer(const HttpRequest& request, const std::string& request_id,
                                     HttpResponse response) {
  const bool known =
      std::ranges::any_of(table(), [&](const Route& route) { return route.path == request.path; });
  context_.metrics.count_answer(known ? std::string_view(request.path) : "other", response.status);
  const bool failed = response.status >= 400;
  if (context_.log.level() == LogLevel::all || (failed && context_.log.level() == LogLevel::errors)) {
    OrderedJson line = line_of(request_id, request.peer, request.method, request.path, response.status);
    if (failed) line["answer"] = response.body;
    context_.log.write("request", line);
  }
  response.headers.emplace_back("x-request-id", request_id);
  return std::make_shared<ReplyCall>(std::move(response));
}

std::shared_ptr<Call> Routes::answer(const HttpRequest& request, const std::string& request_id,
                                     const ApiError& error) {
  return answer(request, request_id, error_response(error));
}

HttpResponse Routes::refuse(const RefusedRequest& refused) {
  const int status = refused.status;
  static constexpr std::pair<int, std::string_view> kCodes[] = {
      {408, "request_timeout"},   {413, "body_too_large"},       {415, "unsupported_encoding"},
      {431, "headers_too_large"}, {501, "unsupported_encoding"}, {503, "overloaded"}};
  std::string_view code = "invalid_http";
  for (const auto& [known, name] : kCodes)
    if (known == status) code = name;
  context_.metrics.count_answer("other", status);
  HttpResponse response = error_response({.status = status,
                                          .message = refused.message,
                                          .param = {},
                                          .code = std::string(code),
                                          .retry_after_s = status == 503 ? 1 : 0});
  const std::string request_id = request_id_of({});
  response.headers.emplace_back("x-request-id", request_id);
  if (context_.log.level() == LogLevel::off) return response;
  OrderedJson line = line_of(request_id, refused.peer, refused.method, refused.path, status);
  line["error"] = refused.message;
  context_.log.write("refused", line);
  return response;
}

std::shared_ptr<Call> Routes::generation(ApiKind kind, HttpRequest& request, const std::string& request_id,
                                         Wake& wake) {
  auto call =
      std::make_shared<GenerationCall>(context_, kind, std::move(request), request_id, std::move(wake));
  auto tracked = std::make_shared<TrackedCall>(*this, call);
  if (!call->start())
    call->fail({.status = 503,
                .message = "too many requests wait to be read; try again later",
                .param = {},
                .code = "overloaded",
                .retry_after_s = 1});
  return tracked;
}

std::shared_ptr<Call> Routes::completions(HttpRequest& request, const std::string& id, Wake& wake) {
  return generation(ApiKind::completions, request, id, wake);
}

std::shared_ptr<Call> Routes::chat(HttpRequest& request, const std::string& id, Wake& wake) {
  return generation(ApiKind::chat, request, id, wake);
}

std::shared_ptr<Call> Routes::generate(HttpRequest& request, const std::string& id, Wake& wake) {
  return generation(ApiKind::generate, request, id, wake);
}

std::shared_ptr<Call> Routes::models(HttpRequest& request, const std::string& id, Wake&) {
  const OrderedJson list = {{"object", "list"},
                            {"data", OrderedJson::array({model_card(context_, created_)})}};
  return answer(request, id, HttpResponse{.body = json_text(list)});
}

/// Names may have slashes.
std::shared_ptr<Call> Routes::model(HttpRequest& request, const std::string& id, Wake&) {
  const std::string name = percent_decoded(std::string_view(request.path).substr(kModels.size() + 1));
  if (name == context_.model.name)
    return answer(request, id, HttpResponse{.body = json_text(model_card(context_, created_))});
  return answer(request, id,
                ApiError{.status = 404,
                         .message = fmt::format("model is \"{}\", needs \"{}\", which is served here",
                                                name.substr(0, 200), context_.model.name),
                         .param = "model",
                         .code = "model_not_found"});
}

std::shared_ptr<Call> Routes::health(HttpRequest& request, const std::string& id, Wake&) {
  if (draining_)
    return answer(
        request, id,
        ApiError{
            .status = 503, .message = "the server is shutting down", .param = {}, .code = "shutting_down"});
  return answer(request, id, HttpResponse{.content_type = "text/plain"});
}

/// One token through the engine.
std::shared_ptr<Call> Routes::health_generate(HttpRequest& request, const std::string& id, Wake& wake) {
  request.body = R"({"input_ids":[0],"sampling_params":{"max_new_tokens":1,"temperature":0}})";
  return generation(ApiKind::generate, request, id, wake);
}

std::shared_ptr<Call> Routes::server_info(HttpRequest& request, const std::string& id, Wake&) {
  const EngineOptions& o = context_.engine.options();
  const EngineStats s = context_.engine.stats();
  const OrderedJson info = {{"version", "vivace " VIVACE_VERSION},
                            {"model_path", context_.model.path},
                            {"served_model_name", context_.model.name},
                            {"device", o.device},
                            {"max_model_len", context_.engine.max_model_len()},
                            {"max_batch", o.max_batch},
                            {"token_budget", o.token_budget},
                            {"max_queue", o.max_waiting},
                            {"page_tokens", o.page_tokens},
                            {"prefix_cache", o.prefix_cache},
                            {"deterministic", o.deterministic},
                            {"prefer", o.prefer},
                            {"internal_states", OrderedJson::array({{{"running", s.running},
                                                                     {"waiting", s.waiting},
                                                                     {"kv_pages", s.pages_total},
                                                                     {"kv_pages_free", s.pages_free}}})}};
  return answer(request, id, HttpResponse{.body = json_text(info)});
}

std::shared_ptr<Call> Routes::model_info(HttpRequest& request, const std::string& id, Wake&) {
  const OrderedJson info = {
      {"model_path", context_.model.path}, {"tokenizer_path", context_.model.path}, {"is_generation", true}};
  return answer(request, id, HttpResponse{.body = json_text(info)});
}

std::shared_ptr<Call> Routes::flush_cache(HttpRequest& request, const std::string& id, Wake&) {
  context_.engine.clear_prefix_cache();
  return answer(request, id,
                HttpResponse{.content_type = "text/plain", .body = "The prefix cache is empty.\n"});
}

std::shared_ptr<Call> Routes::version(HttpRequest& request, const std::string& id, Wake&) {
  return answer(request, id, HttpResponse{.body = json_text({{"version", VIVACE_VERSION}})});
}

std::shared_ptr<Call> Routes::metrics(HttpRequest& request, const std::string& id, Wake&) {
  return answer(request, id,
                HttpResponse{.content_type = "text/plain; version=0.0.4; charset=utf-8",
                             .body = context_.metrics.text(context_.engine, http_stats_())});
}

bool Routes::wait_until_idle(Milliseconds limit) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, limit, [&] { return active_.empty(); });
}

void Routes::fail_all(const ApiError& error) {
  std::vector<std::shared_ptr<GenerationCall>> calls;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [address, weak] : active_)
      if (auto call = weak.lock()) calls.push_back(std::move(call));
  }
  for (const auto& call : calls) call->fail(error);
}

}  // namespace vivace::server
