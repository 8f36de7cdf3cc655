#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "src/bench/report.h"

namespace vivace::bench {

namespace {

std::string ms(double value) {
  if (!std::isfinite(value)) return "-";
  return value < 10 ? fmt::format("{:.2f}", value) : fmt::format("{:.1f}", value);
}

std::string why(const RowUse& use) {
  if (!use.explained) return "-";
  std::string text = refusals_text(use.refused);
  return text.empty() ? "first in the table" : text;
}

}  // namespace

std::string refusals_text(const std::vector<Refusal>& refused) {
  std::string text;
  for (auto first = refused.begin(); first != refused.end(); ++first) {
    const auto alike = [&](const Refusal& other) { return other.reason == first->reason; };
    if (std::find_if(refused.begin(), first, alike) != first) continue;
    std::string rows;
    for (auto r = first; r != refused.end(); ++r)
      if (alike(*r)) rows += (rows.empty() ? "" : ", ") + r->row;
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", rows, first->reason);
  }
  return text;
}

std::string rows_text(const std::vector<RowUse>& rows) {
  size_t op_width = 8, row_width = 3;
  for (const RowUse& use : rows) {
    op_width = std::max(op_width, use.op.size());
    row_width = std::max(row_width, use.row.size());
  }
  std::string out = fmt::format("{:<{}}  {:<{}}  {:>10}  {}\n", "operator", op_width, "row", row_width,
                                "calls", "why not a row before it");
  for (const RowUse& use : rows) {
    out += fmt::format("{:<{}}  {:<{}}  {:>10}  {}\n", use.op, op_width, use.row, row_width, use.calls,
                       why(use));
  }
  return out;
}

std::vector<std::string> notes_of(const Metrics& m) {
  std::vector<std::string> notes;
  if (m.short_outputs > 0) {
    notes.push_back(fmt::format("{} of {} outputs are shorter than was asked: the end token is not ignored",
                                m.short_outputs, m.requests - m.failures));
  }
  if (m.usage_missing > 0) {
    notes.push_back(
        fmt::format("{} of {} streams had no usage: a chunk counts as a token, prompts as planned",
                    m.usage_missing, m.requests - m.failures));
  }
  return notes;
}

std::string to_text(const Report& report) {
  const Metrics& m = report.metrics;
  std::string out = fmt::format("{:<26}{:>10}{:>10}{:>10}{:>10}{:>10}\n", "latency (ms)", "median", "P90",
                                "P99", "P99.9", "largest");
  const auto line = [&](const char* name, const Distribution& d) {
    out += fmt::format("{:<26}{:>10}{:>10}{:>10}{:>10}{:>10}\n", name, ms(d.median), ms(d.p90), ms(d.p99),
                       ms(d.p999), ms(d.max));
  };
  line("TTFT  first token", m.ttft_ms);
  line("TPOT  per output token", m.tpot_ms);
  line("ITL   between tokens", m.itl_ms);
  out += fmt::format("\n{:<26}{:>10.1f} tok/s generated, {:.1f} tok/s with prompts\n", "throughput",
                     m.throughput_tok_s, m.total_tok_s);
  if (report.slo.given()) {
    out += fmt::format("{:<26}{:>10.2f} requests/s within {}: {} of {}\n", "goodput", m.goodput_s,
                       report.slo.text(), m.good, m.requests);
  }
  out += fmt::format("{:<26}{:>10} of which {} failed", "requests", m.requests, m.failures);
  for (size_t i = 0; i < m.failures_by_kind.size(); ++i) {
    const auto& [kind, count] = m.failures_by_kind[i];
    out += fmt::format("{}{}: {}", i == 0 ? " (" : ", ", kind, count);
  }
  out += m.failures_by_kind.empty() ? "\n" : ")\n";
  out += fmt::format("{:<26}{:>10} in, {} out, {} from the prefix cache\n", "tokens", m.prompt_tokens,
                     m.output_tokens, m.cached_tokens);
  out += fmt::format("{:<26}{:>10.2f} s, {:.1f} requests open on average\n", "duration", m.duration_s,
                     m.mean_concurrency);
  if (const double touched = report.touched_experts(); std::isfinite(touched)) {
    out += fmt::format("{:<26}{:>10.1f} of {}, touched in a layer by a step of decodes alone, mean\n",
                       "experts", touched, report.experts);
  }
  if (report.url.empty()) {
    out += fmt::format("{:<26}{:>10.1f} MiB, of which the model file maps {:.1f}\n", "peak memory",
                       static_cast<double>(report.peak_memory_bytes) / 0x1p20,
                       static_cast<double>(report.mapped_bytes) / 0x1p20);
  }
  for (const std::string& note : notes_of(m)) out += "note: " + note + "\n";
  return report.rows.empty() ? out : out + "\n" + rows_text(report.rows);
}

}  // namespace vivace::bench
