#include "vivace/fused_moe.h"

#include <vector>

#include "src/core/checks.h"
#include "src/core/workspace.h"
#include "src/ops/fused_moe/table.h"

namespace vivace {

namespace {

constexpr int64_t kActivations = dtypes_mask(DType::f32, DType::bf16);
constexpr int64_t kWeights = dtypes_mask(DType::f32, DType::f16, DType::bf16, DType::q4_0, DType::q4_1,
                                         DType::q8_0, DType::q4_k, DType::q6_k);

/// Whether a matrix has this shape and type and rows that a kernel can read.
bool fits(const Tensor& m, DType dtype, int64_t rows, int64_t columns) {
  const int64_t block = info_of(dtype).block_elements;
  return m.dtype == dtype && m.rank == 2 && m.shape[0] == rows && m.shape[1] == columns &&
         (m.stride[1] == 1 || columns <= 1) && m.stride[0] >= 0 && m.stride[0] % block == 0 &&
         (m.data != nullptr || m.elements() == 0);
}

/// Experts given one by one must look like the first. Layers have hundreds: no string is built unless one
/// fails.
Status check_experts(const FusedMoeArgs& args) {
  const ExpertWeights& first = args.experts[0];
  const int64_t intermediate = first.gate.shape[0], hidden = first.gate.shape[1];
  for (size_t e = 0; e < args.experts.size(); ++e) {
    const ExpertWeights& w = args.experts[e];
    const Tensor* bad = !fits(w.gate, first.gate.dtype, intermediate, hidden)   ? &w.gate
                        : !fits(w.up, first.gate.dtype, intermediate, hidden)   ? &w.up
                        : !fits(w.down, first.down.dtype, hidden, intermediate) ? &w.down
                                                                                : nullptr;
    if (bad == nullptr) continue;
    const bool is_down = bad == &w.down;
    return invalid_argument(
        "fused_moe: experts[{}].{} is {}, needs {}[{}, {}] with contiguous rows, like expert 0", e,
        is_down        ? "down"
        : bad == &w.up ? "up"
                       : "gate",
        to_string(*bad), name_of(is_down ? first.down.dtype : first.gate.dtype),
        is_down ? hidden : intermediate, is_down ? intermediate : hidden);
  }
  return {};
}

}  // namespace

Facts fused_moe_facts(const FusedMoeArgs& args) {
  const bool stacked = args.gate_up.present(), one_by_one = !args.experts.empty();
  return Facts()
      .add("tokens", args.x.shape[0])
      .add("hidden", args.x.shape[1])
      .add("intermediate", expert_intermediate(args))
      .add("experts", expert_count(args))
      .add("top_k", args.expert_ids.shape[1])
      .add("x", args.x.dtype)
      .add("gate_up", stacked      ? args.gate_up.dtype
                      : one_by_one ? args.experts[0].gate.dtype
                                   : DType::none)
      .add("down", stacked      ? args.down.dtype
                   : one_by_one ? args.experts[0].down.dtype
                                : DType::none);
}

Status fused_moe(const FusedMoeArgs& args, const Stream& stream) {
  Checker check("fused_moe", stream.device);
  check.tensor("x", args.x, {"tokens", "hidden"})
      .tensor("y", args.y, {"tokens", "hidden"})
      .tensor("expert_ids", args.expert_ids, {"tokens", "top_k"})
      .tensor("expert_weights", args.expert_weights, {"tokens", "top_k"})
      .dtype("x", args.x, kActivations)
      .dtype("y", args.y, dtypes_mask(args.x.dtype))
      .dtype("expert_ids", args.expert_ids, dtypes_mask(DType::i32))
      .dtype("expert_weights", args.expert_weights, dtypes_mask(DType::f32));
  VIVACE_TRY(check.status());
  if (args.gate_up.present() == !args.experts.empty()) {
    return invalid_argument("fused_moe: gate_up is {} with {} experts given one by one, needs one of the two",
                            to_string(args.gate_up), args.experts.size());
  }
  if (args.gate_up.present()) {
    check.tensor("gate_up", args.gate_up, {"experts", "intermediate * 2", "hidden"})
        .tensor("down", args.down, {"experts", "hidden", "intermediate"})
        .define("intermediate * 2", 2 * args.down.shape[2], "2 * down.shape[2]")
        .dtype("gate_up", args.gate_up, kWeights)
        .dtype("down", args.down, kWeights);
  } else {
    check.tensor("experts[0].gate", args.experts[0].gate, {"intermediate", "hidden"})
        .tensor("experts[0].up", args.experts[0].up, {"intermediate", "hidden"})
        .tensor("experts[0].down", args.experts[0].down, {"hidden", "intermediate"})
        .dtype("experts[0].gate", args.experts[0].gate, kWeights)
        .dtype("experts[0].down", args.experts[0].down, kWeights);
    VIVACE_TRY(check.status());
    VIVACE_TRY(check_experts(args));
  }
  if (args.shared.present()) {
    check.tensor("shared.gate", args.shared.gate, {"shared intermediate", "hidden"})
        .tensor("shared.up", args.shared.up, {"shared intermediate", "hidden"})
        .tensor("shared.down", args.shared.down, {"hidden", "shared intermediate"})
        .dtype("shared.gate", args.shared.gate, kWeights)
        .dtype("shared.up", args.shared.up, dtypes_mask(args.shared.gate.dtype))
        .dtype("shared.down", args.shared.down, kWeights);
  }
  VIVACE_TRY(check.status());
  if (args.x.elements() == 0) return {};
  VIVACE_TRY_ASSIGN(const int64_t needed, fused_moe_workspace_bytes(args, stream));
  VIVACE_TRY(check_workspace("fused_moe", args.workspace, needed, stream.device));
  return dispatch(kFusedMoe, args, stream);
}

Result<int64_t> fused_moe_workspace_bytes(const FusedMoeArgs& args, const Stream& stream) {
  return workspace_bytes(kFusedMoe, args, stream);
}

Cost fused_moe_cost(const FusedMoeArgs& args) {
  const int64_t experts = expert_count(args), tokens = args.x.shape[0];
  Cost cost{2 * args.x.bytes() + args.expert_ids.bytes() + args.expert_weights.bytes(), 0};
  const auto weights = [](const ExpertWeights& w) {
    return Cost{w.gate.bytes() + w.up.bytes() + w.down.bytes(), 3 * 2 * w.gate.elements()};
  };
  std::vector<bool> visited(experts);
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t* ids = args.expert_ids.at(t).as<const int32_t>();
    for (int64_t j = 0; j < args.expert_ids.shape[1]; ++j) {
      if (!has_work(ids[j], experts)) continue;
      const Cost of_expert = weights(expert_at(args, ids[j]));
      cost.flops += of_expert.flops;
      if (!visited[ids[j]]) cost.bytes += of_expert.bytes;
      visited[ids[j]] = true;
    }
  }
  if (args.shared.present()) {
    const Cost of_shared = weights(args.shared);
    cost.bytes += of_shared.bytes;
    cost.flops += tokens * of_shared.flops;
  }
  return cost;
}

Choice fused_moe_explain(const FusedMoeArgs& args, const Stream& stream) {
  return explain(kFusedMoe, args, stream);
}

}  // namespace vivace
