#pragma once

#include <cmath>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/bench/load.h"
#include "src/bench/metrics.h"
#include "vivace/dispatch.h"
#include "vivace/engine.h"

namespace vivace::bench {

/// Which implementation ran an operator during the run, and why it was that one.
struct RowUse {
  std::string op, row;
  int64_t calls = 0;
  std::vector<Refusal> refused;  ///< the rows tried before it, each with its reason
  bool explained = true;         ///< false: `refused` is not known
};

/// The calls per row that a server of this project counts, out of its /metrics: vivace_op_calls_total. Other lines, and
/// those of other servers, are passed over.
std::vector<RowUse> rows_of_metrics(std::string_view metrics);
/// What was called since `before`; rows that were not are left out.
std::vector<RowUse> rows_since(const std::vector<RowUse>& now, const std::vector<RowUse>& before);

/// A table of them, each with its calls and its reasons.
std::string rows_text(const std::vector<RowUse>& rows);
/// Rows with their reasons, those that have the same together.
std::string refusals_text(const std::vector<Refusal>& refused);

/// A finished run with everything that is needed to repeat it.
struct Report {
  std::string url;            ///< of the server; empty: the engine of this process
  std::string model;          ///< as given
  std::string model_summary;  ///< format, architecture, number of tensors
  std::string command;        ///< the command line
  std::string version, when;  ///< when: ISO 8601, UTC
  std::string machine;        ///< processor, instruction set, memory
  int threads = 0;
  std::string workload;
  uint64_t seed = 0;
  int64_t concurrency = 0;  ///< 0 in an open loop
  double rate = 0;          ///< requests per second in an open loop
  double temperature = 0;
  int64_t rounds = 1;
  Slo slo;
  std::string plan;   ///< fingerprint() of what was sent; runs of one plan have comparable outputs
  double load_s = 0;  ///< from the start of the program until the engine was ready
  int64_t peak_memory_bytes = 0;
  int64_t mapped_bytes = 0;                                   ///< of the model's files, part of the peak
  std::vector<std::pair<std::string, std::string>> settings;  ///< other options, in order
  Metrics metrics;
  LoadResult load;  ///< of all rounds
  EngineStats engine;
  int64_t experts = 0;  ///< of a MoE layer; 0 in a dense model
  /// Mean of a layer's touched experts in steps of decodes alone; NaN where none ran.
  double touched_experts() const {
    return engine.moe_layers == 0
               ? NAN
               : static_cast<double>(engine.touched_experts) / static_cast<double>(engine.moe_layers);
  }
  std::vector<RowUse> rows;
};

/// What a reader of the figures must know: outputs that ended early, tokens that were not counted by the target.
std::vector<std::string> notes_of(const Metrics& metrics);

nlohmann::ordered_json to_json(const Report& report);
/// The tables that the command prints: latencies, totals, rows. `width` limits long lines.
std::string to_text(const Report& report);
/// One self-contained page: no scripts, no network, light and dark.
std::string to_html(const Report& report);

}  // namespace vivace::bench
