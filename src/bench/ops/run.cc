#include "src/bench/ops/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/core/log.h"
#include "src/device/runtime.h"
#include "src/ops/linear/cublaslt.h"

namespace vivace::bench {

namespace {

using Json = nlohmann::ordered_json;

bool has(const OpWorkload& workload, const OpWorkload::Field& field) {
  return std::find(workload.fields.begin(), workload.fields.end(), field) != workload.fields.end();
}

const OpWorkload::Field* field_of(const OpWorkload& workload, std::string_view name) {
  const auto own = std::ranges::find(workload.fields, name, &OpWorkload::Field::name);
  return own == workload.fields.end() ? nullptr : &*own;
}

const OpSuite& suite_of(const OpWorkload& workload) {
  return *std::ranges::find(op_suites(), workload.suite, &OpSuite::name);
}

/// An attention case is its name.
bool named_by_lengths(const OpWorkload& workload) {
  return workload.suite.starts_with("attention");
}

/// "a, b, c", each once.
template <class Items, class Text>
std::string listed_once(const Items& items, Text&& text_of) {
  std::vector<std::string> seen;
  for (const auto& item : items) {
    std::string text = text_of(item);
    if (!text.empty() && std::ranges::find(seen, text) == seen.end()) seen.push_back(std::move(text));
  }
  return fmt::format("{}", fmt::join(seen, ", "));
}

/// Texts of cases, each once: "a, b" of one suite, "first: a, b; second: none" of several.
template <class TextsOf>
std::string listed_by_suite(const std::vector<OpWorkload>& cases, TextsOf&& texts_of) {
  std::vector<std::pair<std::string, std::vector<std::string>>> suites;
  for (const OpWorkload& workload : cases) {
    if (suites.empty() || suites.back().first != workload.suite) suites.push_back({workload.suite, {}});
    std::ranges::move(texts_of(workload), std::back_inserter(suites.back().second));
  }
  std::string text;
  for (const auto& [suite, texts] : suites) {
    const std::string list = listed_once(texts, std::identity());
    if (suites.size() > 1) text += fmt::format("{}{}: ", text.empty() ? "" : "; ", suite);
    text += list.empty() ? "none" : list;
  }
  return text;
}

/// The cases that a filter may change: of its name, where it has one.
Result<std::vector<OpWorkload>> cases_named(const std::vector<OpWorkload>& listed, const OpFilter& filter) {
  std::vector<OpWorkload> named;
  Status no_lengths;
  for (const OpWorkload& candidate : listed) {
    bool fits = filter.name.empty() || candidate.name == filter.name;
    if (!fits && named_by_lengths(candidate)) {
      if (no_lengths.ok()) no_lengths = parse_case_lengths(filter.name).status();
      fits = no_lengths.ok();
    }
    if (fits) named.push_back(candidate);
  }
  if (!named.empty()) return named;
  if (!no_lengths.ok() && std::ranges::all_of(listed, named_by_lengths)) return no_lengths;
  return not_found("there is no case called '{}', needs one of {}", filter.name,
                   listed_by_suite(listed, [](const OpWorkload& w) { return std::vector{w.name}; }));
}

/// Of cases that stand suite by suite, one at least.
bool several_suites(const std::vector<OpWorkload>& cases) {
  return cases.front().suite != cases.back().suite;
}

/// Why none of the cases (there is one at least) can be changed in this field.
Status no_such_field(const std::vector<OpWorkload>& cases, const OpWorkload::Field& field) {
  const auto text_of = [](const OpWorkload::Value& value) {
    return std::holds_alternative<std::string>(value) ? std::get<std::string>(value)
                                                      : std::string("a whole number");
  };
  const std::string values = listed_once(cases, [&](const OpWorkload& w) {
    const OpWorkload::Field* own = field_of(w, field.name);
    return own == nullptr ? std::string() : text_of(own->value);
  });
  if (!values.empty())
    return invalid_argument("{} is {}, needs {}", field.name, describe(field.value), values);
  const std::string fields = listed_by_suite(cases, [](const OpWorkload& w) {
    std::vector<std::string> names;
    for (const OpWorkload::Field& f : w.fields) names.push_back(f.name);
    return names;
  });
  if (several_suites(cases)) return not_found("there is no field {}, needs {}", field.name, fields);
  const std::string& suite = cases.front().suite;
  if (fields == "none")
    return not_found("there is no field {} in {}, whose cases have none", field.name, suite);
  return not_found("there is no field {} in {}, needs {}", field.name, suite, fields);
}

/// The listed case that shares most of the filter's fields, with the others in place of its own.
Result<OpWorkload> changed_case(const std::vector<OpWorkload>& listed, const OpFilter& filter) {
  VIVACE_TRY_ASSIGN(std::vector<OpWorkload> cases, cases_named(listed, filter));
  for (const OpWorkload::Field& field : filter.fields) {
    // Values change, but an operator is another kind of case.
    const auto lacks = [&](const OpWorkload& candidate) {
      const OpWorkload::Field* own = field_of(candidate, field.name);
      return own == nullptr || own->value.index() != field.value.index() ||
             (field.name == "op" && *own != field);
    };
    if (std::ranges::all_of(cases, lacks)) return no_such_field(cases, field);
    std::erase_if(cases, lacks);
  }
  if (several_suites(cases)) {
    return invalid_argument("cases of {} can be changed to it, needs --suite with one of them",
                            listed_once(cases, [](const OpWorkload& w) { return w.suite; }));
  }
  const auto shared = [&](const OpWorkload& candidate) {
    return std::ranges::count_if(filter.fields, [&](const auto& field) { return has(candidate, field); });
  };
  const OpWorkload& nearest = *std::ranges::max_element(cases, {}, shared);
  OpWorkload changed = nearest;
  if (named_by_lengths(nearest) && !filter.name.empty()) changed.name = filter.name;
  for (const OpWorkload::Field& field : filter.fields) {
    std::visit([&](const auto& value) { changed.with(field.name, value); }, field.value);
  }
  const OpSuite& suite = suite_of(changed);
  const auto renames = [&](const OpWorkload::Field& field) {
    return std::ranges::find(suite.name_fields, field.name) != suite.name_fields.end() &&
           !has(nearest, field);
  };
  if (std::ranges::any_of(filter.fields, renames)) changed.name = "own";
  if (suite.follow != nullptr) VIVACE_TRY(suite.follow(changed, nearest, filter.fields));
  VIVACE_TRY(suite.check(changed));
  return changed;
}

Status check_and_time(OpResult& result, PreparedOp& prepared, int64_t replays, const Stream& stream) {
  result.row = prepared.row();
  VIVACE_TRY(prepared.call(0, stream));
  VIVACE_TRY(device::synchronize(stream));
  VIVACE_TRY_ASSIGN(result.max_abs_error, prepared.max_abs_error(stream));
  if (result.max_abs_error && std::isnan(*result.max_abs_error)) {
    return error(Code::internal, "the output differs from the reference by NaN");
  }
  VIVACE_TRY_ASSIGN(result.timing, time_graph(prepared, replays, stream));
  const Floor floor = prepared.floor();
  result.floor_us = floor.us();
  if (!result.baseline) result.formula_us = prepared.formula_us();
  result.read_tb_s = floor.bytes / result.timing.median_us * 1e-6;
  result.tflop_s = floor.flops / result.timing.median_us * 1e-6;
  return {};
}

std::vector<std::string> libraries_of(const OpWorkload& workload) {
  const OpSuite& suite = suite_of(workload);
  return suite.libraries != nullptr ? suite.libraries(workload) : std::vector<std::string>();
}

}  // namespace

Result<std::vector<OpWorkload>> select_workloads(const std::vector<std::string>& suites,
                                                 const std::vector<OpFilter>& filters) {
  for (const std::string& name : suites) {
    if (std::ranges::find(op_suites(), name, &OpSuite::name) != op_suites().end()) continue;
    return not_found("suite is '{}', needs one of {}", name,
                     listed_once(op_suites(), [](const OpSuite& suite) { return std::string(suite.name); }));
  }
  std::vector<OpWorkload> listed, chosen;
  for (const OpSuite& suite : op_suites()) {
    if (!suites.empty() && std::ranges::find(suites, suite.name) == suites.end()) continue;
    std::ranges::move(suite.workloads(), std::back_inserter(listed));
  }
  if (filters.empty()) return listed;
  for (const OpFilter& filter : filters) {
    const size_t before = chosen.size();
    std::ranges::copy_if(listed, std::back_inserter(chosen),
                         [&](const OpWorkload& workload) { return filter.accepts(workload); });
    if (chosen.size() > before) continue;
    Result<OpWorkload> own = changed_case(listed, filter);
    if (!own.ok()) return own.status().at(fmt::format("case '{}'", filter.text));
    chosen.push_back(std::move(*own));
  }
  return chosen;
}

std::vector<OpResult> run_workloads(const std::vector<OpWorkload>& workloads, const OpRunOptions& options,
                                    const Stream& stream) {
  const auto of_cublaslt = [](const std::string& row) { return row.starts_with("cublas"); };
  const bool cublaslt = cublaslt_found();
  if (options.libraries && !cublaslt && std::ranges::any_of(workloads, [&](const OpWorkload& workload) {
        return std::ranges::any_of(libraries_of(workload), of_cublaslt);
      })) {
    log_line("cuBLASLt was not found: nothing is timed beside it; vivace doctor says how to get it");
  }
  std::vector<OpResult> results;
  // Times what `prepare` gives; false after an error of the device: nothing that follows would mean anything.
  const auto timed = [&](OpResult& result, auto&& prepare) {
    result.failure = guarded("bench ops", [&]() -> Status {
      VIVACE_TRY_ASSIGN(PreparedOp * prepared, prepare());
      return check_and_time(result, *prepared, options.replays, stream);
    });
    if (options.finished) options.finished(result);
    return result.failure.code() != Code::device_error;
  };
  for (size_t i = 0; i < workloads.size(); ++i) {
    const OpWorkload& workload = workloads[i];
    if (options.progress) options.progress(i, workloads.size(), workload);
    std::unique_ptr<PreparedOp> ours;
    OpResult& result = results.emplace_back();
    result.workload = workload;
    const bool on = timed(result, [&]() -> Result<PreparedOp*> {
      VIVACE_TRY_ASSIGN(ours, suite_of(workload).prepare(workload, stream));
      return ours.get();
    });
    if (!on) return results;
    if (!options.libraries || ours == nullptr) continue;
    for (const std::string& row : libraries_of(workload)) {
      if (of_cublaslt(row) && !cublaslt) continue;
      std::unique_ptr<PreparedOp> library;
      OpResult& beside = results.emplace_back();
      beside.workload = workload;
      beside.row = row;
      beside.baseline = true;
      const bool on = timed(beside, [&]() -> Result<PreparedOp*> {
        VIVACE_TRY_ASSIGN(library, ours->through_library(row, stream));
        return library.get();
      });
      if (!on) return results;
    }
  }
  return results;
}

Result<OpTargets> OpTargets::parse(std::string_view json_text) {
  auto all = std::make_shared<Json>(Json::parse(json_text, nullptr, false));
  if (!all->is_object()) return invalid_argument("the targets are not a JSON object of lists by suite");
  OpTargets targets;
  targets.suites_ = std::move(all);
  return targets;
}

void OpTargets::apply(OpResult& result) const {
  if (result.baseline) return;
  const auto list = suites_->find(result.workload.suite);
  if (list == suites_->end() || !list->is_array()) return;
  const bool exact = result.workload.text("mode") == "exact";
  const std::vector<OpWorkload::Field>& defaults = suite_of(result.workload).target_defaults;
  for (const Json& entry : *list) {
    if (!entry.is_object() || entry.value("case", "") != result.workload.name) continue;
    const bool agrees = std::ranges::all_of(result.workload.fields, [&](const OpWorkload::Field& field) {
      const auto own = entry.find(field.name);
      if (own == entry.end()) {
        const auto left_out = std::ranges::find(defaults, field.name, &OpWorkload::Field::name);
        return left_out == defaults.end() || *left_out == field;
      }
      if (const auto* number = std::get_if<int64_t>(&field.value)) return own->is_number() && *own == *number;
      return own->is_string() && *own == std::get<std::string>(field.value);
    });
    const auto target = entry.find(exact ? "exact_target_us" : "target_us");
    if (agrees && target != entry.end() && target->is_number()) result.target_us = target->get<double>();
  }
}

Json json_of(const std::vector<OpResult>& results) {
  Json rows = Json::array();
  for (const OpResult& result : results) {
    Json row = {{"suite", result.workload.suite}, {"case", result.workload.name}};
    for (const OpWorkload::Field& field : result.workload.fields) {
      std::visit([&](const auto& value) { row[field.name] = value; }, field.value);
    }
    if (!result.row.empty()) row["row"] = result.row;
    if (result.baseline) row["baseline"] = true;
    if (!result.failure.ok()) {
      row["failure"] = result.failure.message();
      rows.push_back(std::move(row));
      continue;
    }
    row["us"] = result.timing.median_us;
    row["p10_us"] = result.timing.p10_us;
    row["p90_us"] = result.timing.p90_us;
    row["floor_us"] = result.floor_us;
    row["share_of_floor"] = result.share_of_floor();
    row["tb_s"] = result.read_tb_s;
    row["tflop_s"] = result.tflop_s;
    if (result.max_abs_error) row["max_abs_error"] = *result.max_abs_error;
    if (result.formula_us) row["formula_us"] = *result.formula_us;
    if (result.target_us) row["target_us"] = *result.target_us;
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string OpTable::add(const OpResult& result) {
  std::string out;
  if (result.workload.suite != suite_) {
    out = end();
    if (!suite_.empty()) out += "\n";
    suite_ = result.workload.suite;
    out += fmt::format("{}\n{:<58} {:<22} {:>9} {:>9} {:>9} {:>9} {:>6} {:>6} {:>7} {:>9} {:>8} {:>6}\n",
                       suite_, "case", "row", "us", "p10", "p90", "floor", "share", "TB/s", "TFLOP/s",
                       "error", "target", "ratio");
  }
  const std::string name = result.workload.name + "  " + fields_text(result.workload, " ");
  if (!result.failure.ok()) {
    return out + fmt::format("{:<58} {:<22} failed: {}\n", name, result.row, result.failure.message());
  }
  const std::optional<double> reach = result.target_us ? result.target_us : result.formula_us;
  out += fmt::format(
      "{:<58} {:<22} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>5.0f}% {:>6.2f} {:>7.0f} "
      "{:>9} {:>8} {:>6}\n",
      name, result.row, result.timing.median_us, result.timing.p10_us, result.timing.p90_us, result.floor_us,
      100 * result.share_of_floor(), result.read_tb_s, result.tflop_s,
      result.max_abs_error ? fmt::format("{:.2e}", *result.max_abs_error) : "",
      reach ? fmt::format("{}{:.1f}", result.target_us ? "" : "~", *reach) : "",
      reach ? fmt::format("{:.2f}", result.timing.median_us / *reach) : "");
  if (reach) (result.target_us ? targets_ : formulas_).add(result.timing.median_us / *reach);
  return out;
}

std::string OpTable::end() {
  const std::string out = targets_.line("target") + formulas_.line("the targets' formula (~)");
  targets_ = formulas_ = {};
  return out;
}

void OpTable::Ratios::add(double ratio) {
  logs += std::log(ratio);
  worst = std::max(worst, ratio);
  ++count;
}

std::string OpTable::Ratios::line(std::string_view of) const {
  if (count == 0) return "";
  return fmt::format("geometric mean of us / {} over {} cases: {:.3f}, the largest {:.3f}\n", of, count,
                     std::exp(logs / static_cast<double>(count)), worst);
}

}  // namespace vivace::bench
