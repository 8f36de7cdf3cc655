#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "src/bench/load.h"
#include "src/bench/metrics.h"
#include "src/bench/report.h"
#include "src/bench/step.h"
#include "src/bench/svg.h"
#include "src/bench/workload.h"
#include "tests/bench/fake_target.h"

namespace vivace::bench {
namespace {

WorkloadOptions mixed(int64_t requests) {
  WorkloadOptions options;
  options.requests = requests;
  options.max_model_len = 8192;
  options.vocab = 1000;
  options.seed = 3;
  return options;
}

/// A record whose chunks come at these times.
RequestRecord record(double start, std::vector<double> chunks) {
  RequestRecord r;
  r.prompt_tokens = 10;
  r.start_s = start;
  r.end_s = chunks.empty() ? start : chunks.back();
  r.completion_tokens = static_cast<int64_t>(chunks.size());
  r.chunk_s = std::move(chunks);
  return r;
}

TEST(Percentile, IsNumpysLinearInterpolation) {
  const std::vector<double> values = {1, 2, 4, 8};
  EXPECT_DOUBLE_EQ(percentile(values, 0), 1);
  EXPECT_DOUBLE_EQ(percentile(values, 50), 3);     // numpy.percentile([1, 2, 4, 8], 50)
  EXPECT_DOUBLE_EQ(percentile(values, 90), 6.8);   // numpy.percentile([1, 2, 4, 8], 90)
  EXPECT_DOUBLE_EQ(percentile(values, 99), 7.88);  // numpy.percentile([1, 2, 4, 8], 99)
  EXPECT_DOUBLE_EQ(percentile(values, 100), 8);
  EXPECT_DOUBLE_EQ(percentile({5}, 99), 5);
  EXPECT_TRUE(std::isnan(percentile({}, 50)));
}

TEST(Metrics, FollowTheirDefinitions) {
  LoadResult result;
  result.requests = {record(0, {0.5, 0.6, 0.8}), record(0.25, {0.5}), record(0, {})};
  result.requests[2].error = "failed";
  result.duration_s = 2;
  const Metrics m = measure(result);
  EXPECT_EQ(m.requests, 3);
  EXPECT_EQ(m.failures, 1);
  EXPECT_EQ(m.output_tokens, 4);
  EXPECT_DOUBLE_EQ(m.throughput_tok_s, 2);
  ASSERT_EQ(m.ttft_ms.values.size(), 2u);
  EXPECT_NEAR(m.ttft_ms.values[0], 250, 1e-9);
  EXPECT_NEAR(m.ttft_ms.values[1], 500, 1e-9);
  ASSERT_EQ(m.tpot_ms.values.size(), 1u) << "a request with one token has no TPOT";
  EXPECT_NEAR(m.tpot_ms.values[0], 150, 1e-9);
  ASSERT_EQ(m.itl_ms.values.size(), 2u);
  EXPECT_NEAR(m.itl_ms.values[0], 100, 1e-9);
  EXPECT_NEAR(m.itl_ms.values[1], 200, 1e-9);
}

TEST(Metrics, CountsWhoGeneratesAtTheSameTime) {
  LoadResult result;
  // Alone from 0 to 1, two from 1 to 3, alone again until 4.
  result.requests = {record(0, {0, 0.9, 2.9}), record(0.5, {1, 2, 3, 4})};
  result.duration_s = 4;
  const Metrics m = measure(result);
  ASSERT_EQ(m.by_batch.size(), 2u);
  EXPECT_EQ(m.by_batch[0].batch, 1);
  EXPECT_EQ(m.by_batch[0].gaps, 2);
  EXPECT_EQ(m.by_batch[1].batch, 2);
  EXPECT_EQ(m.by_batch[1].gaps, 3);
}

TEST(Metrics, TimelineConservesTokensAndTime) {
  LoadResult result;
  result.requests = {record(0, {0.5, 0.6, 0.8}), record(0.25, {0.5, 1.5, 2.0})};
  result.duration_s = 2;
  double tokens = 0, open = 0;
  for (const TimelineBin& bin : measure(result).timeline) {
    tokens += bin.tokens_per_s * bin.width_s;
    open += bin.open * bin.width_s;
  }
  EXPECT_NEAR(tokens, 6, 1e-9);
  EXPECT_NEAR(open, 0.8 + 1.75, 1e-9);
}

TEST(Metrics, OfNothing) {
  LoadResult result;
  result.requests = {record(0, {})};
  result.requests[0].error = "failed";
  const Metrics m = measure(result);
  EXPECT_EQ(m.failures, 1);
  EXPECT_TRUE(std::isnan(m.ttft_ms.median));
  Report report;
  report.metrics = m;
  report.load = result;
  EXPECT_TRUE(to_json(report)["ttft_ms"]["median"].is_null());
  EXPECT_NE(to_html(report).find("Failed requests"), std::string::npos);
}

TEST(Workload, MixedHasItsMediansAndStaysInTheContext) {
  WorkloadOptions options = mixed(4001);
  options.max_model_len = 512;
  const auto plan = plan_workload(options);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<double> in, out;
  for (const PlannedRequest& r : *plan) {
    in.push_back(static_cast<double>(r.prompt.ids.size()));
    out.push_back(static_cast<double>(r.output_tokens));
    EXPECT_LE(in.back() + out.back(), 512);
    EXPECT_TRUE(!r.cut || in.back() + out.back() == 512) << in.back() << " + " << out.back();
    EXPECT_GE(in.back(), 1);
    EXPECT_GE(out.back(), 1);
    for (const int32_t id : r.prompt.ids) EXPECT_TRUE(id >= 0 && id < 1000);
  }
  // The standard error of a log-normal's median is about 1.25 sigma / sqrt(n) of it; five of those are allowed.
  EXPECT_NEAR(distribution_of(in).median, 96, 5 * 96 * 1.25 * 1.2 / std::sqrt(4001));
  EXPECT_NEAR(distribution_of(out).median, 48, 5 * 48 * 1.25 * 0.8 / std::sqrt(4001));
  // ln(512 / 96) / 1.2 = 1.39 deviations: a twelfth of the prompts alone is longer.
  EXPECT_GT(std::ranges::count(*plan, true, &PlannedRequest::cut), 4001 / 15);
  options.max_model_len = 1 << 20;
  EXPECT_EQ(std::ranges::count(*plan_workload(options), true, &PlannedRequest::cut), 0);
}

TEST(Workload, RepeatsWithItsSeedAndOnlyThen) {
  const auto a = plan_workload(mixed(20)), b = plan_workload(mixed(20));
  WorkloadOptions other = mixed(20);
  other.seed = 4;
  const auto c = plan_workload(other);
  bool differs = false;
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ((*a)[i].prompt.ids, (*b)[i].prompt.ids);
    EXPECT_EQ((*a)[i].seed, (*b)[i].seed);
    differs = differs || (*a)[i].prompt.ids != (*c)[i].prompt.ids;
  }
  EXPECT_TRUE(differs);
}

TEST(Workload, UniformAndArrivals) {
  WorkloadOptions options = mixed(2000);
  options.workload = Workload::uniform;
  options.rate = 4;
  options.text_ids = {1, 2, 3};
  const auto plan = plan_workload(options);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->front().arrival_s, 0);
  for (const PlannedRequest& r : *plan) {
    EXPECT_EQ(r.prompt.ids.size(), 128u);
    EXPECT_EQ(r.output_tokens, 64);
    EXPECT_EQ(r.prompt.ids[1], r.prompt.ids[0] % 3 + 1) << "a slice of the text, cyclic";
  }
  // 1,999 exponential gaps: the mean's standard error is mean / sqrt(n).
  EXPECT_NEAR(plan->back().arrival_s / 1999, 0.25, 5 * 0.25 / std::sqrt(1999));
}

TEST(Workload, RefusesWhatDoesNotFit) {
  WorkloadOptions options = mixed(1);
  options.workload = Workload::uniform;
  options.max_model_len = 100;
  const auto plan = plan_workload(options);
  ASSERT_FALSE(plan.ok());
  EXPECT_NE(plan.status().message().find("max_model_len is 100, needs at least 192"), std::string::npos)
      << plan.status().message();
  EXPECT_FALSE(workload_from_name("random").ok());
}

TEST(Load, ClosedLoopKeepsItsBound) {
  FakeTarget target;
  LoadOptions options;
  options.concurrency = 3;
  const auto plan = plan_workload(mixed(50));
  const LoadResult result = run_load(target, *plan, options);
  ASSERT_EQ(result.requests.size(), 50u);
  EXPECT_LE(target.most_open(), 3);
  for (size_t i = 0; i < 50; ++i) {
    EXPECT_EQ(result.requests[i].error, "");
    EXPECT_EQ(result.requests[i].completion_tokens, (*plan)[i].output_tokens);
    EXPECT_EQ(static_cast<int64_t>(result.requests[i].chunk_s.size()), (*plan)[i].output_tokens);
    EXPECT_GE(result.requests[i].chunk_s.front(), result.requests[i].start_s);
  }
}

TEST(Load, OpenLoopWaitsForArrivals) {
  FakeTarget target;
  LoadOptions options;
  options.open_loop = true;
  std::vector<PlannedRequest> plan(3);
  for (size_t i = 0; i < 3; ++i) plan[i] = {{{1}}, 2, 0.05 * static_cast<double>(i), 0};
  const LoadResult result = run_load(target, plan, options);
  for (size_t i = 0; i < 3; ++i) EXPECT_GE(result.requests[i].start_s, plan[i].arrival_s);
  EXPECT_GE(result.duration_s, 0.1);
}

TEST(Load, RecordsRefusedAndFailedRequests) {
  FakeTarget target;
  std::vector<PlannedRequest> plan = {
      {{{FakeTarget::kRefusedId}}, 4}, {{{1}}, 4}, {{{FakeTarget::kFailingId}}, 4}};
  LoadOptions options;
  int64_t last_failed = -1;
  options.progress = [&](const LoadProgress& p) { last_failed = p.failed; };
  const LoadResult result = run_load(target, plan, options);
  EXPECT_EQ(result.requests[0].error, "the queue is full");
  EXPECT_EQ(result.requests[1].error, "");
  EXPECT_EQ(result.requests[2].error, "it broke");
  EXPECT_GE(last_failed, 0);
  EXPECT_EQ(measure(result).failures, 2);
}

TEST(Load, WatchesWholeRequests) {
  FakeTarget target;
  LoadOptions options;
  options.concurrency = 1;
  int begun = 0;
  std::string text;
  options.watch = [&](const std::string& piece, bool begin) {
    begun += begin ? 1 : 0;
    text += piece;
  };
  std::vector<PlannedRequest> plan(4, PlannedRequest{{{1}}, 5});
  run_load(target, plan, options);
  EXPECT_EQ(begun, 4);
  EXPECT_EQ(text.size(), 4u * 5u * 5u);
}

TEST(Html, EscapesWhatComesFromOutside) {
  Report report;
  report.model = "<script>alert(1)</script>\xff";
  report.command = "a & b \"c\"";
  report.rows = {{"linear", "<b>", 3, {{"x", "needs a < b"}}}};
  report.load.requests = {record(0, {0.5, 0.6, 0.8})};
  report.metrics = measure(report.load);
  const std::string html = to_html(report);
  EXPECT_EQ(html.find("<script"), std::string::npos);
  EXPECT_EQ(html.find("<b>\n"), std::string::npos);
  EXPECT_NE(html.find("<span>&amp;</span> <span>b</span> <span>&quot;c&quot;</span>"), std::string::npos);
  EXPECT_NE(html.find("needs a &lt; b"), std::string::npos);
  EXPECT_EQ(html.find('\xff'), std::string::npos);
  EXPECT_EQ(html.find("http"), std::string::npos) << "the page must not reach for the network";
  EXPECT_NO_THROW(to_json(report).dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

/// The number behind `name="` in `element`.
double attribute(const std::string& element, const std::string& name) {
  return std::stod(element.substr(element.find(" " + name + "=\"") + name.size() + 3));
}

TEST(Svg, ZeroHasNoSign) {
  for (const double high : {0.9, 1.0, 5.0, 1e-3}) {
    const std::string svg = Plot(340, 250, {"x", 0, high}, {"y", 0, high}).svg("t");
    EXPECT_EQ(svg.find(">-0"), std::string::npos) << high;
  }
}

TEST(Svg, ScalesWithTheWindow) {
  const std::string svg = Plot(340, 250, {"x", 0, 1}, {"y", 0, 1}).svg("t");
  EXPECT_NE(svg.find("viewBox=\"0 0 340 250\""), std::string::npos);
  EXPECT_EQ(svg.substr(0, svg.find('>')).find(" width="), std::string::npos);
  // No column of a grid is wider than the window.
  const std::string html = to_html({});
  for (size_t at = html.find("minmax("); at != std::string::npos; at = html.find("minmax(", at + 1)) {
    const std::string least = html.substr(at + 7, html.find(',', at) - at - 7);
    EXPECT_TRUE(least.starts_with("min(") || std::stod(least) <= 320) << least;
  }
}

/// What is behind a label covers the lines, and comes after them.
TEST(Svg, LinesOfMarkersEndAtLabels) {
  for (const double at : {0.1, 0.5, 0.9}) {
    Plot plot(340, 250, {"x", 0, 1}, {"y", 0, 1});
    plot.marker(at, "median 12.3", 0);
    plot.marker(at + 0.01, "P90 14.5", 1);
    const std::string svg = plot.svg("t");
    const size_t back = svg.find("<rect class=\"markback\""), text = svg.find("median 12.3");
    ASSERT_NE(back, std::string::npos);
    EXPECT_GT(back, svg.rfind("class=\"mark\""));
    EXPECT_GT(text, back);
    const std::string rect = svg.substr(back, svg.find('>', back) - back);
    const size_t label = svg.rfind("<text", text);
    const double x = attribute(svg.substr(label, text - label), "x");
    const double left = attribute(rect, "x"), width = attribute(rect, "width");
    EXPECT_GE(width, 11 * 6);
    EXPECT_TRUE(x >= left && x <= left + width) << x;
  }
}

TEST(Step, AShareAboveOneIsExplained) {
  StepReport report;
  report.points = {{.batch = 1, .median_us = 100, .floor_us = 99}};
  const char* explained = "of floor above 1: caches hold part";
  EXPECT_EQ(to_text(report).find(explained), std::string::npos);
  report.points.push_back({.batch = 2, .median_us = 100, .floor_us = 110});
  EXPECT_NE(to_text(report).find(explained), std::string::npos);
}

TEST(Step, OperatorsStandBesideTheStep) {
  StepReport report;
  report.points = {{.batch = 1, .median_us = 100, .floor_us = 50}};
  EXPECT_FALSE(to_json(report)["points"][0].contains("operators"));
  report.options.operators = true;
  report.points[0].operators = {
      {.op = "linear",
       .row = "cpu.f32",
       .calls = 2,
       .us = 90,
       .bytes = 4e6,
       .floor_us = 45,
       .flops = 500'000},
      {.op = "rms_norm", .row = "cpu.simd", .calls = 3, .us = 30, .bytes = 3e3, .floor_us = 3, .flops = 9}};
  const nlohmann::ordered_json point = to_json(report)["points"][0];
  EXPECT_EQ(point["operators_us"], 120);
  EXPECT_EQ(point["operators"][0]["share"], 0.75);
  EXPECT_EQ(point["operators"][0]["share_of_floor"], 0.5);
  EXPECT_EQ(point["operators"][1]["us_per_call"], 10);
  const std::string text = to_text(report);
  for (const char* line :
       {"linear              cpu.f32                  2     2.000        0.250      45.00      90.0   "
        "75.0%       45.0     0.500\n",
        " 120.0\nthe step, its calls not timed", " 100.0\ndifference",
        " 20.0\n\nus: ", "on a CPU it may be, since these are other steps"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << "\nis not in\n" << text;
  }
}

/// A clock may not move during a short call.
TEST(Step, SharesOfNothingAreZero) {
  StepReport report;
  report.options.operators = true;
  report.points = {
      {.batch = 1, .floor_us = 5, .operators = {{.op = "linear", .row = "cpu.f32", .floor_us = 2}}}};
  const nlohmann::ordered_json point = to_json(report)["points"][0], line = point["operators"][0];
  for (const char* field : {"tokens_per_s", "share_of_floor"}) EXPECT_EQ(point[field], 0) << field;
  for (const char* field : {"us_per_call", "share", "share_of_floor"}) EXPECT_EQ(line[field], 0) << field;
  const std::string text = to_text(report);
  EXPECT_EQ(text.find("inf"), std::string::npos) << text;
  EXPECT_EQ(text.find("nan"), std::string::npos) << text;
}

TEST(Html, PrettyNumbers) {
  EXPECT_EQ(pretty(0.456), "0.46");
  EXPECT_EQ(pretty(12.34), "12.3");
  EXPECT_EQ(pretty(123.4), "123");
  EXPECT_EQ(pretty(1234567), "1,234,567");
  EXPECT_EQ(pretty(-1234), "-1,234");
  EXPECT_EQ(pretty(NAN), "–");
  EXPECT_EQ(axis_end(0), 1);
  EXPECT_GE(axis_end(99), 99);
}

}  // namespace
}  // namespace vivace::bench
