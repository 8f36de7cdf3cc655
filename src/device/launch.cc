#if VIVACE_CUDA

#include <cuda_runtime.h>

#include <array>
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

/// A kernel on a device, and what is known of it.
struct Kernel {
  const void* function = nullptr;
  int ordinal = -1;
  /// There is 9.0, and its code is for that: code of 8.0 has no wait for the kernel before it.
  bool can_wait = false;
  int64_t smem_limit = -1;      ///< of dynamic shared memory
  bool large_clusters = false;  ///< it may have more CTAs in a cluster than every GPU with clusters allows
};

constexpr int kPortableCluster = 8;

/// Asks once, and raises limits on demand. What a kernel declares itself counts against the 48 KB that need no request.
Status prepare_kernel(const LaunchShape& shape, Kernel& kernel) {
  constexpr int64_t kDefaultLimit = 48 << 10;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Kernel> kernels;
  std::lock_guard lock(mutex);
  Kernel& known = kernels[{kernel.function, kernel.ordinal}];
  if (known.function == nullptr) {
    cudaFuncAttributes attributes{};
    VIVACE_TRY(
        cuda_status(cudaFuncGetAttributes(&attributes, kernel.function), "reading a kernel's attributes"));
    VIVACE_TRY_ASSIGN(const device::DeviceInfo* device, device::device_info(kernel.ordinal));
    known = kernel;
    known.smem_limit = kDefaultLimit - static_cast<int64_t>(attributes.sharedSizeBytes);
    known.can_wait = attributes.ptxVersion >= 90 && device->major >= 9;
  }
  if (shape.smem_bytes > known.smem_limit) {
    VIVACE_TRY(cuda_status(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(shape.smem_bytes)),
                           "raising the shared memory limit"));
    known.smem_limit = shape.smem_bytes;
  }
  if (shape.cluster > kPortableCluster && !known.large_clusters) {
    VIVACE_TRY(
        cuda_status(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                    "allowing a large cluster"));
    known.large_clusters = true;
  }
  kernel = known;
  return {};
}

/// The kernel, prepared. A thread remembers those that it launched last, so that it rarely waits for the others.
Status find_kernel(const void* function, int ordinal, const LaunchShape& shape, const Kernel*& found) {
  constexpr size_t kPlaces = 256;
  static thread_local std::array<Kernel, kPlaces> last;
  Kernel& kernel =
      last[reinterpret_cast<uintptr_t>(function) / 16 % kPlaces];  // functions begin at multiples of 16
  found = &kernel;
  if (kernel.function == function && kernel.ordinal == ordinal && shape.smem_bytes <= kernel.smem_limit &&
      (shape.cluster <= kPortableCluster || kernel.large_clusters))
    return {};
  Kernel asked{.function = function, .ordinal = ordinal};
  VIVACE_TRY(prepare_kernel(shape, asked));
  kernel = asked;
  return {};
}

}  // namespace

Status launch(std::string_view name, const void* kernel, const LaunchShape& shape, const Stream& stream,
              void** params) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return {};
  const device::DeviceGuard guard(stream.ordinal);
  const Kernel* known = nullptr;
  if (Status status = find_kernel(kernel, stream.ordinal, shape, known); !status.ok()) {
    return status.at(describe(name, shape));
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<size_t>(shape.smem_bytes);
  config.stream = cuda_stream(stream);
  config.attrs = attributes;
  if (shape.overlap_previous && known->can_wait) {
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
