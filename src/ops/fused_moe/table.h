#pragma once

#include "src/core/dispatch.h"
#include "vivace/fused_moe.h"

namespace vivace {

Status fused_moe_reference(const FusedMoeArgs& args, const Stream& stream);
Status fused_moe_cpu(const FusedMoeArgs& args, const Stream& stream);
int64_t fused_moe_cpu_workspace_bytes(const FusedMoeArgs& args, const Stream& stream);

Facts fused_moe_facts(const FusedMoeArgs& args);

inline int64_t expert_count(const FusedMoeArgs& args) {
  return args.gate_up.present() ? args.gate_up.shape[0] : static_cast<int64_t>(args.experts.size());
}

/// Columns of the intermediate; 0 without experts.
inline int64_t expert_intermediate(const FusedMoeArgs& args) {
  if (args.gate_up.present()) return args.gate_up.shape[1] / 2;
  return args.experts.empty() ? 0 : args.experts[0].gate.shape[0];
}

/// The matrices of expert `e`, as views, whichever form they came in.
inline ExpertWeights expert_at(const FusedMoeArgs& args, int64_t e) {
  if (!args.gate_up.present()) return args.experts[e];
  const Tensor both = args.gate_up.at(e);
  const int64_t intermediate = both.shape[0] / 2;
  return {both.rows(0, intermediate), both.rows(intermediate, intermediate), args.down.at(e)};
}

/// Whether `id` names one of the experts.
inline bool has_work(int32_t id, int64_t experts) {
  return id >= 0 && id < experts;
}

inline constexpr Need kMoeInF32[] = {{"x", Need::dtype_in, dtypes_mask(DType::f32)}};

inline constexpr Row<FusedMoeArgs> kFusedMoeRows[] = {
    {"cpu.grouped", Device::cpu, kMoeInF32, fused_moe_cpu,
     "tokens grouped by expert, fp32 products of linear's kernels", fused_moe_cpu_workspace_bytes},
    {"reference", Device::cpu, {}, fused_moe_reference, "float64, straight from the formula"},
};

inline constexpr Operator<FusedMoeArgs> kFusedMoe = {
    "fused_moe", "routed experts: gate and up, SiLU, down, weighted sum, shared expert", fused_moe_facts,
    kFusedMoeRows};

}  // namespace vivace
