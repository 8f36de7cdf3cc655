#include "vivace/linear.h"

#include <algorithm>
#include <optional>

#include "src/core/checks.h"
#include "src/core/log.h"
#include "src/ops/linear/cublaslt.h"
#include "src/ops/linear/fp8_scales.h"
#include "src/ops/linear/table.h"

namespace vivace {

namespace {

struct PartNames {
  std::string_view weight, bias, y, n, scale, blocks;
};
constexpr PartNames kPartNames[LinearArgs::kMaxParts] = {
    {"parts[0].weight", "parts[0].bias", "parts[0].y", "n0", "parts[0].weight_scale", "n0 blocks"},
    {"parts[1].weight", "parts[1].bias", "parts[1].y", "n1", "parts[1].weight_scale", "n1 blocks"},
    {"parts[2].weight", "parts[2].bias", "parts[2].y", "n2", "parts[2].weight_scale", "n2 blocks"},
};

int parts_of(const LinearArgs& args) {
  return std::clamp(args.part_count, 1, LinearArgs::kMaxParts);
}

Facts facts_of(const LinearArgs& args, bool cublaslt_algorithm) {
  const bool fp8 = args.x.dtype == DType::fp8_e4m3;
  int64_t outputs = 0, in_block_formats = 0, other_type = 0, not_f32 = 0, other_bias = 0, odd_n = 0;
  int64_t weight_alignment = alignment_of(args.parts[0].weight), y_alignment = alignment_of(args.parts[0].y);
  int64_t scale_alignment = alignment_of(args.x_scale);
  const int64_t parts = std::max(parts_of(args), 1);
  for (int p = 0; p < parts_of(args); ++p) {
    const LinearPart& part = args.parts[p];
    outputs += part.weight.shape[0];
    in_block_formats += is_block_format(part.weight.dtype);
    other_type += part.weight.dtype != args.x.dtype;
    not_f32 += part.y.dtype != DType::f32;
    other_bias += part.bias.present() && (part.bias.dtype != DType::bf16 || part.y.dtype != DType::bf16);
    odd_n += fp8 && part.weight.shape[0] % 16 != 0;
    weight_alignment = std::min(weight_alignment, alignment_of(part.weight));
    y_alignment = std::min(y_alignment, alignment_of(part.y));
    scale_alignment = std::min(scale_alignment, alignment_of(part.weight_scale));
  }
  Facts facts;
  facts.add("tokens", args.x.shape[0])
      .add("tokens_per_part", (args.x.shape[0] + parts - 1) / parts)
      .add("k", args.x.shape[1])
      .add("n", args.parts[0].weight.shape[0])
      .add("outputs", outputs)
      .add("weight", args.parts[0].weight.dtype)
      .add("x", args.x.dtype)
      .add("x_scaling", fp8 ? static_cast<int64_t>(args.x_scaling) : 0)
      .add("exact", int64_t{args.exact})
      .add("batch_invariant", int64_t{args.batch_invariant})
      .add("parts_in_block_formats", in_block_formats)
      .add("parts_of_other_type", other_type)
      .add("parts_not_to_f32", not_f32)
      .add("parts_with_other_bias", other_bias)
      .add("parts_with_odd_n", odd_n)
      .add("k_bytes", args.x.shape[1] * info_of(args.x.dtype).block_bytes)
      .add("x_alignment", alignment_of(args.x))
      .add("weight_alignment", weight_alignment)
      .add("y_alignment", y_alignment)
      .add("scale_alignment", scale_alignment)
      .add("cublaslt", int64_t{args.x.device == Device::cuda && cublaslt_found()})
      .add("cublaslt_algorithm", int64_t{cublaslt_algorithm});
  return facts;
}

/// How a call runs.
struct Way {
  const Operator<LinearArgs>* table = &kLinear;
  const Row<LinearArgs>* row = nullptr;  ///< null: none fits
  std::optional<LinearPlans> plans;      ///< with cuBLASLt's row
};

/// Where cuBLASLt's row would run, the library is asked on this device: without an algorithm another row of the table runs.
/// Fails, as the call then does, where the library fails.
Result<Way> way_of(const LinearArgs& args, const Stream& stream) {
  Way way{.row = choose(kLinear, args, stream)};
#if VIVACE_CUDA
  if (way.row != nullptr && way.row->run == linear_cublaslt) {
    VIVACE_TRY_ASSIGN(way.plans, linear_cublaslt_plans(args, stream));
    if (!way.plans)
      way = {.table = &kLinearWithoutAlgorithm, .row = choose(kLinearWithoutAlgorithm, args, stream)};
  }
#endif
  return way;
}

Status run(const Way& way, const LinearArgs& args, const Stream& stream) {
#if VIVACE_CUDA
  if (way.plans) return linear_by_plans(args, *way.plans, stream);
#endif
  return way.row->run(args, stream);
}

}  // namespace

Facts linear_facts(const LinearArgs& args) {
  return facts_of(args, true);
}

Facts linear_facts_without_algorithm(const LinearArgs& args) {
  return facts_of(args, false);
}

Status linear(const LinearArgs& args, const Stream& stream) {
  constexpr int64_t kPlain = dtypes_mask(DType::f32, DType::bf16, DType::f16);
  constexpr int64_t kOtherWeights =
      kPlain | dtypes_mask(DType::q4_0, DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k);
  constexpr int64_t kFp8 = dtypes_mask(DType::fp8_e4m3), kF32 = dtypes_mask(DType::f32);
  constexpr int64_t kOutputs = dtypes_mask(DType::f32, DType::bf16);
  const bool fp8 = args.x.dtype == DType::fp8_e4m3, blocks = fp8 && args.x_scaling == Fp8Scaling::block;
  const int64_t weights = fp8 ? kFp8 : kOtherWeights;  // fp8 goes with fp8
  Checker check("linear", stream);
  check
      .that(args.part_count >= 1 && args.part_count <= LinearArgs::kMaxParts, "part_count", args.part_count,
            "1 to 3")
      .tensor("x", args.x, {"tokens", "k"})
      .dtype("x", args.x, kOutputs | kFp8)
      .given("x_scale", args.x_scale, fp8, fp8 ? "scales with fp8 x" : "none");
  if (blocks) {
    check.define("k blocks", scale_blocks(args.x.shape[1]), "ceil(k / 128)")
        .tensor("x_scale", args.x_scale, {"tokens", "k blocks"});
  } else if (fp8) {
    check.tensor("x_scale", args.x_scale, {args.x_scaling == Fp8Scaling::token ? "tokens" : "1"});
  }
  check.dtype("x_scale", args.x_scale, kF32);
  int64_t outputs = 0;
  for (int p = 0; p < parts_of(args); ++p) {
    const LinearPart& part = args.parts[p];
    const PartNames& name = kPartNames[p];
    check.tensor(name.weight, part.weight, {name.n, "k"})
        .optional(name.bias, part.bias, {name.n})
        .tensor(name.y, part.y, {"tokens", name.n})
        .dtype(name.weight, part.weight, weights)
        .dtype(name.bias, part.bias, kPlain)
        .dtype(name.y, part.y, kOutputs)
        .written(name.y, part.y)
        .given(name.scale, part.weight_scale, fp8, fp8 ? "scales with fp8 weights" : "none");
    if (blocks) {
      check.define(name.blocks, scale_blocks(part.weight.shape[0]), "ceil(n / 128)")
          .tensor(name.scale, part.weight_scale, {name.blocks, "k blocks"});
    } else if (fp8) {
      check.tensor(name.scale, part.weight_scale, {"1"});
    }
    check.dtype(name.scale, part.weight_scale, kF32);
    outputs += part.y.elements();
  }
  check.optional("workspace", args.workspace, {"bytes"})
      .dtype("workspace", args.workspace, dtypes_mask(DType::u8));
  VIVACE_TRY(check.status());
  if (outputs == 0) return {};
  if (stream.check_only) {
    return choose(kLinear, args, stream) != nullptr ? Status() : internal::refuse(kLinear, args, stream);
  }
  VIVACE_TRY_ASSIGN(const Way way, way_of(args, stream));
  if (way.row == nullptr) return internal::refuse(*way.table, args, stream);
  if (way.table == &kLinearWithoutAlgorithm) {
    log_once(fmt::format("linear: cuBLASLt has no algorithm for some calls in {}; they run and count as {}",
                         name_of(args.x.dtype), way.row->name));
  }
  return run_counted(*way.table, *way.row, args, stream, [&] { return run(way, args, stream); });
}

Result<int64_t> linear_workspace_bytes(const LinearArgs& args, const Stream& stream) {
  return workspace_bytes(kLinear, args, stream);
}

Cost linear_cost(const LinearArgs& args) {
  Cost cost{args.x.bytes() + args.x_scale.bytes(), 0};
  for (int p = 0; p < parts_of(args); ++p) {
    const LinearPart& part = args.parts[p];
    cost.bytes += part.weight.bytes() + part.weight_scale.bytes() + part.bias.bytes() + part.y.bytes();
    cost.flops += 2 * args.x.shape[0] * part.weight.elements();
  }
  return cost;
}

Choice linear_explain(const LinearArgs& args, const Stream& stream) {
  const Result<Way> way = way_of(args, stream);
  if (way.ok()) return explain(*way->table, args, stream);
  return {.row = {}, .refused = {{std::string(choose(kLinear, args, stream)->name), way.status().message()}}};
}

}  // namespace vivace
