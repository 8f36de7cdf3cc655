// y_p = x · weight_pᵀ + bias_p        the shared tensor-core product, a launch per part
//
// Two numbers for n outputs, inner size k, m tokens
//   bytes  n k + m k + m n   elements; up to about a hundred tokens the weight is what counts
//   flops  2 m n k
//
// A sum over k is never split, and tiles for few and for many tokens add in the same order: a token's bits do not
// depend on how many tokens there are.

#if VIVACE_CUDA

#include "src/ops/gemm/gemm.h"
#include "src/ops/linear/table.h"

namespace vivace {

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
