#include "src/model/quantize.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/vivace/commands.h"
#include "apps/vivace/model_files.h"
#include "apps/vivace/output.h"
#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/engine/compute.h"
#include "src/model/mapped_file.h"

namespace vivace::cli {

namespace {

constexpr int64_t kWindow = 1024;  // tokens that calibration reads at once, unless the context is shorter

/// The activations of the model on the calibration text.
Result<model::Calibration> calibration_of(const QuantizeArgs& args, const Stream& stream) {
  VIVACE_TRY_ASSIGN(const ModelFiles files, open_model_files(args.model));
  VIVACE_TRY(need_tokenizer(files, args.model, "calibration needs one to read the text"));
  auto text = model::MappedFile::open(args.calibration_file);
  if (!text.ok()) return text.status().at("--calibration");
  const std::span<const uint8_t> bytes = (*text)->bytes();
  const model::ModelConfig& config = files.checkpoint->config();
  VIVACE_TRY_ASSIGN(
      const std::vector<int32_t> ids,
      model::score_ids(*files.tokenizer, {reinterpret_cast<const char*>(bytes.data()), bytes.size()},
                       config.eos_ids.empty() ? 0 : config.eos_ids.front()));
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

struct Outcome {
  model::QuantizeResult result;
  model::ScoreResult score;  ///< tokens 0: no calibration
};

Result<Outcome> run_quantize(const QuantizeArgs& args) {
  model::QuantizeOptions options{.scale_type = args.scale_type, .margin = args.margin};
  options.format =
      args.scheme == "block128" ? model::WeightFormat::fp8_block128 : model::WeightFormat::fp8_static;
  if (args.scheme != "block128" && args.calibration_file.empty()) {
    return invalid_argument(
        "--calibration is needed with --scheme per-tensor: static scales of activations come from a text "
        "that is like "
        "what the model will read");
  }
  VIVACE_TRY(model::check_quantize_paths(args.model, args.out));
  VIVACE_TRY_ASSIGN(const auto compute, engine::Compute::create("cpu", args.threads));
  const Stream stream = compute->stream(nullptr);
  Outcome outcome;
  model::Calibration calibration;
  if (!args.calibration_file.empty()) {
    VIVACE_TRY_ASSIGN(calibration, calibration_of(args, stream));
    options.calibration = &calibration;
    outcome.score = calibration.score;
  }
  ProgressLine line;
  options.progress = [&](int64_t done, int64_t total) {
    line.update(static_cast<double>(done) / static_cast<double>(std::max<int64_t>(1, total)),
                fmt::format("{:.1f} of {:.1f} MB", static_cast<double>(done) * 1e-6,
                            static_cast<double>(total) * 1e-6));
  };
  auto result = model::quantize_folder(args.model, args.out, options, stream);
  line.finish();
  VIVACE_TRY_ASSIGN(outcome.result, std::move(result));
  return outcome;
}

void print_table(const QuantizeArgs& args, const Outcome& outcome) {
  const model::QuantizeResult& r = outcome.result;
  const auto megabytes = [](int64_t bytes) { return static_cast<double>(bytes) * 1e-6; };
  std::string text =
      fmt::format("{:<16}{:>10}{:>14}{:>14}{:>18}\n", "", "matrices", "MB before", "MB after", "rms error");
  for (const model::QuantizedGroup& group : r.groups) {
    text += fmt::format("{:<16}{:>10}{:>14.2f}{:>14.2f}{:>17.2f}%\n", group.name, group.matrices,
                        megabytes(group.bytes_before), megabytes(group.bytes_after),
                        100 * group.relative_error());
  }
  text += fmt::format("{:<16}{:>10}{:>14.2f}{:>14.2f}\n", "kept", r.kept_tensors, megabytes(r.kept_bytes),
                      megabytes(r.kept_bytes));
  if (outcome.score.tokens > 0) {
    text += fmt::format("calibration: {} predictions, perplexity {:.4f}\n", outcome.score.tokens,
                        outcome.score.perplexity);
  }
  if (r.unvisited_experts > 0) {
    text += fmt::format(
        "{} expert{} had no token in the calibration text; they take the largest range of their layer\n",
        r.unvisited_experts, r.unvisited_experts == 1 ? "" : "s");
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
                      {"rms_relative_error", group.relative_error()}});
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
  if (!outcome.ok()) return fail(outcome.status());
  if (args.json) {
    print_document(args, *outcome);
  } else {
    print_table(args, *outcome);
  }
  return 0;
}

}  // namespace vivace::cli
