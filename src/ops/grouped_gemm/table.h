#pragma once

#include "src/core/dispatch.h"
#include "src/ops/gemm/limits.h"
#include "vivace/grouped_gemm.h"

namespace vivace {

Status grouped_gemm_reference(const GroupedGemmArgs& args, const Stream& stream);
Status grouped_gemm_cpu(const GroupedGemmArgs& args, const Stream& stream);
Status grouped_gemm_sm90(const GroupedGemmArgs& args, const Stream& stream);
Status grouped_gemm_cuda(const GroupedGemmArgs& args, const Stream& stream);

Facts grouped_gemm_facts(const GroupedGemmArgs& args);

/// Whether fp8 values come with a scale per 128 of them.
inline bool has_block_scales(const GroupedGemmArgs& args) {
  return args.x_scale.rank == 2;
}

/// Rows [begin, end) of group `g`, clipped to x.
struct GroupRows {
  int64_t begin, end;
};
inline GroupRows rows_of_group(const GroupedGemmArgs& args, int64_t g) {
  const int64_t start = args.group_start.as<const int32_t>()[g],
                rows = args.group_rows.as<const int32_t>()[g];
  const int64_t end = start + rows < args.x.shape[0] ? start + rows : args.x.shape[0];
  return {start > 0 ? start : 0, end};
}

// On the CPU other types are for tests, which the reference serves.
inline constexpr Need kGroupedGemmCpuNeeds[] = {
    {"x", Need::dtype_in, dtypes_mask(DType::f32)},
    {"y", Need::dtype_in, dtypes_mask(DType::f32)},
};
// Rows of 16-byte chunks.
inline constexpr Need kGroupedGemmCudaNeeds[] = {
    {"compute_capability", Need::at_least, 80},
    {"x", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"weight", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"k_bytes", Need::multiple_of, 16},
    {"x_alignment", Need::multiple_of, 16},
    {"weight_alignment", Need::multiple_of, 16},
};
// Its list of groups is in shared memory.
inline constexpr Need kGroupedGemmSm90Needs[] = {
    {"compute_capability", Need::equals, 90},
    {"x", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"weight", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"batch_invariant", Need::equals, 0},
    {"groups", Need::at_most, gemm::kMostGroups},
    {"k", Need::at_least, 1},
    {"k_bytes", Need::multiple_of, 16},
    {"n", Need::multiple_of, 8},
    {"x_alignment", Need::multiple_of, 16},
    {"weight_alignment", Need::multiple_of, 16},
    {"y_alignment", Need::multiple_of, 16},
};

inline constexpr Row<GroupedGemmArgs> kGroupedGemmRows[] = {
#if VIVACE_CUDA
    {"sm90.wide", Device::cuda, kGroupedGemmSm90Needs, grouped_gemm_sm90,
     "warp groups multiply 128 or 192 rows of weights by up to 256 rows of x; tiles as high as a group needs"},
    {"cuda.grouped", Device::cuda, kGroupedGemmCudaNeeds, grouped_gemm_cuda,
     "tensor cores; the group of a tile is searched on the device"},
#endif
    {"cpu.groups", Device::cpu, kGroupedGemmCpuNeeds, grouped_gemm_cpu,
     "fp32 products of linear's kernels, groups and columns over threads"},
    {"reference", Device::cpu, {}, grouped_gemm_reference, "float64, straight from the formula"},
};

inline constexpr Operator<GroupedGemmArgs> kGroupedGemm = {
    "grouped_gemm", "rows of each group times the group's transposed weight", grouped_gemm_facts,
    grouped_gemm_cost, kGroupedGemmRows};

}  // namespace vivace
