#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "vivace/status.h"

// HTTP/1.1 connections: parsing, limits, timeouts, keep-alive, writes. Knows nothing of models.

namespace vivace::server {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

struct HttpRequest {
  std::string method, path;  ///< `path` is without scheme, host and query
  std::string authorization, request_id;
  std::string body;
  std::string peer;  ///< address and port
  Clock::time_point received;
  /// While it lives, the body counts against HttpOptions::max_body_total.
  std::shared_ptr<const void> body_share;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
  std::string body;
};

/// What a connection shall do next for a call.
struct CallStep {
  enum Kind {
    wait,   ///< nothing yet; the call will wake the connection
    reply,  ///< `response` is the whole answer
    begin,  ///< a stream of events begins: status and headers of `response`
    event,  ///< `payload` is written at once and alone; with `last` the stream is over
    cut,    ///< the client reads too slowly: close without a word
  };
  Kind kind = wait;
  HttpResponse response;
  std::string payload;
  Clock::time_point since;  ///< of an event: when it was there to be written
  bool last = false;
  bool close = false;  ///< the connection ends with this answer
};

/// A request that is being answered. The connection calls both from its own thread, and never again after detach().
class Call {
 public:
  virtual ~Call() = default;
  virtual CallStep next() = 0;
  enum class End { answered, client_gone, too_slow, stopped };
  /// Called exactly once: the connection is done with the call. It must not wake the connection any more.
  virtual void detach(End end) = 0;
};

/// Has the connection ask its call for the next step; from any thread, until detach() returns.
using Wake = std::function<void()>;
/// Called on an I/O thread; must not block and not throw.
using Handler = std::function<std::shared_ptr<Call>(HttpRequest request, Wake wake)>;
/// What is no request, and whose it is; method and path are empty where they have not been read.
struct RefusedRequest {
  int status = 400;
  std::string message;
  std::string peer, method, path;
};
/// The answer to it: 400, 408, 413, 431, 503.
using Refuse = std::function<HttpResponse(const RefusedRequest& refused)>;

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8000;  ///< 0: any that is free
  int io_threads = 2;
  int64_t max_connections = 4096;          ///< more are answered 503 and closed
  int64_t max_header = int64_t{16} << 10;  ///< request line and headers; more is 431
  int64_t max_body = int64_t{8} << 20;     ///< more is 413
  int64_t max_body_total = int64_t{256}
                           << 20;  ///< bodies of all connections that are not parsed yet; more is 503
  int64_t socket_buffer = int64_t{64} << 10;  ///< the kernel's, for what a client has not read
  Milliseconds header_timeout{10'000};  ///< from the first byte (or the accept) to the end of the headers
  Milliseconds body_timeout{60'000};    ///< from there to the end of the body
  Milliseconds idle_timeout{75'000};    ///< between requests of a connection
  Milliseconds write_timeout{30'000};   ///< how long what is there to be read may wait for its reader
};

struct HttpStats {
  int64_t open = 0, accepted = 0, refused = 0;  ///< refused: beyond max_connections
  int64_t slow = 0;                             ///< cut for reading too slowly
  int64_t timed_out = 0;                        ///< headers, bodies and idle connections
};

/// Listens and serves until it is destroyed. Threads: `io_threads`, whatever the number of connections.
class HttpServer {
 public:
  virtual ~HttpServer() = default;
  /// Fails  invalid_argument: the host is no address or the port is out of range. io_error: it cannot be bound.
  static Result<std::unique_ptr<HttpServer>> listen(const HttpOptions& options, Handler handler,
                                                    Refuse refuse);

  virtual int port() const = 0;
  virtual HttpStats stats() const = 0;
  /// From here on an answer is the last of its connection; connections between two requests are closed.
  virtual void drain() = 0;
};

}  // namespace vivace::server
