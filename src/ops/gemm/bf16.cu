#include "src/ops/gemm/kernel.h"

namespace vivace::gemm {

Status run_bf16(std::string_view name, const Problem& problem, const Stream& stream) {
  return run_any_tile<bf16, false>(name, problem, stream);
}

}  // namespace vivace::gemm
