#include <cmath>
#include <nlohmann/json.hpp>

#include "src/bench/report.h"

namespace vivace::bench {

namespace {

using Json = nlohmann::ordered_json;

Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json percentiles(const Distribution& d) {
  return {{"median", number(d.median)}, {"p90", number(d.p90)}, {"p99", number(d.p99)},
          {"p999", number(d.p999)},     {"max", number(d.max)}, {"mean", number(d.mean)}};
}

}  // namespace

Json to_json(const Report& report) {
  const Metrics& m = report.metrics;
  Json rows = Json::array(), batches = Json::array(), timeline = Json::array(), requests = Json::array();
  Json settings = Json::object(), kinds = Json::object();
  for (const RowUse& use : report.rows) {
    Json refused = Json::array();
    for (const Refusal& r : use.refused) refused.push_back({{"row", r.row}, {"reason", r.reason}});
    rows.push_back({{"op", use.op},
                    {"row", use.row},
                    {"calls", use.calls},
                    {"refused", use.explained ? refused : Json(nullptr)}});
  }
  for (const BatchPoint& p : m.by_batch) {
    batches.push_back({{"batch", p.batch},
                       {"gaps", p.gaps},
                       {"median_ms", number(p.median_ms)},
                       {"p10_ms", number(p.p10_ms)},
                       {"p90_ms", number(p.p90_ms)}});
  }
  for (const TimelineBin& bin : m.timeline) {
    timeline.push_back({{"start_s", bin.start_s},
                        {"open", bin.open},
                        {"generating", bin.generating},
                        {"tokens_per_s", bin.tokens_per_s},
                        {"itl_median_ms", number(bin.itl_median_ms)},
                        {"itl_p90_ms", number(bin.itl_p90_ms)}});
  }
  for (const auto& [kind, count] : m.failures_by_kind) kinds[kind] = count;
  for (const RequestRecord& r : report.load.requests) {
    const bool tpot = r.completion_tokens > 1 && !r.chunk_s.empty();
    Json one = {{"prompt_tokens", r.prompt_tokens},
                {"completion_tokens", r.completion_tokens},
                {"start_s", r.start_s},
                {"ttft_ms", r.chunk_s.empty() ? Json(nullptr) : Json((r.chunk_s.front() - r.start_s) * 1000)},
                {"tpot_ms", tpot ? Json((r.chunk_s.back() - r.chunk_s.front()) * 1000 /
                                        static_cast<double>(r.completion_tokens - 1))
                                 : Json(nullptr)},
                {"end_s", r.end_s},
                {"round", r.round},
                {"text", r.text}};
    if (!r.error.empty()) one["error"] = r.error;
    if (!r.error.empty()) one["error_kind"] = r.error_kind;
    requests.push_back(std::move(one));
  }
  for (const auto& [name, value] : report.settings) settings[name] = value;
  const bool local = report.url.empty();
  Json engine = {{"steps", report.engine.steps},
                 {"preemptions", report.engine.preemptions},
                 {"pages_total", report.engine.pages_total},
                 {"touched_experts", number(report.touched_experts())}};
  return {
      {"requests", m.requests},
      {"failures", m.failures},
      {"failures_by_kind", kinds},
      {"duration_s", m.duration_s},
      {"throughput_tok_s", m.throughput_tok_s},
      {"peak_memory_bytes", local ? Json(report.peak_memory_bytes) : Json(nullptr)},
      {"ttft_ms", percentiles(m.ttft_ms)},
      {"tpot_ms", percentiles(m.tpot_ms)},
      {"itl_ms", percentiles(m.itl_ms)},
      {"rows", rows},
      {"e2e_ms", percentiles(m.e2e_ms)},
      {"prompt_tokens", m.prompt_tokens},
      {"output_tokens", m.output_tokens},
      {"cached_tokens", m.cached_tokens},
      {"total_tok_s", m.total_tok_s},
      {"requests_per_s", m.request_s},
      {"mean_concurrency", m.mean_concurrency},
      {"slo", report.slo.given() ? Json(report.slo.text()) : Json(nullptr)},
      {"good", report.slo.given() ? Json(m.good) : Json(nullptr)},
      {"goodput_per_s", report.slo.given() ? Json(m.goodput_s) : Json(nullptr)},
      {"short_outputs", m.short_outputs},
      {"usage_missing", m.usage_missing},
      {"itl_by_batch", batches},
      {"timeline", timeline},
      {"engine", local ? engine : Json(nullptr)},
      {"url", local ? Json(nullptr) : Json(report.url)},
      {"model", report.model},
      {"model_summary", report.model_summary},
      {"experts", local ? Json(report.experts) : Json(nullptr)},
      {"mapped_bytes", report.mapped_bytes},
      {"workload", report.workload},
      {"seed", report.seed},
      {"temperature", report.temperature},
      {"rounds", report.rounds},
      {"plan", report.plan},
      {"concurrency", report.concurrency > 0 ? Json(report.concurrency) : Json(nullptr)},
      {"rate", report.rate > 0 ? Json(report.rate) : Json(nullptr)},
      {"threads", local ? Json(report.threads) : Json(nullptr)},
      {"load_s", report.load_s},
      {"settings", settings},
      {"machine", report.machine},
      {"command", report.command},
      {"version", report.version},
      {"when", report.when},
      {"per_request", requests},
  };
}

}  // namespace vivace::bench
