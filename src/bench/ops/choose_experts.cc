#include <algorithm>
#include <cmath>
#include <vector>

#include "src/bench/ops/memory.h"
#include "src/bench/ops/suites.h"
#include "src/core/error.h"
#include "src/ops/choose_experts/table.h"

namespace vivace::bench {

namespace {

constexpr int64_t kSets = 24;
constexpr int64_t kSampledTokens = 8;

class PreparedChooseExperts final : public PreparedOp {
 public:
  explicit PreparedChooseExperts(const OpWorkload& w)
      : m_(w.number("m")),
        n_(w.number("n")),
        k_(w.number("k")),
        top_k_(w.number("top_k")),
        groups_(w.number("groups")),
        zero_experts_(w.number("zero_experts")),
        terms_(w.text("mode") == "exact"      ? 3
               : w.text("mode") == "two_term" ? 2
                                              : 1),
        sigmoid_(w.text("scoring") == "sigmoid") {}

  Status prepare(const Stream& stream) {
    for (int64_t i = 0; i < kSets; ++i) {
      ChooseExpertsArgs& args = sets_.emplace_back();
      const uint64_t seed = 1000 + 10 * static_cast<uint64_t>(i);
      VIVACE_TRY_ASSIGN(args.logits.x, memory_.random(DType::bf16, {m_, k_}, 1, seed, stream));
      args.logits.weight.term_count = terms_;
      for (int t = 0; t < terms_; ++t) {  // a term has what the one before it leaves
        const double deviation = std::ldexp(1 / std::sqrt(static_cast<double>(k_)), -9 * t);
        VIVACE_TRY_ASSIGN(args.logits.weight.terms[t],
                          memory_.random(DType::bf16, {n_, k_}, deviation, seed + 1 + t, stream));
      }
      args.logits.weight_ready = true;  // as in a step of a model
      RouteTopKArgs& choice = args.choice;
      if (sigmoid_ || zero_experts_ > 0) {
        VIVACE_TRY_ASSIGN(choice.correction_bias,
                          memory_.random(DType::f32, {n_}, sigmoid_ ? 0.1 : 1e-3, seed + 4, stream));
      }
      VIVACE_TRY_ASSIGN(choice.expert_ids, memory_.make(DType::i32, {m_, top_k_}, stream));
      VIVACE_TRY_ASSIGN(choice.expert_weights, memory_.make(DType::f32, {m_, top_k_}, stream));
      if (zero_experts_ > 0) {
        VIVACE_TRY_ASSIGN(choice.zero_weight, memory_.make(DType::f32, {m_}, stream));
      }
      choice.scoring = sigmoid_ ? RouteScoring::sigmoid : RouteScoring::softmax;
      choice.groups = groups_;
      choice.top_groups = (groups_ + 1) / 2;
      choice.zero_experts = zero_experts_;
      VIVACE_TRY_ASSIGN(const int64_t scratch, choose_experts_workspace_bytes(args, stream));
      if (scratch > 0) {
        VIVACE_TRY_ASSIGN(args.workspace, memory_.make(DType::u8, {scratch}, stream));
      }
    }
    choice_ = choose_experts_explain(sets_[0], stream);
    return {};
  }
  int64_t sets() const override { return kSets; }
  Status call(int64_t set, const Stream& stream) override { return choose_experts(sets_[set], stream); }
  std::string row() const override { return choice_.row; }
  Floor floor() const override {
    const Cost cost = choose_experts_cost(sets_[0]);
    return {.bytes = static_cast<double>(cost.bytes), .flops = static_cast<double>(cost.flops)};
  }
  /// Of the weights, place by place: two experts next to each other may change places and their weights hardly differ.
  Result<std::optional<double>> max_abs_error(const Stream& stream) override {
    const ChooseExpertsArgs& given = sets_[0];
    const int64_t tokens = std::min(m_, kSampledTokens);
    std::vector<HostTensor> copies;
    Status status;
    const auto copy_of = [&](const Tensor& tensor) {
      if (!tensor.present() || !status.ok()) return Tensor();
      Result<HostTensor> copy = download(tensor, stream);
      if (!copy.ok()) {
        status = copy.status();
        return Tensor();
      }
      return copies.emplace_back(std::move(*copy)).tensor;
    };
    ChooseExpertsArgs want;
    want.logits.x = copy_of(given.logits.x.rows(0, tokens));
    want.logits.weight = given.logits.weight;
    for (Tensor& term : want.logits.weight.terms) term = copy_of(term);
    want.choice = given.choice;
    want.choice.correction_bias = copy_of(given.choice.correction_bias);
    const Tensor got = copy_of(given.choice.expert_weights.rows(0, tokens));
    want.choice.expert_ids = copy_of(given.choice.expert_ids.rows(0, tokens));
    want.choice.expert_weights = copy_of(given.choice.expert_weights.rows(0, tokens));
    if (given.choice.zero_weight.present())
      want.choice.zero_weight = copy_of(given.choice.zero_weight.rows(0, tokens));
    VIVACE_TRY(std::move(status));
    std::vector<float> scores(static_cast<size_t>(tokens * n_));
    want.logits.scores = Tensor(scores.data(), DType::f32, {tokens, n_});
    VIVACE_TRY(choose_experts_reference(want, Stream{}));
    double worst = 0;
    for (int64_t i = 0; i < got.elements(); ++i)
      worst = larger(worst, std::abs(double{got.as<float>()[i]} - want.choice.expert_weights.as<float>()[i]));
    return std::optional<double>(worst);
  }
  Result<std::unique_ptr<PreparedOp>> through_library(std::string_view row, const Stream& stream) override;

  const ChooseExpertsArgs& args(int64_t set) const { return sets_[set]; }
  int64_t score_bytes(const Stream& stream) const { return choose_experts_score_bytes(sets_[0], stream); }

 private:
  int64_t m_, n_, k_, top_k_, groups_, zero_experts_;
  int terms_;
  bool sigmoid_;
  DeviceTensors memory_;
  std::vector<ChooseExpertsArgs> sets_;
  Choice choice_;
};

/// router_gemm and route_top_k one behind the other, whatever row the fused call has.
class TwoCallsBeside final : public PreparedOp {
 public:
  explicit TwoCallsBeside(PreparedChooseExperts& ours) : ours_(ours) {}

  Status prepare(const Stream& stream) {
    for (int64_t i = 0; i < kSets; ++i) {
      ChooseExpertsArgs& args = sets_.emplace_back(ours_.args(i));
      VIVACE_TRY_ASSIGN(args.workspace, memory_.make(DType::u8, {ours_.score_bytes(stream)}, stream));
    }
    return {};
  }
  int64_t sets() const override { return kSets; }
  Status call(int64_t set, const Stream& stream) override {
    return choose_experts_two_calls(sets_[set], stream);
  }
  std::string row() const override { return "two_calls"; }
  Floor floor() const override { return ours_.floor(); }
  Result<std::optional<double>> max_abs_error(const Stream& stream) override {
    return ours_.max_abs_error(stream);  // the outputs are the same tensors
  }

 private:
  PreparedChooseExperts& ours_;
  DeviceTensors memory_;
  std::vector<ChooseExpertsArgs> sets_;
};

Result<std::unique_ptr<PreparedOp>> PreparedChooseExperts::through_library(std::string_view,
                                                                           const Stream& stream) {
  return prepared<TwoCallsBeside>(stream, *this);
}

std::vector<std::string> libraries(const OpWorkload&) {
  return {"two_calls"};
}

std::vector<OpWorkload> workloads() {
  struct Model {
    const char* name;
    int64_t n, k, top_k;
    const char* scoring;
    int64_t groups, zero_experts;
  };
  std::vector<OpWorkload> all;
  for (const Model& model : {Model{"hy3", 192, 4096, 8, "sigmoid", 1, 0},
                             {"longcat-lite", 384, 3072, 12, "softmax", 1, 128},
                             {"dsv3", 256, 7168, 8, "sigmoid", 8, 0},
                             {"qwen3-235b", 128, 4096, 8, "softmax", 1, 0}}) {
    for (const char* mode : {"two_term", "exact", "bf16"}) {
      for (const int64_t m : {1, 8, 17, 32, 64, 128, 512}) {
        OpWorkload w{.suite = "choose_experts", .name = model.name, .fields = {}};
        all.push_back(w.with("m", m)
                          .with("n", model.n)
                          .with("k", model.k)
                          .with("top_k", model.top_k)
                          .with("groups", model.groups)
                          .with("zero_experts", model.zero_experts)
                          .with("scoring", std::string(model.scoring))
                          .with("mode", std::string(mode)));
      }
    }
  }
  return all;
}

Status check(const OpWorkload& w) {
  VIVACE_TRY(check_field(w, "m", 1, 1 << 20));
  VIVACE_TRY(check_field(w, "n", 1, 4096));
  VIVACE_TRY(check_field(w, "k", 1, 1 << 17));
  VIVACE_TRY(check_field(w, "groups", 1, w.number("n")));
  if (w.number("n") % w.number("groups") != 0) return refuse_field(w, "groups", "a divisor of n");
  VIVACE_TRY(check_field(w, "top_k", 1, w.number("n") / w.number("groups") * ((w.number("groups") + 1) / 2)));
  VIVACE_TRY(check_field(w, "zero_experts", 0, w.number("n")));
  VIVACE_TRY(choice_of(w, "scoring", {"softmax", "sigmoid"}).status());
  VIVACE_TRY(choice_of(w, "mode", {"two_term", "exact", "bf16"}).status());
  const auto m = static_cast<double>(w.number("m")), n = static_cast<double>(w.number("n")),
             k = static_cast<double>(w.number("k"));
  return check_memory(w, kSets * (2 * m * k + 6 * n * k + 8 * m * n));
}

Result<std::unique_ptr<PreparedOp>> prepare(const OpWorkload& w, const Stream& stream) {
  return prepared<PreparedChooseExperts>(stream, w);
}

}  // namespace

const OpSuite kChooseExpertsSuite = {
    "choose_experts", "router logits and the choice of experts in one call, beside the two calls",
    workloads,        check,
    prepare,          libraries,
    nullptr,          {"n", "k", "top_k", "groups", "zero_experts", "scoring"}};

}  // namespace vivace::bench
