#include "vivace/fused_moe.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "src/core/checks.h"
#include "src/core/dispatch_in_workspace.h"
#include "src/core/workspace.h"
#include "src/ops/fused_moe/table.h"

namespace vivace {

namespace {

constexpr int64_t kF32 = dtypes_mask(DType::f32), kFp8 = dtypes_mask(DType::fp8_e4m3);
constexpr int64_t kActivations = dtypes_mask(DType::f32, DType::bf16) | kFp8;
constexpr int64_t kOtherWeights = dtypes_mask(DType::f32, DType::f16, DType::bf16, DType::q4_0, DType::q4_1,
                                              DType::q8_0, DType::q4_k, DType::q6_k);

/// Whether a matrix has this shape and type and rows that a kernel can read; in a question it may be nowhere.
bool fits(const Tensor& m, DType dtype, int64_t rows, int64_t columns, bool question) {
  const int64_t block = info_of(dtype).block_elements;
  return m.dtype == dtype && m.rank == 2 && m.shape[0] == rows && m.shape[1] == columns &&
         (m.stride[1] == 1 || columns <= 1) && m.stride[0] >= 0 && m.stride[0] % block == 0 &&
         (question || m.data != nullptr || m.elements() == 0);
}

/// Whether two scales of the same matrix of two experts look alike.
bool same_shape(const Tensor& a, const Tensor& b, bool question) {
  if (!a.present() && !b.present()) return true;
  return a.dtype == b.dtype && a.rank == b.rank && a.shape == b.shape && a.contiguous() &&
         a.device == b.device && (question || a.data != nullptr || a.elements() == 0);
}

/// Experts given one by one must look like the first. Layers have hundreds: no string is built unless one
/// fails.
Status check_experts(const FusedMoeArgs& args, bool question) {
  const ExpertWeights& first = args.experts[0];
  const int64_t intermediate = first.gate.shape[0], hidden = first.gate.shape[1];
  for (size_t e = 0; e < args.experts.size(); ++e) {
    const ExpertWeights& w = args.experts[e];
    const Tensor* bad = !fits(w.gate, first.gate.dtype, intermediate, hidden, question)   ? &w.gate
                        : !fits(w.up, first.gate.dtype, intermediate, hidden, question)   ? &w.up
                        : !fits(w.down, first.down.dtype, hidden, intermediate, question) ? &w.down
                                                                                          : nullptr;
    if (bad == nullptr) {
      const bool same = same_shape(w.gate_scale, first.gate_scale, question) &&
                        same_shape(w.up_scale, first.up_scale, question) &&
                        same_shape(w.down_scale, first.down_scale, question) &&
                        same_shape(w.act_scale, first.act_scale, question);
      if (same) continue;
      return invalid_argument("fused_moe: experts[{}] has scales {}, {}, {}, {}, needs those of expert 0", e,
                              to_string(w.gate_scale), to_string(w.up_scale), to_string(w.down_scale),
                              to_string(w.act_scale));
    }
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

constexpr std::string_view kWithFp8 = "scales with fp8 weights", kOneWithFp8 = "a scale with fp8 weights";
struct ScaleNames {
  std::string_view gate, up, down, act;
};
constexpr ScaleNames kFirstExpert = {"experts[0].gate_scale", "experts[0].up_scale", "experts[0].down_scale",
                                     "experts[0].act_scale"};
constexpr ScaleNames kSharedExpert = {"shared.gate_scale", "shared.up_scale", "shared.down_scale",
                                      "shared.act_scale"};

/// What fp32 keeps with an inverse.
bool in_range(double factor) {
  return factor >= 1e-30 && factor <= 1e30;
}

/// Whether an optional map may be read here.
bool map_is_readable(const Tensor& map) {
  return !map.present() || (map.device == Device::cpu && map.data != nullptr && map.dtype == DType::i32 &&
                            map.rank == 1 && (map.stride[0] == 1 || map.shape[0] <= 1));
}

/// The scales of a call.
struct Scheme {
  bool fp8, blocks;  ///< of 128, not one a tensor
};
Scheme scheme_of(const FusedMoeArgs& args) {
  if (!quantises(args)) return {is_fp8(args), has_block_scales(args)};
  if (args.gate_up.present()) return {true, args.gate_up_scale.rank == 4};
  return {true, args.experts[0].gate_scale.rank == 2};
}

/// Scales of an expert that comes as three matrices: none without fp8.
Status check_scales(Checker& check, const FusedMoeArgs& args, const Scheme& scheme, const ExpertWeights& w,
                    const ScaleNames& names) {
  const auto [fp8, blocks] = scheme;
  const auto one = [&](std::string_view name, const Tensor& scale, bool present, bool block, int64_t n,
                       int64_t k) -> Status {
    check.given(name, scale, present, present ? kOneWithFp8 : "none");
    if (!present) return check.status();
    if (block) {
      const std::string rows = std::to_string(scale_blocks(n)), columns = std::to_string(scale_blocks(k));
      check.tensor(name, scale, {rows, columns}).dense(name, scale);
    } else {
      check.tensor(name, scale, {"1"});
    }
    check.dtype(name, scale, kF32);
    return check.status();
  };
  const int64_t intermediate = args.block_offset + w.gate.shape[0], hidden = args.x.shape[1];
  VIVACE_TRY(one(names.gate, w.gate_scale, fp8, blocks, intermediate, hidden));
  VIVACE_TRY(one(names.up, w.up_scale, fp8, blocks, intermediate, hidden));
  VIVACE_TRY(one(names.down, w.down_scale, fp8, blocks, hidden, intermediate));
  return one(names.act, w.act_scale, fp8 && !blocks, false, 1, 1);
}

/// What says which experts are here. Messages have whole numbers in full.
Status check_slice(const FusedMoeArgs& args) {
  constexpr int64_t kLast = INT32_MAX;  // as ids are i32
  const int64_t first = args.first_expert, total = args.total_experts;
  if (first < 0 || first > kLast)
    return invalid_argument("fused_moe: first_expert is {}, needs 0 to {}", first, kLast);
  const int64_t end = first + expert_count(args);
  if (total != 0 && (total < end || total > kLast))
    return invalid_argument("fused_moe: total_experts is {}, needs 0, or {} to {}", total, end, kLast);
  if (!args.expert_map.present()) return {};
  if (total != 0)
    return invalid_argument("fused_moe: total_experts is {}, needs 0 with an expert_map", total);
  if (first != 0) return invalid_argument("fused_moe: first_expert is {}, needs 0 with an expert_map", first);
  return {};
}

/// The scales of stacked weights are there with fp8, and all of one kind: that of x_scale, or of gate_up_scale
/// where x is quantised here.
Status check_kind(Checker& check, const FusedMoeArgs& args, const Scheme& scheme) {
  const bool fp8 = scheme.fp8, blocks = scheme.blocks;
  const std::string_view needs = fp8 ? kWithFp8 : "none";
  check.given("gate_up_scale", args.gate_up_scale, fp8, needs)
      .given("down_scale", args.down_scale, fp8, needs);
  if (!check.ok() || !fp8) return check.status();
  const bool judged_by_x = !quantises(args);
  const auto one = [&](std::string_view name, const Tensor& scale, int rank) -> Status {
    if (scale.rank == rank) return {};
    return invalid_argument("fused_moe: {} is {}, needs {} dimension{}: {} has {}", name, to_string(scale),
                            rank, rank == 1 ? "" : "s", judged_by_x ? "x_scale" : "gate_up_scale",
                            blocks ? "blocks of 128" : "no blocks of 128");
  };
  const int rank = args.gate_up_scale.rank;
  if (judged_by_x) {
    VIVACE_TRY(one("gate_up_scale", args.gate_up_scale, blocks ? 4 : 2));
  } else if (rank != 2 && rank != 4) {
    return invalid_argument("fused_moe: gate_up_scale is {}, needs 2 dimensions, or 4 with blocks of 128",
                            to_string(args.gate_up_scale));
  }
  return one("down_scale", args.down_scale, blocks ? 3 : 1);
}

}  // namespace

Facts fused_moe_facts(const FusedMoeArgs& args) {
  const bool stacked = args.gate_up.present(), one_by_one = !args.experts.empty();
  const DType up = stacked ? args.gate_up.dtype : one_by_one ? args.experts[0].gate.dtype : DType::none;
  const DType down = stacked ? args.down.dtype : one_by_one ? args.experts[0].down.dtype : DType::none;
  const ExpertWeights& shared = args.shared;
  const bool with_shared = shared.present();
  Facts facts;
  facts.add("tokens", args.x.shape[0])
      .add("hidden", args.x.shape[1])
      .add("intermediate", expert_intermediate(args))
      .add("experts", expert_count(args))
      .add("top_k", args.expert_ids.shape[1])
      .add("x", args.x.dtype)
      .add("y", args.y.dtype)
      .add("gate_up", up)
      .add("down", down)
      .add("stacked", int64_t{stacked})
      .add("shared_of_other_type",
           int64_t{with_shared && (shared.gate.dtype != up || shared.down.dtype != down)})
      .add("shared_of_two_strides",
           int64_t{with_shared && shared.gate.shape[0] > 1 && shared.gate.stride[0] != shared.up.stride[0]})
      .add("block_offset", args.block_offset)
      .add("hidden_bytes", args.x.shape[1] * info_of(args.x.dtype).block_bytes)
      .add("intermediate_bytes", expert_intermediate(args) * info_of(down).block_bytes)
      .add("shared_intermediate_bytes",
           with_shared ? shared.gate.shape[0] * info_of(shared.down.dtype).block_bytes : 0)
      .add("shared_intermediate", with_shared ? shared.gate.shape[0] : 0)
      .add("rows_of_expert", rows_of_expert(args))
      .add("batch_invariant", int64_t{args.batch_invariant})
      .add("outputs_of_tokens", args.x.shape[0] * (args.expert_ids.shape[1] + with_shared))
      .add("x_alignment", alignment_of(args.x))
      .add("gate_up_alignment", alignment_of(args.gate_up))
      .add("down_alignment", alignment_of(args.down))
      .add("shared_alignment",
           std::min({alignment_of(shared.gate), alignment_of(shared.up), alignment_of(shared.down)}));
  return facts;
}

QuantisedMoe quantised_moe(const FusedMoeArgs& args) {
  const int64_t tokens = args.x.shape[0], hidden = args.x.shape[1], blocks = scale_blocks(hidden);
  const int64_t stride = (hidden + 15) / 16 * 16;  // bytes: rows that any row of the table reads
  const bool made = scheme_of(args).blocks;
  const int64_t x_bytes = whole_lines(tokens * stride),
                scale_bytes = made ? whole_lines(tokens * blocks * int64_t{sizeof(float)}) : 0;
  QuantisedMoe q{.left = args, .bytes = kWorkspaceSlack + x_bytes + scale_bytes};
  uint8_t* const memory = args.workspace.data != nullptr ? first_line(args.workspace) : nullptr;
  const auto at = [&](int64_t offset) { return memory != nullptr ? memory + offset : nullptr; };
  q.left.x = Tensor(at(0), DType::fp8_e4m3, {tokens, hidden}, args.x.device);
  q.left.x.stride[0] = stride;
  if (made) q.left.x_scale = Tensor(at(x_bytes), DType::f32, {tokens, blocks}, args.x.device);
  if (args.workspace.present()) {
    q.left.workspace.data = at(x_bytes + scale_bytes);
    q.left.workspace.shape[0] = std::max<int64_t>(0, args.workspace.shape[0] - q.bytes);
  }
  q.quantisation = {.x = args.x,
                    .y = q.left.x,
                    .scale = q.left.x_scale,
                    .scaling = made ? Fp8Scaling::block : Fp8Scaling::tensor};
  return q;
}

Status fused_moe(const FusedMoeArgs& args, const Stream& stream) {
  Checker check("fused_moe", stream);
  const auto [fp8, blocks] = scheme_of(args);
  const bool made = blocks && quantises(args);  // the scales of x
  check.tensor("x", args.x, {"tokens", "hidden"})
      .tensor("y", args.y, {"tokens", "hidden"})
      .tensor("expert_ids", args.expert_ids, {"tokens", "top_k"})
      .tensor("expert_weights", args.expert_weights, {"tokens", "top_k"})
      .dtype("x", args.x, kActivations)
      .dtype("y", args.y, fp8 ? dtypes_mask(DType::f32, DType::bf16) : dtypes_mask(args.x.dtype))
      .dtype("expert_ids", args.expert_ids, dtypes_mask(DType::i32))
      .dtype("expert_weights", args.expert_weights, dtypes_mask(DType::f32))
      .optional("expert_map", args.expert_map, {"ids"})
      .dtype("expert_map", args.expert_map, dtypes_mask(DType::i32))
      .dense("expert_map", args.expert_map)
      .that(in_range(args.swiglu.alpha), "swiglu.alpha", args.swiglu.alpha, "1e-30 to 1e30")
      .that(in_range(args.swiglu.limit) || args.swiglu.limit == INFINITY, "swiglu.limit", args.swiglu.limit,
            "1e-30 to 1e30, or infinity")
      .that(std::abs(args.swiglu.beta) <= 1e30, "swiglu.beta", args.swiglu.beta, "-1e30 to 1e30")
      .written("y", args.y);
  VIVACE_TRY(check.status());
  VIVACE_TRY(check_slice(args));
  const int64_t kWeights = fp8 ? kFp8 : kOtherWeights;  // fp8 goes with fp8
  if (args.block_offset < 0 || args.block_offset >= kFp8ScaleBlock)
    return invalid_argument("fused_moe: block_offset is {}, needs 0 to 127", args.block_offset);
  if (quantises(args) && args.gate_up.present()) {  // which x_scale goes with the weights, their scales say
    VIVACE_TRY(check_kind(check, args, {fp8, blocks}));
  } else if (quantises(args)) {
    check.given(kFirstExpert.gate, args.experts[0].gate_scale, true, kOneWithFp8);
  }
  check.given("x_scale", args.x_scale, fp8 && !made,
              made              ? "none where x is quantised with made scales"
              : quantises(args) ? "a scale [1] that x is quantised by"
              : fp8             ? "scales with fp8 x"
                                : "none");
  check.define("hidden blocks", scale_blocks(args.x.shape[1]), "ceil(hidden / 128)");
  if (fp8 && !made) {
    if (blocks) {
      check.tensor("x_scale", args.x_scale, {"tokens", "hidden blocks"});
    } else {
      check.tensor("x_scale", args.x_scale, {"1"});
    }
    check.dtype("x_scale", args.x_scale, kF32);
  }
  VIVACE_TRY(check.status());
  if (!blocks && args.block_offset != 0) {
    return invalid_argument("fused_moe: block_offset is {}, needs 0 without scales of blocks",
                            args.block_offset);
  }
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
    if (!quantises(args)) VIVACE_TRY(check_kind(check, args, {fp8, blocks}));
    check.given("act_scale", args.act_scale, fp8 && !blocks,
                fp8 && !blocks ? "a scale with one scale an expert" : "none");
    if (fp8 && blocks) {
      check
          .define("intermediate blocks", scale_blocks(args.block_offset + args.down.shape[2]),
                  "ceil((block_offset + intermediate) / 128)")
          .tensor("gate_up_scale", args.gate_up_scale,
                  {"experts", "2", "intermediate blocks", "hidden blocks"})
          .tensor("down_scale", args.down_scale, {"experts", "hidden blocks", "intermediate blocks"});
    } else if (fp8) {
      check.tensor("gate_up_scale", args.gate_up_scale, {"experts", "2"})
          .tensor("down_scale", args.down_scale, {"experts"});
      if (args.act_scale.rank == 1 && args.act_scale.shape[0] == 1) {
        check.tensor("act_scale", args.act_scale, {"1"});
      } else {
        check.tensor("act_scale", args.act_scale, {"experts"});
      }
    }
    check.dtype("gate_up_scale", args.gate_up_scale, kF32)
        .dtype("down_scale", args.down_scale, kF32)
        .dtype("act_scale", args.act_scale, kF32);
  } else {
    check.tensor("experts[0].gate", args.experts[0].gate, {"intermediate", "hidden"})
        .tensor("experts[0].up", args.experts[0].up, {"intermediate", "hidden"})
        .tensor("experts[0].down", args.experts[0].down, {"hidden", "intermediate"})
        .dtype("experts[0].gate", args.experts[0].gate, kWeights)
        .dtype("experts[0].down", args.experts[0].down, kWeights);
    VIVACE_TRY(check_scales(check, args, {fp8, blocks}, args.experts[0], kFirstExpert));
    VIVACE_TRY(check_experts(args, stream.check_only));
  }
  if (args.shared.present()) {
    check.tensor("shared.gate", args.shared.gate, {"shared intermediate", "hidden"})
        .tensor("shared.up", args.shared.up, {"shared intermediate", "hidden"})
        .tensor("shared.down", args.shared.down, {"hidden", "shared intermediate"})
        .dtype("shared.gate", args.shared.gate, kWeights)
        .dtype("shared.up", args.shared.up, dtypes_mask(args.shared.gate.dtype))
        .dtype("shared.down", args.shared.down, kWeights);
    VIVACE_TRY(check_scales(check, args, {fp8, blocks}, args.shared, kSharedExpert));
  }
  VIVACE_TRY(check.status());
  if (args.x.elements() == 0) return {};
  if (!quantises(args)) return dispatch_in_workspace(kFusedMoe, args, stream);
  VIVACE_TRY_ASSIGN(const int64_t needed, fused_moe_workspace_bytes(args, stream));
  VIVACE_TRY(check_workspace("fused_moe", args.workspace, needed, stream));
  const QuantisedMoe q = quantised_moe(args);
  VIVACE_TRY(quantize_fp8(q.quantisation, stream));
  return dispatch(kFusedMoe, q.left, stream);
}

Result<int64_t> fused_moe_workspace_bytes(const FusedMoeArgs& args, const Stream& stream) {
  if (!quantises(args)) return workspace_bytes(kFusedMoe, args, stream);
  const QuantisedMoe q = quantised_moe(args);
  VIVACE_TRY_ASSIGN(const int64_t of_row, workspace_bytes(kFusedMoe, q.left, stream));
  return q.bytes + of_row;
}

Cost fused_moe_cost(const FusedMoeArgs& args) {
  if (quantises(args)) {
    const QuantisedMoe q = quantised_moe(args);
    const Cost before = quantize_fp8_cost(q.quantisation), after = fused_moe_cost(q.left);
    return {before.bytes + after.bytes, before.flops + after.flops};
  }
  const int64_t experts = expert_count(args), tokens = args.x.shape[0];
  Cost cost{args.x.bytes() + args.y.bytes() + args.expert_ids.bytes() + args.expert_weights.bytes(), 0};
  const auto weights = [](const ExpertWeights& w) {
    return Cost{w.gate.bytes() + w.up.bytes() + w.down.bytes(), 3 * 2 * w.gate.elements()};
  };
  const bool stacked = args.gate_up.present();
  const Cost of_stacked = stacked && experts > 0
                              ? Cost{args.gate_up.bytes() / experts + args.down.bytes() / experts,
                                     3 * args.gate_up.elements() / experts}
                              : Cost{};
  const auto cost_at = [&](int64_t e) { return stacked ? of_stacked : weights(args.experts[e]); };
  // A question may come with shapes alone, and nothing has checked that they agree.
  const Tensor& chosen = args.expert_ids;
  const bool readable = chosen.device == Device::cpu && chosen.data != nullptr &&
                        chosen.dtype == DType::i32 && chosen.rank == 2 && chosen.shape[0] == tokens &&
                        (chosen.stride[1] == 1 || chosen.shape[1] <= 1) && map_is_readable(args.expert_map);
  if (!readable && experts > 0) {
    // The routing is out of reach here: as many experts as the pairs can visit.
    const int64_t pairs = tokens * args.expert_ids.shape[1];
    const Cost of_expert = cost_at(0);
    cost.bytes += std::min(experts, pairs) * of_expert.bytes;
    cost.flops += pairs * experts / total_experts(args) * of_expert.flops;
  }
  const LocalExperts local = local_experts(args);
  std::vector<bool> visited(readable ? experts : 0);
  for (int64_t t = 0; readable && t < tokens; ++t) {
    const int32_t* ids = args.expert_ids.at(t).as<const int32_t>();
    for (int64_t j = 0; j < args.expert_ids.shape[1]; ++j) {
      const int32_t e = local.of(ids[j]);
      if (e < 0) continue;
      const Cost of_expert = cost_at(e);
      cost.flops += of_expert.flops;
      if (!visited[e]) cost.bytes += of_expert.bytes;
      visited[e] = true;
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
  return explain(kFusedMoe, quantises(args) ? quantised_moe(args).left : args, stream);
}

}  // namespace vivace
