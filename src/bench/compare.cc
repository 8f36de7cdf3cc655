#include "src/bench/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "src/bench/page.h"
#include "src/bench/svg.h"
#include "src/core/error.h"

namespace vivace::bench {

namespace {

using Json = nlohmann::ordered_json;

/// The field behind "a.b"; null: absent.
const Json* find(const Json& json, std::string_view path) {
  const Json* at = &json;
  while (at != nullptr && !path.empty()) {
    const std::string key(path.substr(0, path.find('.')));
    path.remove_prefix(std::min(path.size(), key.size() + 1));
    const auto it = at->is_object() ? at->find(key) : at->end();
    at = at->is_object() && it != at->end() ? &*it : nullptr;
  }
  return at;
}

double number(const Json& json, std::string_view path) {
  const Json* value = find(json, path);
  return value != nullptr && value->is_number() ? value->get<double>() : NAN;
}

/// A count; 0: it is none.
int64_t count(const Json& json, std::string_view path) {
  const double value = number(json, path);
  return value >= 0 && value < 1e15 ? static_cast<int64_t>(value) : 0;
}

std::string text(const Json& json, std::string_view path) {
  const Json* value = find(json, path);
  return value != nullptr && value->is_string() ? value->get<std::string>() : "";
}

/// What every figure below needs; the rest may be missing.
Status check(const Json& json, const std::string& name) {
  if (!json.is_object()) return invalid_argument("{}: needs a JSON object, the results of a run", name);
  for (const char* field : {"requests", "failures", "duration_s", "throughput_tok_s"}) {
    if (!std::isfinite(number(json, field)))
      return invalid_argument("{}: {} is no number, needs the results of bench serve", name, field);
  }
  for (const char* field : {"ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"}) {
    const Json* value = find(json, field);
    if (value == nullptr || !value->is_object())
      return invalid_argument("{}: {} is no object, needs the results of bench serve", name, field);
  }
  const Json* list = find(json, "per_request");
  if (list == nullptr || !list->is_array())
    return invalid_argument("{}: per_request is no list, needs the results of bench serve", name);
  return {};
}

using Rounds = std::map<int64_t, std::vector<double>>;

/// A field of the requests that succeeded, by round.
Rounds by_round(const Json& json, const char* field) {
  Rounds rounds;
  for (const Json& request : json.at("per_request")) {
    if (!text(request, "error").empty()) continue;
    const double value = number(request, field);
    if (std::isfinite(value)) rounds[count(request, "round")].push_back(value);
  }
  return rounds;
}

Distribution all_of(const Rounds& rounds) {
  std::vector<double> values;
  for (const auto& [round, part] : rounds) values.insert(values.end(), part.begin(), part.end());
  return distribution_of(std::move(values));
}

std::optional<RoundRatios> ratios_of_rounds(const Rounds& a, const Rounds& b) {
  std::vector<double> ratios;
  for (const auto& [round, values] : a) {
    const auto other = b.find(round);
    if (other != b.end())
      ratios.push_back(distribution_of(other->second).median / distribution_of(values).median);
  }
  if (ratios.size() < 2) return {};
  const Distribution d = distribution_of(std::move(ratios));
  return RoundRatios{d.values.front(), d.median, d.max};
}

/// Runs of one plan find as much in their prefix caches, unless one of them was asked before.
std::vector<std::string> notes_of(const Json& a, const Json& b) {
  constexpr double kAlike = 0.05;  // of the prompts
  const double x = number(a, "cached_tokens"), y = number(b, "cached_tokens");
  const double prompts = number(a, "prompt_tokens");
  if (!(std::abs(x - y) > kAlike * prompts)) return {};
  return {fmt::format(
      "the prefix caches gave {:.0f} and {:.0f} tokens: was one side asked the same before? Times to "
      "the first token differ by it; a new --seed or a fresh start makes them comparable",
      x, y)};
}

Comparison::Side side_of(const Json& json, const std::string& name) {
  Comparison::Side side;
  side.name = name;
  side.command = text(json, "command");
  side.model = text(json, "model");
  side.when = text(json, "when");
  side.requests = count(json, "requests");
  side.failures = count(json, "failures");
  side.ttft_ms = all_of(by_round(json, "ttft_ms"));
  side.tpot_ms = all_of(by_round(json, "tpot_ms"));
  const Json* batches = find(json, "itl_by_batch");
  if (batches == nullptr || !batches->is_array()) return side;
  for (const Json& batch : *batches) {
    const BatchPoint point{count(batch, "batch"), count(batch, "gaps"), number(batch, "median_ms"),
                           number(batch, "p10_ms"), number(batch, "p90_ms")};
    if (point.batch > 0 && std::isfinite(point.median_ms)) side.by_batch.push_back(point);
  }
  return side;
}

Agreement agreement_of(const Json& a, const Json& b) {
  Agreement agreement;
  const std::string plan = text(a, "plan");
  if (plan.empty() || plan != text(b, "plan")) {
    agreement.why_not = "the runs had different requests";
  } else if (number(a, "temperature") != 0 || number(b, "temperature") != 0) {
    agreement.why_not = "only greedy outputs (--temperature 0) are compared";
  }
  if (!agreement.why_not.empty()) return agreement;
  const Json &left = a.at("per_request"), &right = b.at("per_request");
  double shares = 0;
  for (size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
    const bool both = find(left[i], "text") != nullptr && find(right[i], "text") != nullptr;
    if (!both || !text(left[i], "error").empty() || !text(right[i], "error").empty()) continue;
    const std::string x = text(left[i], "text"), y = text(right[i], "text");
    const size_t longest = std::max(x.size(), y.size());
    const auto [differ, unused] = std::mismatch(x.begin(), x.end(), y.begin(), y.end());
    ++agreement.compared;
    agreement.equal += x == y;
    shares += longest == 0 ? 1 : static_cast<double>(differ - x.begin()) / static_cast<double>(longest);
  }
  if (agreement.compared == 0) {
    agreement.why_not = "no request succeeded in both";
  } else {
    agreement.common_share = shares / static_cast<double>(agreement.compared);
  }
  return agreement;
}

std::string outputs(const Agreement& agreement) {
  if (!agreement.why_not.empty()) return "not compared: " + agreement.why_not;
  return fmt::format("{} of {} are equal; {:.1f} % of the text before the first difference", agreement.equal,
                     agreement.compared, 100 * agreement.common_share);
}

std::string ratio_text(double ratio) {
  return std::isfinite(ratio) ? fmt::format("{:.3f}", ratio) : "-";
}

std::string rounds_text(const ComparedValue& value) {
  if (!value.rounds) return "";
  return fmt::format("{:.3f} ({:.3f} to {:.3f})", value.rounds->median, value.rounds->least,
                     value.rounds->largest);
}

std::string value_text(double value) {
  return std::isfinite(value) ? fmt::format("{:.2f}", value) : "-";
}

Json finite(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

std::string batch_chart(const Comparison& c) {
  double slowest = 0, widest = 0;
  for (const Comparison::Side* side : {&c.a, &c.b}) {
    for (const BatchPoint& point : side->by_batch) {
      slowest = std::max(slowest, point.median_ms);
      widest = std::max(widest, static_cast<double>(point.batch));
    }
  }
  Plot plot(1030, 300, {"requests generating at the same time", 0, widest + 1, true},
            {"time per output token (ms)", 0, axis_end(slowest)});
  for (const auto& [side, series] : {std::pair{&c.a, "a"}, std::pair{&c.b, "b"}}) {
    std::vector<std::pair<double, double>> points;
    for (const BatchPoint& point : side->by_batch)
      points.push_back({static_cast<double>(point.batch), point.median_ms});
    if (!points.empty()) plot.line(points, series);
    for (const auto& [batch, time] : points) plot.dot(batch, time, series);
  }
  return plot.svg("Median time per output token against the number of requests that generate, both runs");
}

}  // namespace

Result<Comparison> compare(const Json& a, const std::string& a_name, const Json& b,
                           const std::string& b_name) {
  VIVACE_TRY(check(a, a_name));
  VIVACE_TRY(check(b, b_name));
  Comparison c;
  c.a = side_of(a, a_name);
  c.b = side_of(b, b_name);
  const auto add = [&](const std::string& name, const char* unit, const std::string& path) {
    ComparedValue value{name, unit, number(a, path), number(b, path)};
    if (!std::isfinite(value.a) && !std::isfinite(value.b)) return;
    value.ratio = value.a != 0 ? value.b / value.a : NAN;
    c.values.push_back(value);
  };
  for (const auto& [field, title] :
       {std::pair{"ttft_ms", "TTFT"}, {"tpot_ms", "TPOT"}, {"itl_ms", "ITL"}, {"e2e_ms", "request"}}) {
    for (const auto& [name, label] : {std::pair{"median", "median"}, {"p90", "P90"}, {"p99", "P99"}}) {
      add(fmt::format("{} {}", title, label), "ms", fmt::format("{}.{}", field, name));
      if (name != std::string_view("median") || c.values.empty()) continue;
      if (c.values.back().name == fmt::format("{} {}", title, label))
        c.values.back().rounds = ratios_of_rounds(by_round(a, field), by_round(b, field));
    }
  }
  add("throughput", "tok/s", "throughput_tok_s");
  add("goodput", "requests/s", "goodput_per_s");
  add("duration", "s", "duration_s");
  add("requests open", "", "mean_concurrency");
  add("failures", "", "failures");
  add("output tokens", "", "output_tokens");
  add("cached tokens", "", "cached_tokens");
  c.agreement = agreement_of(a, b);
  c.notes = notes_of(a, b);
  return c;
}

std::string to_text(const Comparison& c) {
  std::string out = fmt::format("A  {}\nB  {}\n\n{:<26}{:>12}{:>12}{:>10}  {}\n", c.a.name, c.b.name, "", "A",
                                "B", "B / A", "of single rounds");
  for (const ComparedValue& value : c.values) {
    const std::string name = value.unit.empty() ? value.name : fmt::format("{} ({})", value.name, value.unit);
    out += fmt::format("{:<26}{:>12}{:>12}{:>10}  {}", name, value_text(value.a), value_text(value.b),
                       ratio_text(value.ratio), rounds_text(value));
    out.resize(out.find_last_not_of(' ') + 1);
    out += '\n';
  }
  out += fmt::format("{:<26}{}\n", "outputs", outputs(c.agreement));
  for (const std::string& note : c.notes) out += "note: " + note + "\n";
  return out;
}

Json to_json(const Comparison& c) {
  Json values = Json::array();
  for (const ComparedValue& value : c.values) {
    Json one = {{"name", value.name},
                {"unit", value.unit},
                {"a", finite(value.a)},
                {"b", finite(value.b)},
                {"ratio", finite(value.ratio)}};
    if (value.rounds)
      one["ratio_of_rounds"] = {{"least", finite(value.rounds->least)},
                                {"median", finite(value.rounds->median)},
                                {"largest", finite(value.rounds->largest)}};
    values.push_back(std::move(one));
  }
  Json agreement = {{"compared", c.agreement.compared}, {"equal", c.agreement.equal}};
  if (c.agreement.why_not.empty()) {
    agreement["common_share"] = c.agreement.common_share;
  } else {
    agreement["why_not"] = c.agreement.why_not;
  }
  return {{"a", c.a.name}, {"b", c.b.name}, {"values", values}, {"outputs", agreement}, {"notes", c.notes}};
}

std::string to_html(const Comparison& c) {
  std::string out = page_begin("Two runs compared");
  out += "<h1>Two runs compared</h1>\n";
  for (const auto& [side, letter] : {std::pair{&c.a, "a"}, std::pair{&c.b, "b"}}) {
    const char upper = static_cast<char>(*letter - 'a' + 'A');
    out += fmt::format("<p class=\"lead\"><i class=\"{}\"></i>{}: {}, {} request{}, {} failed. {}</p>\n",
                       letter, upper, escape_html(side->name), side->requests, side->requests == 1 ? "" : "s",
                       side->failures, escape_html(side->when));
    // Sides of one run have one command.
    if (side == &c.b || c.a.command != c.b.command)
      out += "<pre><code>" + command_html(side->command) + "</code></pre>\n";
  }
  out += "<div class=\"cards\">\n";
  for (const ComparedValue& value : c.values) {
    if (value.name == "TTFT median" || value.name == "TPOT median" || value.name == "throughput")
      out += card(ratio_text(value.ratio), "", value.name + ", B / A");
  }
  const bool known = c.agreement.why_not.empty();
  out += card(known ? fmt::format("{}", c.agreement.equal) : "–",
              known ? fmt::format("of {}", c.agreement.compared) : "", "outputs are equal",
              known && c.agreement.equal < c.agreement.compared);
  out +=
      "</div>\n<h2>Figures</h2>\n<div class=\"panel scroll\"><table><tr><th>quantity</th>"
      "<th class=\"num\">A</th><th class=\"num\">B</th><th class=\"num\">B / A</th>"
      "<th class=\"num\">of single rounds: median, range</th></tr>\n";
  for (const ComparedValue& value : c.values) {
    const std::string name = value.unit.empty() ? value.name : fmt::format("{} ({})", value.name, value.unit);
    out += fmt::format(
        "<tr><td>{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td>"
        "<td class=\"num\">{}</td></tr>\n",
        escape_html(name), pretty(value.a), pretty(value.b), ratio_text(value.ratio), rounds_text(value));
  }
  out += "</table></div>\n<p>Outputs: " + escape_html(outputs(c.agreement)) + ".</p>\n";
  for (const std::string& note : c.notes) out += "<p>Note: " + escape_html(note) + ".</p>\n";
  const std::string legend = "<i class=\"a\"></i>A<i class=\"b\"></i>B; one in N requests is above the line";
  out += "<h2>Distributions</h2>\n<div class=\"two\">\n<div class=\"panel\"><h3>Time to first token</h3>" +
         tail({{&c.a.ttft_ms, "a"}, {&c.b.ttft_ms, "b"}}, legend, "Time to first token of both runs") +
         "</div>\n<div class=\"panel\"><h3>Time per output token</h3>" +
         tail({{&c.a.tpot_ms, "a"}, {&c.b.tpot_ms, "b"}}, legend, "Time per output token of both runs") +
         "</div>\n</div>\n";
  if (!c.a.by_batch.empty() || !c.b.by_batch.empty()) {
    out +=
        "<h2>Batch size</h2>\n<div class=\"panel scroll\"><p class=\"legend\"><i class=\"a\"></i>A<i "
        "class=\"b\"></i>B: median time per output token</p>" +
        batch_chart(c) + "</div>\n";
  }
  return out +
         page_end("Percentiles interpolate linearly between values. Failed requests are in no latency.");
}

}  // namespace vivace::bench
