#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "src/bench/ops/workload.h"
#include "vivace/engine.h"

// The command line as plain structs. Values are in range when they get here; what only the model can judge (an id
// outside the vocabulary, a prompt beyond the context) is checked where the model is known.

namespace vivace::cli {

struct GenerateArgs {
  EngineOptions engine;
  std::optional<std::string> prompt, chat;
  std::vector<int32_t> prompt_ids;  ///< empty unless --prompt-ids was given
  std::string system;               ///< for --chat; empty: none
  int64_t max_tokens = 128;
  SamplingParams sampling;
  std::vector<std::string> stop;
  bool ignore_eos = false, json = false;
};

struct ScoreArgs {
  EngineOptions engine;
  std::string text_file;
  int64_t window = 0;
  int64_t max_windows = 0;              ///< 0: all
  std::optional<int32_t> separator_id;  ///< absent: the model's end token
  bool json = false;
};

struct TokenizeArgs {
  std::string model, text;
  bool parse_special = false, json = false;
};

struct QuantizeArgs {
  std::string model, out, scheme;
  std::string calibration_file;  ///< a text; empty: none
  std::string calibration_ids;   ///< a file of token ids; empty: none
  int64_t max_windows = 0;       ///< of the calibration text; 0: all
  double margin = 1;
  DType scale_type = DType::f32;
  int threads = 0;
  bool json = false;
};

struct BenchServeArgs {
  EngineOptions engine;
  std::string workload = "mixed";
  int64_t requests = 64;
  int64_t concurrency = 8;
  double rate = 0;  ///< > 0: an open loop
  uint64_t seed = 0;
  double temperature = 0;
  bool watch = false;
  std::string json_file, report_file;
  std::string command;  ///< the command line, for the report
};

struct BenchOpsArgs {
  std::string device = "cuda", prefer;
  std::vector<bench::OpWorkload> workloads;
  int64_t replays = 20;
  std::string targets_file, json_file;
  bool baselines = true;
  bool list = false;
};

struct BenchStepArgs {
  EngineOptions engine;
  std::vector<int64_t> batches = {1};
  int64_t context = 1024, steps = 64;
  uint64_t seed = 0;
  std::string json_file;
  std::string command;  ///< the command line, for the report
};

struct OpsArgs {
  bool json = false, markdown = false;
};

struct OpsExplainArgs {
  EngineOptions engine;
  int64_t batch = 1;
  bool json = false;
};

struct OpsScheduleArgs {
  std::string lengths_text;
  std::vector<int64_t> lengths;  ///< of at least one request
  int64_t heads_q = 0, heads_kv = 0;
  int64_t query_tokens = 1, window = 0, piece_tiles = 0;
  int64_t sms = kH200Sms;
  std::optional<int64_t> workers;  ///< absent: as many as fit the SMs
  std::string row;                 ///< of attention_decode: "sm90" or "cuda.mma"; empty: the first that takes the step
  bool fp8 = false;                ///< K and V, else bf16
  std::string json_file;

  static constexpr int64_t kH200Sms = 132;
};

struct DoctorArgs {
  std::string model;  ///< empty: none
  bool json = false;
};

using Command =
    std::variant<std::monostate, GenerateArgs, ScoreArgs, TokenizeArgs, QuantizeArgs, BenchServeArgs,
                 BenchOpsArgs, BenchStepArgs, OpsArgs, OpsExplainArgs, OpsScheduleArgs, DoctorArgs>;

struct Parsed {
  Command command;    ///< empty: nothing to run, the program ends with exit_code
  int exit_code = 0;  ///< 0 after help or version, 2 after a usage error (already printed)
};

Parsed parse_command_line(int argc, char** argv);

}  // namespace vivace::cli
