#include "src/c_api/objects.h"

#include <algorithm>
#include <cstring>

#include "src/core/error.h"

// The parts of DLPack 1 that are used here, in its layout.

namespace vivace::c_api {

namespace {

constexpr int32_t kDlCpu = 1, kDlCuda = 2, kDlCudaHost = 3, kDlCudaManaged = 13;

struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DlExchange {
  uint32_t major, minor;
  const void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DlTensor* out);
};

int32_t dtype_of(const DlTensor& tensor) {
  struct Known {
    uint8_t code, bits;
    int32_t dtype;
  };
  static constexpr Known kKnown[] = {{2, 32, VIVACE_F32}, {4, 16, VIVACE_BF16}, {10, 8, VIVACE_FP8_E4M3},
                                     {0, 32, VIVACE_I32}, {2, 16, VIVACE_F16},  {0, 64, VIVACE_I64},
                                     {1, 8, VIVACE_U8},   {6, 8, VIVACE_U8}};
  for (const Known& known : kKnown) {
    if (known.code == tensor.code && known.bits == tensor.bits && tensor.lanes == 1) return known.dtype;
  }
  return 0;
}

Status read_object(const DlExchange& exchange, void* object, vivace_tensor& out) {
  DlTensor tensor{};
  if (exchange.tensor_from_object(object, &tensor) != 0) {
    return error(Code::internal, "vivace_call_objects: the exchange gives no tensor");
  }
  const bool cuda = tensor.device_type == kDlCuda || tensor.device_type == kDlCudaManaged;
  if (!cuda && tensor.device_type != kDlCpu && tensor.device_type != kDlCudaHost) {
    return invalid_argument(
        "vivace: a tensor lies on a device of DLPack's kind {}, needs 1 (CPU) or 2 (CUDA)",
        tensor.device_type);
  }
  if (tensor.ndim < 0 || tensor.ndim > VIVACE_MAX_RANK) {
    return invalid_argument("vivace: a tensor has {} dimensions, at most {} are known", tensor.ndim,
                            int{VIVACE_MAX_RANK});
  }
  out = {};
  out.data = static_cast<unsigned char*>(tensor.data) + tensor.byte_offset;
  out.dtype = dtype_of(tensor);
  if (out.dtype == 0) {
    return invalid_argument(
        "vivace: a tensor has DLPack's type ({}, {} bits, {} lanes), which is unknown here", tensor.code,
        tensor.bits, tensor.lanes);
  }
  out.rank = tensor.ndim;
  out.device = cuda ? VIVACE_DEVICE_CUDA : VIVACE_DEVICE_CPU;
  out.ordinal = cuda ? tensor.device_id : 0;
  std::copy_n(tensor.shape, tensor.ndim, out.shape);
  int64_t dense = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    out.stride[i] = tensor.strides != nullptr ? tensor.strides[i] : dense;
    dense *= tensor.shape[i];
  }
  return {};
}

}  // namespace

Status fill_objects(const vivace_object_call& call, const void* args, unsigned char* filled,
                    vivace_stream& stream) {
  const auto* exchange = static_cast<const DlExchange*>(call.exchange);
  if (exchange == nullptr || exchange->major != 1 || exchange->tensor_from_object == nullptr) {
    return invalid_argument("vivace_call_objects: exchange is none of DLPack 1 that takes objects apart");
  }
  if (call.run == nullptr || call.args_bytes < 8 || call.args_bytes > VIVACE_MAX_ARGS_BYTES ||
      call.tensor_count < 0 || (call.tensor_count > 0 && call.tensors == nullptr)) {
    return invalid_argument(
        "vivace_call_objects: args_bytes is {} and tensor_count {}, needs 8 to {} and a run", call.args_bytes,
        call.tensor_count, int{VIVACE_MAX_ARGS_BYTES});
  }
  std::memcpy(filled, args, static_cast<size_t>(call.args_bytes));
  stream.context = call.context;
  bool first = true;
  for (int64_t i = 0; i < call.tensor_count; ++i) {
    const int64_t place = call.tensors[i];
    if (place < 8 || place % 8 != 0 ||
        place > call.args_bytes - static_cast<int64_t>(sizeof(vivace_tensor))) {
      return invalid_argument("vivace_call_objects: tensors[{}] is {}, which is no place in {} bytes", i,
                              place, call.args_bytes);
    }
    void* object = nullptr;
    std::memcpy(&object, filled + place, sizeof(object));
    vivace_tensor tensor{};
    if (object != call.none) VIVACE_TRY(read_object(*exchange, object, tensor));
    std::memcpy(filled + place, &tensor, sizeof(tensor));
    if (!first || tensor.dtype == 0) continue;
    first = false;
    stream.device = tensor.device;
    stream.ordinal = tensor.ordinal;
  }
  return {};
}

}  // namespace vivace::c_api
