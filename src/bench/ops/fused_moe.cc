#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "src/bench/ops/memory.h"
#include "src/bench/ops/moe_routing.h"
#include "src/bench/ops/suites.h"
#include "src/core/error.h"
#include "src/core/number.h"
#include "src/ops/fused_moe/table.h"
#include "src/ops/quantize_fp8/quantize.h"
#include "vivace/fused_moe.h"

namespace vivace::bench {

namespace {

constexpr int64_t kSets = 4;

/// Of a workload that has one of them.
Routing routing_of(const OpWorkload& w) {
  return static_cast<Routing>(std::ranges::find(kRoutings, w.text("routing")) - kRoutings.begin());
}

/// One set of weights, four draws of a routing over it.
class PreparedFusedMoe final : public PreparedOp {
 public:
  explicit PreparedFusedMoe(const OpWorkload& w)
      : workload_(w),
        tokens_(w.number("tokens")),
        experts_(w.number("experts")),
        top_k_(w.number("top_k")),
        hidden_(w.number("hidden")),
        intermediate_(w.number("intermediate")),
        quant_(w.text("quant")) {}

  Status prepare(const Stream& stream) {
    const bool fp8 = quant_ != "bf16", blockwise = quant_ == "blockwise";
    const DType type = fp8 ? DType::fp8_e4m3 : DType::bf16;
    // fp8 weights are stored with deviation 1 and scaled, so that the values between the products are of order 1.
    const double in = 1 / std::sqrt(static_cast<double>(hidden_)),
                 out = 1 / std::sqrt(static_cast<double>(intermediate_));
    FusedMoeArgs base;
    VIVACE_TRY_ASSIGN(base.gate_up,
                      memory_.random(type, {experts_, 2 * intermediate_, hidden_}, fp8 ? 1 : in, 1, stream));
    VIVACE_TRY_ASSIGN(base.down,
                      memory_.random(type, {experts_, hidden_, intermediate_}, fp8 ? 1 : out, 2, stream));
    const auto constant = [&](std::initializer_list<int64_t> shape, double value) {
      return memory_.copy_of(
          std::vector<float>(static_cast<size_t>(Tensor(nullptr, DType::f32, shape).elements()),
                             static_cast<float>(value)),
          DType::f32, shape, stream);
    };
    const int64_t rows_h = scale_blocks(hidden_), rows_i = scale_blocks(intermediate_);
    if (blockwise) {
      VIVACE_TRY_ASSIGN(base.gate_up_scale, constant({experts_, 2, rows_i, rows_h}, in));
      VIVACE_TRY_ASSIGN(base.down_scale, constant({experts_, rows_h, rows_i}, out));
    } else if (fp8) {
      VIVACE_TRY_ASSIGN(base.gate_up_scale, constant({experts_, 2}, in));
      VIVACE_TRY_ASSIGN(base.down_scale, constant({experts_}, out));
      VIVACE_TRY_ASSIGN(base.act_scale, constant({1}, 1.0 / 16));
    }
    std::vector<RoutedTokens> routings;
    for (int64_t i = 0; i < kSets; ++i) {
      FusedMoeArgs& args = sets_.emplace_back(base);
      const RoutedTokens& routed = routings.emplace_back(
          route_tokens(routing_of(workload_), tokens_, experts_, top_k_, static_cast<uint32_t>(i + 1)));
      VIVACE_TRY_ASSIGN(args.x, memory_.random(type, {tokens_, hidden_}, 1, 10 + i, stream));
      VIVACE_TRY_ASSIGN(args.y, memory_.make(DType::bf16, {tokens_, hidden_}, stream));
      VIVACE_TRY_ASSIGN(args.expert_ids, memory_.copy_of(routed.ids, DType::i32, {tokens_, top_k_}, stream));
      VIVACE_TRY_ASSIGN(args.expert_weights,
                        memory_.copy_of(routed.weights, DType::f32, {tokens_, top_k_}, stream));
      if (blockwise) {
        VIVACE_TRY_ASSIGN(args.x_scale, constant({tokens_, rows_h}, 1));
      } else if (fp8) {
        VIVACE_TRY_ASSIGN(args.x_scale, constant({1}, 1));
      }
    }
    VIVACE_TRY_ASSIGN(const int64_t scratch, fused_moe_workspace_bytes(sets_[0], stream));
    VIVACE_TRY_ASSIGN(const Tensor workspace, memory_.make(DType::u8, {scratch}, stream));
    for (FusedMoeArgs& args : sets_) args.workspace = workspace;
    cost_ = moe_cost(workload_, routings);
    choice_ = fused_moe_explain(sets_[0], stream);
    return {};
  }
  int64_t sets() const override { return kSets; }
  Status call(int64_t set, const Stream& stream) override { return fused_moe(sets_[set], stream); }
  std::string row() const override { return choice_.row; }
  Floor floor() const override { return cost_.floor; }
  std::optional<double> formula_us() const override { return cost_.formula_us(); }

  /// Of the first, the last and a token between: their experts' weights are copied to the host.
  Result<std::optional<double>> max_abs_error(const Stream& stream) override {
    double worst = 0;
    for (const int64_t token : std::set<int64_t>{0, tokens_ / 2, tokens_ - 1}) {
      VIVACE_TRY_ASSIGN(const double error, error_of(sets_[0], token, stream));
      worst = larger(worst, error);
    }
    return std::optional<double>(worst);
  }

 private:
  Result<double> error_of(const FusedMoeArgs& set, int64_t token, const Stream& stream) const {
    std::vector<HostTensor> kept;
    kept.reserve(static_cast<size_t>(8 * top_k_ + 16));
    const auto keep = [&](const Tensor& tensor) -> Result<Tensor> {
      if (!tensor.present()) return Tensor();
      VIVACE_TRY_ASSIGN(HostTensor host, download(tensor, stream));
      kept.push_back(std::move(host));
      return kept.back().tensor;
    };
    FusedMoeArgs args;
    VIVACE_TRY_ASSIGN(args.x, keep(set.x.rows(token, 1)));
    VIVACE_TRY_ASSIGN(args.x_scale, keep(set.x_scale.rank == 2 ? set.x_scale.rows(token, 1) : set.x_scale));
    VIVACE_TRY_ASSIGN(const Tensor got, keep(set.y.rows(token, 1)));
    VIVACE_TRY_ASSIGN(args.expert_ids, keep(set.expert_ids.rows(token, 1)));
    VIVACE_TRY_ASSIGN(args.expert_weights, keep(set.expert_weights.rows(token, 1)));
    VIVACE_TRY_ASSIGN(const Tensor act_scale, keep(set.act_scale));
    std::vector<ExpertWeights> experts;
    const auto ids = args.expert_ids.as<int32_t>();
    const auto weights = args.expert_weights.as<float>();
    for (int64_t j = 0; j < top_k_; ++j) {
      const int32_t id = ids[j];
      if (id < 0) continue;  // another rank's
      VIVACE_TRY_ASSIGN(const Tensor gate_up, keep(set.gate_up.at(id)));
      VIVACE_TRY_ASSIGN(const Tensor down, keep(set.down.at(id)));
      ids[experts.size()] = static_cast<int32_t>(experts.size());
      weights[experts.size()] = weights[j];
      ExpertWeights& expert = experts.emplace_back();
      expert.gate = gate_up.rows(0, intermediate_);
      expert.up = gate_up.rows(intermediate_, intermediate_);
      expert.down = down;
      if (set.gate_up_scale.present()) {
        VIVACE_TRY_ASSIGN(const Tensor scales, keep(set.gate_up_scale.at(id)));
        VIVACE_TRY_ASSIGN(const Tensor down_scale, keep(set.down_scale.rows(id, 1)));
        const bool blockwise = scales.rank == 3;
        expert.gate_scale = blockwise ? scales.at(0) : scales.rows(0, 1);
        expert.up_scale = blockwise ? scales.at(1) : scales.rows(1, 1);
        expert.down_scale = blockwise ? down_scale.at(0) : down_scale;
        expert.act_scale = act_scale;
      }
    }
    args.experts = experts;
    // An expert each, so that they are computed side by side.
    std::vector<std::vector<float>> parts(experts.size(), std::vector<float>(static_cast<size_t>(hidden_)));
    std::vector<Status> failures(experts.size());
    check_threads().parallel_for(std::ssize(experts), [&](int64_t j, int) {
      FusedMoeArgs one = args;
      one.expert_ids.shape[1] = one.expert_weights.shape[1] = 1;
      one.expert_ids.data = ids + j;
      one.expert_weights.data = weights + j;
      one.y = Tensor(parts[j].data(), DType::f32, {1, hidden_});
      failures[j] = fused_moe_reference(one, Stream{});
    });
    for (const Status& failure : failures) VIVACE_TRY(failure);
    double worst = 0;
    for (int64_t i = 0; i < hidden_; ++i) {
      double want = 0;
      for (const std::vector<float>& part : parts) want += part[i];
      worst = larger(worst, std::abs(load(got.dtype, got.data, i) - want));
    }
    return worst;
  }

  OpWorkload workload_;
  int64_t tokens_, experts_, top_k_, hidden_, intermediate_;
  std::string quant_;
  DeviceTensors memory_;
  std::vector<FusedMoeArgs> sets_;
  MoeCost cost_;
  Choice choice_;
};

std::vector<OpWorkload> workloads() {
  struct Model {
    const char* name;
    int64_t tp, ep, experts, hidden, intermediate;
  };
  constexpr Model kHy3[] = {{"hy3", 8, 1, 192, 4096, 192}, {"hy3", 1, 8, 24, 4096, 1536}};
  std::vector<OpWorkload> all;
  const auto add = [&](const Model& m, int64_t tokens, std::string_view quant, Routing routing) {
    OpWorkload w{.suite = "fused_moe", .name = m.name, .fields = {}};
    w.with("tp", m.tp).with("ep", m.ep).with("tokens", tokens).with("experts", m.experts);
    w.with("top_k", int64_t{8}).with("hidden", m.hidden).with("intermediate", m.intermediate);
    w.with("quant", std::string(quant)).with("routing", std::string(kRoutings[static_cast<size_t>(routing)]));
    all.push_back(std::move(w));
  };
  for (const char* quant : {"per_tensor", "blockwise", "bf16"}) {
    for (const Model& m : {Model{"qwen3-235b", 8, 1, 128, 4096, 192},
                           kHy3[0],
                           {"deepseek-v3", 8, 1, 256, 7168, 256},
                           {"qwen3-235b", 1, 8, 16, 4096, 1536},
                           kHy3[1],
                           {"deepseek-v3", 1, 8, 32, 7168, 2048}}) {
      for (const int64_t tokens : {1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}) {
        add(m, tokens, quant, Routing::uniform);
      }
    }
  }
  for (const Routing routing : {Routing::zipf, Routing::one, Routing::half}) {
    for (const Model& m : kHy3) {
      for (const int64_t tokens : {16, 256, 4096}) add(m, tokens, "per_tensor", routing);
    }
  }
  return all;
}

Status check(const OpWorkload& w) {
  VIVACE_TRY(check_field(w, "tp", 1, 1024));
  VIVACE_TRY(check_field(w, "ep", 1, 1024));
  VIVACE_TRY(check_field(w, "tokens", 1, 1 << 20));
  VIVACE_TRY(check_field(w, "experts", 1, 4096));
  VIVACE_TRY_ASSIGN(const size_t routing, choice_of(w, "routing", kRoutings));
  const int64_t choices = experts_to_choose(static_cast<Routing>(routing), w.number("experts"));
  VIVACE_TRY(check_field(w, "top_k", 1, std::min<int64_t>(128, choices)));
  VIVACE_TRY(check_field(w, "hidden", 16, 1 << 16));
  VIVACE_TRY(check_field(w, "intermediate", 16, 1 << 16));
  VIVACE_TRY_ASSIGN(const size_t quant, choice_of(w, "quant", {"per_tensor", "blockwise", "bf16"}));
  const double element = quant == 2 ? 2 : 1;
  const auto tokens = static_cast<double>(w.number("tokens")),
             hidden = static_cast<double>(w.number("hidden"));
  const double weights = 3 * static_cast<double>(w.number("experts") * w.number("intermediate")) * hidden;
  return check_memory(w, weights * element + kSets * tokens * hidden * (element + 2));
}

/// tp ranks share out an expert's rows and ep ranks the experts, so another number of ranks means other shares.
Status follow(OpWorkload& changed, const OpWorkload& listed, const std::vector<OpWorkload::Field>& named) {
  const auto is_named = [&](std::string_view field) {
    return std::ranges::find(named, field, &OpWorkload::Field::name) != named.end();
  };
  for (const auto& [ranks, share] : {std::pair{"tp", "intermediate"}, {"ep", "experts"}}) {
    if (!is_named(ranks) || is_named(share)) continue;
    const int64_t count = changed.number(ranks), whole = listed.number(ranks) * listed.number(share);
    if (count < 1 || whole % count != 0) {
      return refuse_field(changed, ranks, fmt::format("a divisor of {}, the {} of all ranks", whole, share));
    }
    changed.with(share, whole / count);
  }
  return {};
}

Result<std::unique_ptr<PreparedOp>> prepare(const OpWorkload& w, const Stream& stream) {
  return prepared<PreparedFusedMoe>(stream, w);
}

}  // namespace

const OpSuite kFusedMoeSuite = {.name = "fused_moe",
                                .summary = "the routed experts of a layer",
                                .workloads = workloads,
                                .check = check,
                                .prepare = prepare,
                                .follow = follow,
                                .name_fields = {"experts", "top_k", "hidden", "intermediate"},
                                .target_defaults = {{"routing", "uniform"}}};

}  // namespace vivace::bench
