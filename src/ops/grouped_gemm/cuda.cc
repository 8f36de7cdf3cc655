// y[r] = x[r] · weight[g]ᵀ        the shared tensor-core product
//
// Two numbers for m rows in G groups
//   bytes  G n k + m k + m n   elements; a dozen rows per group are bound by the weights
//   flops  2 m n k

#if VIVACE_CUDA

#include "src/ops/gemm/sm90_wide.h"
#include "src/ops/grouped_gemm/table.h"

namespace vivace {

namespace {

gemm::Problem problem_of(const GroupedGemmArgs& args) {
  gemm::Problem problem;
  problem.type = args.x.dtype;
  problem.a = args.x.data;
  problem.a_stride = args.x.stride[0];
  problem.b = args.weight.data;
  problem.b_stride = args.weight.stride[1];
  problem.b_group_stride = args.weight.stride[0];
  problem.rows = args.x.shape[0];
  problem.n = args.weight.shape[1];
  problem.k = args.x.shape[1];
  problem.group_start = args.group_start.as<const int32_t>();
  problem.group_rows = args.group_rows.as<const int32_t>();
  problem.groups = args.weight.shape[0];
  problem.y = args.y.data;
  problem.y_type = args.y.dtype;
  problem.y_stride = args.y.stride[0];
  if (args.x.dtype == DType::fp8_e4m3) {
    problem.block_scales = has_block_scales(args);
    problem.a_scale = args.x_scale.as<const float>();
    problem.a_scale_stride = problem.block_scales ? args.x_scale.stride[0] : 0;
    problem.b_scale = args.weight_scale.as<const float>();
    problem.b_scale_group_stride = args.weight_scale.stride[0];
    problem.b_scale_stride = problem.block_scales ? args.weight_scale.stride[1] : 0;
  }
  return problem;
}

}  // namespace

Status grouped_gemm_cuda(const GroupedGemmArgs& args, const Stream& stream) {
  return gemm::run("grouped_gemm", problem_of(args), stream);
}

Status grouped_gemm_sm90(const GroupedGemmArgs& args, const Stream& stream) {
  return gemm::run_sm90("grouped_gemm", problem_of(args), stream);
}

}  // namespace vivace

#endif  // VIVACE_CUDA
