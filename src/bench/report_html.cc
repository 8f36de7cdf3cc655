// The page, top to bottom: what was run, headline numbers, percentiles, distributions, time line, batch size, prompt
// length, rows, settings. Everything that comes from outside goes through escape_html.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "src/bench/page.h"
#include "src/bench/report.h"
#include "src/bench/svg.h"

namespace vivace::bench {

namespace {

/// A list that may break after its commas.
std::string spaced(std::string text) {
  for (size_t at = text.find(','); at != std::string::npos; at = text.find(',', at + 1))
    text.insert(at + 1, " ");
  return text;
}

std::string headline(const Report& r) {
  const Metrics& m = r.metrics;
  return "<div class=\"cards\">\n" + card(pretty(m.tpot_ms.median), "ms", "TPOT, median") +
         card(pretty(m.ttft_ms.median), "ms", "TTFT, median") + card(pretty(m.itl_ms.p99), "ms", "ITL, P99") +
         card(pretty(m.throughput_tok_s), "tok/s", "throughput") +
         (r.slo.given() ? card(pretty(m.goodput_s), "/s", "goodput within " + spaced(r.slo.text())) : "") +
         (r.url.empty()
              ? card(pretty(static_cast<double>(r.peak_memory_bytes) / 0x1p20), "MiB", "peak memory")
              : "") +
         card(fmt::format("{}", m.failures), fmt::format("of {}", m.requests), "requests failed",
              m.failures > 0) +
         "</div>\n";
}

std::string percentile_table(const Metrics& m) {
  std::string out =
      "<div class=\"panel scroll\"><table><tr><th>quantity</th><th class=\"num\">median</th><th "
      "class=\"num\">P90</th>"
      "<th class=\"num\">P99</th><th class=\"num\">P99.9</th><th class=\"num\">largest</th>"
      "<th class=\"num\">mean</th><th class=\"num\">values</th></tr>\n";
  const auto row = [&](const char* name, const Distribution& d) {
    out += fmt::format("<tr><td>{}</td>", name);
    for (const double value :
         {d.median, d.p90, d.p99, d.p999, d.max, d.mean, static_cast<double>(d.values.size())}) {
      out += fmt::format("<td class=\"num\">{}</td>", pretty(value));
    }
    out += "</tr>\n";
  };
  row("TTFT, time to first token (ms)", m.ttft_ms);
  row("TPOT, time per output token (ms)", m.tpot_ms);
  row("ITL, time between tokens (ms)", m.itl_ms);
  row("whole request (ms)", m.e2e_ms);
  return out + "</table></div>\n";
}

/// Equal bins, or bins of equal ratio on a logarithmic axis.
struct Bins {
  double low = 0, high = 1;
  bool logarithmic = false;
  std::vector<int64_t> counts;

  double edge(size_t i) const {
    const double t = static_cast<double>(i) / static_cast<double>(counts.size());
    return logarithmic ? low * std::pow(high / low, t) : low + (high - low) * t;
  }
  void add(double value) {
    const double t =
        logarithmic ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
    const double last = static_cast<double>(counts.size() - 1);
    ++counts[static_cast<size_t>(std::clamp(t * static_cast<double>(counts.size()), 0.0, last))];
  }
};

Bins bins_of(const Distribution& d) {
  Bins bins;
  bins.counts.resize(std::clamp<size_t>(static_cast<size_t>(2 * std::sqrt(d.values.size())), 10, 40));
  const double smallest = std::max(d.values.front(), 1e-3), largest = std::max(d.values.back(), smallest);
  // A long tail on a linear axis would squeeze everything else into two bars.
  bins.logarithmic = largest > 5 * d.median;
  bins.low = bins.logarithmic ? smallest * 0.9 : 0;
  bins.high = bins.logarithmic ? largest * 1.1 : axis_end(largest);
  for (const double value : d.values) bins.add(value);
  return bins;
}

std::string histogram(const Distribution& d, const std::string& title, const std::string& quantity,
                      const std::string& counted) {
  std::string out = "<div class=\"panel\"><h3>" + escape_html(title) + "</h3>";
  if (d.values.empty()) return out + "<p>No values.</p></div>\n";
  const Bins bins = bins_of(d);
  const double tallest = static_cast<double>(*std::max_element(bins.counts.begin(), bins.counts.end()));
  const std::string unit = bins.logarithmic ? " (ms, logarithmic)" : " (ms)";
  // Three rows of labels stay free above the bars.
  Plot plot(340, 250, {quantity + unit, bins.low, bins.high, false, bins.logarithmic},
            {counted, 0, axis_end(tallest * 1.3), true});
  for (size_t i = 0; i < bins.counts.size(); ++i) {
    if (bins.counts[i] == 0) continue;
    plot.bar(bins.edge(i), bins.edge(i + 1), static_cast<double>(bins.counts[i]), "a",
             fmt::format("{} to {} ms: {}", pretty(bins.edge(i)), pretty(bins.edge(i + 1)), bins.counts[i]));
  }
  plot.marker(d.median, "median " + pretty(d.median), 0);
  plot.marker(d.p90, "P90 " + pretty(d.p90), 1);
  plot.marker(d.p99, "P99 " + pretty(d.p99), 2);
  out += plot.svg(fmt::format("Histogram of {}: median {} ms, P90 {} ms, P99 {} ms", title, pretty(d.median),
                              pretty(d.p90), pretty(d.p99)));
  return out + "</div>\n";
}

/// A line per run of intervals that have a value: no line where there is nothing.
void broken_line(Plot& plot, const std::vector<TimelineBin>& bins, double TimelineBin::*field,
                 std::string_view series) {
  std::vector<std::pair<double, double>> points;
  for (const TimelineBin& bin : bins) {
    if (std::isfinite(bin.*field)) {
      points.push_back({bin.start_s + bin.width_s / 2, bin.*field});
    } else if (!points.empty()) {
      plot.line(std::exchange(points, {}), series);
    }
  }
  if (!points.empty()) plot.line(points, series);
}

std::string token_time(const Metrics& m, double end) {
  double slowest = 0;
  for (const TimelineBin& bin : m.timeline) {
    if (std::isfinite(bin.itl_p90_ms)) slowest = std::max(slowest, bin.itl_p90_ms);
  }
  Plot plot(1030, 200, {"time since the first request (s)", 0, end},
            {"time per output token (ms)", 0, axis_end(slowest)});
  broken_line(plot, m.timeline, &TimelineBin::itl_p90_ms, "b");
  broken_line(plot, m.timeline, &TimelineBin::itl_median_ms, "a");
  return "<div class=\"panel scroll\"><p class=\"legend\"><i class=\"a\"></i>median of the gaps between "
         "tokens"
         "<i class=\"b\"></i>P90</p>" +
         plot.svg("Time per output token over time, median and P90") + "</div>\n";
}

std::string timeline(const Metrics& m) {
  if (m.timeline.empty()) return {};
  std::vector<std::pair<double, double>> open, generating, speed;
  double most = 0, fastest = 0;
  for (const TimelineBin& bin : m.timeline) {
    const double middle = bin.start_s + bin.width_s / 2;
    open.push_back({middle, bin.open});
    generating.push_back({middle, bin.generating});
    speed.push_back({middle, bin.tokens_per_s});
    most = std::max(most, bin.open);
    fastest = std::max(fastest, bin.tokens_per_s);
  }
  const double end = m.timeline.back().start_s + m.timeline.back().width_s;
  Plot requests(1030, 200, {"time since the first request (s)", 0, end},
                {"requests", 0, axis_end(most), true});
  requests.area(open, "b");
  requests.line(open, "b");
  requests.line(generating, "a");
  Plot tokens(1030, 200, {"time since the first request (s)", 0, end},
              {"generated tok/s", 0, axis_end(fastest)});
  tokens.area(speed, "c");
  tokens.line(speed, "c");
  return "<div class=\"panel scroll\"><p class=\"legend\"><i class=\"b\"></i>open: sent and not finished"
         "<i class=\"a\"></i>generating: the decode batch</p>" +
         requests.svg("Requests that are open and that are generating, over time") +
         "</div>\n<div class=\"panel scroll\">" +
         "<p class=\"legend\"><i class=\"c\"></i>generated tokens per second, all requests</p>" +
         tokens.svg("Generated tokens per second over time") + "</div>\n" + token_time(m, end);
}

std::string by_batch(const Metrics& m) {
  if (m.by_batch.empty()) return "<p>No request generated more than one token.</p>";
  double slowest = 0;
  for (const BatchPoint& p : m.by_batch) slowest = std::max(slowest, p.p90_ms);
  const double widest = static_cast<double>(m.by_batch.back().batch);
  Plot plot(520, 300, {"requests generating at the same time", 0, widest + 1, true},
            {"time per output token (ms)", 0, axis_end(slowest)});
  std::vector<std::pair<double, double>> medians;
  for (const BatchPoint& p : m.by_batch) {
    const double x = static_cast<double>(p.batch);
    medians.push_back({x, p.median_ms});
    plot.whisker(x, p.p10_ms, p.p90_ms, "a");
  }
  plot.line(medians, "a");
  for (const BatchPoint& p : m.by_batch) {
    plot.dot(static_cast<double>(p.batch), p.median_ms, "a",
             fmt::format("{} generating: median {} ms, P10 {} ms, P90 {} ms, {} gaps", p.batch,
                         pretty(p.median_ms), pretty(p.p10_ms), pretty(p.p90_ms), p.gaps));
  }
  return "<p class=\"legend\"><i class=\"a\"></i>median, with strokes from P10 to P90</p>" +
         plot.svg("Time per output token against the number of requests that generate");
}

std::string by_prompt(const LoadResult& load) {
  double longest = 0, slowest = 0;
  for (const RequestRecord& r : load.requests) {
    if (!r.error.empty() || r.chunk_s.empty()) continue;
    longest = std::max(longest, static_cast<double>(r.prompt_tokens));
    slowest = std::max(slowest, (r.chunk_s.front() - r.start_s) * 1000);
  }
  Plot plot(520, 300, {"prompt length (tokens)", 0, axis_end(longest)},
            {"time to first token (ms)", 0, axis_end(slowest)});
  for (const RequestRecord& r : load.requests) {
    if (!r.error.empty() || r.chunk_s.empty()) continue;
    const double ttft = (r.chunk_s.front() - r.start_s) * 1000;
    plot.dot(static_cast<double>(r.prompt_tokens), ttft, "b",
             fmt::format("{} tokens in, {} out: {} ms", r.prompt_tokens, r.completion_tokens, pretty(ttft)));
  }
  return "<p class=\"legend\"><i class=\"b\"></i>one request</p>" +
         plot.svg("Time to first token against the length of the prompt, one point per request");
}

std::string row_table(const std::vector<RowUse>& rows) {
  std::string out =
      "<div class=\"panel scroll\"><table><tr><th>operator</th><th>row that ran</th><th "
      "class=\"num\">calls</th>"
      "<th>rows before it, and why they did not run</th></tr>\n";
  for (const RowUse& use : rows) {
    std::string why;
    for (const Refusal& r : use.refused) {
      why += fmt::format("<li><code>{}</code> {}</li>", escape_html(r.row), escape_html(r.reason));
    }
    if (why.empty()) why = use.explained ? "first in the table" : "–";
    why = use.refused.empty() ? why : "<ul class=\"why\">" + why + "</ul>";
    out += fmt::format(
        "<tr><td><code>{}</code></td><td><code>{}</code></td><td class=\"num\">{}</td><td "
        "class=\"why\">{}</td></tr>\n",
        escape_html(use.op), escape_html(use.row), pretty(static_cast<double>(use.calls)), why);
  }
  return out + "</table></div>\n";
}

std::string failures(const LoadResult& load, const Metrics& m) {
  constexpr size_t kMost = 200;
  std::string out, kinds;
  size_t rows = 0;
  for (size_t i = 0; i < load.requests.size(); ++i) {
    const RequestRecord& r = load.requests[i];
    if (r.error.empty() || ++rows > kMost) continue;
    out += fmt::format("<tr><td class=\"num\">{}</td><td class=\"num\">{}</td><td>{}</td><td>{}</td></tr>\n",
                       i, r.prompt_tokens, escape_html(r.error_kind), escape_html(r.error));
  }
  if (out.empty()) return out;
  for (const auto& [kind, count] : m.failures_by_kind)
    kinds += fmt::format("{}{}: {}", kinds.empty() ? "" : ", ", kind, count);
  if (rows > kMost) kinds += fmt::format("; the first {} are listed", kMost);
  return "<h2>Failed requests</h2>\n<p>" + escape_html(kinds) +
         "</p>\n<div class=\"panel scroll\"><table><tr><th class=\"num\">request</th>"
         "<th class=\"num\">prompt</th><th>kind</th><th>error</th></tr>\n" +
         out + "</table></div>\n";
}

std::string run_table(const Report& r) {
  const Metrics& m = r.metrics;
  std::string out = "<div class=\"panel scroll\"><table>\n";
  const auto row = [&](const std::string& name, const std::string& value) {
    out += fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", escape_html(name), escape_html(value));
  };
  row("model", r.model + (r.model_summary.empty() ? "" : " (" + r.model_summary + ")"));
  if (!r.url.empty()) row("server", r.url);
  row(r.url.empty() ? "machine" : "the client's machine", r.machine);
  if (r.url.empty()) row("threads", fmt::format("{}", r.threads));
  row("workload",
      fmt::format("{}, {} request{}, seed {}", r.workload, m.requests, m.requests == 1 ? "" : "s", r.seed));
  row("load", r.concurrency > 0
                  ? fmt::format("closed loop, {} requests open at once", r.concurrency)
                  : fmt::format("open loop, Poisson arrivals at {} per second", pretty(r.rate)));
  row("tokens",
      fmt::format("{} in, {} out, {} prompt tokens from the prefix cache",
                  pretty(static_cast<double>(m.prompt_tokens)), pretty(static_cast<double>(m.output_tokens)),
                  pretty(static_cast<double>(m.cached_tokens))));
  row("duration",
      fmt::format("{} s, {} requests open on average", pretty(m.duration_s), pretty(m.mean_concurrency)));
  if (r.slo.given()) {
    row("goodput", fmt::format("{} of {} requests within {}, {} per second", m.good, m.requests, r.slo.text(),
                               pretty(m.goodput_s)));
  }
  for (const std::string& note : notes_of(m)) row("note", note);
  if (r.url.empty()) {
    row("start", fmt::format("{} s until the engine was ready", pretty(r.load_s)));
    row("memory", fmt::format("{} MiB at most, of which the model file maps {}",
                              pretty(static_cast<double>(r.peak_memory_bytes) / 0x1p20),
                              pretty(static_cast<double>(r.mapped_bytes) / 0x1p20)));
    row("engine", fmt::format("{} steps, {} preemptions, {} KV pages", r.engine.steps, r.engine.preemptions,
                              r.engine.pages_total));
    if (std::isfinite(r.touched_experts())) {
      row("experts", fmt::format("{} of {}, touched in a layer by a step of decodes alone, mean",
                                 pretty(r.touched_experts()), r.experts));
    }
  }
  for (const auto& [name, value] : r.settings) row(name, value);
  return out + "</table></div>\n";
}

}  // namespace

std::string to_html(const Report& r) {
  const Metrics& m = r.metrics;
  const size_t slash = r.model.find_last_of('/');
  const std::string name = slash == std::string::npos ? r.model : r.model.substr(slash + 1);
  std::string out = page_begin(name + ", " + r.workload + " workload");
  out += fmt::format("<h1>{}, {} workload</h1>\n", escape_html(name), escape_html(r.workload));
  const std::string where = r.url.empty() ? r.machine : r.url + ", the client on " + r.machine;
  const std::string threads =
      r.url.empty() ? fmt::format(", {} thread{}", r.threads, r.threads == 1 ? "" : "s") : "";
  out += fmt::format("<p class=\"lead\">{} request{} on {}{}. Vivace {}, {}.</p>\n", m.requests,
                     m.requests == 1 ? "" : "s", escape_html(where), threads, escape_html(r.version),
                     escape_html(r.when));
  out += "<pre><code>" + command_html(r.command) + "</code></pre>\n";
  out += headline(r);
  out +=
      "<h2>Latency</h2>\n<p>TTFT runs from sending a request to its first token, waiting and prompt "
      "included. TPOT is "
      "the time from the first to the last token of a request over the tokens after the first. ITL is each "
      "single "
      "gap between two tokens, over all requests.</p>\n";
  out += percentile_table(m);
  out += "<div class=\"three\">\n" + histogram(m.ttft_ms, "Time to first token", "TTFT", "requests") +
         histogram(m.tpot_ms, "Time per output token", "TPOT", "requests") +
         histogram(m.itl_ms, "Time between tokens", "ITL", "gaps") + "</div>\n";
  out +=
      "<h2>Tails</h2>\n<p>One value in N is above the line.</p>\n<div class=\"two\">\n"
      "<div class=\"panel\"><h3>Time between tokens, per output token</h3>" +
      tail({{&m.itl_ms, "b"}, {&m.tpot_ms, "a"}},
           "<i class=\"b\"></i>ITL, one in N gaps<i class=\"a\"></i>TPOT, one in N requests",
           "How large the largest gaps between tokens and times per output token are") +
      "</div>\n<div class=\"panel\"><h3>Time to first token</h3>" +
      tail({{&m.ttft_ms, "c"}}, "<i class=\"c\"></i>TTFT, one in N requests",
           "How large the largest times to the first token are") +
      "</div>\n</div>\n";
  out += "<h2>Over time</h2>\n" + timeline(m);
  out += "<h2>What latency depends on</h2>\n<div class=\"two\">\n<div class=\"panel\"><h3>Batch size</h3>" +
         by_batch(m) + "</div>\n<div class=\"panel\"><h3>Prompt length</h3>" + by_prompt(r.load) +
         "</div>\n</div>\n";
  if (!r.rows.empty()) {
    out +=
        "<h2>Which implementation ran each operator</h2>\n<p>Each operator has an ordered table of "
        "implementations; "
        "the first whose needs the call meets runs.</p>\n" +
        row_table(r.rows);
  }
  out += failures(r.load, m);
  out += "<h2>The run</h2>\n" + run_table(r);
  out += page_end(
      "Percentiles interpolate linearly between values. Failed requests count as failures and are in no "
      "latency.");
  return out;
}

}  // namespace vivace::bench
