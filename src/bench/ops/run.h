#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "src/bench/ops/suite.h"
#include "src/bench/ops/timing.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::bench {

/// A workload timed on a row or through a library, or why it was not timed.
struct OpResult {
  OpWorkload workload;
  std::string row;
  bool baseline = false;  ///< a library beside our rows
  Timing timing;
  double floor_us = 0;
  double read_tb_s = 0, tflop_s = 0;  ///< what the floor's bytes and operations took place at
  std::optional<double> max_abs_error;
  Status failure;
  std::optional<double> target_us;
  std::optional<double> formula_us;  ///< what the formula of the suite's targets gives for this case

  double share_of_floor() const { return timing.median_us > 0 ? floor_us / timing.median_us : 0; }
};

struct OpRunOptions {
  int64_t replays = 20;
  bool libraries = true;  ///< times libraries too, where a suite names any and they are found
  /// Called before each workload.
  std::function<void(size_t done, size_t total, const OpWorkload& next)> progress;
  /// Called after each row and each library.
  std::function<void(OpResult& result)> finished;
};

/// The cases of these suites (none given: all) that a filter accepts (none given: all). A filter that accepts none makes
/// one of its own from the nearest listed case, called "own" where the name of that no longer holds. Needs no GPU.
/// Fails  not_found: no such suite, case or field; the message lists what there is. invalid_argument: the case of its own
/// does not pass its suite's check(), or several suites have cases that could be changed to it.
Result<std::vector<OpWorkload>> select_workloads(const std::vector<std::string>& suites,
                                                 const std::vector<OpFilter>& filters);

/// Checks each workload's output against float64 once, then times it, then the libraries in the same way. What fails
/// keeps its place with the reason. One line of log where libraries are wanted and cuBLASLt was not found.
std::vector<OpResult> run_workloads(const std::vector<OpWorkload>& workloads, const OpRunOptions& options,
                                    const Stream& stream);

/// Targets by suite and workload.
class OpTargets {
 public:
  /// Of a JSON object of lists by suite, whose entries have this project's field names. invalid_argument: the text is not
  /// of that form.
  static Result<OpTargets> parse(std::string_view json_text);
  /// Sets target_us where an entry agrees in every field that both have, its suite's target_defaults counted as the entry's;
  /// a target is for our row alone.
  void apply(OpResult& result) const;

 private:
  std::shared_ptr<const nlohmann::ordered_json> suites_;
};

/// One object per result: suite, case, the workload's fields, row, baseline (true where the row is a library's), us, p10_us,
/// p90_us, floor_us, share_of_floor, tb_s, tflop_s; max_abs_error, formula_us, target_us and failure where there are any.
nlohmann::ordered_json json_of(const std::vector<OpResult>& results);

/// A table, line by line, and per suite the geometric mean of us / target_us. Cases without a target have the formula's
/// time in its place, behind a ~, and a line of their own below.
class OpTable {
 public:
  /// The line of a result, after the heading of its suite where that begins.
  std::string add(const OpResult& result);
  /// What is still to be said of the last suite.
  std::string end();

 private:
  /// of us over what is to be reached
  struct Ratios {
    double logs = 0, worst = 0;
    int64_t count = 0;
    void add(double ratio);
    std::string line(std::string_view of) const;
  };
  std::string suite_;
  Ratios targets_, formulas_;
};

}  // namespace vivace::bench
