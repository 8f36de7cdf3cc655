// y_p = x · weight_pᵀ + bias_p        a launch per part: the shared tensor-core product, or cuBLASLt's
//
// Two numbers for n outputs, inner size k, m tokens
//   bytes  n k + m k + m n   elements; up to about a hundred tokens the weight is what counts
//   flops  2 m n k
//
// Our own product never splits a sum over k, and its tiles for few and for many tokens add in the same order: a token's
// bits do not depend on how many tokens there are.

#if VIVACE_CUDA

#include <algorithm>

#include "src/core/error.h"
#include "src/ops/gemm/gemm.h"
#include "src/ops/linear/cublaslt.h"
#include "src/ops/linear/table.h"

namespace vivace {

namespace {

CublasltProduct product_of(const LinearArgs& args, const LinearPart& part) {
  return {.x = args.x,
          .weight = part.weight,
          .y = part.y,
          .bias = part.bias,
          .x_scale = args.x_scale,
          .weight_scale = part.weight_scale,
          .workspace = args.workspace.data};
}

}  // namespace

int64_t linear_cublaslt_workspace(const LinearArgs&, const Stream&) {
  return kCublasltWorkspaceBytes;
}

Result<std::optional<LinearPlans>> linear_cublaslt_plans(const LinearArgs& args, const Stream& stream) {
  LinearPlans plans = {};
  if (stream.ordinal < 0) return std::optional(plans);  // of a GPU that is not here: there is nobody to ask
  for (int p = 0; p < std::min(args.part_count, LinearArgs::kMaxParts); ++p) {
    if (args.parts[p].y.elements() == 0) continue;
    VIVACE_TRY_ASSIGN(plans[p], cublaslt_plan(product_of(args, args.parts[p]), stream));
    if (plans[p] == nullptr) return std::optional<LinearPlans>();
  }
  return std::optional(plans);
}

Status linear_cublaslt(const LinearArgs& args, const Stream& stream) {
  if (stream.ordinal < 0) return invalid_argument("linear: stream.ordinal is {}, needs that of a device", stream.ordinal);
  VIVACE_TRY_ASSIGN(const std::optional<LinearPlans> plans, linear_cublaslt_plans(args, stream));
  if (!plans) return unsupported("linear: cuBLASLt has no algorithm for x {}", to_string(args.x));
  return linear_by_plans(args, *plans, stream);
}

Status linear_by_plans(const LinearArgs& args, const LinearPlans& plans, const Stream& stream) {
  const int64_t given = args.workspace.present() ? args.workspace.shape[0] : 0;
  if (given < kCublasltWorkspaceBytes) {
    return invalid_argument("linear: workspace.shape[0] is {}, needs {} bytes (linear_workspace_bytes)", given,
                            kCublasltWorkspaceBytes);
  }
  for (int p = 0; p < args.part_count; ++p) {
    if (args.parts[p].y.elements() == 0) continue;
    const Status status = cublaslt_multiply(product_of(args, args.parts[p]), *plans[p], stream);
    if (!status.ok()) return status.at("linear");
  }
  return {};
}

Status linear_cuda_mma(const LinearArgs& args, const Stream& stream) {
  for (int p = 0; p < args.part_count; ++p) {
    const LinearPart& part = args.parts[p];
    gemm::Problem problem;
    problem.type = args.x.dtype;
    problem.a = args.x.data;
    problem.a_stride = args.x.stride[0];
    problem.b = part.weight.data;
    problem.b_stride = part.weight.stride[0];
    problem.rows = args.x.shape[0];
    problem.n = part.weight.shape[0];
    problem.k = args.x.shape[1];
    problem.y = part.y.data;
    problem.y_type = part.y.dtype;
    problem.y_stride = part.y.stride[0];
    problem.bias = part.bias.present() ? part.bias.data : nullptr;
    problem.bias_type = part.bias.dtype;
    if (args.x.dtype == DType::fp8_e4m3) {
      problem.block_scales = args.x_scaling == Fp8Scaling::block;
      problem.a_scale = args.x_scale.as<const float>();
      problem.a_scale_stride = args.x_scaling == Fp8Scaling::tensor ? 0 : args.x_scale.stride[0];
      problem.b_scale = part.weight_scale.as<const float>();
      problem.b_scale_stride = problem.block_scales ? part.weight_scale.stride[0] : 0;
    }
    VIVACE_TRY(gemm::run("linear", problem, stream));
  }
  return {};
}

}  // namespace vivace

#endif  // VIVACE_CUDA
