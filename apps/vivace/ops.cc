#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

#include "apps/vivace/commands.h"
#include "apps/vivace/explain.h"
#include "apps/vivace/output.h"
#include "src/bench/report.h"

namespace vivace::cli {

namespace {

using Json = nlohmann::ordered_json;

std::string needs_text(const RowInfo& row) {
  std::string text;
  for (const Need& need : row.needs) text += (text.empty() ? "" : ", ") + describe(need, nullptr);
  return text;
}

Json ops_json() {
  Json all = Json::array();
  for (const OpInfo& op : operators()) {
    Json rows = Json::array();
    for (const RowInfo& row : op.rows) {
      Json needs = Json::array();
      for (const Need& need : row.needs) needs.push_back(describe(need, nullptr));
      rows.push_back(
          {{"row", row.name}, {"device", name_of(row.device)}, {"needs", needs}, {"summary", row.summary}});
    }
    all.push_back({{"op", op.name}, {"summary", op.summary}, {"rows", rows}});
  }
  return all;
}

std::string ops_text() {
  std::string out;
  for (const OpInfo& op : operators()) {
    out += fmt::format("{}{}: {}\n", out.empty() ? "" : "\n", op.name, op.summary);
    for (const RowInfo& row : op.rows) {
      const std::string needs = needs_text(row);
      out += fmt::format("  {:<24} {:<5} {}{}\n", row.name, name_of(row.device), row.summary,
                         needs.empty() ? "" : "; " + needs);
    }
  }
  return out;
}

std::string ops_markdown() {
  std::string out =
      "# Operators and their rows\n\n"
      "Written by `vivace ops --markdown > docs/generated/ops.md`; a test notices a stale file. Rows are in "
      "order of\n"
      "preference: the first whose needs a call meets runs.\n";
  for (const OpInfo& op : operators()) {
    out += fmt::format(
        "\n## {}\n\n{}. Contract: `include/vivace/{}.h`.\n\n| row | device | how | needs "
        "|\n|---|---|---|---|\n",
        op.name, op.summary, op.name);
    for (const RowInfo& row : op.rows) {
      const std::string needs = needs_text(row);
      out += fmt::format("| `{}` | {} | {} | {} |\n", row.name, name_of(row.device), row.summary,
                         needs.empty() ? "nothing" : needs);
    }
  }
  return out;
}

Json explain_json(const std::vector<model::OpUse>& uses) {
  Json all = Json::array();
  for (const model::OpUse& use : uses) {
    Json refused = Json::array();
    for (const Refusal& r : use.choice.refused) refused.push_back({{"row", r.row}, {"reason", r.reason}});
    all.push_back({{"layer", use.layer},
                   {"op", use.op},
                   {"row", use.choice.row.empty() ? Json(nullptr) : Json(use.choice.row)},
                   {"phase", model::name_of(use.phase)},
                   {"batch", use.batch},
                   {"note", use.note},
                   {"refused", refused}});
  }
  return all;
}

/// The calls of one layer, or of several in a row that agree.
struct LayerGroup {
  int64_t first, last;
  std::vector<std::string> lines;
};

std::string use_line(const model::OpUse& use) {
  std::string why = use.note;
  const std::string refused = bench::refusals_text(use.choice.refused);
  why += (why.empty() || refused.empty() ? "" : "; ") + refused;
  return fmt::format("  {:<20} {:<22} {}", use.op, use.choice.row.empty() ? "no row fits" : use.choice.row,
                     why);
}

/// The calls of one step, layer by layer.
std::string step_text(std::span<const model::OpUse> uses) {
  std::vector<LayerGroup> groups;
  for (const model::OpUse& use : uses) {
    if (groups.empty() || groups.back().last != use.layer) groups.push_back({use.layer, use.layer, {}});
    std::vector<std::string>& lines = groups.back().lines;
    std::string line = use_line(use);
    // Several calls of one operator in a layer that agree are one line: q, k and v projections, for example.
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(std::move(line));
  }
  std::string out;
  for (size_t i = 0; i < groups.size();) {
    size_t end = i + 1;
    while (end < groups.size() && groups[end].lines == groups[i].lines && groups[i].first >= 0 &&
           groups[end].first == groups[end - 1].first + 1) {
      ++end;
    }
    const int64_t first = groups[i].first, last = groups[end - 1].first;
    if (first < 0) {
      out += "\noutside the layers\n";
    } else if (first == last) {
      out += fmt::format("\nlayer {}\n", first);
    } else {
      out += fmt::format("\nlayers {}-{}\n", first, last);
    }
    for (const std::string& line : groups[i].lines)
      out += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    i = end;
  }
  return out;
}

std::string explain_text(const std::vector<model::OpUse>& uses) {
  const auto prefill = std::find_if(
      uses.begin(), uses.end(), [](const model::OpUse& use) { return use.phase == model::Phase::prefill; });
  const auto title = [](const char* kind, int64_t count, const char* unit) {
    return fmt::format("one {} of {} {}{}\n", kind, count, unit, count == 1 ? "" : "s");
  };
  return title("decode step", uses.front().batch, "request") + step_text({uses.begin(), prefill}) + "\n\n" +
         title("prompt chunk", prefill->batch, "token") + step_text({prefill, uses.end()});
}

}  // namespace

int run(const OpsArgs& args) {
  if (args.json) {
    print_json(ops_json());
  } else {
    write_out(args.markdown ? ops_markdown() : ops_text());
  }
  return 0;
}

int run(const OpsExplainArgs& args) {
  const Result<std::vector<model::OpUse>> uses = explain_model(args.engine, {args.batch});
  if (!uses.ok()) return fail(uses.status());
  if (args.json) {
    print_json(explain_json(*uses));
  } else {
    write_out(explain_text(*uses));
  }
  return 0;
}

}  // namespace vivace::cli
