#if VIVACE_CUDA

#include <cstdlib>

#include "src/device/runtime.h"
#include "src/ops/gemm/sm90_wide.h"
#include "src/ops/gemm/sm90_wide_plan.h"

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

bool sm90_can(const Problem& p) {
  constexpr int64_t kFar = int64_t{1} << 40, kMostBytes = int64_t{1} << 36, kMostRows = INT32_MAX;
  const int64_t size = p.type == DType::bf16 ? 2 : 1;
  const auto* gate = static_cast<const uint8_t*>(p.b);
  const auto* up = static_cast<const uint8_t*>(p.b_up);
  if (p.gated && (gate == up || std::abs(up - gate) >= kFar)) return false;
  const auto steps = [&](int64_t count, int64_t stride) {
    return count <= 1 || (stride > 0 && stride * size < kFar);
  };
  return steps(p.n, p.b_stride) && steps(p.groups, p.b_group_stride) &&
         (p.a_index != nullptr || steps(p.rows, p.a_stride)) && p.rows < kMostRows &&
         p.rows * p.a_stride * size < kMostBytes && (p.rows / 64 + p.groups) * (p.n / 64 + 1) < kMostRows;
}

bool sm90_makes_scales(const Problem& problem, const Stream& stream) {
  const Result<const device::DeviceInfo*> device = device::device_info(stream.ordinal);
  return device.ok() && problem.gated && problem.block_scales && problem.rows > 0 && problem.n > 0 &&
         problem.groups > 0 && sm90_can(problem) && wide_plan(problem, (*device)->sms).tall;
}

Status run_sm90(std::string_view name, const Problem& problem, const Stream& stream) {
  if (problem.rows <= 0 || problem.n <= 0 || problem.groups <= 0) return {};
  if (!sm90_can(problem)) return run(name, problem, stream);
  VIVACE_TRY_ASSIGN(const device::DeviceInfo* device, device::device_info(stream.ordinal));
  if (problem.type == DType::bf16) return run_sm90_bf16(name, problem, stream, device->sms);
  if (wide_plan(problem, device->sms).tall) return run_sm90_tall(name, problem, stream, device->sms);
  return problem.block_scales ? run_sm90_fp8_block(name, problem, stream, device->sms)
                              : run_sm90_fp8(name, problem, stream, device->sms);
}

}  // namespace vivace::gemm

#endif  // VIVACE_CUDA
