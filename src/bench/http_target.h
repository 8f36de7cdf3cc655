#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "src/bench/openai.h"
#include "src/bench/target.h"
#include "vivace/status.h"

namespace vivace::bench {

/// The parts of "http://HOST[:PORT][/PATH]"; an IPv6 address stands in brackets.
struct HttpUrl {
  std::string host, port;
  std::string path;  ///< without a slash at its end, and without a last "/v1"

  /// invalid_argument: `text` is none. unsupported: https.
  static Result<HttpUrl> parse(const std::string& text);
};

struct HttpTargetOptions {
  std::string url;
  std::string model;    ///< empty: the first that /v1/models lists
  std::string api_key;  ///< empty: none
  double connect_timeout_s = 10;
  double read_timeout_s = 300;  ///< without a byte from the server
};

/// A server with OpenAI's protocol at an address. One thread drives all streams. Connections are kept alive and used
/// again; where the server closed an idle one a new one is made and the request sent once more.
///
/// What fails a request has a kind: "connect", "connect timeout", "read timeout", "disconnected", "HTTP <status>",
/// "server error" (an error in the middle of a stream) and "protocol" (what came is not such a stream).
class HttpTarget : public Target {
 public:
  /// Resolves the address and asks /v1/models.
  static Result<std::unique_ptr<HttpTarget>> create(const HttpTargetOptions& options);
  /// Open requests end as "cancelled".
  ~HttpTarget() override;

  const openai::ServedModel& model() const;
  /// Kept connections that turned out to be closed, each replaced by a new one.
  int64_t reconnects() const;
  Status start(const LoadRequest& request, Sink sink) override;
  /// The body of a GET that answers 200. Waits.
  Result<std::string> get(const std::string& path);

 private:
  HttpTarget();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace vivace::bench
