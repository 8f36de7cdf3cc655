// linear through cuBLASLt, which is opened when first needed and never linked.
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

#include "src/core/error.h"
#include "src/device/launch.h"
#include "src/device/runtime.h"
#include "src/ops/linear/table.h"

namespace vivace {

namespace {

constexpr int64_t kWorkspaceBytes = 32 << 20;  // what NVIDIA recommends for Hopper
constexpr int64_t kWorkspaceAlignment = 256;

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
  return error(Code::device_error, "linear: {} of cuBLASLt failed with status {}", what,
               static_cast<int>(status));
}

/// What a choice of algorithm depends on: device, sizes, strides, types, whether there is a bias, alignments.
using Key = std::array<int64_t, 14>;

struct Plan {
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm;
  bool supported = false;
};

/// Handles and plans of all devices. A plan's descriptor holds the pointers of a call, so calls are enqueued one by one.
struct Plans {
  std::mutex mutex;
  std::map<int, cublasLtHandle_t> handles;
  std::map<Key, Plan> plans;
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

Status make_plan(const LinearArgs& args, const LinearPart& part, cublasLtHandle_t handle, Plan& plan) {
  const Library& lt = library();
  const OutsideCapture outside;
  const auto tokens = static_cast<uint64_t>(args.x.shape[0]), n = static_cast<uint64_t>(part.weight.shape[0]);
  const auto k = static_cast<uint64_t>(args.x.shape[1]);
  // A single row may have any stride; cuBLASLt wants at least the row's length.
  const auto leading = [](const Tensor& t) { return std::max(t.stride[0], t.shape[1]); };
  VIVACE_TRY(checked(lt.create_desc(&plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a descriptor"));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  VIVACE_TRY(checked(lt.set_desc(plan.desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
                     "transposing"));
  if (part.bias.present()) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    VIVACE_TRY(
        checked(lt.set_desc(plan.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue), "a bias"));
  }
  VIVACE_TRY(checked(lt.create_layout(&plan.weight, type_of(part.weight.dtype), k, n, leading(part.weight)),
                     "a layout"));
  VIVACE_TRY(
      checked(lt.create_layout(&plan.x, type_of(args.x.dtype), k, tokens, leading(args.x)), "a layout"));
  VIVACE_TRY(
      checked(lt.create_layout(&plan.y, type_of(part.y.dtype), n, tokens, leading(part.y)), "a layout"));
  cublasLtMatmulPreference_t preference = nullptr;
  VIVACE_TRY(checked(lt.create_preference(&preference), "a preference"));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    lt.set_preference(preference, attribute, &value, sizeof value);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspaceBytes));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(alignment_of(part.weight)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(alignment_of(args.x)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(alignment_of(part.y)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(alignment_of(part.y)));
  cublasLtMatmulHeuristicResult_t result = {};
  int found = 0;
  const cublasStatus_t status =
      lt.heuristic(handle, plan.desc, plan.weight, plan.x, plan.y, plan.y, preference, 1, &result, &found);
  lt.destroy_preference(preference);
  plan.supported = status == CUBLAS_STATUS_SUCCESS && found == 1 && result.state == CUBLAS_STATUS_SUCCESS;
  plan.algorithm = result.algo;
  return {};
}

Status run_part(const LinearArgs& args, const LinearPart& part, void* workspace, const Stream& stream,
                bool& supported) {
  const Library& lt = library();
  Plans& plans = all_plans();
  const std::lock_guard lock(plans.mutex);
  cublasLtHandle_t& handle = plans.handles[stream.ordinal];
  if (handle == nullptr) {
    const OutsideCapture outside;
    VIVACE_TRY(checked(lt.create(&handle), "a handle"));
  }
  const Key key = {stream.ordinal,
                   args.x.shape[0],
                   part.weight.shape[0],
                   args.x.shape[1],
                   args.x.stride[0],
                   part.weight.stride[0],
                   part.y.stride[0],
                   static_cast<int64_t>(args.x.dtype),
                   static_cast<int64_t>(part.weight.dtype),
                   static_cast<int64_t>(part.y.dtype),
                   part.bias.present(),
                   alignment_of(args.x),
                   alignment_of(part.weight),
                   alignment_of(part.y)};
  auto at = plans.plans.find(key);
  if (at == plans.plans.end()) {
    Plan plan;
    VIVACE_TRY(make_plan(args, part, handle, plan));
    at = plans.plans.emplace(key, plan).first;
  }
  Plan& plan = at->second;
  supported = plan.supported;
  if (!supported) return {};
  const auto point = [&](cublasLtMatmulDescAttributes_t attribute, const void* pointer) {
    return checked(lt.set_desc(plan.desc, attribute, &pointer, sizeof pointer), "a pointer");
  };
  if (part.bias.present()) VIVACE_TRY(point(CUBLASLT_MATMUL_DESC_BIAS_POINTER, part.bias.data));
  if (args.x.dtype == DType::fp8_e4m3) {
    VIVACE_TRY(point(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, part.weight_scale.data));
    VIVACE_TRY(point(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, args.x_scale.data));
  }
  const float one = 1, zero = 0;
  return checked(lt.matmul(handle, plan.desc, &one, part.weight.data, plan.weight, args.x.data, plan.x, &zero,
                           part.y.data, plan.y, part.y.data, plan.y, &plan.algorithm, workspace,
                           kWorkspaceBytes, cuda_stream(stream)),
                 "a product");
}

}  // namespace

bool cublaslt_found() {
  return library().complete;
}

std::vector<std::string> cublaslt_names() {
  return {std::begin(kNames), std::end(kNames)};
}

int64_t linear_cublaslt_workspace(const LinearArgs&, const Stream&) {
  return kWorkspaceBytes + kWorkspaceAlignment - 1;
}

Status linear_cublaslt(const LinearArgs& args, const Stream& stream) {
  const int64_t needed = linear_cublaslt_workspace(args, stream);
  const int64_t given = args.workspace.present() ? args.workspace.shape[0] : 0;
  if (given < needed) {
    return invalid_argument("linear: workspace.shape[0] is {}, needs {} bytes (linear_workspace_bytes)",
                            given, needed);
  }
  const auto address = reinterpret_cast<uintptr_t>(args.workspace.data);
  void* workspace = reinterpret_cast<void*>((address + kWorkspaceAlignment - 1) / kWorkspaceAlignment *
                                            kWorkspaceAlignment);
  const device::DeviceGuard guard(stream.ordinal);
  for (int p = 0; p < args.part_count; ++p) {
    const LinearPart& part = args.parts[p];
    if (part.y.elements() == 0) continue;
    bool supported = args.x.shape[1] > 0;  // without k, y is the bias
    if (supported) VIVACE_TRY(run_part(args, part, workspace, stream, supported));
    if (supported) continue;
    // The heuristic knows no algorithm: our own product has the same needs.
    LinearArgs alone = args;
    alone.parts[0] = part;
    alone.part_count = 1;
    VIVACE_TRY(linear_cuda_mma(alone, stream));
  }
  return {};
}

}  // namespace vivace

#elif VIVACE_CUDA

#include "src/ops/linear/table.h"

namespace vivace {

bool cublaslt_found() {
  return false;
}
std::vector<std::string> cublaslt_names() {
  return {};
}
int64_t linear_cublaslt_workspace(const LinearArgs&, const Stream&) {
  return 0;
}
Status linear_cublaslt(const LinearArgs&, const Stream&) {
  return Status(Code::unsupported, "linear: built without cuBLASLt's header");
}

}  // namespace vivace

#else

namespace vivace {

bool cublaslt_found() {
  return false;
}
std::vector<std::string> cublaslt_names() {
  return {};
}

}  // namespace vivace

#endif
