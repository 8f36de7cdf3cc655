#pragma once

#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <thread>

namespace vivace::server {

enum class LogLevel : uint8_t { off, errors, all };

/// One JSON object a line, written by a thread of its own: whoever reads the log slowly delays nobody. Lines that find
/// the queue full are dropped, and a line says how many.
class Log {
 public:
  explicit Log(LogLevel level, std::FILE* file = stderr);
  /// Writes what is queued.
  ~Log();

  LogLevel level() const { return level_; }
  /// Adds "time" and "event" in front of `fields` (an object). Called by any thread; never blocks on the file.
  void write(std::string_view event, const nlohmann::ordered_json& fields);

 private:
  void loop();

  static constexpr size_t kMostQueued = 8192;
  const LogLevel level_;
  std::FILE* const file_;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::string> lines_;
  int64_t dropped_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace vivace::server
