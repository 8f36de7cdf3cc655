#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "apps/vivace/commands.h"
#include "apps/vivace/machine.h"
#include "apps/vivace/model_files.h"
#include "apps/vivace/output.h"
#include "src/cpu/simd.h"
#include "src/device/build_info.h"
#include "src/device/runtime.h"
#include "src/ops/linear/cublaslt.h"
#include "vivace/dispatch.h"

namespace vivace::cli {

namespace {

using Json = nlohmann::ordered_json;

/// Rows whose name begins so.
int64_t rows_of(std::string_view backend) {
  int64_t rows = 0;
  for (const OpInfo& op : operators()) {
    rows += std::ranges::count_if(op.rows, [&](const RowInfo& row) { return row.name.starts_with(backend); });
  }
  return rows;
}

/// What of a GPU is here, and what the program has for it.
struct Cuda {
  device::BuildInfo build = device::build_info();
  Gpus driver = find_gpus();
  std::vector<device::DeviceInfo> devices;
  device::LibraryProbe cublaslt = device::probe_library(
      build.cuda ? cublaslt_names() : std::vector<std::string>{"libcublasLt.so.13", "libcublasLt.so.12"});
  device::LibraryProbe nccl = device::probe_library({"libnccl.so.2", "libnccl.so"});
  int64_t portable_rows = rows_of("cuda."), sm90_rows = rows_of("sm90.");

  Cuda() {
    for (int i = 0; i < device::device_count(); ++i) {
      if (const auto info = device::device_info(i); info.ok()) devices.push_back(**info);
    }
  }
  int64_t rows() const { return portable_rows + sm90_rows; }
};

std::vector<std::string> gpu_advice(const Cuda& cuda) {
  std::vector<std::string> lines;
  if (!cuda.build.cuda && cuda.driver.count > 0) {
    lines.push_back(
        fmt::format("{} GPU{} found, but this build has no CUDA rows ({}): everything runs on the processor; "
                    "configure with VIVACE_CUDA=AUTO where nvcc is installed (the CUDA toolkit)",
                    cuda.driver.count, cuda.driver.count == 1 ? " was" : "s were", cuda.build.problem));
  }
  if (!cuda.build.cuda) return lines;
  if (cuda.devices.empty()) {
    lines.push_back(cuda.driver.driver ? "the NVIDIA driver is here and shows no usable GPU: see nvidia-smi; "
                                         "in a container, start it with "
                                         "access to the GPU (docker run --gpus all)"
                                       : "no NVIDIA driver: the GPU rows of this build cannot run here; on a "
                                         "machine with a GPU, install "
                                         "its driver");
    return lines;
  }
  for (const device::DeviceInfo& gpu : cuda.devices) {
    if (gpu.major < 8) {
      lines.push_back(fmt::format("{} has compute capability {}.{}: the CUDA rows need 8.0", gpu.name,
                                  gpu.major, gpu.minor));
    } else if (!gpu.sm90() && cuda.sm90_rows > 0) {
      lines.push_back(
          fmt::format("{} has compute capability {}.{}: it runs the cuda.* rows, the sm90.* rows need 9.0",
                      gpu.name, gpu.major, gpu.minor));
    }
  }
  if (cuda.cublaslt.found.empty()) {
    lines.push_back(
        "cuBLASLt was not found: linear runs its own slower product; install the CUDA toolkit's libcublas "
        "(apt install "
        "libcublas-13-0, or pip install nvidia-cublas and add its folder to LD_LIBRARY_PATH)");
  }
  return lines;
}

std::vector<std::string> advice(const Machine& machine, const Cuda& cuda) {
  std::vector<std::string> lines = gpu_advice(cuda);
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

std::string vectors_text(const Machine& machine) {
#if defined(__x86_64__)
  if (cpu::isa() == cpu::Isa::avx2 && __builtin_cpu_supports("avx512f")) {
    return machine.isa + ", the widest in this build; the processor's AVX-512 is not used";
  }
#endif
  return machine.isa;
}

std::string library_text(const device::LibraryProbe& probe) {
  return probe.found.empty() ? "not found" : probe.found;
}

std::string gpu_text(const Cuda& cuda) {
  const Gpus& driver = cuda.driver;
  std::string out = fmt::format("GPUs        {}\n",
                                driver.problem.empty()
                                    ? fmt::format("{} (driver for CUDA {})", driver.count, driver.version)
                                    : "none: " + driver.problem);
  for (size_t i = 0; i < cuda.devices.size(); ++i) {
    const device::DeviceInfo& gpu = cuda.devices[i];
    out += fmt::format("cuda:{:<7}{}, compute capability {}.{}, {} SMs, {:.1f} GiB, L2 {} MiB\n", i, gpu.name,
                       gpu.major, gpu.minor, gpu.sms, static_cast<double>(gpu.memory_bytes) / 0x1p30,
                       gpu.l2_bytes >> 20);
  }
  if (cuda.build.cuda) {
    const char* ptx =
        cuda.build.code.find("compute_") == std::string::npos ? "" : " (compute is PTX, for other GPUs)";
    out += fmt::format("CUDA        runtime {} in this build, kernels for {}{}\n", cuda.build.runtime,
                       cuda.build.code, ptx);
  } else {
    out += fmt::format("CUDA        not in this build: {}\n", cuda.build.problem);
  }
  out += fmt::format("libraries   cuBLASLt: {}; NCCL: {}\n", library_text(cuda.cublaslt),
                     library_text(cuda.nccl));
  return out;
}

Json gpu_json(const Cuda& cuda) {
  const auto library = [](const device::LibraryProbe& probe) {
    return Json{{"found", probe.found.empty() ? Json(nullptr) : Json(probe.found)},
                {"problem", probe.problem}};
  };
  Json devices = Json::array();
  for (const device::DeviceInfo& gpu : cuda.devices) {
    devices.push_back({{"name", gpu.name},
                       {"compute_capability", fmt::format("{}.{}", gpu.major, gpu.minor)},
                       {"sms", gpu.sms},
                       {"memory_bytes", gpu.memory_bytes},
                       {"l2_bytes", gpu.l2_bytes},
                       {"smem_per_block", gpu.smem_per_block}});
  }
  return {{"compiled", cuda.build.cuda},         {"problem", cuda.build.problem},
          {"runtime", cuda.build.runtime},       {"code", cuda.build.code},
          {"driver", cuda.build.driver},         {"devices", devices},
          {"cublaslt", library(cuda.cublaslt)},  {"nccl", library(cuda.nccl)},
          {"portable_rows", cuda.portable_rows}, {"sm90_rows", cuda.sm90_rows}};
}

}  // namespace

int run(const DoctorArgs& args) {
  const Machine machine = this_machine();
  const Cuda cuda;
  const int64_t cpu_rows = rows_of("cpu.") + rows_of("reference");
  const std::vector<std::string> lines = advice(machine, cuda);
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
                 {"gpus", cuda.driver.count},
                 {"gpu_driver", cuda.driver.driver},
                 {"gpu_problem", cuda.driver.problem},
                 {"cpu_rows", cpu_rows},
                 {"cuda_rows", cuda.rows()},
                 {"cuda", gpu_json(cuda)},
                 {"advice", lines}};
    if (!model.empty()) json["model"] = {{"path", args.model}, {"summary", model}, {"mapped_bytes", mapped}};
    print_json(json);
    return 0;
  }
  std::string out = fmt::format("vivace      {} (compiled by g++ {})\n", VIVACE_VERSION, __VERSION__);
  out += fmt::format("system      {}\nprocessor   {}\n", machine.system, machine.processor);
  out += fmt::format("cores       {} that this process may use\n", machine.cores);
  out += fmt::format("vectors     {}\n", vectors_text(machine));
  out += fmt::format("memory      {:.1f} GiB, {:.1f} available\n",
                     static_cast<double>(machine.memory_bytes) / 0x1p30,
                     static_cast<double>(machine.available_bytes) / 0x1p30);
  out += gpu_text(cuda);
  out += fmt::format("rows        {} for the cpu, {}\n", cpu_rows,
                     cuda.rows() > 0 ? fmt::format("{} for cuda: {} portable, {} for 9.0 alone", cuda.rows(),
                                                   cuda.portable_rows, cuda.sm90_rows)
                                     : "none for cuda in this build");
  if (!model.empty()) {
    out += fmt::format("model       {}, {:.1f} MiB mapped\n", model, static_cast<double>(mapped) / 0x1p20);
  }
  for (const std::string& line : lines) out += "advice      " + line + "\n";
  write_out(out);
  return 0;
}

}  // namespace vivace::cli
