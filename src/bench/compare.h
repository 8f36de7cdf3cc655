#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/bench/metrics.h"
#include "vivace/status.h"

namespace vivace::bench {

/// Ratios b / a of the medians of one round each: the middle one is blind to a round that something disturbed.
struct RoundRatios {
  double least = 0, median = 0, largest = 0;
};

/// One quantity of two runs.
struct ComparedValue {
  std::string name, unit;
  double a = 0, b = 0;
  double ratio = 0;                   ///< b / a; NaN where there is none
  std::optional<RoundRatios> rounds;  ///< of medians, where there are rounds
};

/// How far two runs of one plan gave the same text. Requests that failed in either are not compared.
struct Agreement {
  int64_t compared = 0, equal = 0;
  double common_share = 0;  ///< mean share of the longer text before the first difference; 1 without any
  std::string why_not;      ///< not empty: nothing was compared, and why
};

/// Two finished runs side by side.
struct Comparison {
  struct Side {
    std::string name;  ///< a file, an address or a command
    std::string command, model, when;
    int64_t requests = 0, failures = 0;
    Distribution ttft_ms, tpot_ms;
    std::vector<BatchPoint> by_batch;
  };
  Side a, b;
  std::vector<ComparedValue> values;
  Agreement agreement;
  /// What makes the figures hard to compare, such as prefix caches that were not equally warm.
  std::vector<std::string> notes;
};

/// From two documents of to_json(Report). `a_name` and `b_name` start messages.
/// Fails  invalid_argument: a document is not such a one; the message has the field.
Result<Comparison> compare(const nlohmann::ordered_json& a, const std::string& a_name,
                           const nlohmann::ordered_json& b, const std::string& b_name);

std::string to_text(const Comparison& comparison);
nlohmann::ordered_json to_json(const Comparison& comparison);
/// One self-contained page.
std::string to_html(const Comparison& comparison);

}  // namespace vivace::bench
