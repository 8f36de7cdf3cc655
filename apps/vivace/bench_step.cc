#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/vivace/commands.h"
#include "apps/vivace/explain.h"
#include "apps/vivace/machine.h"
#include "apps/vivace/output.h"
#include "src/bench/step.h"
#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/engine/compute.h"

namespace vivace::cli {

namespace {

/// The engine's options for steps of these batches, and no more memory than they need.
EngineOptions options_of(const BenchStepArgs& args) {
  EngineOptions options = args.engine;
  options.max_model_len = args.context;
  options.max_batch = *std::ranges::max_element(args.batches);
  options.token_budget = options.max_batch;
  options.log = note;
  return options;
}

Status check(const BenchStepArgs& args, const model::ModelConfig& config) {
  if (args.context > config.max_position) {
    return invalid_argument("--context is {}, needs at most {}, the model's context", args.context,
                            config.max_position);
  }
  return args.json_file.empty() || args.json_file == "-" ? Status()
                                                         : check_writable(args.json_file).at("--json");
}

Status run_bench(const BenchStepArgs& args) {
  VIVACE_TRY_ASSIGN(std::unique_ptr<model::Checkpoint> opened, model::Checkpoint::open(args.engine.model));
  const std::shared_ptr<const model::Checkpoint> checkpoint = std::move(opened);
  const model::ModelConfig& config = checkpoint->config();
  VIVACE_TRY(check(args, config));
  const EngineOptions options = options_of(args);
  bench::StepReport report{.model = args.engine.model,
                           .model_summary = checkpoint->summary(),
                           .command = args.command,
                           .version = VIVACE_VERSION,
                           .when = now_utc(),
                           .device = {},
                           .settings = settings_of(options),
                           .options = {.batches = args.batches,
                                       .context = args.context,
                                       .steps = args.steps,
                                       .read_rate = 0,
                                       .seed = args.seed,
                                       .operators = args.operators},
                           .layers = config.layers,
                           .sparse_layers = config.sparse_layers(),
                           .experts = config.experts,
                           .top_k = config.top_k,
                           .points = {},
                           .rows = {}};
  {  // its memory is free again before the model comes
    VIVACE_TRY_ASSIGN(const auto compute, engine::Compute::create(options.device, options.threads));
    VIVACE_TRY_ASSIGN(report.options.read_rate, bench::read_rate(compute->stream(nullptr)));
    VIVACE_TRY_ASSIGN(report.device, describe(compute->stream(nullptr)));
  }
  note(fmt::format("{}: loading", args.engine.model));
  const int64_t pages = bench::pages_for_steps(report.options, options.page_tokens);
  auto made = engine::make_model_runner(checkpoint, options, pages);
  if (made.status().code() == Code::out_of_memory) {
    return made.status().at(fmt::format("--batch {} with --context {}", options.max_batch, args.context));
  }
  VIVACE_TRY_ASSIGN(const auto runner, std::move(made));
  note(fmt::format("filling {} pages with {:.2f} GB of keys and values", pages,
                   static_cast<double>(pages * runner->model().page_bytes()) * 1e-9));
  ProgressLine line;
  double done = 0;
  VIVACE_TRY_ASSIGN(report.points, bench::time_steps(*runner, report.options, [&](int64_t batch) {
                      line.update(done++ / static_cast<double>(args.batches.size()),
                                  fmt::format("batch {}", batch));
                    }));
  line.finish();
  report.rows = bench::rows_since(row_calls(runner->dispatch()), {});
  VIVACE_TRY(add_reasons(report.rows, explain_decodes(runner->model(), args.batches, runner->stream()),
                         options.prefer));
  if (args.json_file == "-") {
    print_json(bench::to_json(report));
    return {};
  }
  write_out(bench::to_text(report));
  if (args.json_file.empty()) return {};
  VIVACE_TRY(write_file(args.json_file, json_text(bench::to_json(report))).at("--json"));
  note("results: " + args.json_file);
  return {};
}

}  // namespace

int run(const BenchStepArgs& args) {
  say_when_interrupted();
  const Status status = guarded("bench step", [&] { return run_bench(args); });
  return status.ok() ? 0 : fail(status);
}

}  // namespace vivace::cli
