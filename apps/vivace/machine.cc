#include "apps/vivace/machine.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/utsname.h>

#include <charconv>
#include <ctime>
#include <fstream>
#include <string_view>

#include "src/core/error.h"
#include "src/cpu/machine.h"
#include "src/cpu/simd.h"
#include "src/cpu/thread_pool.h"
#include "src/device/runtime.h"

namespace vivace::cli {

namespace {

/// The rest of the first line of `path` that starts with `key`, without blanks and the colon; "" if there is none.
std::string line_value(const char* path, std::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (!line.starts_with(key)) continue;
    const size_t begin = line.find_first_not_of(" \t:", key.size());
    return begin == std::string::npos ? std::string() : line.substr(begin);
  }
  return {};
}

/// The number at the start of `text`; 0 if there is none.
int64_t leading_number(std::string_view text) {
  int64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

int64_t kib_value(const char* path, std::string_view key) {
  return leading_number(line_value(path, key)) * 1024;
}

}  // namespace

Machine this_machine() {
  Machine m;
  utsname name{};
  uname(&name);
  m.processor = line_value("/proc/cpuinfo", "model name");
  if (m.processor.empty()) m.processor = name.machine;
  m.isa = cpu::name_of(cpu::isa());
  m.system = fmt::format("{} {} {}", name.sysname, name.release, name.machine);
  m.cores = cpu::usable_cores();
  m.memory_bytes = cpu::memory_bytes();
  m.available_bytes = cpu::available_memory_bytes();
  return m;
}

std::string describe(const Machine& machine) {
  return fmt::format("{} ({}), {} cores, {:.1f} GiB", machine.processor, machine.isa, machine.cores,
                     static_cast<double>(machine.memory_bytes) / 0x1p30);
}

Result<std::string> describe(const Stream& stream) {
  if (stream.device == Device::cpu) {
    const int threads = cpu::threads_of(stream.threads);
    return fmt::format("{}, {} thread{}", describe(this_machine()), threads, threads == 1 ? "" : "s");
  }
  VIVACE_TRY_ASSIGN(const device::DeviceInfo* info, device::device_info(stream.ordinal));
  return fmt::format("{} (compute capability {}.{}), {} SMs, {:.1f} GiB", info->name, info->major,
                     info->minor, info->sms, static_cast<double>(info->memory_bytes) / 0x1p30);
}

Gpus find_gpus() {
  Gpus gpus;
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    gpus.problem = "libcuda.so.1 is not there";
    return gpus;
  }
  gpus.driver = true;
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDeviceGetCount"));
  const auto version = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  int value = 0;
  if (version != nullptr && version(&value) == 0) {
    gpus.version = fmt::format("{}.{}", value / 1000, value % 1000 / 10);
  }
  if (init == nullptr || count == nullptr) {
    gpus.problem = "libcuda.so.1 lacks cuInit or cuDeviceGetCount";
  } else if (const int code = init(0); code != 0) {
    gpus.problem = fmt::format("cuInit returned {}", code);
  } else if (int devices = 0; count(&devices) == 0) {
    gpus.count = devices;
  } else {
    gpus.problem = "cuDeviceGetCount failed";
  }
  dlclose(library);
  return gpus;
}

int64_t peak_memory_bytes() {
  return kib_value("/proc/self/status", "VmHWM");
}

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

}  // namespace vivace::cli
