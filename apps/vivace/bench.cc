#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "apps/vivace/bench_side.h"
#include "apps/vivace/commands.h"
#include "apps/vivace/machine.h"
#include "apps/vivace/output.h"
#include "src/bench/compare.h"
#include "src/core/error.h"

namespace vivace::cli {

namespace {

using Sides = std::vector<std::unique_ptr<BenchSide>>;
using Json = nlohmann::ordered_json;

/// Prompts of a workload that every side can take. Token ids where all count in the same ones, else text.
Result<bench::WorkloadOptions> workload_options(const BenchServeArgs& args, Sides& sides) {
  bench::WorkloadOptions options;
  VIVACE_TRY_ASSIGN(options.workload, bench::workload_from_name(args.workload));
  options.requests = args.requests.value_or(64);
  options.rate = args.rate;
  for (const auto& side : sides) {
    const int64_t limit = side->max_model_len();
    if (limit > 0 && (options.max_model_len == 0 || limit < options.max_model_len))
      options.max_model_len = limit;
  }
  const int64_t own = args.engine.max_model_len;
  if (own > 0 && (options.max_model_len == 0 || own < options.max_model_len)) options.max_model_len = own;
  if (options.max_model_len == 0) {
    options.max_model_len = 4096;
    note(
        "the server does not say how long its context is: 4096 tokens are assumed; --max-model-len says "
        "otherwise");
  }
  if (args.vocab > 0) {
    options.vocab = args.vocab;
    return options;
  }
  const std::string& model = sides.front()->options().model;
  const bool same = std::ranges::all_of(
      sides, [&](const auto& side) { return !model.empty() && side->options().model == model; });
  if (!args.chat && same) {
    options.vocab = sides.front()->vocab();
    if (const auto& tokenizer = sides.front()->files().tokenizer; tokenizer != nullptr) {
      VIVACE_TRY_ASSIGN(options.text_ids,
                        tokenizer->encode(bench::prompt_text(), model::SpecialTokens::as_text));
      return options;
    }
    if (options.vocab > 0) return options;
  }
  options.chat = args.chat;
  for (const auto& side : sides) {
    VIVACE_TRY_ASSIGN(const BenchSide::TextLength length, side->text_length(args.chat));
    const bool first = options.bytes_per_token <= 0;
    options.bytes_per_token =
        first ? length.bytes_per_token : std::min(options.bytes_per_token, length.bytes_per_token);
    options.template_tokens = std::max(options.template_tokens, length.template_tokens);
  }
  // Tokens of a piece of text are a few more or less than its bytes say.
  options.template_tokens += options.max_model_len / 16;
  return options;
}

/// A plan per round; a server's prefix cache must not know a round from the one before.
Result<std::vector<std::vector<bench::PlannedRequest>>> make_plans(const BenchServeArgs& args, Sides& sides) {
  std::vector<std::vector<bench::PlannedRequest>> plans;
  bench::WorkloadOptions workload;
  if (args.dataset.empty()) {
    VIVACE_TRY_ASSIGN(workload, workload_options(args, sides));
  }
  const int64_t rounds = args.other ? args.rounds : 1;
  for (int64_t round = 0; round < rounds; ++round) {
    const uint64_t seed = args.seed + static_cast<uint64_t>(round);
    std::vector<bench::PlannedRequest> plan;
    if (args.dataset.empty()) {
      workload.seed = seed;
      VIVACE_TRY_ASSIGN(plan, bench::plan_workload(workload));
    } else {
      bench::DatasetOptions dataset{args.dataset, args.max_tokens, args.requests.value_or(0)};
      dataset.first = round * args.requests.value_or(0);
      dataset.rate = args.rate;
      dataset.seed = seed;
      dataset.chat = args.chat;
      Result<std::vector<bench::PlannedRequest>> read = bench::plan_dataset(dataset);
      if (!read.ok()) return read.status().at("--dataset");
      plan = std::move(read).value();
    }
    plans.push_back(std::move(plan));
  }
  if (const auto cut = std::ranges::count(plans.front(), true, &bench::PlannedRequest::cut); cut > 0) {
    note(
        fmt::format("{} of {} request{} cut short: drawn longer than the {} tokens of --max-model-len, or "
                    "the model's context",
                    cut, plans.front().size(), plans.front().size() == 1 ? "" : "s", workload.max_model_len));
  }
  return plans;
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

bench::LoadOptions load_options(const BenchServeArgs& args, const std::string& label, ProgressLine& line) {
  bench::LoadOptions options;
  options.concurrency = args.concurrency;
  options.open_loop = args.rate > 0;
  options.temperature = args.temperature;
  options.ignore_eos = !args.stop_at_eos;
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
  options.progress = [&line, label](const bench::LoadProgress& p) {
    const double speed = p.elapsed_s > 0 ? static_cast<double>(p.tokens) / p.elapsed_s : 0;
    line.update(static_cast<double>(p.finished) / static_cast<double>(p.requests),
                fmt::format("{}{} of {} request{} done, {} running, {} tokens, {:.1f} tok/s, {:.0f} s{}",
                            label, p.finished, p.requests, p.requests == 1 ? "" : "s", p.running, p.tokens,
                            speed, p.elapsed_s, p.failed > 0 ? fmt::format(", {} FAILED", p.failed) : ""));
  };
  return options;
}

/// What cannot be written is said before the run, not after it.
Status check_outputs(const BenchServeArgs& args) {
  if (!args.json_file.empty() && args.json_file != "-")
    VIVACE_TRY(check_writable(args.json_file).at("--json"));
  if (!args.report_file.empty()) VIVACE_TRY(check_writable(args.report_file).at("--report"));
  return {};
}

/// Text and JSON to where they belong, and the page.
Status write_results(const BenchServeArgs& args, const std::string& text, const Json& json,
                     const std::string& html) {
  if (args.json_file == "-") {
    print_json(json);
  } else {
    write_out(text);
    if (!args.json_file.empty()) {
      VIVACE_TRY(write_file(args.json_file, json_text(json)).at("--json"));
      note("results: " + args.json_file);
    }
  }
  if (!args.report_file.empty()) {
    VIVACE_TRY(write_file(args.report_file, html).at("--report"));
    note("report: " + args.report_file);
  }
  return {};
}

Result<Json> read_results(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  const bool empty = file.peek() == std::ifstream::traits_type::eof() && !file.bad();
  if (!file.is_open() || (!empty && !(text << file.rdbuf()))) return io_error("{}: cannot be read", path);
  Json json = Json::parse(text.str(), nullptr, false);
  if (json.is_discarded()) return invalid_argument("{}: is not JSON", path);
  return json;
}

Status compare_files(const BenchServeArgs& args) {
  const std::string &a = args.compare_files[0], &b = args.compare_files[1];
  Result<Json> left = read_results(a), right = read_results(b);
  if (!left.ok()) return left.status().at("--compare");
  if (!right.ok()) return right.status().at("--compare");
  const Result<bench::Comparison> comparison = bench::compare(*left, a, *right, b);
  if (!comparison.ok()) return comparison.status().at("--compare");
  return write_results(args, bench::to_text(*comparison), bench::to_json(*comparison),
                       bench::to_html(*comparison));
}

/// Each side takes its turn at each plan; who is first alternates too.
void run_rounds(const BenchServeArgs& args, Sides& sides,
                const std::vector<std::vector<bench::PlannedRequest>>& plans) {
  for (size_t round = 0; round < plans.size(); ++round) {
    for (size_t turn = 0; turn < sides.size(); ++turn) {
      const size_t index = (turn + round) % sides.size();
      const std::string label = sides.size() == 1 ? ""
                                                  : fmt::format("round {} of {}, {}: ", round + 1,
                                                                plans.size(), index == 0 ? "A" : "B");
      ProgressLine line;
      sides[index]->add(
          bench::run_load(sides[index]->target(), plans[round], load_options(args, label, line)));
      line.finish();
      if (args.watch) note("\n");
    }
  }
}

/// Failures are said even where the results go to a file.
void note_failures(const bench::Report& report) {
  const auto first = std::ranges::find_if(report.load.requests,
                                          [](const bench::RequestRecord& r) { return !r.error.empty(); });
  if (first == report.load.requests.end()) return;
  note(fmt::format("{}: {} of {} requests failed, the first: {}",
                   report.url.empty() ? report.model : report.url, report.metrics.failures,
                   report.metrics.requests, visible(first->error)));
}

std::string side_name(const BenchServeArgs& args, const BenchSide& side, size_t index) {
  const bool flags = index == 1 && args.other && !args.other->text.empty() && side.url().empty();
  return flags ? side.name() + " " + args.other->text : side.name();
}

Status run_bench(const BenchServeArgs& args, int64_t& failures) {
  VIVACE_TRY(check_outputs(args));
  if (!args.compare_files.empty()) return compare_files(args);
  Sides sides(args.other ? 2 : 1);
  const std::string first_url = args.urls.empty() ? "" : args.urls.front();
  VIVACE_TRY_ASSIGN(sides[0], BenchSide::open(args, args.engine, first_url));
  if (args.other) {
    VIVACE_TRY_ASSIGN(sides[1], BenchSide::open(args, args.other->engine, args.other->url));
  }
  VIVACE_TRY_ASSIGN(const auto plans, make_plans(args, sides));
  for (const auto& side : sides) {
    VIVACE_TRY(side->warm_up(plans.front().front()));
    const size_t count = plans.front().size();
    note(fmt::format("{}: ready after {:.1f} s; {}, {} request{}, seed {}, {}", side->name(), side->load_s(),
                     args.dataset.empty() ? args.workload + " workload" : args.dataset, count,
                     count == 1 ? "" : "s", args.seed,
                     args.rate > 0 ? fmt::format("{} per second", args.rate)
                                   : fmt::format("{} open at once", args.concurrency)));
  }
  for (const auto& side : sides) side->begin();
  run_rounds(args, sides, plans);

  std::string fingerprint;
  for (const auto& plan : plans) fingerprint += (fingerprint.empty() ? "" : "+") + bench::fingerprint(plan);
  std::vector<bench::Report> reports;
  std::vector<std::string> names;
  for (size_t i = 0; i < sides.size(); ++i) {
    names.push_back(side_name(args, *sides[i], i));
    VIVACE_TRY_ASSIGN(bench::Report report, sides[i]->finish(args));
    report.plan = fingerprint;
    report.rounds = static_cast<int64_t>(plans.size());
    failures += report.metrics.failures;
    note_failures(report);
    reports.push_back(std::move(report));
  }
  if (reports.size() == 1) {
    const bench::Report& report = reports.front();
    return write_results(args, bench::to_text(report), bench::to_json(report), bench::to_html(report));
  }
  const Json a = bench::to_json(reports[0]), b = bench::to_json(reports[1]);
  VIVACE_TRY_ASSIGN(const bench::Comparison comparison, bench::compare(a, names[0], b, names[1]));
  const std::string text = fmt::format("A  {}\n\n{}\nB  {}\n\n{}\n{}", names[0], bench::to_text(reports[0]),
                                       names[1], bench::to_text(reports[1]), bench::to_text(comparison));
  const Json json = {{"comparison", bench::to_json(comparison)}, {"a", a}, {"b", b}};
  return write_results(args, text, json, bench::to_html(comparison));
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
