// Beast and Asio are known to this file alone. A request is a coroutine on the one thread of the io_context, so nothing
// here needs a lock.

#include "src/bench/http_target.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <future>
#include <limits>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "src/bench/sse.h"
#include "src/core/error.h"

namespace vivace::bench {

namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using Clock = std::chrono::steady_clock;
using ErrorCode = boost::system::error_code;
using tcp = asio::ip::tcp;

constexpr size_t kReadBytes = 16 << 10;
constexpr size_t kHeaderBytes = 64 << 10;
constexpr size_t kMostErrorBytes = 64 << 10;  ///< of an error's body
constexpr int64_t kSpareChunks = 64;          ///< chunks without a token that a stream may have

struct Connection {
  explicit Connection(asio::io_context& io) : stream(io) {}
  beast::tcp_stream stream;
  beast::flat_buffer buffer;
};

/// Why a request failed; no kind: it did not.
struct Failure {
  std::string kind, message;
  explicit operator bool() const { return !kind.empty(); }
};

Failure broken(const ErrorCode& error, double timeout_s) {
  if (error == beast::error::timeout)
    return {"read timeout", fmt::format("nothing came for {:g} s", timeout_s)};
  if (error.category() == http::make_error_code(http::error::end_of_stream).category() &&
      error != http::error::end_of_stream && error != http::error::partial_message)
    return {"protocol", "the answer is not HTTP/1.1: " + error.message()};
  return {"disconnected", "the server closed the connection before the end: " + error.message()};
}

/// One request's stream of events, from bytes to the sink.
class Stream {
 public:
  Stream(int64_t output_tokens, const Target::Sink& sink)
      : most_chunks_(output_tokens + kSpareChunks), sink_(sink) {}

  /// Takes bytes of the body that came at `now`.
  Failure push(std::string_view bytes, Clock::time_point now) {
    now_ = now;
    const Status status = events_.push(bytes, [this](std::string_view data) { return take(data); });
    return status.ok() ? failure_ : Failure{"protocol", status.message()};
  }
  /// The body ended.
  Failure finish() {
    events_.finish([this](std::string_view data) { return take(data); });
    if (!failure_ && !done_ && !finished_)
      failure_ = {"disconnected", "the stream ended without a finish_reason or [DONE]"};
    return failure_;
  }
  void fill(LoadEvent& last) const {
    last.prompt_tokens = usage_.prompt_tokens;
    last.completion_tokens = usage_.completion_tokens;
    last.cached_tokens = usage_.cached_tokens;
  }

 private:
  bool take(std::string_view data) {
    if (data == "[DONE]") done_ = true;
    if (done_) return true;
    Result<openai::Chunk> read = openai::read_chunk(data);
    if (!read.ok()) return fail({"protocol", read.status().message()});
    openai::Chunk chunk = std::move(read).value();
    if (!chunk.error.empty()) return fail({"server error", chunk.error});
    finished_ = finished_ || chunk.finished;
    if (chunk.completion_tokens >= 0) usage_ = chunk;
    if (!chunk.counted) return true;
    if (++chunks_ > most_chunks_)
      return fail({"protocol", fmt::format("more than {} chunks for {} tokens", most_chunks_,
                                           most_chunks_ - kSpareChunks)});
    LoadEvent event;
    event.chunk = true;
    event.text = std::move(chunk.text);
    event.time = now_;
    sink_(event);
    return true;
  }
  bool fail(Failure failure) {
    failure_ = std::move(failure);
    return false;
  }

  const int64_t most_chunks_;
  const Target::Sink& sink_;
  SseParser events_;
  Clock::time_point now_;
  openai::Chunk usage_;
  Failure failure_;
  int64_t chunks_ = 0;
  bool done_ = false, finished_ = false;
};

/// Each open stream is a file descriptor: as many as this process may have.
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

Result<HttpUrl> HttpUrl::parse(const std::string& text) {
  constexpr std::string_view kScheme = "http://";
  const auto refuse = [&] {
    return invalid_argument("is '{}', needs http://HOST[:PORT], such as http://127.0.0.1:8000", text);
  };
  if (text.starts_with("https://")) {
    return unsupported("is '{}', needs http://: there is no TLS here; a local proxy can add it", text);
  }
  if (!text.starts_with(kScheme)) return refuse();
  HttpUrl url;
  std::string rest = text.substr(kScheme.size());
  if (rest.find_first_of(" \t\r\n?#@") != std::string::npos) return refuse();
  if (const size_t slash = rest.find('/'); slash != std::string::npos) {
    url.path = rest.substr(slash);
    rest.resize(slash);
  }
  while (url.path.ends_with('/')) url.path.pop_back();
  if (url.path.ends_with("/v1")) url.path.resize(url.path.size() - 3);
  if (const size_t end = rest.find(']'); rest.starts_with('[') && end != std::string::npos) {
    url.host = rest.substr(1, end - 1);
    rest.erase(0, end + 1);
  } else {
    url.host = rest.substr(0, rest.find(':'));
    rest.erase(0, url.host.size());
  }
  url.port = rest.empty() ? "80" : rest.substr(1);
  const bool digits = !url.port.empty() && url.port.size() <= 5 &&
                      std::ranges::all_of(url.port, [](char c) { return c >= '0' && c <= '9'; });
  if (url.host.empty() || (!rest.empty() && rest.front() != ':') || !digits) return refuse();
  if (const int port = std::stoi(url.port); port < 1 || port > 65535) return refuse();
  return url;
}

struct HttpTarget::Impl {
  HttpTargetOptions options;
  HttpUrl url;
  openai::ServedModel model;
  tcp::resolver::results_type addresses;
  std::atomic<int64_t> reconnects = 0, requests = 0;

  asio::io_context io{1};
  asio::executor_work_guard<asio::io_context::executor_type> work = asio::make_work_guard(io);
  std::vector<std::unique_ptr<Connection>> idle;
  bool stopping = false;
  std::vector<Connection*> busy;
  std::thread thread;

  using Request = http::request<http::string_body>;

  Request request(http::verb verb, std::string_view path, std::string body) {
    Request r(verb, url.path + std::string(path), 11);
    r.set(http::field::host, url.host.find(':') == std::string::npos
                                 ? fmt::format("{}:{}", url.host, url.port)
                                 : fmt::format("[{}]:{}", url.host, url.port));
    r.set(http::field::user_agent, "vivace-bench/" VIVACE_VERSION);
    r.set("x-request-id", fmt::format("vivace-bench-{}", ++requests));
    if (!options.api_key.empty()) r.set(http::field::authorization, "Bearer " + options.api_key);
    if (verb == http::verb::post) r.set(http::field::content_type, "application/json");
    r.body() = std::move(body);
    r.prepare_payload();
    return r;
  }

  std::chrono::nanoseconds read_timeout() const {
    return std::chrono::nanoseconds(static_cast<int64_t>(options.read_timeout_s * 1e9));
  }

  asio::awaitable<Failure> connect(Connection& connection) {
    ErrorCode error;
    beast::tcp_stream& stream = connection.stream;
    stream.expires_after(std::chrono::nanoseconds(static_cast<int64_t>(options.connect_timeout_s * 1e9)));
    co_await stream.async_connect(addresses, asio::redirect_error(asio::use_awaitable, error));
    if (error == beast::error::timeout) {
      co_return Failure{"connect timeout",
                        fmt::format("no connection within {:g} s", options.connect_timeout_s)};
    }
    if (error) co_return Failure{"connect", "cannot connect: " + error.message()};
    stream.socket().set_option(tcp::no_delay(true), error);
    co_return Failure{};
  }

  using Parser = http::response_parser<http::buffer_body>;

  /// Sends and reads the header of the answer, on a kept connection or on a new one.
  asio::awaitable<Failure> send(Request& request, std::unique_ptr<Connection>& connection,
                                std::optional<Parser>& parser) {
    for (;;) {
      if (stopping) co_return Failure{"cancelled", "the client was stopped"};
      const bool kept = !idle.empty();
      if (kept) {
        connection = std::move(idle.back());
        idle.pop_back();
      } else {
        connection = std::make_unique<Connection>(io);
        busy.push_back(connection.get());
        if (Failure failure = co_await connect(*connection)) co_return failure;
      }
      if (kept) busy.push_back(connection.get());
      ErrorCode error;
      connection->stream.expires_after(read_timeout());
      co_await http::async_write(connection->stream, request,
                                 asio::redirect_error(asio::use_awaitable, error));
      if (error == beast::error::timeout) co_return broken(error, options.read_timeout_s);
      // A server may refuse a body before it has read all of it: its answer says more than the error.
      parser.emplace();
      parser->header_limit(kHeaderBytes);
      parser->body_limit(std::numeric_limits<uint64_t>::max());  // read_body() has its own
      ErrorCode read_error;
      co_await http::async_read_header(connection->stream, connection->buffer, *parser,
                                       asio::redirect_error(asio::use_awaitable, read_error));
      if (!read_error) co_return Failure{};
      if (!kept || read_error == beast::error::timeout || parser->got_some() || stopping)
        co_return broken(read_error, options.read_timeout_s);
      ++reconnects;  // the server had closed it: the request never arrived
      release(connection);
    }
  }

  void release(std::unique_ptr<Connection>& connection) {
    std::erase(busy, connection.get());
    connection.reset();
  }

  /// Reads the body to its end; `take` gets each part of it, and says when it wants no more.
  template <class Take>
  asio::awaitable<Failure> read_body(Connection& connection, Parser& parser, Take take) {
    char part[kReadBytes];
    while (!parser.is_done()) {
      parser.get().body().data = part;
      parser.get().body().size = sizeof(part);
      parser.get().body().more = true;
      ErrorCode error;
      connection.stream.expires_after(read_timeout());
      co_await http::async_read_some(connection.stream, connection.buffer, parser,
                                     asio::redirect_error(asio::use_awaitable, error));
      const std::string_view bytes(part, sizeof(part) - parser.get().body().size);
      if (!bytes.empty()) {
        if (Failure failure = take(bytes)) co_return failure;
      }
      if (error && error != http::error::need_buffer) co_return broken(error, options.read_timeout_s);
    }
    co_return Failure{};
  }

  /// The whole exchange; `stream` gets the body of a 200, `body` (when there is no stream) too, and an error's body
  /// becomes the message.
  asio::awaitable<Failure> exchange(Request request, Stream* stream, std::string* body) {
    std::unique_ptr<Connection> connection;
    std::optional<Parser> parser;
    Failure failure = co_await send(request, connection, parser);
    if (!failure) {
      const http::response<http::buffer_body>& response = parser->get();
      const unsigned status = response.result_int();
      const std::string type(response[http::field::content_type]);
      if (status != 200) {
        std::string text;
        failure = co_await read_body(*connection, *parser, [&](std::string_view bytes) -> Failure {
          text += bytes;
          return text.size() > kMostErrorBytes ? Failure{"cut", ""} : Failure{};
        });
        // What the status says counts, however the body ended.
        failure = {fmt::format("HTTP {}", status),
                   fmt::format("HTTP {}: {}", status, openai::error_message(text))};
      } else if (stream == nullptr) {
        failure = co_await read_body(*connection, *parser, [&](std::string_view bytes) -> Failure {
          *body += bytes;
          return body->size() > SseParser::kMaxEventBytes ? Failure{"protocol", "the answer is too long"}
                                                          : Failure{};
        });
      } else if (!type.starts_with("text/event-stream")) {
        failure = {"protocol",
                   fmt::format("content-type is '{}', needs text/event-stream", type.substr(0, 100))};
      } else {
        failure = co_await read_body(
            *connection, *parser, [&](std::string_view bytes) { return stream->push(bytes, Clock::now()); });
        if (!failure) failure = stream->finish();
      }
    }
    if (connection != nullptr) {
      const bool keep = parser && parser->is_done() && parser->keep_alive() && !stopping;
      if (keep) {
        std::erase(busy, connection.get());
        connection->stream.expires_never();
        idle.push_back(std::move(connection));
      } else {
        release(connection);
      }
    }
    co_return failure;
  }

  asio::awaitable<void> serve(Request request, int64_t output_tokens, Sink sink) {
    Stream stream(output_tokens, sink);
    Failure failure;
    try {
      failure = co_await exchange(std::move(request), &stream, nullptr);
    } catch (const std::exception& e) {
      failure = {"client", e.what()};
    }
    if (failure && stopping) failure = {"cancelled", "the client was stopped"};
    LoadEvent last;
    last.last = true;
    last.time = Clock::now();
    last.error_kind = failure.kind;
    last.error = failure.message;
    stream.fill(last);
    sink(last);
  }

  /// Runs until every coroutine has ended.
  void stop() {
    asio::post(io, [this] {
      stopping = true;
      idle.clear();
      for (Connection* connection : busy) connection->stream.close();
      work.reset();
    });
    thread.join();
  }
};

HttpTarget::HttpTarget() : impl_(std::make_unique<Impl>()) {}

HttpTarget::~HttpTarget() {
  if (impl_->thread.joinable()) impl_->stop();
}

Result<std::unique_ptr<HttpTarget>> HttpTarget::create(const HttpTargetOptions& options) {
  raise_descriptor_limit();
  std::unique_ptr<HttpTarget> target(new HttpTarget);
  Impl& impl = *target->impl_;
  impl.options = options;
  VIVACE_TRY_ASSIGN(impl.url, HttpUrl::parse(options.url));
  ErrorCode error;
  impl.addresses = tcp::resolver(impl.io).resolve(impl.url.host, impl.url.port, error);
  if (error) return not_found("{}: cannot find the address: {}", options.url, error.message());
  impl.thread = std::thread([&impl] { impl.io.run(); });
  Result<std::string> body = target->get("/v1/models");
  if (!body.ok()) {
    if (!options.model.empty() && body.status().code() == Code::not_found) {
      impl.model.id = options.model;  // a server may have no list
      return target;
    }
    return body.status().at(options.url);
  }
  Result<openai::ServedModel> model = openai::read_models(*body, options.model);
  if (!model.ok()) return model.status().at(options.url);
  impl.model = std::move(model).value();
  return target;
}

const openai::ServedModel& HttpTarget::model() const {
  return impl_->model;
}

int64_t HttpTarget::reconnects() const {
  return impl_->reconnects;
}

Status HttpTarget::start(const LoadRequest& request, Sink sink) {
  // Written here, not on the thread that takes the times of other streams.
  Impl::Request message = impl_->request(http::verb::post, openai::path_of(request.prompt),
                                         openai::body_of(request, impl_->model.id));
  asio::post(impl_->io, [impl = impl_.get(), message = std::move(message), tokens = request.output_tokens,
                         sink = std::move(sink)]() mutable {
    asio::co_spawn(impl->io, impl->serve(std::move(message), tokens, std::move(sink)), asio::detached);
  });
  return {};
}

Result<std::string> HttpTarget::get(const std::string& path) {
  std::string body;
  std::promise<Failure> done;
  asio::post(impl_->io, [&] {
    asio::co_spawn(
        impl_->io,
        [&]() -> asio::awaitable<void> {
          Failure failure;
          try {
            failure = co_await impl_->exchange(impl_->request(http::verb::get, path, {}), nullptr, &body);
          } catch (const std::exception& e) {
            failure = {"client", e.what()};
          }
          done.set_value(std::move(failure));
        },
        asio::detached);
  });
  const Failure failure = done.get_future().get();
  if (!failure) return body;
  const Code code = failure.kind == "HTTP 404" ? Code::not_found : Code::io_error;
  return error(code, "{}: {}", path, failure.message);
}

}  // namespace vivace::bench
