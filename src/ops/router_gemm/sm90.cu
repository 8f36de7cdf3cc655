// The rows for compute capability 9.0: which kernel a call runs, and how it is laid over the device.

#include "src/ops/router_gemm/sm90.h"

#include <map>
#include <mutex>

#include "src/device/launch.h"
#include "src/device/runtime.h"

namespace vivace {

using namespace router;

namespace {

/// Never launched: asks how many clusters fit where a CTA takes a whole SM.
__global__ void whole_sm_kernel() {}

Result<Residents> count_residents(const Stream& stream) {
  const device::DeviceGuard guard(stream.ordinal);
  VIVACE_TRY_ASSIGN(const device::DeviceInfo* info, device::device_info(stream.ordinal));
  VIVACE_TRY(
      internal::cuda_status(cudaFuncSetAttribute(whole_sm_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(info->smem_per_block)),
                            "raising the shared memory limit"));
  Residents residents = {};
  for (int ctas = 1; ctas <= kMostCtas; ++ctas) {
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(256);
    config.dynamicSmemBytes = static_cast<size_t>(info->smem_per_block);
    config.attrs = &cluster;
    config.numAttrs = 1;
    int clusters = 0;
    VIVACE_TRY(internal::cuda_status(cudaOccupancyMaxActiveClusters(&clusters, whole_sm_kernel, &config),
                                     "counting the clusters that fit"));
    residents.ctas[ctas] = std::max(clusters, 1) * ctas;
  }
  return residents;
}

/// Of the device of `stream`: asked once.
Result<Residents> residents_of(const Stream& stream) {
  static std::mutex mutex;
  static std::map<int, Residents> known;
  std::lock_guard lock(mutex);
  if (const auto it = known.find(stream.ordinal); it != known.end()) return it->second;
  VIVACE_TRY_ASSIGN(const Residents residents, count_residents(stream));
  return known[stream.ordinal] = residents;
}

Problem problem_of(const Params& p) {
  return {.tokens = p.tokens, .experts = p.experts, .hidden = p.hidden, .terms = p.term_count};
}

}  // namespace

Status router_gemm_sm90_pieces(const RouterGemmArgs& args, const Stream& stream) {
  const Params p = params_of(args);
  if (const FewPlan plan = few_plan(problem_of(p)); plan.ctas > 0) return run_few_tokens(p, plan, stream);
  VIVACE_TRY_ASSIGN(const Residents residents, residents_of(stream));
  return run_tiles(p, pieces_plan(problem_of(p), residents), stream);
}

Status router_gemm_sm90_tiles(const RouterGemmArgs& args, const Stream& stream) {
  const Params p = params_of(args);
  VIVACE_TRY_ASSIGN(const Residents residents, residents_of(stream));
  return run_tiles(p, prompt_plan(problem_of(p), residents), stream);
}

}  // namespace vivace
