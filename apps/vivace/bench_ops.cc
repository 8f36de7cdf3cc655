#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "apps/vivace/commands.h"
#include "apps/vivace/output.h"
#include "src/bench/ops/run.h"
#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/engine/compute.h"
#include "src/model/mapped_file.h"

namespace vivace::cli {

namespace {

std::string listing(const std::vector<bench::OpWorkload>& workloads) {
  std::string out;
  for (const bench::OpWorkload& workload : workloads) {
    out += fmt::format("{:<18} {}", workload.suite, workload.name);
    for (const auto& field : workload.fields) {
      std::visit([&](const auto& value) { out += fmt::format(",{}={}", field.name, value); }, field.value);
    }
    out += "\n";
  }
  return out;
}

Result<std::string> read_text(const std::string& path) {
  VIVACE_TRY_ASSIGN(const auto file, model::MappedFile::open(path));
  const auto bytes = file->bytes();
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Status run_bench(const BenchOpsArgs& args) {
  bench::OpRunOptions options{.suites = args.suites, .filters = {}, .replays = args.replays,
                               .libraries = args.baselines, .progress = {}, .finished = {}};
  for (const std::string& text : args.cases) {
    Result<bench::OpFilter> filter = bench::OpFilter::parse(text);
    if (!filter.ok()) return filter.status().at("--case");
    options.filters.push_back(std::move(*filter));
  }
  VIVACE_TRY_ASSIGN(const std::vector<bench::OpWorkload> workloads, bench::select_workloads(options));
  if (args.list) {
    write_out(listing(workloads));
    return {};
  }
  std::optional<bench::OpTargets> targets;
  if (!args.targets_file.empty()) {
    VIVACE_TRY_ASSIGN(const std::string text, read_text(args.targets_file));
    VIVACE_TRY_ASSIGN(targets, bench::OpTargets::parse(text));
  }
  if (!args.json_file.empty() && args.json_file != "-") VIVACE_TRY(check_writable(args.json_file));
  VIVACE_TRY_ASSIGN(const auto compute, engine::Compute::create(args.device, 0));
  if (compute->device().device != Device::cuda) {
    return unsupported("--device is '{}', needs cuda: these suites time a GPU (vivace-op-bench times CPU rows)", args.device);
  }
  Dispatch dispatch;
  if (!args.prefer.empty()) VIVACE_TRY(dispatch.prefer(args.prefer));
  ProgressLine line;
  options.progress = [&](size_t done, size_t total, const bench::OpWorkload& next) {
    line.update(static_cast<double>(done) / static_cast<double>(total),
                fmt::format("{} of {}: {} {}", done, total, next.suite, next.name));
  };
  const bool table_shown = args.json_file != "-";
  bench::OpTable table;
  options.finished = [&](bench::OpResult& result) {
    if (targets) targets->apply(result);
    line.finish();
    if (table_shown) write_out(table.add(result));
  };
  const std::vector<bench::OpResult> results = bench::run_workloads(workloads, options, compute->stream(&dispatch));
  line.finish();
  if (table_shown) {
    write_out(table.end());
    if (!args.json_file.empty()) VIVACE_TRY(write_file(args.json_file, json_text(bench::json_of(results))));
  } else {
    print_json(bench::json_of(results));
  }
  for (const bench::OpResult& result : results) {
    if (result.library && result.failure.code() == Code::unsupported) continue;  // the library cannot do this case
    if (!result.failure.ok()) return result.failure.at(result.workload.suite + " " + result.workload.name);
  }
  return {};
}

}  // namespace

int run(const BenchOpsArgs& args) {
  const Status status = guarded("bench ops", [&] { return run_bench(args); });
  return status.ok() ? 0 : fail(status);
}

}  // namespace vivace::cli
