#if VIVACE_CUDA

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <string>

#include "src/device/launch.h"
#include "src/device/runtime.h"

namespace vivace::internal {

Status cuda_status(cudaError_t error, std::string_view place) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // a sticky error stays; any other is consumed here
  const Code code = error == cudaErrorMemoryAllocation ? Code::out_of_memory : Code::device_error;
  return Status(code, std::string(place) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

namespace {

std::string describe(std::string_view name, const LaunchShape& s) {
  const auto dim = [](dim3 d) {
    return std::to_string(d.x) + "x" + std::to_string(d.y) + "x" + std::to_string(d.z);
  };
  return "launch of " + std::string(name) + " (grid " + dim(s.grid) + ", block " + dim(s.block) + ", " +
         std::to_string(s.smem_bytes) + " bytes of shared memory, cluster " + std::to_string(s.cluster) + ")";
}

/// What is known of a kernel on a device.
struct Kernel {
  int64_t smem_limit = -1;  ///< of dynamic shared memory; -1: not asked yet
  bool can_wait = false;    ///< its code is of 9.0 or newer: code of 8.0 has no wait for the kernel before it
};

/// Asks once, and raises the limit on demand. What a kernel declares itself counts against the 48 KB that need no request.
Status prepare_kernel(const void* kernel, int ordinal, int64_t smem_bytes, bool& can_wait) {
  constexpr int64_t kDefaultLimit = 48 << 10;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Kernel> kernels;
  std::lock_guard lock(mutex);
  Kernel& known = kernels[{kernel, ordinal}];
  if (known.smem_limit < 0) {
    cudaFuncAttributes attributes{};
    VIVACE_TRY(cuda_status(cudaFuncGetAttributes(&attributes, kernel), "reading a kernel's attributes"));
    known.smem_limit = kDefaultLimit - static_cast<int64_t>(attributes.sharedSizeBytes);
    known.can_wait = attributes.ptxVersion >= 90;
  }
  can_wait = known.can_wait;
  if (smem_bytes <= known.smem_limit) return {};
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
  if (error == cudaSuccess) known.smem_limit = smem_bytes;
  return cuda_status(error, "raising the shared memory limit");
}

}  // namespace

Status launch(std::string_view name, const void* kernel, const LaunchShape& shape, const Stream& stream,
              void** params) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return {};
  const device::DeviceGuard guard(stream.ordinal);
  bool can_wait = false;
  if (Status status = prepare_kernel(kernel, stream.ordinal, shape.smem_bytes, can_wait); !status.ok()) {
    return status.at(describe(name, shape));
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<size_t>(shape.smem_bytes);
  config.stream = cuda_stream(stream);
  config.attrs = attributes;
  VIVACE_TRY_ASSIGN(const device::DeviceInfo* device, device::device_info(stream.ordinal));
  if (shape.overlap_previous && can_wait && device->major >= 9) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    ++config.numAttrs;
  }
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel, params);
  return error == cudaSuccess ? Status() : cuda_status(error, describe(name, shape));
}

}  // namespace vivace::internal

#endif  // VIVACE_CUDA
