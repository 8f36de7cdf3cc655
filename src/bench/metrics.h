#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/bench/load.h"
#include "vivace/status.h"

namespace vivace::bench {

/// Percentile `q` in [0, 100] of sorted values, linear between neighbours as numpy's default is. NaN for none.
double percentile(const std::vector<double>& sorted, double q);

/// One measured quantity with all its values, sorted.
struct Distribution {
  std::vector<double> values;
  double median = 0, p90 = 0, p99 = 0, p999 = 0, max = 0, mean = 0;  ///< NaN without values
};
Distribution distribution_of(std::vector<double> values);

/// Time per output token while `batch` requests were generating.
struct BatchPoint {
  int64_t batch = 0;
  int64_t gaps = 0;  ///< gaps between tokens that it is made of
  double median_ms = 0, p10_ms = 0, p90_ms = 0;
};

/// One interval of the run.
struct TimelineBin {
  double start_s = 0, width_s = 0;
  double open = 0;        ///< requests sent and not finished, averaged over the interval
  double generating = 0;  ///< those of them between their first and last token
  double tokens_per_s = 0;
  double itl_median_ms = 0, itl_p90_ms = 0;  ///< of the gaps that end in it; NaN without any
};

/// Bounds on what one request's user sees; a request within all that are given is good.
struct Slo {
  std::optional<double> ttft_ms, tpot_ms, e2e_ms;

  bool given() const { return ttft_ms || tpot_ms || e2e_ms; }
  /// "ttft=500ms,tpot=0.05s": bounds above 0 of ttft, tpot and e2e; without a unit they are milliseconds.
  static Result<Slo> parse(std::string_view text);
  std::string text() const;  ///< "ttft=500ms,tpot=50ms"
};

/// Failed requests count as failures and are in no latency.
/// TTFT: first counted chunk minus just before sending. ITL: gaps between counted chunks, pooled over requests.
/// TPOT: (last chunk - first chunk) / (tokens - 1) of each request with more than one token.
/// Goodput: requests within the bounds over the duration; one of a single token is within any bound on TPOT.
struct Metrics {
  int64_t requests = 0, failures = 0;
  std::vector<std::pair<std::string, int64_t>> failures_by_kind;  ///< by name; the sum is `failures`
  int64_t good = 0;                                               ///< 0 without bounds
  int64_t short_outputs = 0;  ///< succeeded with fewer tokens than were asked for
  int64_t usage_missing =
      0;  ///< succeeded, and chunks stand for tokens because the target did not count them
  int64_t prompt_tokens = 0, output_tokens = 0, cached_tokens = 0;  ///< of the requests that succeeded
  double duration_s = 0;
  double throughput_tok_s = 0;  ///< generated tokens over the duration
  double total_tok_s = 0;       ///< prompt and generated tokens
  double request_s = 0;
  double goodput_s = 0;         ///< good requests per second
  double mean_concurrency = 0;  ///< sum of latencies over the duration
  Distribution ttft_ms, tpot_ms, itl_ms, e2e_ms;
  std::vector<BatchPoint> by_batch;
  std::vector<TimelineBin> timeline;
};

/// Linear in the number of tokens, up to sorting.
Metrics measure(const LoadResult& result, const Slo& slo = {});

}  // namespace vivace::bench
