// The page, top to bottom: what was run, headline numbers, percentiles, distributions, time line, batch size, prompt
// length, rows, settings. Everything that comes from outside goes through escape_html.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "src/bench/report.h"
#include "src/bench/svg.h"

namespace vivace::bench {

namespace {

constexpr std::string_view kStyle = R"css(
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#16202c;--soft:#556371;--rule:#dde3e9;--grid:#e8ecf0;
--a:#1f5fd0;--b:#b85600;--c:#0b7a6b;--bad:#b3261e;--code:#eef1f5}
@media (prefers-color-scheme:dark){:root{--page:#0f141a;--card:#171e26;--ink:#e6ebf0;--soft:#9aa8b5;--rule:#2b3641;
--grid:#25303a;--a:#7aa7ff;--b:#ffab5e;--c:#4fd1bd;--bad:#ff8a80;--code:#202933}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1080px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:28px;line-height:1.25;margin:0 0 6px;font-weight:650;letter-spacing:-.01em}
h2{font-size:19px;margin:44px 0 4px;font-weight:650}
h3{font-size:15px;margin:0 0 8px;font-weight:600}
p{margin:4px 0 14px;max-width:78ch;color:var(--soft)}
p.lead{color:var(--ink);margin-bottom:10px;max-width:none}
code{font:13.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{background:var(--code);border-radius:8px;padding:12px 14px;margin:0 0 20px;overflow-x:auto;white-space:pre-wrap;
overflow-wrap:anywhere}
pre span{display:inline-block}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(155px,1fr));gap:12px;margin:20px 0 8px}
.card,.panel{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.card{padding:14px 16px}
.card b{display:block;font-size:27px;line-height:1.15;font-weight:650;font-variant-numeric:tabular-nums}
.card b small{font-size:14px;font-weight:500;color:var(--soft);margin-left:4px}
.card span{font-size:13.5px;color:var(--soft)}
.card.bad b{color:var(--bad)}
.panel{padding:16px 16px 8px;margin:10px 0}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:12px}
.three{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr));gap:12px}
.two .panel,.three .panel{margin:0}
.legend{font-size:13.5px;color:var(--soft);margin:0 0 4px}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin:0 6px 0 14px;vertical-align:-1px}
.legend i:first-child{margin-left:0}
i.a{background:var(--a)}i.b{background:var(--b)}i.c{background:var(--c)}
svg{display:block;width:100%;height:auto}
svg text{font-family:inherit;fill:var(--soft);font-size:12px}
svg .label{fill:var(--ink);font-size:12.5px}
svg .marklabel{fill:var(--ink);font-size:12px;font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:4px}
.markback{fill:var(--card)}
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--soft);fill:none}
.mark{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:4 3;fill:none}
.a{--series:var(--a)}.b{--series:var(--b)}.c{--series:var(--c)}
.fill{fill:var(--series);fill-opacity:.75}.area{fill:var(--series);fill-opacity:.2}
.line{stroke:var(--series);stroke-width:2;fill:none;stroke-linejoin:round}.line.thin{stroke-width:1.3;opacity:.75}
.dot{fill:var(--series);fill-opacity:.8;stroke:var(--card);stroke-width:.8}
.scroll{overflow-x:auto}.scroll svg{min-width:620px}
table{border-collapse:collapse;width:100%;font-size:14.5px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:7px 14px 7px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{font-weight:600;font-size:13px;color:var(--soft)}
tr:last-child td{border-bottom:0}
.num{text-align:right}
td.why{color:var(--soft)}
ul.why{margin:0;padding:0;list-style:none}
footer{margin-top:40px;font-size:13.5px;color:var(--soft)}
@media print{body{background:#fff}.panel,.card{break-inside:avoid}}
)css";

std::string card(const std::string& value, const std::string& unit, const std::string& what,
                 bool bad = false) {
  return fmt::format("<div class=\"card{}\"><b>{}<small>{}</small></b><span>{}</span></div>\n",
                     bad ? " bad" : "", escape_html(value), escape_html(unit), escape_html(what));
}

std::string headline(const Report& r) {
  const Metrics& m = r.metrics;
  return "<div class=\"cards\">\n" + card(pretty(m.tpot_ms.median), "ms", "TPOT, median") +
         card(pretty(m.ttft_ms.median), "ms", "TTFT, median") + card(pretty(m.itl_ms.p99), "ms", "ITL, P99") +
         card(pretty(m.throughput_tok_s), "tok/s", "throughput") +
         card(pretty(static_cast<double>(r.peak_memory_bytes) / 0x1p20), "MiB", "peak memory") +
         card(fmt::format("{}", m.failures), fmt::format("of {}", m.requests), "requests failed",
              m.failures > 0) +
         "</div>\n";
}

/// Lines break between words only: a browser would break after the hyphens of a flag.
std::string command_html(const std::string& command) {
  std::string out = "<span>";
  for (const char c : escape_html(command))
    out += c == ' ' ? std::string("</span> <span>") : std::string(1, c);
  return out + "</span>";
}

std::string percentile_table(const Metrics& m) {
  std::string out =
      "<div class=\"panel scroll\"><table><tr><th>quantity</th><th class=\"num\">median</th><th "
      "class=\"num\">P90</th>"
      "<th class=\"num\">P99</th><th class=\"num\">mean</th><th class=\"num\">values</th></tr>\n";
  const auto row = [&](const char* name, const Distribution& d) {
    out += fmt::format(
        "<tr><td>{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td>"
        "<td class=\"num\">{}</td><td class=\"num\">{}</td></tr>\n",
        name, pretty(d.median), pretty(d.p90), pretty(d.p99), pretty(d.mean),
        pretty(static_cast<double>(d.values.size())));
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
         tokens.svg("Generated tokens per second over time") + "</div>\n";
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
    why = why.empty() ? "first in the table" : "<ul class=\"why\">" + why + "</ul>";
    out += fmt::format(
        "<tr><td><code>{}</code></td><td><code>{}</code></td><td class=\"num\">{}</td><td "
        "class=\"why\">{}</td></tr>\n",
        escape_html(use.op), escape_html(use.row), pretty(static_cast<double>(use.calls)), why);
  }
  return out + "</table></div>\n";
}

std::string failures(const LoadResult& load) {
  std::string out;
  for (size_t i = 0; i < load.requests.size(); ++i) {
    const RequestRecord& r = load.requests[i];
    if (r.error.empty()) continue;
    out += fmt::format("<tr><td class=\"num\">{}</td><td class=\"num\">{}</td><td>{}</td></tr>\n", i,
                       r.prompt_tokens, escape_html(r.error));
  }
  if (out.empty()) return out;
  return "<h2>Failed requests</h2>\n<div class=\"panel scroll\"><table><tr><th class=\"num\">request</th>"
         "<th class=\"num\">prompt</th><th>error</th></tr>\n" +
         out + "</table></div>\n";
}

std::string run_table(const Report& r) {
  const Metrics& m = r.metrics;
  std::string out = "<div class=\"panel scroll\"><table>\n";
  const auto row = [&](const std::string& name, const std::string& value) {
    out += fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", escape_html(name), escape_html(value));
  };
  row("model", r.model + (r.model_summary.empty() ? "" : " (" + r.model_summary + ")"));
  row("machine", r.machine);
  row("threads", fmt::format("{}", r.threads));
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
  for (const auto& [name, value] : r.settings) row(name, value);
  return out + "</table></div>\n";
}

}  // namespace

std::string to_html(const Report& r) {
  const Metrics& m = r.metrics;
  const size_t slash = r.model.find_last_of('/');
  const std::string name = slash == std::string::npos ? r.model : r.model.substr(slash + 1);
  std::string out =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>" +
      escape_html(name) + ", " + escape_html(r.workload) + " workload</title>\n<style>";
  out += kStyle;
  out += "</style></head>\n<body><main>\n";
  out += fmt::format("<h1>{}, {} workload</h1>\n", escape_html(name), escape_html(r.workload));
  out += fmt::format("<p class=\"lead\">{} request{} on {}, {} thread{}. Vivace {}, {}.</p>\n", m.requests,
                     m.requests == 1 ? "" : "s", escape_html(r.machine), r.threads, r.threads == 1 ? "" : "s",
                     escape_html(r.version), escape_html(r.when));
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
  out += "<h2>Over time</h2>\n" + timeline(m);
  out += "<h2>What latency depends on</h2>\n<div class=\"two\">\n<div class=\"panel\"><h3>Batch size</h3>" +
         by_batch(m) + "</div>\n<div class=\"panel\"><h3>Prompt length</h3>" + by_prompt(r.load) +
         "</div>\n</div>\n";
  out +=
      "<h2>Which implementation ran each operator</h2>\n<p>Each operator has an ordered table of "
      "implementations; "
      "the first whose needs the call meets runs.</p>\n" +
      row_table(r.rows);
  out += failures(r.load);
  out += "<h2>The run</h2>\n" + run_table(r);
  out +=
      "<footer>Percentiles interpolate linearly between values. Failed requests count as failures and are in "
      "no "
      "latency.</footer>\n</main></body></html>\n";
  return out;
}

}  // namespace vivace::bench
