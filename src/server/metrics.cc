#include "src/server/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace vivace::server {

namespace {

constexpr double kWaits[] = {0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60};
constexpr double kGaps[] = {0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015,
                            0.02,  0.03,  0.05,  0.1,   0.2,   0.5,  1};
constexpr double kDurations[] = {0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300};

void head(std::string& out, std::string_view name, std::string_view type, std::string_view help) {
  out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
}

void value(std::string& out, std::string_view name, std::string_view type, std::string_view help,
           int64_t number) {
  head(out, name, type, help);
  out += fmt::format("{} {}\n", name, number);
}

}  // namespace

void Histogram::add(double seconds) {
  const auto bucket = static_cast<size_t>(std::ranges::lower_bound(bounds_, seconds) - bounds_.begin());
  counts_[bucket].fetch_add(1, std::memory_order_relaxed);
  sum_ns_.fetch_add(std::llround(seconds * 1e9), std::memory_order_relaxed);
}

void Histogram::write(std::string& out, std::string_view name, std::string_view help) const {
  head(out, name, "histogram", help);
  int64_t total = 0;
  for (size_t i = 0; i < bounds_.size(); ++i) {
    total += counts_[i].load(std::memory_order_relaxed);
    out += fmt::format("{}_bucket{{le=\"{}\"}} {}\n", name, bounds_[i], total);
  }
  total += counts_[bounds_.size()].load(std::memory_order_relaxed);
  out += fmt::format("{}_bucket{{le=\"+Inf\"}} {}\n{}_sum {:.9f}\n{}_count {}\n", name, total, name,
                     static_cast<double>(sum_ns_.load(std::memory_order_relaxed)) / 1e9, name, total);
}

Metrics::Metrics() : ttft(kWaits), tpot(kGaps), itl(kGaps), duration(kDurations) {}

void Metrics::count_answer(std::string_view path, int status) {
  const std::lock_guard lock(mutex_);
  ++answers_[{std::string(path), status}];
}

std::string Metrics::text(const Engine& engine, const HttpStats& http) const {
  std::string out;
  head(out, "vivace_requests_total", "counter",
       "Answered requests by path and status; 499: the client left before an answer began");
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, count] : answers_)
      out +=
          fmt::format("vivace_requests_total{{path=\"{}\",code=\"{}\"}} {}\n", key.first, key.second, count);
  }
  value(out, "vivace_requests_in_flight", "gauge", "Generation requests that are being answered", in_flight);
  value(out, "vivace_connections", "gauge", "Open connections", http.open);
  value(out, "vivace_connections_total", "counter", "Accepted connections", http.accepted);
  value(out, "vivace_connections_refused_total", "counter", "Connections beyond the limit", http.refused);
  value(out, "vivace_slow_readers_total", "counter", "Connections cut because their reader was too slow",
        http.slow);
  value(out, "vivace_timeouts_total", "counter",
        "Connections closed while headers, a body or a request was awaited", http.timed_out);

  const EngineStats s = engine.stats();
  value(out, "vivace_sequences_running", "gauge", "Sequences that are being generated", s.running);
  value(out, "vivace_sequences_waiting", "gauge", "Sequences in the queue", s.waiting);
  value(out, "vivace_queue_limit", "gauge", "Most sequences beyond those that the batch has places for", engine.options().max_waiting);
  value(out, "vivace_sequences_finished_total", "counter", "Sequences that ended by themselves", s.finished);
  value(out, "vivace_sequences_cancelled_total", "counter", "Sequences that were cancelled", s.cancelled);
  value(out, "vivace_sequences_failed_total", "counter", "Sequences that ended with an error", s.failed);
  value(out, "vivace_preemptions_total", "counter", "Sequences that gave up their pages and began anew",
        s.preemptions);
  value(out, "vivace_engine_steps_total", "counter", "Steps of the engine", s.steps);
  value(out, "vivace_prompt_tokens_total", "counter", "Prompt tokens of accepted requests", prompt_tokens);
  value(out, "vivace_computed_prompt_tokens_total", "counter", "Prompt tokens that were computed",
        s.prompt_tokens);
  value(out, "vivace_cached_prompt_tokens_total", "counter", "Prompt tokens found in the prefix cache",
        s.cached_tokens);
  value(out, "vivace_generated_tokens_total", "counter", "Generated tokens", s.generated_tokens);
  value(out, "vivace_kv_pages", "gauge", "Pages of keys and values", s.pages_total);
  value(out, "vivace_kv_pages_free", "gauge", "Pages that hold nothing", s.pages_free);
  value(out, "vivace_kv_pages_cached", "gauge", "Pages that only the prefix cache holds", s.pages_cached);

  head(out, "vivace_op_calls_total", "counter", "Calls of each operator's rows");
  std::map<std::string_view, int64_t> fallbacks;
  for (const RowCount& count : engine.dispatch().counts()) {
    out +=
        fmt::format("vivace_op_calls_total{{op=\"{}\",row=\"{}\"}} {}\n", count.op, count.row, count.calls);
    if (count.row == "reference") fallbacks[count.op] += count.calls;
  }
  head(out, "vivace_op_fallbacks_total", "counter", "Calls that no row but the reference could take");
  for (const auto& [op, calls] : fallbacks)
    out += fmt::format("vivace_op_fallbacks_total{{op=\"{}\"}} {}\n", op, calls);

  ttft.write(out, "vivace_time_to_first_token_seconds", "From the request's first byte to its first token");
  tpot.write(out, "vivace_time_per_output_token_seconds", "Mean gap between the tokens of an answer");
  itl.write(out, "vivace_inter_token_latency_seconds", "Each gap between two tokens");
  duration.write(out, "vivace_request_duration_seconds",
                 "From a generation request's first byte to its last answer");
  return out;
}

}  // namespace vivace::server
