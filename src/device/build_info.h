#pragma once

#include <string>
#include <vector>

namespace vivace::device {

/// What of CUDA the program was built with, and what this machine has for it. Opens no device.
struct BuildInfo {
  bool cuda = false;    ///< built with CUDA rows
  std::string runtime;  ///< CUDA runtime in the program, "13.0"; empty without
  std::string driver;   ///< newest CUDA that the driver knows, "13.0"; empty without a driver or CUDA
  std::string problem;  ///< why it has no CUDA rows; empty with them
  std::string code;  ///< what the kernels were compiled to, "sm_80 compute_80 sm_90 sm_90a"; compute_N is PTX
};
BuildInfo build_info();

/// A shared library that is opened when first needed: the first of `names` that the loader finds.
struct LibraryProbe {
  std::string found;  ///< the name that was opened, or its path where the loader says; empty: none
  std::string problem;
};
LibraryProbe probe_library(const std::vector<std::string>& names);

}  // namespace vivace::device
