#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "apps/vivace/commands.h"
#include "apps/vivace/machine.h"
#include "apps/vivace/model_files.h"
#include "apps/vivace/output.h"
#include "src/cpu/simd.h"
#include "vivace/dispatch.h"

namespace vivace::cli {

namespace {

using Json = nlohmann::ordered_json;

int64_t rows_on(Device device) {
  int64_t rows = 0;
  for (const OpInfo& op : operators()) {
    for (const RowInfo& row : op.rows) rows += row.device == device ? 1 : 0;
  }
  return rows;
}

std::vector<std::string> advice(const Machine& machine, const Gpus& gpus, int64_t cuda_rows) {
  std::vector<std::string> lines;
  if (cuda_rows == 0 && gpus.count > 0) {
    lines.push_back(
        fmt::format("{} GPU{} found, but this build has no CUDA rows: everything runs on the processor",
                    gpus.count, gpus.count == 1 ? " was" : "s were"));
  }
#if defined(__x86_64__)
  if (cpu::isa() == cpu::Isa::baseline) {
    lines.push_back("this processor has no AVX2: the CPU rows use their slower baseline");
  }
#endif
  if (machine.cores == 1) lines.push_back("one core only: decoding and everything else share it");
  if (machine.available_bytes > 0 && machine.available_bytes < int64_t{1} << 30) {
    lines.push_back(fmt::format("{} MiB of memory are available: a small --kv-memory such as 64M helps",
                                machine.available_bytes >> 20));
  }
  return lines;
}

std::string gpu_text(const Gpus& gpus) {
  if (!gpus.problem.empty()) return "none: " + gpus.problem;
  return fmt::format("{} (driver for CUDA {})", gpus.count, gpus.version);
}

}  // namespace

int run(const DoctorArgs& args) {
  const Machine machine = this_machine();
  const Gpus gpus = find_gpus();
  const int64_t cpu_rows = rows_on(Device::cpu), cuda_rows = rows_on(Device::cuda);
  const std::vector<std::string> lines = advice(machine, gpus, cuda_rows);
  std::string model;
  int64_t mapped = 0;
  if (!args.model.empty()) {
    const Result<ModelFiles> files = open_model_files(args.model);
    if (!files.ok()) return fail(files.status());
    model = files->checkpoint->summary();
    mapped = files->checkpoint->mapped_bytes();
  }
  if (args.json) {
    Json json = {{"version", VIVACE_VERSION},
                 {"compiler", __VERSION__},
                 {"processor", machine.processor},
                 {"isa", machine.isa},
                 {"system", machine.system},
                 {"cores", machine.cores},
                 {"memory_bytes", machine.memory_bytes},
                 {"available_bytes", machine.available_bytes},
                 {"gpus", gpus.count},
                 {"gpu_driver", gpus.driver},
                 {"gpu_problem", gpus.problem},
                 {"cpu_rows", cpu_rows},
                 {"cuda_rows", cuda_rows},
                 {"advice", lines}};
    if (!model.empty()) json["model"] = {{"path", args.model}, {"summary", model}, {"mapped_bytes", mapped}};
    print_json(json);
    return 0;
  }
  std::string out = fmt::format("vivace      {} (compiled by g++ {})\n", VIVACE_VERSION, __VERSION__);
  out += fmt::format("system      {}\nprocessor   {}\n", machine.system, machine.processor);
  out += fmt::format("cores       {} that this process may use\n", machine.cores);
  out += fmt::format("vectors     {}\n", machine.isa);
  out += fmt::format("memory      {:.1f} GiB, {:.1f} available\n",
                     static_cast<double>(machine.memory_bytes) / 0x1p30,
                     static_cast<double>(machine.available_bytes) / 0x1p30);
  out += fmt::format("GPUs        {}\n", gpu_text(gpus));
  out += fmt::format("rows        {} for the cpu, {}\n", cpu_rows,
                     cuda_rows > 0 ? fmt::format("{} for cuda", cuda_rows) : "none for cuda in this build");
  if (!model.empty()) {
    out += fmt::format("model       {}, {:.1f} MiB mapped\n", model, static_cast<double>(mapped) / 0x1p20);
  }
  for (const std::string& line : lines) out += "advice      " + line + "\n";
  write_out(out);
  return 0;
}

}  // namespace vivace::cli
