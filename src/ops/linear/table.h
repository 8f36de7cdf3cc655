#pragma once

#include <array>
#include <optional>
#include <span>

#include "src/core/dispatch.h"
#include "src/ops/linear/cublaslt.h"
#include "vivace/linear.h"

namespace vivace {

Status linear_reference(const LinearArgs& args, const Stream& stream);
Status linear_cpu_q8(const LinearArgs& args, const Stream& stream);
int64_t linear_cpu_q8_workspace(const LinearArgs& args, const Stream& stream);
Status linear_cpu_f32(const LinearArgs& args, const Stream& stream);
Status linear_cpu_fp8(const LinearArgs& args, const Stream& stream);
int64_t linear_cpu_fp8_workspace(const LinearArgs& args, const Stream& stream);
Status linear_cublaslt(const LinearArgs& args, const Stream& stream);
int64_t linear_cublaslt_workspace(const LinearArgs& args, const Stream& stream);
/// cuBLASLt's plan of each part of a call that the row otherwise takes; nothing where it has none for one of them.
using LinearPlans = std::array<const CublasltPlan*, LinearArgs::kMaxParts>;
Result<std::optional<LinearPlans>> linear_cublaslt_plans(const LinearArgs& args, const Stream& stream);
Status linear_by_plans(const LinearArgs& args, const LinearPlans& plans, const Stream& stream);
Status linear_cuda_mma(const LinearArgs& args, const Stream& stream);
Status linear_sm90_split(const LinearArgs& args, const Stream& stream);

/// tokens, also divided by the parts and rounded up, k, n and weight of part 0, x, exact and batch_invariant (0 or 1); over all parts: outputs, how many have a block
/// format, another type than x, a y that is not f32, a bias that cuBLASLt does not add, an n that is no multiple of 16;
/// and whether cuBLASLt was found (a call on a GPU looks) and has an algorithm, which linear() asks on a device.
Facts linear_facts(const LinearArgs& args);
/// The same where cuBLASLt has none.
Facts linear_facts_without_algorithm(const LinearArgs& args);

inline constexpr Need kLinearQ8Needs[] = {
    {"x", Need::dtype_in, dtypes_mask(DType::f32)},
    {"parts_not_to_f32", Need::equals, 0},
    {"exact", Need::equals, 0},
    {"parts_in_block_formats", Need::at_least, 1},
};
inline constexpr Need kLinearF32Needs[] = {{"x", Need::dtype_in, dtypes_mask(DType::f32)},
                                           {"parts_not_to_f32", Need::equals, 0}};
inline constexpr Need kLinearFp8Needs[] = {{"x", Need::dtype_in, dtypes_mask(DType::fp8_e4m3)},
                                           {"parts_not_to_f32", Need::equals, 0}};

inline constexpr Need kLinearMmaNeeds[] = {
    {"compute_capability", Need::at_least, 80},
    {"x", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"parts_of_other_type", Need::equals, 0},
    {"k_bytes", Need::multiple_of, 16},
    {"x_alignment", Need::multiple_of, 16},
    {"weight_alignment", Need::multiple_of, 16},
};
/// Of all parts: tiles of 64, the last of a part not full, of which a grid has 65,535 at most.
inline constexpr int64_t kMostSplitOutputs = 64 * (65535 - LinearArgs::kMaxParts);
// The order of sums is its own. Other rows launch a kernel for each part, this one none more.
inline constexpr Need kLinearSm90SplitNeeds[] = {
    {"tokens_per_part", Need::at_most, 32},
    {"compute_capability", Need::equals, 90},
    {"batch_invariant", Need::equals, 0},
    {"tokens", Need::at_most, 128},
    {"outputs", Need::at_most, kMostSplitOutputs},
    {"x", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"parts_of_other_type", Need::equals, 0},
    {"k_bytes", Need::at_most, 1 << 30},
    {"k_bytes", Need::multiple_of, 16},
    {"x_alignment", Need::multiple_of, 16},
    {"weight_alignment", Need::multiple_of, 16},
};
/// The same with any number of tokens for a part.
inline constexpr std::span kLinearSm90Split128Needs = std::span(kLinearSm90SplitNeeds).subspan(1);
inline constexpr Need kLinearCublasltNeeds[] = {
    {"compute_capability", Need::at_least, 80},
    {"batch_invariant", Need::equals, 0},
    {"x", Need::dtype_in, dtypes_mask(DType::bf16)},
    {"cublaslt_algorithm", Need::equals, 1},
    {"cublaslt", Need::equals, 1},
    {"parts_of_other_type", Need::equals, 0},
    {"parts_with_other_bias", Need::equals, 0},
    {"k", Need::at_least, 1},
    {"k_bytes", Need::multiple_of, 16},
    {"x_alignment", Need::multiple_of, 16},
    {"weight_alignment", Need::multiple_of, 16},
    {"y_alignment", Need::multiple_of, 16},
};
// fp8 came with 8.9. Blocks of scales would need those of x transposed.
inline constexpr Need kLinearCublasltFp8Needs[] = {
    {"x", Need::dtype_in, dtypes_mask(DType::fp8_e4m3)},
    {"compute_capability", Need::at_least, 89},
    {"batch_invariant", Need::equals, 0},
    {"x_scaling", Need::equals, static_cast<int64_t>(Fp8Scaling::tensor)},
    {"cublaslt_algorithm", Need::equals, 1},
    {"cublaslt", Need::equals, 1},
    {"parts_of_other_type", Need::equals, 0},
    {"parts_with_other_bias", Need::equals, 0},
    {"parts_with_odd_n", Need::equals, 0},
    {"k", Need::at_least, 1},
    {"k_bytes", Need::multiple_of, 16},
    {"x_alignment", Need::multiple_of, 16},
    {"weight_alignment", Need::multiple_of, 16},
    {"y_alignment", Need::multiple_of, 16},
    {"scale_alignment", Need::multiple_of, 16},
};

inline constexpr Row<LinearArgs> kLinearRows[] = {
#if VIVACE_CUDA
    {"sm90.split", Device::cuda, kLinearSm90SplitNeeds, linear_sm90_split,
     "warp groups, k shared by a cluster of CTAs, all parts in one launch: decode steps"},
    {"cuda.cublaslt", Device::cuda, kLinearCublasltNeeds, linear_cublaslt,
     "cuBLASLt, an algorithm per shape by its heuristic", linear_cublaslt_workspace},
    {"cuda.cublaslt.fp8", Device::cuda, kLinearCublasltFp8Needs, linear_cublaslt,
     "the same on fp8 with a scale per tensor", linear_cublaslt_workspace},
    {"sm90.split.128", Device::cuda, kLinearSm90Split128Needs, linear_sm90_split,
     "the same for more tokens, where cuBLASLt does not take the call"},
    {"cuda.mma", Device::cuda, kLinearMmaNeeds, linear_cuda_mma,
     "tensor cores; sums over k in one order for any number of tokens"},
#endif
    {"cpu.q8", Device::cpu, kLinearQ8Needs, linear_cpu_q8,
     "block formats times activations in int8 or int16, integer products; plain parts as cpu.f32",
     linear_cpu_q8_workspace},
    {"cpu.f32", Device::cpu, kLinearF32Needs, linear_cpu_f32,
     "fp32 products of the weights' exact values, unpacked a few rows at a time"},
    {"cpu.fp8", Device::cpu, kLinearFp8Needs, linear_cpu_fp8,
     "x and weights times their scales in fp32, then as cpu.f32", linear_cpu_fp8_workspace},
    {"reference", Device::cpu, {}, linear_reference, "float64 on the weights' exact values"},
};

inline constexpr Operator<LinearArgs> kLinear = {
    "linear", "x times one to three transposed weights, plus bias", linear_facts, linear_cost, kLinearRows};
/// The same table for a call that cuBLASLt has no algorithm for.
inline constexpr Operator<LinearArgs> kLinearWithoutAlgorithm = {
    kLinear.name, kLinear.summary, linear_facts_without_algorithm, linear_cost, kLinear.rows};

}  // namespace vivace
