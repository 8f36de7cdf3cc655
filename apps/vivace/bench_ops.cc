#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "apps/vivace/commands.h"
#include "apps/vivace/output.h"
#include "src/bench/ops/run.h"
#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/device/runtime.h"
#include "src/engine/compute.h"
#include "src/model/mapped_file.h"

namespace vivace::cli {

namespace {

std::string listing(const std::vector<bench::OpWorkload>& workloads) {
  std::string out;
  for (const bench::OpWorkload& workload : workloads) {
    out += fmt::format("{:<18} {}{}{}\n", workload.suite, workload.name, workload.fields.empty() ? "" : ",",
                       bench::fields_text(workload, ","));
  }
  return out;
}

Result<std::string> read_text(const std::string& path) {
  VIVACE_TRY_ASSIGN(const auto file, model::MappedFile::open(path));
  const auto bytes = file->bytes();
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Status run_bench(const BenchOpsArgs& args) {
  if (args.list) {
    write_out(listing(args.workloads));
    return {};
  }
  bench::OpRunOptions options{
      .replays = args.replays, .libraries = args.baselines, .progress = {}, .finished = {}};
  std::optional<bench::OpTargets> targets;
  if (!args.targets_file.empty()) {
    const Result<std::string> text = read_text(args.targets_file);
    if (!text.ok()) return text.status().at("--targets");
    auto parsed = bench::OpTargets::parse(*text);
    if (!parsed.ok()) return parsed.status().at("--targets " + args.targets_file);
    targets = std::move(*parsed);
  }
  if (!args.json_file.empty() && args.json_file != "-")
    VIVACE_TRY(check_writable(args.json_file).at("--json"));
  VIVACE_TRY_ASSIGN(const engine::DeviceName name, engine::parse_device(args.device));
  auto gpu = device::OwnedStream::create(name.ordinal);
  if (!gpu.ok()) return gpu.status().at(fmt::format("--device is '{}'", args.device));
  Dispatch dispatch;
  if (!args.prefer.empty()) VIVACE_TRY(dispatch.prefer(args.prefer));
  Stream stream = (*gpu)->stream();
  stream.dispatch = &dispatch;
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
  const std::vector<bench::OpResult> results = bench::run_workloads(args.workloads, options, stream);
  line.finish();
  if (table_shown) {
    write_out(table.end());
    if (!args.json_file.empty()) VIVACE_TRY(write_file(args.json_file, json_text(bench::json_of(results))));
  } else {
    print_json(bench::json_of(results));
  }
  for (const bench::OpResult& result : results) {
    if (result.baseline && result.failure.code() == Code::unsupported)
      continue;  // the library cannot do this case
    if (!result.failure.ok()) return result.failure.at(result.workload.suite + " " + result.workload.name);
  }
  return {};
}

}  // namespace

int run(const BenchOpsArgs& args) {
  say_when_interrupted();
  const Status status = guarded("bench ops", [&] { return run_bench(args); });
  return status.ok() ? 0 : fail(status);
}

}  // namespace vivace::cli
