#include "src/device/build_info.h"

#include <dlfcn.h>
#include <fmt/format.h>

#if VIVACE_CUDA
#include <cuda_runtime.h>
#endif

namespace vivace::device {

#if VIVACE_CUDA

namespace {

std::string version_text(int version) {
  return version > 0 ? fmt::format("{}.{}", version / 1000, version % 1000 / 10) : std::string();
}

}  // namespace

BuildInfo build_info() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  return {.cuda = true,
          .runtime = version_text(CUDART_VERSION),
          .driver = version_text(driver),
          .code = VIVACE_CUDA_CODE};
}

#else

BuildInfo build_info() {
  return {.problem = VIVACE_NO_CUDA};
}

#endif

LibraryProbe probe_library(const std::vector<std::string>& names) {
  LibraryProbe probe;
  for (const std::string& name : names) {
    void* library = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) {
      const char* problem = dlerror();
      if (probe.problem.empty() && problem != nullptr) probe.problem = problem;
      continue;
    }
    dlclose(library);
    return {.found = name, .problem = {}};
  }
  return probe;
}

}  // namespace vivace::device
