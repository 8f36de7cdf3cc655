#include "src/model/score.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "apps/vivace/commands.h"
#include "apps/vivace/model_files.h"
#include "apps/vivace/output.h"
#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/engine/compute.h"
#include "src/engine/model_runner.h"
#include "src/model/mapped_file.h"
#include "src/model/model.h"
#include "src/model/router_inputs.h"

namespace vivace::cli {

namespace {

Result<int32_t> separator_of(const ScoreArgs& args, const model::ModelConfig& config) {
  if (!args.separator_id && config.eos_ids.empty()) {
    return invalid_argument(
        "--separator-id has no default here: the model names no end token; give the id that ends a document");
  }
  const int32_t id = args.separator_id ? *args.separator_id : config.eos_ids.front();
  if (id >= config.vocab) {
    return invalid_argument("--separator-id is {}, needs an id below the vocabulary of {}", id, config.vocab);
  }
  return id;
}

Status check_router_inputs(const std::string& path, const model::ModelConfig& config) {
  if (path.empty()) return {};
  if (!config.is_moe()) return invalid_argument("--router-inputs is '{}', needs a model with routers", path);
  std::error_code ignored;
  if (std::filesystem::exists(std::filesystem::symlink_status(path, ignored))) {
    return invalid_argument("--router-inputs is '{}', needs a path where nothing is", path);
  }
  return check_writable(path).at("--router-inputs");  // said before the run, not after it
}

void print(const model::ScoreResult& result, bool json) {
  if (json) {
    print_json({{"perplexity", result.perplexity}, {"tokens", result.tokens}});
  } else {
    write_out(fmt::format("perplexity {:.4f} over {} prediction{}\n", result.perplexity, result.tokens,
                          result.tokens == 1 ? "" : "s"));
  }
}

Status run_score(const ScoreArgs& args) {
  const EngineOptions& o = args.engine;
  VIVACE_TRY_ASSIGN(const auto compute, engine::Compute::create(o.device, o.threads));
  VIVACE_TRY_ASSIGN(const ModelFiles files, open_model_files(o.model));
  VIVACE_TRY(need_tokenizer(files, o.model, "score needs one to read the text"));
  VIVACE_TRY_ASSIGN(const int32_t separator, separator_of(args, files.checkpoint->config()));
  VIVACE_TRY(check_router_inputs(args.router_inputs, files.checkpoint->config()));
  auto text_file = model::MappedFile::open(args.text_file);
  if (!text_file.ok()) return text_file.status().at("--text-file");
  const std::span<const uint8_t> bytes = (*text_file)->bytes();

  model::ModelOptions options = engine::model_options_of(o);
  options.max_requests = 1;
  options.device = compute->device().device;
  options.ordinal = compute->device().ordinal;
  VIVACE_TRY_ASSIGN(const auto model, model::Model::load(*files.checkpoint, options));
  int64_t most_ids = 0;
  if (__builtin_mul_overflow(args.window, args.max_windows, &most_ids)) most_ids = 0;
  VIVACE_TRY_ASSIGN(
      const std::vector<int32_t> ids,
      model::score_ids(*files.tokenizer, {reinterpret_cast<const char*>(bytes.data()), bytes.size()},
                       separator, most_ids));
  Dispatch dispatch;
  if (!o.prefer.empty()) VIVACE_TRY(dispatch.prefer(o.prefer));
  const Stream stream = compute->stream(&dispatch);
  ProgressLine line;
  model::ScoreOptions score_options{.window = args.window, .max_windows = args.max_windows};
  score_options.progress = [&](int64_t done, int64_t total) {
    line.update(static_cast<double>(done) / static_cast<double>(total),
                fmt::format("{} of {} windows", done, total));
  };
  model::RouterInputs router_inputs(stream);
  if (!args.router_inputs.empty()) model->observe_calls(router_inputs.observer());
  const auto result = model::score(*model, ids, score_options, stream);
  line.finish();
  VIVACE_TRY(result.status());
  print(*result, args.json);  // whatever becomes of the file
  return args.router_inputs.empty() ? Status()
                                    : router_inputs.write(args.router_inputs).at("--router-inputs");
}

}  // namespace

int run(const ScoreArgs& args) {
  const Status status = guarded("score", [&] { return run_score(args); });
  return status.ok() ? 0 : fail(status);
}

}  // namespace vivace::cli
