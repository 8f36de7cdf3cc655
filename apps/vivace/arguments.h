#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "src/bench/metrics.h"
#include "src/bench/ops/workload.h"
#include "src/server/server.h"
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
  std::string router_inputs;            ///< where the inputs of routers go; empty: nowhere
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

struct ServeArgs {
  EngineOptions engine;
  server::ServerOptions server;
  std::string served_model_name;  ///< empty: the model's path
  std::string api_key_file, chat_template_file;
  std::chrono::milliseconds shutdown_timeout{30'000};
};

struct BenchServeArgs {
  EngineOptions engine;           ///< its model is empty where only servers are measured
  std::vector<std::string> urls;  ///< of servers; none: the engine of this process
  /// The second side of a comparison: what --against changes.
  struct Other {
    EngineOptions engine;
    std::string url;   ///< empty: an engine
    std::string text;  ///< as given
  };
  std::optional<Other> other;
  std::vector<std::string> compare_files;  ///< two, or none
  int64_t rounds = 3;                      ///< of a comparison
  std::string served_model_name, api_key_file, api_key_variable;
  double connect_timeout_s = 10, read_timeout_s = 300;
  bool chat = false;
  int64_t vocab = 0;  ///< > 0: prompts of random ids below it
  std::string workload = "mixed", dataset;
  std::optional<int64_t> requests;
  int64_t max_tokens = 128;  ///< of the data set's lines without a number
  bool stop_at_eos = false;
  int64_t concurrency = 8;
  double rate = 0;  ///< > 0: an open loop
  uint64_t seed = 0;
  double temperature = 0;
  bench::Slo slo;
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
  bool operators = false;
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

using Command = std::variant<std::monostate, GenerateArgs, ScoreArgs, TokenizeArgs, QuantizeArgs, ServeArgs,
                             BenchServeArgs, BenchOpsArgs, BenchStepArgs, OpsArgs, OpsExplainArgs,
                             OpsScheduleArgs, DoctorArgs>;

struct Parsed {
  Command command;    ///< empty: nothing to run, the program ends with exit_code
  int exit_code = 0;  ///< 0 after help or version, 2 after a usage error (already printed)
};

Parsed parse_command_line(int argc, char** argv);

}  // namespace vivace::cli
