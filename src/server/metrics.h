#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "src/server/http.h"
#include "vivace/engine.h"

namespace vivace::server {

/// Counts of values in buckets, as Prometheus' histograms. Any thread may add.
class Histogram {
 public:
  static constexpr size_t kMaxBounds = 16;
  /// `bounds` in seconds, ascending, at most kMaxBounds; must outlive this.
  explicit Histogram(std::span<const double> bounds) : bounds_(bounds) {}
  void add(double seconds);
  void write(std::string& out, std::string_view name, std::string_view help) const;

 private:
  std::span<const double> bounds_;
  std::array<std::atomic<int64_t>, kMaxBounds + 1> counts_{};
  std::atomic<int64_t> sum_ns_{0};
};

/// What the server counts itself; the rest comes from the engine when it is asked for.
class Metrics {
 public:
  Metrics();

  /// An answer, by path (a route's, or "other") and status; 499 when the client left before it.
  void count_answer(std::string_view path, int status);

  Histogram ttft, tpot, itl, duration;
  std::atomic<int64_t> prompt_tokens{0};
  std::atomic<int64_t> in_flight{0};  ///< requests that are parsed, waiting or running

  /// Prometheus' text format.
  std::string text(const Engine& engine, const HttpStats& http) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, int64_t, std::less<>> answers_;
};

}  // namespace vivace::server
