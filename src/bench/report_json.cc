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
  return {
      {"median", number(d.median)}, {"p90", number(d.p90)}, {"p99", number(d.p99)}, {"mean", number(d.mean)}};
}

}  // namespace

Json to_json(const Report& report) {
  const Metrics& m = report.metrics;
  Json rows = Json::array(), batches = Json::array(), requests = Json::array(), settings = Json::object();
  for (const RowUse& use : report.rows) {
    Json refused = Json::array();
    for (const Refusal& r : use.refused) refused.push_back({{"row", r.row}, {"reason", r.reason}});
    rows.push_back({{"op", use.op}, {"row", use.row}, {"calls", use.calls}, {"refused", refused}});
  }
  for (const BatchPoint& p : m.by_batch) {
    batches.push_back({{"batch", p.batch},
                       {"gaps", p.gaps},
                       {"median_ms", number(p.median_ms)},
                       {"p10_ms", number(p.p10_ms)},
                       {"p90_ms", number(p.p90_ms)}});
  }
  for (const RequestRecord& r : report.load.requests) {
    Json one = {{"prompt_tokens", r.prompt_tokens},
                {"completion_tokens", r.completion_tokens},
                {"start_s", r.start_s},
                {"ttft_ms", r.chunk_s.empty() ? Json(nullptr) : Json((r.chunk_s.front() - r.start_s) * 1000)},
                {"end_s", r.end_s}};
    if (!r.error.empty()) one["error"] = r.error;
    requests.push_back(std::move(one));
  }
  for (const auto& [name, value] : report.settings) settings[name] = value;
  return {
      {"requests", m.requests},
      {"failures", m.failures},
      {"duration_s", m.duration_s},
      {"throughput_tok_s", m.throughput_tok_s},
      {"peak_memory_bytes", report.peak_memory_bytes},
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
      {"itl_by_batch", batches},
      {"engine",
       {{"steps", report.engine.steps},
        {"preemptions", report.engine.preemptions},
        {"pages_total", report.engine.pages_total},
        {"touched_experts", number(report.touched_experts())}}},
      {"model", report.model},
      {"model_summary", report.model_summary},
      {"experts", report.experts},
      {"mapped_bytes", report.mapped_bytes},
      {"workload", report.workload},
      {"seed", report.seed},
      {"concurrency", report.concurrency > 0 ? Json(report.concurrency) : Json(nullptr)},
      {"rate", report.rate > 0 ? Json(report.rate) : Json(nullptr)},
      {"threads", report.threads},
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
