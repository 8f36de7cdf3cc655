#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "src/bench/report.h"
#include "src/engine/model_runner.h"
#include "vivace/status.h"

namespace vivace::bench {

/// What a decode step must read: the least it can take is these bytes over the rate at which the device reads memory.
/// Activations, logits and the rows of the embedding are far below a hundredth of them and not counted.
struct StepBytes {
  int64_t dense = 0, experts = 0, kv = 0;
  int64_t total() const { return dense + experts + kv; }
};

/// a / b, or 0 where there is no b: JSON has neither infinity nor NaN.
constexpr double quotient(double a, double b) {
  return b > 0 ? a / b : 0;
}

/// The calls of a step in one row of an operator that compute as much.
struct StepOperator {
  std::string op, row;
  int64_t calls = 0;
  double us = 0;                   ///< of all of them together, each timed by itself; the median over steps
  double bytes = 0, floor_us = 0;  ///< of all of them
  int64_t flops = 0;               ///< of all of them

  double us_per_call() const { return quotient(us, static_cast<double>(calls)); }
  double bytes_per_call() const { return quotient(bytes, static_cast<double>(calls)); }
  double flops_per_call() const { return quotient(static_cast<double>(flops), static_cast<double>(calls)); }
  double share_of_floor() const { return quotient(floor_us, us); }
};

/// Decode steps of one batch.
struct StepPoint {
  int64_t batch = 0;
  double median_us = 0, p10_us = 0, p90_us = 0;
  double touched_experts =
      0;  ///< mean over the sparse layers, in steps that were not timed; 0 in a dense model
  StepBytes bytes;
  double floor_us = 0;
  std::vector<StepOperator> operators;  ///< slowest first; empty unless they were asked for

  double operators_us() const;
  double tokens_per_s() const { return quotient(1e6 * static_cast<double>(batch), median_us); }
  double share_of_floor() const { return quotient(floor_us, median_us); }
};

struct StepOptions {
  std::vector<int64_t> batches;
  int64_t context = 0;   ///< keys that each request's token attends to, itself included
  int64_t steps = 0;     ///< timed, after three that are not
  double read_rate = 0;  ///< bytes per second, as read_rate() measured them
  uint64_t seed = 0;
  bool operators = false;  ///< times the operator calls of each batch too, in more steps
};

/// Bytes per second that this stream's device reads from memory, measured over more than its caches hold.
Result<double> read_rate(const Stream& stream);

/// KV pages that time_steps() needs.
int64_t pages_for_steps(const StepOptions& options, int64_t page_tokens);

/// Times decode steps of the whole model as the engine runs them: random keys and values fill the pages, each
/// request has its pages scattered over the pool, draws at temperature 1 and feeds what it drew into the next
/// step; a step is enqueued while the one before it runs where the runner overlaps. `next` is told the batch
/// that begins.
Result<std::vector<StepPoint>> time_steps(engine::ModelRunner& runner, const StepOptions& options,
                                          const std::function<void(int64_t batch)>& next);

/// A finished run with everything that is needed to repeat it.
struct StepReport {
  std::string model, model_summary, command, version, when;
  std::string device;  ///< "NVIDIA H200, compute capability 9.0, ..." or the processor
  std::vector<std::pair<std::string, std::string>> settings;  ///< options, in order
  StepOptions options;
  int64_t layers = 0, sparse_layers = 0, experts = 0, top_k = 0;
  std::vector<StepPoint> points;
  std::vector<RowUse> rows;  ///< calls of all steps, those before the timed ones included
};
nlohmann::ordered_json to_json(const StepReport& report);
std::string to_text(const StepReport& report);

}  // namespace vivace::bench
