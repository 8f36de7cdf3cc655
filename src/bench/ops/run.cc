#include "src/bench/ops/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
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

/// The listed case that shares most of the filter's fields, with the others in place of its own; absent when no case of
/// that name, and of that operator where a suite has several, has fields so called.
std::optional<OpWorkload> changed_case(const std::vector<OpWorkload>& listed, const OpFilter& filter) {
  std::optional<OpWorkload> nearest;
  int64_t most_shared = -1;
  for (const OpWorkload& candidate : listed) {
    // An attention case is its name.
    const bool named = filter.name.empty() || candidate.name == filter.name ||
                       (candidate.suite.starts_with("attention") && parse_lengths(filter.name).ok());
    const bool known = std::all_of(filter.fields.begin(), filter.fields.end(), [&](const OpWorkload::Field& field) {
      return std::any_of(candidate.fields.begin(), candidate.fields.end(), [&](const OpWorkload::Field& own) {
        return own.name == field.name && own.value.index() == field.value.index() && (own.name != "op" || own == field);
      });
    });
    const int64_t shared = std::count_if(filter.fields.begin(), filter.fields.end(),
                                         [&](const OpWorkload::Field& field) { return has(candidate, field); });
    if (!named || !known || shared <= most_shared) continue;
    most_shared = shared;
    nearest = candidate;
  }
  if (!nearest) return std::nullopt;
  if (!filter.name.empty()) nearest->name = filter.name;
  for (const OpWorkload::Field& field : filter.fields) {
    std::visit([&](const auto& value) { nearest->with(field.name, value); }, field.value);
  }
  return nearest;
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
  result.read_tb_s = floor.bytes / result.timing.median_us * 1e-6;
  result.tflop_s = floor.flops / result.timing.median_us * 1e-6;
  return {};
}

const OpSuite& suite_of(const OpWorkload& workload) {
  return *std::ranges::find(op_suites(), workload.suite, &OpSuite::name);
}

std::vector<std::string> libraries_of(const OpWorkload& workload) {
  const OpSuite& suite = suite_of(workload);
  return suite.libraries != nullptr ? suite.libraries(workload) : std::vector<std::string>();
}

std::string fields_text(const OpWorkload& workload) {
  std::string text;
  for (const OpWorkload::Field& field : workload.fields) {
    const auto* number = std::get_if<int64_t>(&field.value);
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", field.name,
                        number != nullptr ? std::to_string(*number) : std::get<std::string>(field.value));
  }
  return text;
}

}  // namespace

Result<std::vector<OpWorkload>> select_workloads(const OpRunOptions& options) {
  std::vector<OpWorkload> listed, chosen;
  std::string names;
  for (const OpSuite& suite : op_suites()) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", suite.name);
    if (!options.suites.empty() &&
        std::find(options.suites.begin(), options.suites.end(), suite.name) == options.suites.end()) {
      continue;
    }
    const std::vector<OpWorkload> own = suite.workloads();
    listed.insert(listed.end(), own.begin(), own.end());
  }
  for (const std::string& name : options.suites) {
    const auto is_it = [&](const OpSuite& suite) { return suite.name == name; };
    if (std::none_of(op_suites().begin(), op_suites().end(), is_it)) {
      return not_found("suite '{}' does not exist; there are {}", name, names);
    }
  }
  if (options.filters.empty()) return listed;
  for (const OpFilter& filter : options.filters) {
    const size_t before = chosen.size();
    std::copy_if(listed.begin(), listed.end(), std::back_inserter(chosen),
                 [&](const OpWorkload& workload) { return filter.accepts(workload); });
    if (chosen.size() > before) continue;
    if (std::optional<OpWorkload> own = changed_case(listed, filter)) {
      chosen.push_back(std::move(*own));
      continue;
    }
    return invalid_argument("case '{}' fits no case of the suites, and changes none: names and fields are those of the JSON rows",
                            filter.name);
  }
  return chosen;
}

std::vector<OpResult> run_workloads(const std::vector<OpWorkload>& workloads, const OpRunOptions& options,
                                    const Stream& stream) {
  bool libraries = options.libraries && std::ranges::any_of(workloads, [](const OpWorkload& workload) {
    return !libraries_of(workload).empty();
  });
  if (libraries && !cublaslt_found()) {
    log_line("cuBLASLt was not found: nothing is timed beside it; vivace doctor says how to get it");
    libraries = false;
  }
  std::vector<OpResult> results;
  // Times what `prepare` gives; false after an error of the device: nothing that follows would mean anything.
  const auto timed = [&](OpResult& result, auto&& prepare) {
    result.failure = guarded("bench ops", [&]() -> Status {
      VIVACE_TRY_ASSIGN(PreparedOp* prepared, prepare());
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
    if (!libraries || ours == nullptr) continue;
    for (const std::string& row : libraries_of(workload)) {
      std::unique_ptr<PreparedOp> library;
      OpResult& beside = results.emplace_back();
      beside.workload = workload;
      beside.row = row;
      beside.library = true;
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
  if (result.library) return;
  const auto list = suites_->find(result.workload.suite);
  if (list == suites_->end() || !list->is_array()) return;
  const bool exact = result.workload.text("mode") == "exact";
  for (const Json& entry : *list) {
    if (!entry.is_object() || entry.value("case", "") != result.workload.name) continue;
    const bool agrees = std::all_of(
        result.workload.fields.begin(), result.workload.fields.end(), [&](const OpWorkload::Field& field) {
          const auto own = entry.find(field.name);
          if (own == entry.end()) return true;
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
    if (result.library) row["library"] = true;
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
    out += fmt::format("{}\n{:<58} {:<22} {:>9} {:>9} {:>9} {:>9} {:>6} {:>6} {:>7} {:>9} {:>8} {:>6}\n", suite_,
                       "case", "row", "us", "p10", "p90", "floor", "share", "TB/s", "TFLOP/s", "error", "target",
                       "ratio");
  }
  const std::string name = result.workload.name + "  " + fields_text(result.workload);
  if (!result.failure.ok()) {
    return out + fmt::format("{:<58} {:<22} failed: {}\n", name, result.row, result.failure.message());
  }
  out += fmt::format("{:<58} {:<22} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>5.0f}% {:>6.2f} {:>7.0f} "
                     "{:>9} {:>8} {:>6}\n",
                     name, result.row, result.timing.median_us, result.timing.p10_us, result.timing.p90_us,
                     result.floor_us, 100 * result.share_of_floor(), result.read_tb_s, result.tflop_s,
                     result.max_abs_error ? fmt::format("{:.2e}", *result.max_abs_error) : "",
                     result.target_us ? fmt::format("{:.1f}", *result.target_us) : "",
                     result.target_us ? fmt::format("{:.2f}", result.timing.median_us / *result.target_us) : "");
  if (result.target_us) {
    logs_ += std::log(result.timing.median_us / *result.target_us);
    ++targets_;
  }
  return out;
}

std::string OpTable::end() {
  std::string out;
  if (targets_ > 0) {
    out = fmt::format("geometric mean of us / target over {} cases: {:.3f}\n", targets_,
                      std::exp(logs_ / static_cast<double>(targets_)));
  }
  logs_ = 0;
  targets_ = 0;
  return out;
}

}  // namespace vivace::bench
