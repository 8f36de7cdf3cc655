// Products by cuBLASLt.
//
// Two numbers for n outputs, inner size k, m tokens
//   bytes  n k + m k + m n   elements; a decode step is bound by the weight
//   flops  2 m n k
//
// cuBLASLt's matrices are column-major: yᵀ [n, m] = weight [k, n]ᵀ · xᵀ [k, m], all as they lie. An algorithm is chosen
// once per shape, types and alignment by its heuristic, with the workspace that every call brings.

#include "src/ops/linear/cublaslt.h"

#if VIVACE_CUDA && __has_include(<cublasLt.h>)

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <type_traits>

#include "src/core/dispatch.h"
#include "src/core/error.h"
#include "src/device/launch.h"
#include "src/device/runtime.h"

namespace vivace {

struct CublasltPlan {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm;
  bool supported = false;
};

namespace {

constexpr int64_t kWorkspaceAlignment = 256;
constexpr int64_t kWorkspaceBytes = kCublasltWorkspaceBytes - (kWorkspaceAlignment - 1);

constexpr const char* kNames[] = {"libcublasLt.so.13",
                                  "libcublasLt.so.12",
                                  "libcublasLt.so",
                                  "/usr/local/cuda/lib64/libcublasLt.so",
                                  "/usr/local/cuda/lib64/libcublasLt.so.13",
                                  "/usr/local/cuda/lib64/libcublasLt.so.12",
                                  "/usr/local/cuda/lib/libcublasLt.so.13",
                                  "/usr/local/cuda/targets/x86_64-linux/lib/libcublasLt.so.13",
                                  "/usr/local/cuda/targets/x86_64-linux/lib/libcublasLt.so.12",
                                  "/usr/lib/x86_64-linux-gnu/libcublasLt.so.12"};

/// The functions that are used, found in the library.
struct Library {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) create_layout = nullptr;
  decltype(&cublasLtMatmulDescCreate) create_desc = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) set_desc = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference = nullptr;
  bool complete = false;

  Library() {
    void* library = nullptr;
    for (const char* name : kNames) {
      library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library != nullptr) break;
    }
    if (library == nullptr) return;
    complete = true;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      complete = complete && function != nullptr;
    };
    find(create, "cublasLtCreate");
    find(matmul, "cublasLtMatmul");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(create_layout, "cublasLtMatrixLayoutCreate");
    find(create_desc, "cublasLtMatmulDescCreate");
    find(set_desc, "cublasLtMatmulDescSetAttribute");
    find(create_preference, "cublasLtMatmulPreferenceCreate");
    find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    find(destroy_preference, "cublasLtMatmulPreferenceDestroy");
  }
};

const Library& library() {
  static const Library opened;
  return opened;
}

Status checked(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return unsupported("cuBLASLt: {} is not supported", what);
  return error(Code::device_error, "cuBLASLt: {} failed with status {}", what, static_cast<int>(status));
}

/// What a choice of algorithm depends on: device, sizes, strides, types, whether there is a bias, alignments.
using Key = std::array<int64_t, 15>;

Key key_of(const CublasltProduct& p, const Stream& stream) {
  return {stream.ordinal,
          p.x.shape[0],
          p.weight.shape[0],
          p.x.shape[1],
          p.x.stride[0],
          p.weight.stride[0],
          p.y.stride[0],
          static_cast<int64_t>(p.x.dtype),
          static_cast<int64_t>(p.weight.dtype),
          static_cast<int64_t>(p.y.dtype),
          p.tf32,
          p.bias.present(),
          alignment_of(p.x),
          alignment_of(p.weight),
          alignment_of(p.y)};
}

/// Handles and plans of all devices. A plan's descriptor holds the pointers of a call, so calls are enqueued one by one.
struct Plans {
  std::mutex mutex;
  std::map<int, cublasLtHandle_t> handles;
  std::map<Key, CublasltPlan> plans;
};

Plans& all_plans() {
  static Plans plans;
  return plans;
}

/// Allocations that a handle makes are no part of a capture on this thread.
class OutsideCapture {
 public:
  OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

cudaDataType_t type_of(DType dtype) {
  return dtype == DType::f32 ? CUDA_R_32F : dtype == DType::fp8_e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
}

Status make_plan(const CublasltProduct& product, CublasltPlan& plan) {
  const Library& lt = library();
  const OutsideCapture outside;
  const auto tokens = static_cast<uint64_t>(product.x.shape[0]), k = static_cast<uint64_t>(product.x.shape[1]);
  const auto n = static_cast<uint64_t>(product.weight.shape[0]);
  // A single row may have any stride; cuBLASLt wants at least the row's length.
  const auto leading = [](const Tensor& t) { return std::max(t.stride[0], t.shape[1]); };
  const cublasComputeType_t compute = product.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  VIVACE_TRY(checked(lt.create_desc(&plan.desc, compute, CUDA_R_32F), "a descriptor"));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  VIVACE_TRY(checked(lt.set_desc(plan.desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
                     "transposing"));
  if (product.bias.present()) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    VIVACE_TRY(
        checked(lt.set_desc(plan.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue), "a bias"));
  }
  VIVACE_TRY(checked(lt.create_layout(&plan.weight, type_of(product.weight.dtype), k, n, leading(product.weight)),
                     "a layout"));
  VIVACE_TRY(
      checked(lt.create_layout(&plan.x, type_of(product.x.dtype), k, tokens, leading(product.x)), "a layout"));
  VIVACE_TRY(
      checked(lt.create_layout(&plan.y, type_of(product.y.dtype), n, tokens, leading(product.y)), "a layout"));
  cublasLtMatmulPreference_t preference = nullptr;
  VIVACE_TRY(checked(lt.create_preference(&preference), "a preference"));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    lt.set_preference(preference, attribute, &value, sizeof value);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspaceBytes));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(alignment_of(product.weight)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(alignment_of(product.x)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(alignment_of(product.y)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(alignment_of(product.y)));
  cublasLtMatmulHeuristicResult_t result = {};
  int found = 0;
  const cublasStatus_t status = lt.heuristic(plan.handle, plan.desc, plan.weight, plan.x, plan.y, plan.y,
                                             preference, 1, &result, &found);
  lt.destroy_preference(preference);
  plan.supported = status == CUBLAS_STATUS_SUCCESS && found == 1 && result.state == CUBLAS_STATUS_SUCCESS;
  plan.algorithm = result.algo;
  return {};
}

}  // namespace

bool cublaslt_found() {
  return library().complete;
}

std::vector<std::string> cublaslt_names() {
  return {std::begin(kNames), std::end(kNames)};
}

Result<const CublasltPlan*> cublaslt_plan(const CublasltProduct& product, const Stream& stream) {
  if (!cublaslt_found()) return unsupported("cuBLASLt was not found");
  const device::DeviceGuard guard(stream.ordinal);
  Plans& plans = all_plans();
  const std::lock_guard lock(plans.mutex);
  cublasLtHandle_t& handle = plans.handles[stream.ordinal];
  if (handle == nullptr) {
    const OutsideCapture outside;
    VIVACE_TRY(checked(library().create(&handle), "a handle"));
  }
  const Key key = key_of(product, stream);
  auto at = plans.plans.find(key);
  if (at == plans.plans.end()) {
    CublasltPlan plan{.handle = handle};
    VIVACE_TRY(make_plan(product, plan));
    at = plans.plans.emplace(key, plan).first;
  }
  return at->second.supported ? &at->second : nullptr;
}

Status cublaslt_multiply(const CublasltProduct& product, const Stream& stream) {
  VIVACE_TRY_ASSIGN(const CublasltPlan* plan, cublaslt_plan(product, stream));
  if (plan != nullptr) return cublaslt_multiply(product, *plan, stream);
  return unsupported("cuBLASLt: its heuristic knows no algorithm for x {}, weight {} and y {}",
                     to_string(product.x), to_string(product.weight), to_string(product.y));
}

Status cublaslt_multiply(const CublasltProduct& product, const CublasltPlan& plan, const Stream& stream) {
  const Library& lt = library();
  const device::DeviceGuard guard(stream.ordinal);
  const std::lock_guard lock(all_plans().mutex);
  const auto point = [&](cublasLtMatmulDescAttributes_t attribute, const void* pointer) {
    return checked(lt.set_desc(plan.desc, attribute, &pointer, sizeof pointer), "a pointer");
  };
  if (product.bias.present()) VIVACE_TRY(point(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias.data));
  if (product.x.dtype == DType::fp8_e4m3) {
    VIVACE_TRY(point(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, product.weight_scale.data));
    VIVACE_TRY(point(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, product.x_scale.data));
  }
  const auto address = reinterpret_cast<uintptr_t>(product.workspace);
  void* workspace = reinterpret_cast<void*>((address + kWorkspaceAlignment - 1) / kWorkspaceAlignment *
                                            kWorkspaceAlignment);
  const float one = 1, zero = 0;
  return checked(lt.matmul(plan.handle, plan.desc, &one, product.weight.data, plan.weight, product.x.data,
                           plan.x, &zero, product.y.data, plan.y, product.y.data, plan.y, &plan.algorithm,
                           workspace, kWorkspaceBytes, cuda_stream(stream)),
                 "a product");
}

}  // namespace vivace

#else

#include "src/core/error.h"

namespace vivace {

bool cublaslt_found() {
  return false;
}
std::vector<std::string> cublaslt_names() {
  return {};
}
Result<const CublasltPlan*> cublaslt_plan(const CublasltProduct&, const Stream&) {
  return unsupported("this build has no cuBLASLt; build it where nvcc and cublasLt.h are installed");
}
Status cublaslt_multiply(const CublasltProduct& product, const CublasltPlan&, const Stream& stream) {
  return cublaslt_multiply(product, stream);
}
Status cublaslt_multiply(const CublasltProduct&, const Stream&) {
  return unsupported("this build has no cuBLASLt; build it where nvcc and cublasLt.h are installed");
}

}  // namespace vivace

#endif
