#pragma once

#include <memory>
#include <string>
#include <vector>

#include "src/server/http.h"
#include "src/server/log.h"
#include "src/server/model.h"
#include "vivace/engine.h"

namespace vivace::server {

struct ServerOptions {
  HttpOptions http;
  int workers = 2;                                 ///< threads that parse, tokenise and format long answers
  int64_t max_parsing = 4096;                      ///< requests that wait for a worker; more are 503
  int64_t stream_buffer_bytes = int64_t{1} << 20;  ///< what may wait for the reader of a stream
  std::vector<std::string> api_keys;               ///< empty: everybody is let in
  LogLevel log = LogLevel::all;
};

/// Serves an engine over HTTP until it is stopped. The number of threads does not depend on the number of clients.
class Server {
 public:
  virtual ~Server() = default;  ///< stops at once; requests that are being answered get an error
  /// `engine` must outlive the server.
  static Result<std::unique_ptr<Server>> start(const ServerOptions& options, ServedModel model,
                                               Engine& engine);

  virtual int port() const = 0;
  virtual HttpStats http_stats() const = 0;
  /// Takes no new requests (503), lets those that run end within `limit`, and tells the clients of the others (an
  /// error as the answer or as the last event). Returns when all connections are closed. True: all ended by themselves.
  virtual bool stop(Milliseconds limit) = 0;
  /// Has a stop() under way in another thread, or to come, wait no longer.
  virtual void hurry() = 0;
};

/// Raises the limit of open files as far as this process may; returns it.
int64_t raise_file_limit();

/// Keys from the text of a file: one a line; empty lines and those that begin with # are skipped.
/// Fails  invalid_argument: no key, or one with a character that cannot stand in a header.
Result<std::vector<std::string>> parse_api_keys(std::string_view text);

}  // namespace vivace::server
