#pragma once

#include <cstdint>
#include <string>

#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::cli {

/// What the program runs on.
struct Machine {
  std::string processor;  ///< "AMD EPYC", or the architecture when the system does not say
  std::string isa;        ///< the instruction set that the CPU rows use
  std::string system;     ///< "Linux 6.1 x86_64"
  int cores = 0;          ///< that this process may use
  int64_t memory_bytes = 0, available_bytes = 0;  ///< the container's limit when it is lower
};
Machine this_machine();
/// One line: processor, instruction set, cores, memory.
std::string describe(const Machine& machine);

/// One line about what this stream runs on.
Result<std::string> describe(const Stream& stream);

/// The NVIDIA driver on this machine, opened and closed again.
struct Gpus {
  bool driver = false;  ///< libcuda.so.1 is there
  int64_t count = 0;
  std::string version;  ///< of CUDA that the driver knows, such as "12.4"
  std::string problem;  ///< why the driver gave no count; empty: it did
};
Gpus find_gpus();

/// The most memory that this process had resident so far (VmHWM); 0 when the system does not say.
int64_t peak_memory_bytes();
/// Now, as ISO 8601 in UTC.
std::string now_utc();

}  // namespace vivace::cli
