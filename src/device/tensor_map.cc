#if VIVACE_CUDA

#include "src/device/tensor_map.h"

#include <cuda_runtime.h>

#include "src/core/error.h"

namespace vivace::device {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// From the driver that the runtime loaded; null where it is too old. The program does not link libcuda.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function)
                                                                      : nullptr;
}

}  // namespace

Status make_tensor_map(const TensorMapShape& shape, CUtensorMap& map) {
  static const Encode encode = find_encode();
  if (encode == nullptr) {
    return error(Code::device_error,
                 "the driver has no cuTensorMapEncodeTiled, needs one for CUDA 12.0 or newer");
  }
  constexpr std::array<uint32_t, 5> kDense = {1, 1, 1, 1, 1};
  const auto make = [&] {
    return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5, const_cast<void*>(shape.data), shape.extent.data(),
                  shape.stride.data(), shape.box.data(), kDense.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                  shape.swizzle == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = make();
  int device = 0;
  // A thread's first call: the runtime has given it no context yet.
  if (result == CUDA_ERROR_INVALID_CONTEXT && cudaGetDevice(&device) == cudaSuccess &&
      cudaSetDevice(device) == cudaSuccess) {
    result = make();
  }
  if (result == CUDA_SUCCESS) return {};
  return error(Code::device_error, "cuTensorMapEncodeTiled refuses a tensor at {} with CUresult {}",
               shape.data, static_cast<int>(result));
}

}  // namespace vivace::device

#endif  // VIVACE_CUDA
