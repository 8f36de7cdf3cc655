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
};

}  // namespace vivace
