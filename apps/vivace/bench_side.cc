#include "apps/vivace/bench_side.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>

#include "apps/vivace/explain.h"
#include "apps/vivace/machine.h"
#include "apps/vivace/output.h"
#include "src/bench/engine_target.h"
#include "src/core/error.h"

namespace vivace::cli {

namespace {

using Clock = std::chrono::steady_clock;

/// A text that prompts of a plan do not begin with.
constexpr std::string_view kOwnText =
    "Nine grey herons waited by the lock at Penwick while a barge with timber, rope and two goats came "
    "slowly through the upper gate. ";

Result<std::string> api_key(const BenchServeArgs& args) {
  std::string key;
  if (!args.api_key_file.empty()) {
    std::ifstream file(args.api_key_file);
    if (!file) return io_error("--api-key-file: {}: cannot be read", args.api_key_file);
    std::getline(file, key);
    while (!key.empty() && (key.back() == '\r' || key.back() == ' ')) key.pop_back();
    if (key.empty())
      return invalid_argument("--api-key-file: {}: its first line is empty", args.api_key_file);
  } else if (!args.api_key_variable.empty()) {
    const char* value = std::getenv(args.api_key_variable.c_str());
    if (value == nullptr || *value == '\0')
      return invalid_argument("--api-key-env is '{}': no such variable, or it is empty",
                              args.api_key_variable);
    key = value;
  }
  if (std::ranges::any_of(key, [](char c) { return static_cast<unsigned char>(c) < 0x21 || c == 0x7f; }))
    return invalid_argument("the API key has a space or a control character in it");
  return key;
}

/// The outcome of one request that is not part of the run.
Result<bench::RequestRecord> send_one(bench::Target& target, bench::PlannedRequest request) {
  request.output_tokens = 1;
  bench::LoadResult result = bench::run_load(target, {std::move(request)}, {});
  bench::RequestRecord& record = result.requests.front();
  if (!record.error.empty())
    return Status(Code::internal, "the request before the timed run failed: " + record.error);
  return std::move(record);
}

}  // namespace

Result<std::unique_ptr<BenchSide>> BenchSide::open(const BenchServeArgs& args, const EngineOptions& engine,
                                                   const std::string& url) {
  const auto start = Clock::now();
  std::unique_ptr<BenchSide> side(new BenchSide);
  side->url_ = url;
  side->options_ = engine;
  if (!engine.model.empty()) {
    VIVACE_TRY_ASSIGN(side->files_, open_model_files(engine.model));
  }
  if (!url.empty()) {
    bench::HttpTargetOptions options{url, args.served_model_name};
    options.connect_timeout_s = args.connect_timeout_s;
    options.read_timeout_s = args.read_timeout_s;
    VIVACE_TRY_ASSIGN(options.api_key, api_key(args));
    VIVACE_TRY_ASSIGN(std::unique_ptr<bench::HttpTarget> target, bench::HttpTarget::create(options));
    side->server_ = target.get();
    side->target_ = std::move(target);
    side->load_s_ = std::chrono::duration<double>(Clock::now() - start).count();
    return side;
  }
  EngineOptions options = engine;
  options.log = note;
  options.count_experts = true;
  VIVACE_TRY_ASSIGN(side->engine_, Engine::create(options));
  if (side->files_.tokenizer != nullptr) {
    VIVACE_TRY_ASSIGN(side->target_, bench::EngineTarget::create(*side->engine_, *side->files_.tokenizer,
                                                                 side->files_.checkpoint->tokenizer()));
  } else {
    side->target_ = std::make_unique<bench::EngineTarget>(*side->engine_);
  }
  side->load_s_ = std::chrono::duration<double>(Clock::now() - start).count();
  return side;
}

int64_t BenchSide::max_model_len() const {
  return engine_ != nullptr ? engine_->max_model_len() : server_->model().max_model_len;
}

Result<BenchSide::TextLength> BenchSide::text_length(bool chat) {
  if (server_ == nullptr && !chat) {
    VIVACE_TRY(need_tokenizer(files_, options_.model, "the other side needs prompts of text"));
    VIVACE_TRY_ASSIGN(const std::vector<int32_t> ids,
                      files_.tokenizer->encode(bench::prompt_text(), model::SpecialTokens::as_text));
    return TextLength{static_cast<double>(bench::prompt_text().size()) / static_cast<double>(ids.size()), 1};
  }
  // Two lengths: what both have beside their text cancels out.
  double tokens[2], bytes[2];
  for (int i = 0; i < 2; ++i) {
    std::string text(kOwnText);
    if (i == 1) text += text + text;
    bytes[i] = static_cast<double>(text.size());
    bench::PlannedRequest request;
    request.prompt.text = text;
    if (chat) request.prompt = bench::user_message(text);
    VIVACE_TRY_ASSIGN(const bench::RequestRecord record, send_one(*target_, std::move(request)));
    tokens[i] = static_cast<double>(record.prompt_tokens);
  }
  if (tokens[1] <= tokens[0]) {
    constexpr double kUsualBytes = 4;
    note(fmt::format("{}: no usage in its answers: prompts are cut as if a token had {:g} bytes", name(),
                     kUsualBytes));
    return TextLength{kUsualBytes, 32};
  }
  const double per_token = (bytes[1] - bytes[0]) / (tokens[1] - tokens[0]);
  const double rest = tokens[0] - bytes[0] / per_token;
  return TextLength{per_token, static_cast<int64_t>(std::max(0.0, std::ceil(rest)))};
}

Status BenchSide::warm_up(const bench::PlannedRequest& first) {
  bench::PlannedRequest request;
  // Backwards: no request of the plan may find its first page in the prefix cache.
  const std::vector<int32_t>& ids = first.prompt.ids;
  if (!ids.empty()) {
    request.prompt.ids.assign(ids.rbegin(),
                              ids.rbegin() + std::min<int64_t>(16, static_cast<int64_t>(ids.size())));
  } else if (!first.prompt.messages.empty()) {
    request.prompt = bench::user_message(std::string(kOwnText));
  } else {
    request.prompt.text = kOwnText;
  }
  return send_one(*target_, std::move(request)).status();
}

std::vector<bench::RowUse> BenchSide::rows_so_far() {
  if (engine_ != nullptr) return row_calls(engine_->dispatch());
  const Result<std::string> metrics = server_->get("/metrics");
  return metrics.ok() ? bench::rows_of_metrics(*metrics) : std::vector<bench::RowUse>{};
}

void BenchSide::begin() {
  rows_before_ = rows_so_far();
}

Status BenchSide::add_engine_facts(const BenchServeArgs& args, bench::Report& report) {
  report.peak_memory_bytes = peak_memory_bytes();
  engine_->drain();  // the last event comes before its request is counted
  report.engine = engine_->stats();
  report.experts = files_.checkpoint->config().experts;
  EngineOptions options = engine_->options();
  options.max_model_len = engine_->max_model_len();
  engine_.reset();
  const int64_t batch =
      std::max<int64_t>(1, std::min(args.rate > 0 ? 1 : args.concurrency, options.max_batch));
  const Result<std::vector<model::OpUse>> explained = explain_model(options, {1, batch});
  if (!explained.ok()) note("no reasons for the choice of rows: " + explained.status().message());
  VIVACE_TRY(
      add_reasons(report.rows, explained.ok() ? *explained : std::vector<model::OpUse>{}, options.prefer));
  report.mapped_bytes = files_.checkpoint->mapped_bytes();
  report.model_summary = files_.checkpoint->summary();
  report.experts = files_.checkpoint->config().experts;
  report.threads = options.threads > 0 ? options.threads : this_machine().cores;
  report.settings = settings_of(options);
  return {};
}

Result<bench::Report> BenchSide::finish(const BenchServeArgs& args) {
  bench::Report report;
  report.url = url_;
  report.model = server_ != nullptr ? server_->model().id : options_.model;
  report.load = std::move(load_);
  report.slo = args.slo;
  report.metrics = bench::measure(report.load, args.slo);
  report.rows = bench::rows_since(rows_so_far(), rows_before_);
  if (engine_ != nullptr) VIVACE_TRY(add_engine_facts(args, report));
  if (server_ != nullptr && server_->reconnects() > 0) {
    report.settings.push_back(
        {"kept connections that the server closed", fmt::format("{}", server_->reconnects())});
  }
  report.command = args.command;
  report.version = VIVACE_VERSION;
  report.when = now_utc();
  report.machine = describe(this_machine());
  report.workload = args.dataset.empty() ? args.workload : args.dataset;
  report.seed = args.seed;
  report.temperature = args.temperature;
  report.concurrency = args.rate > 0 ? 0 : args.concurrency;
  report.rate = args.rate;
  report.load_s = load_s_;
  return report;
}

}  // namespace vivace::cli
