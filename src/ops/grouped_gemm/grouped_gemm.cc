#include "vivace/grouped_gemm.h"

#include "src/core/checks.h"
#include "src/ops/grouped_gemm/table.h"
#include "src/ops/linear/fp8_scales.h"

namespace vivace {

Facts grouped_gemm_facts(const GroupedGemmArgs& args) {
  Facts facts;
  facts.add("rows", args.x.shape[0])
      .add("groups", args.weight.shape[0])
      .add("n", args.weight.shape[1])
      .add("k", args.x.shape[1])
      .add("x", args.x.dtype)
      .add("weight", args.weight.dtype)
      .add("y", args.y.dtype)
      .add("k_bytes", args.x.shape[1] * info_of(args.x.dtype).block_bytes)
      .add("x_alignment", alignment_of(args.x))
      .add("weight_alignment", alignment_of(args.weight))
      .add("y_alignment", alignment_of(args.y))
      .add("batch_invariant", int64_t{args.batch_invariant});
  return facts;
}

Status grouped_gemm(const GroupedGemmArgs& args, const Stream& stream) {
  constexpr int64_t kF32 = dtypes_mask(DType::f32), kI32 = dtypes_mask(DType::i32);
  constexpr int64_t kPlain = dtypes_mask(DType::f32, DType::bf16, DType::f16);
  const bool fp8 = args.x.dtype == DType::fp8_e4m3, blocks = fp8 && has_block_scales(args);
  Checker check("grouped_gemm", stream);
  check.tensor("x", args.x, {"rows", "k"})
      .tensor("weight", args.weight, {"groups", "n", "k"})
      .tensor("group_start", args.group_start, {"groups"})
      .tensor("group_rows", args.group_rows, {"groups"})
      .tensor("y", args.y, {"rows", "n"})
      .dtype("x", args.x, dtypes_mask(DType::f32, DType::bf16, DType::fp8_e4m3))
      .dtype("weight", args.weight, args.x.dtype == DType::f32 ? kPlain : dtypes_mask(args.x.dtype))
      .dtype("group_start", args.group_start, kI32)
      .dtype("group_rows", args.group_rows, kI32)
      .dtype("y", args.y, dtypes_mask(DType::f32, DType::bf16))
      .written("y", args.y)
      .given("x_scale", args.x_scale, fp8, fp8 ? "scales with fp8 x" : "none")
      .given("weight_scale", args.weight_scale, fp8, fp8 ? "scales with fp8 weights" : "none");
  if (blocks) {
    check.define("k blocks", scale_blocks(args.x.shape[1]), "ceil(k / 128)")
        .define("n blocks", scale_blocks(args.weight.shape[1]), "ceil(n / 128)")
        .tensor("x_scale", args.x_scale, {"rows", "k blocks"})
        .tensor("weight_scale", args.weight_scale, {"groups", "n blocks", "k blocks"});
  } else if (fp8) {
    check.tensor("x_scale", args.x_scale, {"1"}).tensor("weight_scale", args.weight_scale, {"groups"});
  }
  check.dtype("x_scale", args.x_scale, kF32).dtype("weight_scale", args.weight_scale, kF32);
  VIVACE_TRY(check.status());
  for (int64_t g = 0; stream.readable() && g < args.weight.shape[0]; ++g) {
    const int64_t start = args.group_start.as<const int32_t>()[g],
                  rows = args.group_rows.as<const int32_t>()[g];
    if (start >= 0 && rows >= 0 && start + rows <= args.x.shape[0]) continue;
    return invalid_argument("grouped_gemm: group {} has {} rows from {}, needs them inside the {} rows of x",
                            g, rows, start, args.x.shape[0]);
  }
  if (args.y.elements() == 0 || args.weight.shape[0] == 0) return {};
  return dispatch(kGroupedGemm, args, stream);
}

Cost grouped_gemm_cost(const GroupedGemmArgs& args) {
  return {args.x.bytes() + args.weight.bytes() + args.group_start.bytes() + args.group_rows.bytes() +
              args.x_scale.bytes() + args.weight_scale.bytes() + args.y.bytes(),
          2 * args.x.elements() * args.weight.shape[1]};
}

Choice grouped_gemm_explain(const GroupedGemmArgs& args, const Stream& stream) {
  return explain(kGroupedGemm, args, stream);
}

}  // namespace vivace
