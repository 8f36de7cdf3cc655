#pragma once

#include <memory>
#include <string_view>

#include "src/cpu/thread_pool.h"
#include "src/device/runtime.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::engine {

/// The device of an option's text.
struct DeviceName {
  Device device = Device::cpu;
  int ordinal = 0;
};
/// "cpu", "cuda" (the first) or "cuda:N". invalid_argument: another text.
Result<DeviceName> parse_device(std::string_view text);

/// What operators of one model run on: the threads of a CPU, or a stream of a GPU.
class Compute {
 public:
  /// `threads` counts on the CPU alone; 0 takes every core that this process may use.
  /// Fails  unsupported: a GPU is asked for and there is none, or this build has no CUDA rows; the message says what is
  /// missing. out_of_memory: the threads do not start.
  static Result<std::unique_ptr<Compute>> create(std::string_view device, int threads);

  DeviceName device() const { return device_; }
  /// The stream, with this account of preferences and calls; `dispatch` may be null.
  Stream stream(Dispatch* dispatch) const;

 private:
  Compute() = default;
  DeviceName device_;
  std::unique_ptr<cpu::ThreadPool> threads_;
  std::unique_ptr<device::OwnedStream> stream_;
};

}  // namespace vivace::engine
