#pragma once

#include "vivace/tensor.h"

namespace vivace {

class Dispatch;
namespace cpu {
class ThreadPool;
}

/// Where an operator runs and on whose account. A CPU stream runs the call to its end on `threads`; a CUDA
/// stream only enqueues it. Calls on one stream happen in order; a stream is used by one thread at a time.
struct Stream {
  Device device = Device::cpu;
  int ordinal = 0;                     ///< which CUDA device
  int compute_capability = 0;          ///< of a CUDA device, 10 * major + minor
  void* handle = nullptr;              ///< cudaStream_t
  cpu::ThreadPool* threads = nullptr;  ///< CPU workers; null: the calling thread alone
  Dispatch* dispatch = nullptr;        ///< preferences and counters; null: none
  /// A question: arguments are checked but for what their memory and the workspace hold, pointers may be null, and nothing runs.
  bool check_only = false;

  /// Whether a call may look at what its arguments hold before it runs.
  bool readable() const { return device == Device::cpu && !check_only; }
};

}  // namespace vivace
