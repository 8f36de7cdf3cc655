#include "src/model/quantize.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>

#include "apps/vivace/commands.h"
#include "apps/vivace/model_files.h"
#include "apps/vivace/output.h"
#include "apps/vivace/value.h"
#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/engine/compute.h"
#include "src/model/mapped_file.h"

namespace vivace::cli {

namespace {

constexpr int64_t kWindow = 1024;  // tokens that calibration reads at once, unless the context is shorter
constexpr int64_t kLeastTokens = 32;

/// The tokens to calibrate on: of a text, or from a file of ids.
Result<std::vector<int32_t>> calibration_ids(const QuantizeArgs& args, const ModelFiles& files) {
  const bool text_given = !args.calibration_file.empty();
  const std::string flag = text_given ? "--calibration" : "--calibration-ids";
  const std::string& path = text_given ? args.calibration_file : args.calibration_ids;
  auto file = model::MappedFile::open(path);
  if (!file.ok()) return file.status().at(flag);
  const std::span<const uint8_t> bytes = (*file)->bytes();
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  std::vector<int32_t> ids;
  if (text_given) {
    VIVACE_TRY(need_tokenizer(files, args.model, "--calibration-ids takes token ids instead of a text"));
    const std::vector<int32_t>& ends = files.checkpoint->config().eos_ids;
    VIVACE_TRY_ASSIGN(ids, model::score_ids(*files.tokenizer, text, ends.empty() ? 0 : ends.front()));
  } else {
    Result<std::vector<int32_t>> parsed = parse_id_file(text, files.checkpoint->config().vocab);
    if (!parsed.ok()) return parsed.status().at(flag + " " + path);
    ids = std::move(*parsed);
  }
  if (std::ssize(ids) >= kLeastTokens) return ids;
  return invalid_argument("{} {} has {} token{}, needs at least {}: ranges come from what it shows", flag,
                          path, ids.size(), ids.size() == 1 ? "" : "s", kLeastTokens);
}

/// The activations of the model on the calibration text.
Result<model::Calibration> calibration_of(const QuantizeArgs& args, const ModelFiles& files,
                                          const Stream& stream) {
  VIVACE_TRY_ASSIGN(const std::vector<int32_t> ids, calibration_ids(args, files));
  const model::ModelConfig& config = files.checkpoint->config();
  ProgressLine line;
  model::ScoreOptions options{.window = std::min(kWindow, config.max_position),
                              .max_windows = args.max_windows};
  options.progress = [&](int64_t done, int64_t total) {
    line.update(static_cast<double>(done) / static_cast<double>(total),
                fmt::format("calibration: {} of {} windows", done, total));
  };
  auto result = model::calibrate(*files.checkpoint, ids, options, stream);
  line.finish();
  return result;
}

volatile std::sig_atomic_t noted_signal = 0;

/// While it lives, the signals that end a program are noted instead, so that what is half written is removed first. One
/// that was ignored stays so.
class NotedSignals {
 public:
  NotedSignals() {
    for (const int signal : kSignals) {
      struct sigaction now = {};
      sigaction(signal, nullptr, &now);
      if (now.sa_handler == SIG_IGN) continue;
      struct sigaction note = {};
      note.sa_handler = [](int number) { noted_signal = number; };
      note.sa_flags = SA_RESTART;
      sigaction(signal, &note, nullptr);
    }
  }
  ~NotedSignals() {
    for (const int signal : kSignals) {
      struct sigaction now = {};
      sigaction(signal, nullptr, &now);
      if (now.sa_handler != SIG_IGN) std::signal(signal, SIG_DFL);
    }
  }
  NotedSignals(const NotedSignals&) = delete;
  NotedSignals& operator=(const NotedSignals&) = delete;

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
};

struct Outcome {
  model::QuantizeResult result;
  model::ScoreResult score;  ///< tokens 0: no calibration
};

Result<Outcome> run_quantize(const QuantizeArgs& args) {
  model::QuantizeOptions options{.scale_type = args.scale_type, .margin = args.margin};
  options.format =
      args.scheme == "block128" ? model::WeightFormat::fp8_block128 : model::WeightFormat::fp8_static;
  VIVACE_TRY(model::check_quantize_paths(args.model, args.out));
  // Its tokenizer too, which is copied: the result must load.
  VIVACE_TRY_ASSIGN(const ModelFiles files, open_model_files(args.model));
  VIVACE_TRY_ASSIGN(const auto compute, engine::Compute::create("cpu", args.threads));
  const Stream stream = compute->stream(nullptr);
  Outcome outcome;
  model::Calibration calibration;
  if (!args.calibration_file.empty() || !args.calibration_ids.empty()) {
    VIVACE_TRY_ASSIGN(calibration, calibration_of(args, files, stream));
    options.calibration = &calibration;
    outcome.score = calibration.score;
  }
  ProgressLine line;
  options.progress = [&](int64_t done, int64_t total) {
    line.update(static_cast<double>(done) / static_cast<double>(std::max<int64_t>(1, total)),
                fmt::format("{:.1f} of {:.1f} MB", static_cast<double>(done) * 1e-6,
                            static_cast<double>(total) * 1e-6));
  };
  options.stop = [] { return noted_signal != 0; };
  const NotedSignals signals;
  auto result = model::quantize_folder(args.model, args.out, options, stream);
  line.finish();
  VIVACE_TRY_ASSIGN(outcome.result, std::move(result));
  return outcome;
}

/// What the figures of a whole group can hide.
void warn(const QuantizeArgs& args, const Outcome& outcome) {
  for (const model::QuantizedGroup& group : outcome.result.groups) {
    if (group.worst_mean_error <= model::kPoorMeanError) continue;
    note(fmt::format(
        "warning: {}: its weights are off by {:.0f} % in the mean (2 % is usual): some are so large "
        "that their scale does not suit the others{}",
        group.worst_matrix, 100 * group.worst_mean_error,
        args.scheme == "block128" ? "" : "; --scheme block128 keeps that to blocks of 128 x 128"));
  }
}

void print_table(const QuantizeArgs& args, const Outcome& outcome) {
  const model::QuantizeResult& r = outcome.result;
  const auto megabytes = [](int64_t bytes) { return static_cast<double>(bytes) * 1e-6; };
  std::string text = fmt::format("{:<16}{:>10}{:>14}{:>14}{:>14}{:>14}{:>16}\n", "", "matrices", "MB before",
                                 "MB after", "rms error", "became 0", "worst matrix");
  for (const model::QuantizedGroup& group : r.groups) {
    text += fmt::format("{:<16}{:>10}{:>14.2f}{:>14.2f}{:>13.2f}%{:>13.2f}%{:>15.2f}%\n", group.name,
                        group.matrices, megabytes(group.bytes_before), megabytes(group.bytes_after),
                        100 * group.relative_error(), 100 * group.lost_share(), 100 * group.worst_mean_error);
  }
  text += fmt::format("{:<16}{:>10}{:>14.2f}{:>14.2f}\n", "kept", r.kept_tensors, megabytes(r.kept_bytes),
                      megabytes(r.kept_bytes));
  text += "became 0: of the weights that were not; worst matrix: the largest mean of |error| / |weight|\n";
  if (outcome.score.tokens > 0) {
    text += fmt::format("calibration: {} predictions, perplexity {:.4f}\n", outcome.score.tokens,
                        outcome.score.perplexity);
  }
  if (r.unvisited_experts > 0) {
    text +=
        fmt::format("{} had no token in the calibration text: the largest range of the layer is taken\n",
                    r.unvisited_experts == 1 ? "1 expert" : fmt::format("{} experts", r.unvisited_experts));
  }
  text += fmt::format("{}: {} file{} of weights\n", args.out, r.files, r.files == 1 ? "" : "s");
  write_out(text);
}

void print_document(const QuantizeArgs& args, const Outcome& outcome) {
  nlohmann::ordered_json groups = nlohmann::ordered_json::array();
  for (const model::QuantizedGroup& group : outcome.result.groups) {
    groups.push_back({{"name", group.name},
                      {"matrices", group.matrices},
                      {"bytes_before", group.bytes_before},
                      {"bytes_after", group.bytes_after},
                      {"rms_relative_error", group.relative_error()},
                      {"lost_share", group.lost_share()},
                      {"worst_mean_relative_error", group.worst_mean_error},
                      {"worst_matrix", group.worst_matrix}});
  }
  nlohmann::ordered_json document = {{"out", args.out},
                                     {"scheme", args.scheme},
                                     {"groups", groups},
                                     {"kept_tensors", outcome.result.kept_tensors},
                                     {"kept_bytes", outcome.result.kept_bytes},
                                     {"files", outcome.result.files},
                                     {"unvisited_experts", outcome.result.unvisited_experts}};
  if (outcome.score.tokens > 0) {
    document["calibration"] = {{"predictions", outcome.score.tokens},
                               {"perplexity", outcome.score.perplexity}};
  }
  print_json(document);
}

}  // namespace

int run(const QuantizeArgs& args) {
  const Result<Outcome> outcome = guarded("quantize", [&] { return run_quantize(args); });
  if (!outcome.ok()) {
    const int code = fail(outcome.status());
    // The end that the signal asked for, so that a shell sees it.
    if (outcome.status().code() == Code::cancelled) std::raise(noted_signal);
    return code;
  }
  warn(args, *outcome);
  if (args.json) {
    print_document(args, *outcome);
  } else {
    print_table(args, *outcome);
  }
  return 0;
}

}  // namespace vivace::cli
