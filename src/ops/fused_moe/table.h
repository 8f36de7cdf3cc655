#pragma once

#include <algorithm>
#include <span>

#include "src/core/dispatch.h"
#include "src/core/host_device.h"
#include "src/ops/fused_moe/sm90_limits.h"
#include "src/ops/gemm/gate.h"
#include "src/ops/gemm/limits.h"
#include "src/ops/linear/fp8_scales.h"
#include "vivace/fused_moe.h"
#include "vivace/quantize_fp8.h"

namespace vivace {

Status fused_moe_reference(const FusedMoeArgs& args, const Stream& stream);
Status fused_moe_cpu(const FusedMoeArgs& args, const Stream& stream);
int64_t fused_moe_cpu_workspace_bytes(const FusedMoeArgs& args, const Stream& stream);
Status fused_moe_sm90_split(const FusedMoeArgs& args, const Stream& stream);
Status fused_moe_sm90_stream(const FusedMoeArgs& args, const Stream& stream);
Status fused_moe_sm90_wide(const FusedMoeArgs& args, const Stream& stream);
Status fused_moe_cuda(const FusedMoeArgs& args, const Stream& stream);
int64_t fused_moe_gpu_workspace_bytes(const FusedMoeArgs& args, const Stream& stream);

Facts fused_moe_facts(const FusedMoeArgs& args);

inline int64_t expert_count(const FusedMoeArgs& args) {
  return args.gate_up.present() ? args.gate_up.shape[0] : static_cast<int64_t>(args.experts.size());
}

/// How an expert joins its two inner values.
template <class T>
gemm::Gate<T> gate_of(const SwiGlu& swiglu) {
  return {static_cast<T>(swiglu.alpha), static_cast<T>(swiglu.limit), static_cast<T>(swiglu.beta)};
}

/// Which expert here an id is.
struct LocalExperts {
  const int32_t* map;
  int64_t map_size;  ///< -1: no map, experts are neighbours from `first` on
  int32_t first, experts;

  /// -1 for an id without work.
  VIVACE_HOST_DEVICE int32_t of(int32_t id) const {
    if (id < 0) return -1;
    int32_t local = -1;
    if (map_size < 0) {
      local = id - first;  // of two numbers from 0 on
    } else if (id < map_size) {
#ifdef __CUDA_ARCH__
      local = __ldcg(map + id);  // a kernel that reads ids before its turn reads this too: past the L1
#else
      local = map[id];
#endif
    }
    return local >= 0 && local < experts ? local : -1;
  }
};
inline LocalExperts local_experts(const FusedMoeArgs& args) {
  return {.map = args.expert_map.as<const int32_t>(),
          .map_size = args.expert_map.present() ? args.expert_map.shape[0] : -1,
          .first = static_cast<int32_t>(args.first_expert),
          .experts = static_cast<int32_t>(expert_count(args))};
}

/// Experts that the ids are of, here and elsewhere.
inline int64_t total_experts(const FusedMoeArgs& args) {
  const int64_t total = args.expert_map.present() ? args.expert_map.shape[0] : args.total_experts;
  return std::max(total, expert_count(args));
}

/// Rows that an expert has if all are alike to the router, rounded up.
inline int64_t rows_of_expert(const FusedMoeArgs& args) {
  const int64_t pairs = args.x.shape[0] * args.expert_ids.shape[1], experts = total_experts(args);
  return experts > 0 ? (pairs + experts - 1) / experts : 0;
}

/// Columns of the intermediate; 0 without experts.
inline int64_t expert_intermediate(const FusedMoeArgs& args) {
  if (args.gate_up.present()) return args.gate_up.shape[1] / 2;
  return args.experts.empty() ? 0 : args.experts[0].gate.shape[0];
}

/// Whether fp8 values come with a scale per 128 of them, not one per tensor.
inline bool has_block_scales(const FusedMoeArgs& args) {
  return args.x_scale.rank == 2;
}

/// Whether the intermediate goes through fp8.
inline bool is_fp8(const FusedMoeArgs& args) {
  return args.x.dtype == DType::fp8_e4m3;
}

/// The matrices of expert `e`, as views, whichever form they came in.
inline ExpertWeights expert_at(const FusedMoeArgs& args, int64_t e) {
  if (!args.gate_up.present()) return args.experts[e];
  const Tensor both = args.gate_up.at(e);
  const int64_t intermediate = both.shape[0] / 2;
  ExpertWeights w{both.rows(0, intermediate), both.rows(intermediate, intermediate), args.down.at(e)};
  if (!is_fp8(args)) return w;
  // A scale of a stacked tensor as a tensor of its own: [1] or [block rows, block columns].
  const auto scale_of = [](Tensor t) {
    if (t.rank == 0) t.rank = 1, t.shape[0] = 1, t.stride[0] = 1;
    return t;
  };
  w.gate_scale = scale_of(args.gate_up_scale.at(e).at(0));
  w.up_scale = scale_of(args.gate_up_scale.at(e).at(1));
  w.down_scale = scale_of(args.down_scale.at(e));
  if (args.act_scale.present())
    w.act_scale = scale_of(args.act_scale.at(args.act_scale.shape[0] > 1 ? e : 0));
  return w;
}

/// Scales of the matrices of an expert: gate and up have the slice in their rows, down in its columns.
inline Fp8Scales up_scales(const FusedMoeArgs& args, const Tensor& scale) {
  return fp8_scales(scale, args.block_offset, 0);
}
inline Fp8Scales down_scales(const FusedMoeArgs& args, const Tensor& scale) {
  return fp8_scales(scale, 0, args.block_offset);
}

/// The type of gate and up; none where no experts are given, which no call may.
inline DType expert_type(const FusedMoeArgs& args) {
  if (args.gate_up.present()) return args.gate_up.dtype;
  return args.experts.empty() ? DType::none : args.experts[0].gate.dtype;
}

/// A call whose x meets fp8 weights unquantised: what quantises it, and the call that is left, which is what rows see.
struct QuantisedMoe {
  QuantizeFp8Args quantisation;
  FusedMoeArgs left;
  int64_t bytes;  ///< of the workspace, before what the row takes
};
/// Whether a call is one.
inline bool quantises(const FusedMoeArgs& args) {
  return !is_fp8(args) && expert_type(args) == DType::fp8_e4m3;
}
/// In a question the workspace may be absent.
QuantisedMoe quantised_moe(const FusedMoeArgs& args);

inline constexpr Need kFusedMoeCpuNeeds[] = {
    {"x", Need::dtype_in, dtypes_mask(DType::f32, DType::fp8_e4m3)},
    {"y", Need::dtype_in, dtypes_mask(DType::f32)},
};

// Rows of 16-byte chunks; the shared expert as the routed ones.
inline constexpr Need kFusedMoeCudaNeeds[] = {
    {"compute_capability", Need::at_least, 80},
    {"x", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"gate_up", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"down", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"shared_of_other_type", Need::equals, 0},
    {"shared_of_two_strides", Need::equals, 0},
    {"stacked", Need::equals, 1},
    {"experts", Need::at_most, 65535},
    {"hidden_bytes", Need::multiple_of, 16},
    {"intermediate_bytes", Need::multiple_of, 16},
    {"shared_intermediate_bytes", Need::multiple_of, 16},
    {"block_offset", Need::multiple_of, 16},
    {"x_alignment", Need::multiple_of, 16},
    {"gate_up_alignment", Need::multiple_of, 16},
    {"down_alignment", Need::multiple_of, 16},
    {"shared_alignment", Need::multiple_of, 16},
};

// Of a decode step: while a handful of rows an expert leaves the weights' bytes the roof. Units of 16 columns. The order of sums
// is its own, where few rows are multiplied at a time.
inline constexpr Need kFusedMoeSm90SplitNeeds[] = {
    {"batch_invariant", Need::equals, 0},
    {"rows_of_expert", Need::at_most, moe_sm90::kFewRows},
    {"compute_capability", Need::equals, 90},
    {"x", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"gate_up", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"down", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"shared_of_other_type", Need::equals, 0},
    {"shared_of_two_strides", Need::equals, 0},
    {"stacked", Need::equals, 1},
    {"tokens", Need::at_most, moe_sm90::kMaxTokens},
    {"rows_of_expert", Need::at_most, moe_sm90::kMaxRows},
    {"outputs_of_tokens", Need::at_most, moe_sm90::kMaxSlots},
    {"experts", Need::at_most, moe_sm90::kMaxExperts},
    {"hidden", Need::multiple_of, 16},
    {"intermediate", Need::multiple_of, 16},
    {"shared_intermediate", Need::multiple_of, 16},
    {"block_offset", Need::multiple_of, 16},
    {"x_alignment", Need::multiple_of, 16},
    {"gate_up_alignment", Need::multiple_of, 16},
    {"down_alignment", Need::multiple_of, 16},
    {"shared_alignment", Need::multiple_of, 16},
};
/// The same without the first two: in any company, up to kMaxRows.
inline constexpr std::span kFusedMoeSm90StreamNeeds = std::span(kFusedMoeSm90SplitNeeds).subspan(2);
static_assert(kFusedMoeSm90StreamNeeds.front().fact == std::string_view("compute_capability"));

// As cuda.grouped, in products of warp groups.
inline constexpr Need kFusedMoeSm90WideNeeds[] = {
    {"compute_capability", Need::equals, 90},
    {"x", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"gate_up", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"down", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"batch_invariant", Need::equals, 0},
    {"shared_of_other_type", Need::equals, 0},
    {"shared_of_two_strides", Need::equals, 0},
    {"stacked", Need::equals, 1},
    {"experts", Need::at_most, gemm::kMostGroups},
    {"hidden_bytes", Need::multiple_of, 16},
    {"intermediate_bytes", Need::multiple_of, 16},
    {"shared_intermediate_bytes", Need::multiple_of, 16},
    {"block_offset", Need::multiple_of, 16},
    {"x_alignment", Need::multiple_of, 16},
    {"gate_up_alignment", Need::multiple_of, 16},
    {"down_alignment", Need::multiple_of, 16},
    {"shared_alignment", Need::multiple_of, 16},
};

inline constexpr Row<FusedMoeArgs> kFusedMoeRows[] = {
#if VIVACE_CUDA
    {"sm90.split", Device::cuda, kFusedMoeSm90SplitNeeds, fused_moe_sm90_split,
     "as sm90.stream, but four warps share k of gate and up: a few tokens have too few columns for all warps",
     fused_moe_gpu_workspace_bytes},
    {"sm90.stream", Device::cuda, kFusedMoeSm90StreamNeeds, fused_moe_sm90_stream,
     "each warp streams weights through a ring of its own; two launches, a CTA has columns of y for all "
     "experts",
     fused_moe_gpu_workspace_bytes},
    {"sm90.wide", Device::cuda, kFusedMoeSm90WideNeeds, fused_moe_sm90_wide,
     "tokens sorted by expert on the device, grouped products of warp groups, x read in place or put in "
     "order",
     fused_moe_gpu_workspace_bytes},
    {"cuda.grouped", Device::cuda, kFusedMoeCudaNeeds, fused_moe_cuda,
     "tokens sorted by expert on the device, grouped tensor-core products, x read in place",
     fused_moe_gpu_workspace_bytes},
#endif
    {"cpu.grouped", Device::cpu, kFusedMoeCpuNeeds, fused_moe_cpu,
     "tokens grouped by expert, fp32 products of linear's kernels", fused_moe_cpu_workspace_bytes},
    {"reference", Device::cpu, {}, fused_moe_reference, "float64, straight from the formula"},
};

inline constexpr Operator<FusedMoeArgs> kFusedMoe = {
    "fused_moe", "routed experts: gate and up, SwiGLU, down, weighted sum, shared expert", fused_moe_facts,
    fused_moe_cost, kFusedMoeRows};

}  // namespace vivace
