#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "vivace/status.h"

namespace vivace::bench {

/// What a request asks. One of the three is filled: token ids, raw text, or the messages of a chat.
struct Prompt {
  std::vector<int32_t> ids;
  std::string text;
  std::string messages;  ///< a JSON array of {"role": ..., "content": ...}
};

/// One request as the load generator sends it: greedy unless `temperature` is positive.
struct LoadRequest {
  Prompt prompt;
  int64_t output_tokens = 0;  ///< at most; exactly this many with `ignore_eos`
  double temperature = 0;
  uint64_t seed = 0;
  bool ignore_eos = true;
};

/// A chunk of one stream, or its end.
struct LoadEvent {
  bool chunk = false;  ///< counts for TTFT and ITL; a last event may have none
  std::string text;
  bool last = false;
  std::string error;               ///< with `last`: why the request failed, or empty
  std::string error_kind;          ///< with `error`: what failures are counted by, such as "HTTP 429"
  int64_t prompt_tokens = -1;      ///< with `last`; -1: the target did not say
  int64_t completion_tokens = -1;  ///< with `last`; -1: the target did not say
  int64_t cached_tokens = 0;       ///< with `last`: prompt tokens that were not computed again
  std::chrono::steady_clock::time_point time;
};

/// What a load is put on: an engine in this process, or a server at an address.
class Target {
 public:
  /// Called for one request at a time in order, from a thread of the target's own; must not block.
  using Sink = std::function<void(const LoadEvent&)>;

  virtual ~Target() = default;
  /// Sends one request and returns at once. After an error the sink is never called; otherwise its last call
  /// has `last` set.
  virtual Status start(const LoadRequest& request, Sink sink) = 0;
};

}  // namespace vivace::bench
