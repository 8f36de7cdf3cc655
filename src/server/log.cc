#include "src/server/log.h"

#include <fmt/format.h>

#include <chrono>
#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

namespace vivace::server {

namespace {

/// UTC, such as 2026-01-31T12:00:00.123Z.
std::string time_text() {
  const auto now = std::chrono::system_clock::now();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count();
  const std::time_t seconds = ms / 1000;
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", utc.tm_year + 1900, utc.tm_mon + 1,
                     utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, ms % 1000);
}

std::string line_of(std::string_view event, const nlohmann::ordered_json& fields) {
  nlohmann::ordered_json line = {{"time", time_text()}, {"event", event}};
  line.update(fields);
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace

Log::Log(LogLevel level, std::FILE* file) : level_(level), file_(file), thread_([this] { loop(); }) {}

Log::~Log() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  ready_.notify_one();
  thread_.join();
}

void Log::write(std::string_view event, const nlohmann::ordered_json& fields) {
  if (level_ == LogLevel::off) return;
  std::string line = line_of(event, fields);
  {
    const std::lock_guard lock(mutex_);
    if (lines_.size() >= kMostQueued) {
      ++dropped_;
      return;
    }
    lines_.push_back(std::move(line));
  }
  ready_.notify_one();
}

void Log::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    ready_.wait(lock, [&] { return stopping_ || !lines_.empty(); });
    if (lines_.empty()) return;
    std::deque<std::string> lines = std::exchange(lines_, {});
    const int64_t dropped = std::exchange(dropped_, 0);
    lock.unlock();
    if (dropped > 0) lines.push_back(line_of("log_lines_dropped", {{"count", dropped}}));
    for (const std::string& line : lines) std::fwrite(line.data(), 1, line.size(), file_);
    std::fflush(file_);
    lock.lock();
  }
}

}  // namespace vivace::server
