#pragma once

// The one place that launches kernels. For files that are compiled with CUDA.

#include <cuda_runtime.h>

#include <string_view>
#include <utility>

#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace {

struct LaunchShape {
  dim3 grid = 1, block = 32;
  int64_t smem_bytes = 0;  ///< dynamic shared memory
  int cluster = 1;         ///< CTAs per cluster along x
  bool overlap_previous =
      false;  ///< programmatic dependent launch: the kernel itself waits for its predecessor
};

namespace internal {
/// Checks the shape against the device's limits, raises the kernel's shared-memory limit when needed (once per kernel
/// and device), launches, and turns a refusal into a Status that names the kernel and the shape.
Status launch(std::string_view name, const void* kernel, const LaunchShape& shape, const Stream& stream,
              void** params);
/// Status of a CUDA call: device_error with the place, the call's error name and its text.
Status cuda_status(cudaError_t error, std::string_view place);
}  // namespace internal

/// Enqueues kernel(args...) on `stream`. An empty grid is nothing to do.
/// Fails  device_error: the launch was refused; the message names kernel, grid, block, shared memory and cluster.
template <class... Params, class... Args>
Status launch(std::string_view name, void (*kernel)(Params...), const LaunchShape& shape,
              const Stream& stream, Args&&... args) {
  static_assert(sizeof...(Params) == sizeof...(Args), "a kernel gets exactly its parameters");
  auto call = [&](Params... params) {
    void* pointers[] = {static_cast<void*>(&params)..., nullptr};
    return internal::launch(name, reinterpret_cast<const void*>(kernel), shape, stream, pointers);
  };
  return call(std::forward<Args>(args)...);
}

inline cudaStream_t cuda_stream(const Stream& stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

}  // namespace vivace
