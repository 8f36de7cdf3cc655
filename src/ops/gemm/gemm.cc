#if VIVACE_CUDA

#include "src/ops/gemm/gemm.h"

namespace vivace::gemm {

Status run(std::string_view name, const Problem& problem, const Stream& stream) {
  if (problem.rows <= 0 || problem.n <= 0 || problem.groups <= 0) return {};
  if (problem.type == DType::bf16) return run_bf16(name, problem, stream);
  if (problem.k == 0) {
    // Nothing is multiplied, and there are no scales of blocks to read.
    Problem empty = problem;
    empty.type = DType::bf16;
    empty.block_scales = false;
    return run_bf16(name, empty, stream);
  }
  if (!problem.block_scales) return run_fp8(name, problem, stream);
  return chain_suits(problem, stream) ? run_fp8_chain(name, problem, stream)
                                      : run_fp8_block(name, problem, stream);
}

}  // namespace vivace::gemm

#endif  // VIVACE_CUDA
