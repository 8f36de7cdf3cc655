#include "vivace/linear.h"

#include <algorithm>

#include "src/core/checks.h"
#include "src/ops/linear/table.h"

namespace vivace {

namespace {

struct PartNames {
  std::string_view weight, bias, y, n;
};
constexpr PartNames kPartNames[LinearArgs::kMaxParts] = {
    {"parts[0].weight", "parts[0].bias", "parts[0].y", "n0"},
    {"parts[1].weight", "parts[1].bias", "parts[1].y", "n1"},
    {"parts[2].weight", "parts[2].bias", "parts[2].y", "n2"},
};

int parts_of(const LinearArgs& args) {
  return std::clamp(args.part_count, 1, LinearArgs::kMaxParts);
}

}  // namespace

Facts linear_facts(const LinearArgs& args) {
  int64_t block_parts = 0;
  for (int p = 0; p < parts_of(args); ++p) block_parts += is_block_format(args.parts[p].weight.dtype);
  return Facts()
      .add("tokens", args.x.shape[0])
      .add("k", args.x.shape[1])
      .add("n", args.parts[0].weight.shape[0])
      .add("weight", args.parts[0].weight.dtype)
      .add("x", args.x.dtype)
      .add("exact", int64_t{args.exact})
      .add("block_parts", block_parts);
}

Status linear(const LinearArgs& args, const Stream& stream) {
  constexpr int64_t kPlain = dtypes_mask(DType::f32, DType::bf16, DType::f16);
  constexpr int64_t kWeights =
      kPlain | dtypes_mask(DType::q4_0, DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k);
  constexpr int64_t kActivations = dtypes_mask(DType::f32);
  Checker check("linear", stream.device);
  check
      .that(args.part_count >= 1 && args.part_count <= LinearArgs::kMaxParts, "part_count", args.part_count,
            "1 to 3")
      .tensor("x", args.x, {"tokens", "k"})
      .dtype("x", args.x, kActivations);
  int64_t outputs = 0;
  for (int p = 0; p < parts_of(args); ++p) {
    const LinearPart& part = args.parts[p];
    const PartNames& name = kPartNames[p];
    check.tensor(name.weight, part.weight, {name.n, "k"})
        .optional(name.bias, part.bias, {name.n})
        .tensor(name.y, part.y, {"tokens", name.n})
        .dtype(name.weight, part.weight, kWeights)
        .dtype(name.bias, part.bias, kPlain)
        .dtype(name.y, part.y, kActivations);
    outputs += part.y.elements();
  }
  check.optional("workspace", args.workspace, {"bytes"})
      .dtype("workspace", args.workspace, dtypes_mask(DType::u8));
  VIVACE_TRY(check.status());
  if (outputs == 0) return {};
  return dispatch(kLinear, args, stream);
}

Result<int64_t> linear_workspace_bytes(const LinearArgs& args, const Stream& stream) {
  return workspace_bytes(kLinear, args, stream);
}

Cost linear_cost(const LinearArgs& args) {
  Cost cost{args.x.bytes(), 0};
  for (int p = 0; p < parts_of(args); ++p) {
    const LinearPart& part = args.parts[p];
    cost.bytes += part.weight.bytes() + part.bias.bytes() + part.y.bytes();
    cost.flops += 2 * args.x.shape[0] * part.weight.elements();
  }
  return cost;
}

Choice linear_explain(const LinearArgs& args, const Stream& stream) {
  return explain(kLinear, args, stream);
}

}  // namespace vivace
