#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/vivace/commands.h"
#include "apps/vivace/explain.h"
#include "apps/vivace/machine.h"
#include "apps/vivace/model_files.h"
#include "apps/vivace/output.h"
#include "src/bench/engine_target.h"
#include "src/bench/report.h"
#include "src/bench/workload.h"
#include "src/core/error.h"

namespace vivace::cli {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Status make_plan(const BenchServeArgs& args, const ModelFiles& files, const Engine& engine,
                 std::vector<bench::PlannedRequest>& plan) {
  bench::WorkloadOptions options;
  VIVACE_TRY_ASSIGN(options.workload, bench::workload_from_name(args.workload));
  options.requests = args.requests;
  options.rate = args.rate;
  options.seed = args.seed;
  options.max_model_len = engine.max_model_len();
  options.vocab = engine.vocab();
  if (files.tokenizer != nullptr) {
    VIVACE_TRY_ASSIGN(options.text_ids,
                      files.tokenizer->encode(bench::prompt_text(), model::SpecialTokens::as_text));
  }
  VIVACE_TRY_ASSIGN(plan, bench::plan_workload(options));
  return {};
}

/// Touches the weights once, so that the first timed request does not pay for reading the file.
Status warm_up(bench::Target& target, const std::vector<bench::PlannedRequest>& plan) {
  bench::PlannedRequest request;
  // Backwards: no request of the plan may find its first page in the prefix cache.
  const std::vector<int32_t>& ids = plan.front().prompt_ids;
  request.prompt_ids.assign(ids.rbegin(),
                            ids.rbegin() + std::min<int64_t>(16, static_cast<int64_t>(ids.size())));
  request.output_tokens = 1;
  const bench::LoadResult result = bench::run_load(target, {request}, {});
  const std::string& error = result.requests.front().error;
  return error.empty() ? Status()
                       : Status(Code::internal, "the request before the timed run failed: " + error);
}

/// `text` with each run of white space as one space, across pieces; `begin` starts a new text.
std::string one_line(std::string_view text, bool begin) {
  static bool after_space = true;  // watched pieces come from one thread
  if (begin) after_space = true;
  std::string out;
  for (const char c : text) {
    const bool space = c == ' ' || (c >= '\t' && c <= '\r');
    if (!space) out += c;
    if (space && !after_space) out += ' ';
    after_space = space;
  }
  return out;
}

bench::LoadOptions load_options(const BenchServeArgs& args, ProgressLine& line) {
  bench::LoadOptions options;
  options.concurrency = args.concurrency;
  options.open_loop = args.rate > 0;
  options.temperature = args.temperature;
  if (args.watch) {
    // The text is the progress; both on one terminal would tear each other apart.
    options.watch = [](const std::string& text, bool begin) {
      // Runs of white space as one space: the text of small models is full of empty lines.
      if (begin) std::fputs("\n\n> ", stderr);
      std::fputs(one_line(text, begin).c_str(), stderr);
      std::fflush(stderr);
    };
    return options;
  }
  options.progress = [&line](const bench::LoadProgress& p) {
    const double speed = p.elapsed_s > 0 ? static_cast<double>(p.tokens) / p.elapsed_s : 0;
    line.update(static_cast<double>(p.finished) / static_cast<double>(p.requests),
                fmt::format("{} of {} request{} done, {} running, {} tokens, {:.1f} tok/s, {:.0f} s{}",
                            p.finished, p.requests, p.requests == 1 ? "" : "s", p.running, p.tokens, speed,
                            p.elapsed_s, p.failed > 0 ? fmt::format(", {} FAILED", p.failed) : ""));
  };
  return options;
}

Status write_results(const BenchServeArgs& args, const bench::Report& report) {
  if (args.json_file == "-") {
    print_json(bench::to_json(report));
  } else {
    write_out(bench::to_text(report));
    if (!args.json_file.empty()) {
      VIVACE_TRY(write_file(args.json_file, json_text(bench::to_json(report))).at("--json"));
      note("results: " + args.json_file);
    }
  }
  if (!args.report_file.empty()) {
    VIVACE_TRY(write_file(args.report_file, bench::to_html(report)).at("--report"));
    note("report: " + args.report_file);
  }
  return {};
}

/// What cannot be written is said before the run, not after it.
Status check_outputs(const BenchServeArgs& args) {
  if (!args.json_file.empty() && args.json_file != "-")
    VIVACE_TRY(check_writable(args.json_file).at("--json"));
  if (!args.report_file.empty()) VIVACE_TRY(check_writable(args.report_file).at("--report"));
  return {};
}

Status run_bench(const BenchServeArgs& args, int64_t& failures) {
  VIVACE_TRY(check_outputs(args));
  const auto start = Clock::now();
  bench::Report report;
  VIVACE_TRY_ASSIGN(ModelFiles files, open_model_files(args.engine.model));
  report.model_summary = files.checkpoint->summary();
  report.mapped_bytes = files.checkpoint->mapped_bytes();
  EngineOptions engine_options = args.engine;
  engine_options.log = note;
  engine_options.count_experts = true;
  VIVACE_TRY_ASSIGN(std::unique_ptr<Engine> engine, Engine::create(engine_options));
  std::vector<bench::PlannedRequest> plan;
  VIVACE_TRY(make_plan(args, files, *engine, plan));
  if (const auto cut = std::ranges::count(plan, true, &bench::PlannedRequest::cut); cut > 0) {
    note(
        fmt::format("{} of {} request{} cut short: drawn longer than the {} tokens of --max-model-len, or "
                    "the model's context",
                    cut, args.requests, args.requests == 1 ? "" : "s", engine->max_model_len()));
  }
  bench::EngineTarget target(*engine);
  VIVACE_TRY(warm_up(target, plan));
  report.load_s = seconds_since(start);
  note(fmt::format("{}: ready after {:.1f} s; {} workload, {} request{}, seed {}, {}", args.engine.model,
                   report.load_s, args.workload, args.requests, args.requests == 1 ? "" : "s", args.seed,
                   args.rate > 0 ? fmt::format("{} per second", args.rate)
                                 : fmt::format("{} open at once", args.concurrency)));

  const std::vector<RowCount> before = engine->dispatch().counts();
  ProgressLine line;
  report.load = bench::run_load(target, plan, load_options(args, line));
  line.finish();
  if (args.watch) note("\n");
  report.peak_memory_bytes = peak_memory_bytes();
  engine->drain();  // the last event comes before its request is counted
  report.engine = engine->stats();
  report.experts = files.checkpoint->config().experts;
  report.metrics = bench::measure(report.load);
  report.rows = rows_since(engine->dispatch(), before);
  EngineOptions options = engine->options();
  options.max_model_len = engine->max_model_len();
  engine.reset();

  const int64_t batch =
      std::max<int64_t>(1, std::min(args.rate > 0 ? 1 : args.concurrency, options.max_batch));
  const Result<std::vector<model::OpUse>> explained = explain_model(options, {1, batch});
  if (!explained.ok()) note("no reasons for the choice of rows: " + explained.status().message());
  VIVACE_TRY(
      add_reasons(report.rows, explained.ok() ? *explained : std::vector<model::OpUse>{}, options.prefer));

  const Machine machine = this_machine();
  report.model = args.engine.model;
  report.command = args.command;
  report.version = VIVACE_VERSION;
  report.when = now_utc();
  report.machine = describe(machine);
  report.threads = options.threads > 0 ? options.threads : machine.cores;
  report.workload = args.workload;
  report.seed = args.seed;
  report.concurrency = args.rate > 0 ? 0 : args.concurrency;
  report.rate = args.rate;
  report.settings = settings_of(options);
  failures = report.metrics.failures;
  return write_results(args, report);
}

}  // namespace

int run(const BenchServeArgs& args) {
  say_when_interrupted();
  int64_t failures = 0;
  const Status status = run_bench(args, failures);
  if (!status.ok()) return fail(status);
  return failures == 0 ? 0 : kFailure;
}

}  // namespace vivace::cli
