#include <algorithm>
#include <charconv>

#include "src/bench/report.h"

namespace vivace::bench {

namespace {

/// What stands between `begin` and the next quote; empty where there is none.
std::string_view quoted(std::string_view line, std::string_view begin) {
  const size_t at = line.find(begin);
  if (at == std::string_view::npos) return {};
  line.remove_prefix(at + begin.size());
  return line.substr(0, std::min(line.find('"'), line.size()));
}

}  // namespace

std::vector<RowUse> rows_of_metrics(std::string_view metrics) {
  std::vector<RowUse> rows;
  while (!metrics.empty()) {
    const size_t end = std::min(metrics.find('\n'), metrics.size());
    const std::string_view line = metrics.substr(0, end);
    metrics.remove_prefix(std::min(end + 1, metrics.size()));
    if (!line.starts_with("vivace_op_calls_total{")) continue;
    const std::string_view op = quoted(line, "op=\""), row = quoted(line, "row=\"");
    const size_t value = line.rfind("} ");
    int64_t calls = 0;
    if (op.empty() || row.empty() || value == std::string_view::npos) continue;
    const auto [stop, error] = std::from_chars(line.data() + value + 2, line.data() + line.size(), calls);
    if (error == std::errc()) rows.push_back({std::string(op), std::string(row), calls, {}, false});
  }
  return rows;
}

std::vector<RowUse> rows_since(const std::vector<RowUse>& now, const std::vector<RowUse>& before) {
  std::vector<RowUse> rows;
  for (RowUse use : now) {
    for (const RowUse& earlier : before) {
      if (earlier.op == use.op && earlier.row == use.row) use.calls -= earlier.calls;
    }
    if (use.calls > 0) rows.push_back(std::move(use));
  }
  return rows;
}

}  // namespace vivace::bench
