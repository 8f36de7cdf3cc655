#include "src/ops/gemm/sm90_wide.cuh"

namespace vivace::gemm {

Status run_sm90_fp8_block(std::string_view name, const Problem& problem, const Stream& stream, int sms) {
  return run_wide_tiles<fp8, true>(name, problem, stream, sms);
}

}  // namespace vivace::gemm
