#if VIVACE_CUDA

#include <cstdlib>

#include "src/device/runtime.h"
#include "src/ops/gemm/sm90_tiles.h"

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

Status run_sm90(std::string_view name, const Problem& problem, const Stream& stream) {
  if (problem.rows <= 0 || problem.n <= 0 || problem.groups <= 0) return {};
  // Gate and up are one tensor to a tensor copy, which cannot step as far as this.
  const auto* gate = static_cast<const uint8_t*>(problem.b);
  const auto* up = static_cast<const uint8_t*>(problem.b_up);
  if (problem.gated && (gate == up || std::abs(up - gate) >= ptrdiff_t{1} << 40))
    return run(name, problem, stream);
  VIVACE_TRY_ASSIGN(const device::DeviceInfo* device, device::device_info(stream.ordinal));
  if (problem.type == DType::bf16) return run_sm90_bf16(name, problem, stream, device->sms);
  return problem.block_scales ? run_sm90_fp8_block(name, problem, stream, device->sms)
                              : run_sm90_fp8(name, problem, stream, device->sms);
}

}  // namespace vivace::gemm

#endif  // VIVACE_CUDA
