#include <map>
#include <set>

#include "src/ops/choose_experts/cases.h"
#include "src/ops/choose_experts/sm90_plan.h"
#include "src/ops/choose_experts/table.h"
#include "tests/ops/op_test.h"

namespace vivace {
namespace {

std::vector<int32_t> ids_of(const Tensor& t) {
  const auto* ids = t.as<int32_t>();
  return {ids, ids + t.elements()};
}

TEST(ChooseExperts, EveryRowAgreesWithTheReference) {
  for (const ChooseExpertsCase& c : choose_experts_cases(CaseSize::test)) {
    SCOPED_TRACE(c.logits.name);
    ChooseExpertsProblem want(c, 1);
    ASSERT_OK(choose_experts_reference(want.args, Stream{}));
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kChooseExperts, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        ChooseExpertsProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        // The logits of this seed are further apart than they err: the same experts in the same order. A logit errs by at
        // most `roundings` of a sum of |x w|, which is 0.64 sqrt(hidden) in the mean of these inputs and less than one
        // sqrt(hidden); a weight by as much, relatively, and what route_top_k adds.
        EXPECT_EQ(ids_of(got.args.choice.expert_ids), ids_of(want.args.choice.expert_ids));
        const auto hidden = static_cast<double>(c.logits.hidden);
        const double roundings = 4 * 10.5 + 2 + hidden / 64 + 3;
        const double logit = roundings * 0x1p-24 * std::sqrt(hidden);
        const Bound weight{1e-30, 4 * logit + 2 * (32 + static_cast<double>(c.logits.experts) / 4) * 0x1p-24};
        EXPECT_TRUE(close(got.args.choice.expert_weights, want.args.choice.expert_weights, weight));
        if (c.choice.zero_experts > 0) {
          EXPECT_TRUE(close(got.args.choice.zero_weight, want.args.choice.zero_weight, weight));
        }
        if (c.scores) {
          EXPECT_TRUE(close(got.args.logits.scores, want.args.logits.scores, {logit, 0x1p-24}));
        }
        EXPECT_TRUE(got.choice.ids.canaries_intact() && got.choice.weights.canaries_intact());
        EXPECT_TRUE(got.logits.scores.canaries_intact() && got.choice.zero_weight.canaries_intact());
      });
    }
  }
}

// So that a caller may change between them, and an engine choose by the number of tokens.
TEST(ChooseExperts, EveryRowGivesTheBitsOfTheTwoCalls) {
  for (const ChooseExpertsCase& c : choose_experts_cases(CaseSize::test)) {
    SCOPED_TRACE(c.logits.name);
    ChooseExpertsProblem shapes(c, 3);
    shapes.args.logits.batch_invariant = true;
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kChooseExperts, shapes.args, stream, [&](const auto& row) {
        if (row.name == "reference") return;  // float64
        SCOPED_TRACE(row.name);
        ChooseExpertsProblem got(c, 3), want(c, 3);
        got.args.logits.batch_invariant = true;
        ASSERT_OK(row.run(got.args, stream));
        RouterGemmArgs logits = want.logits.args;
        logits.batch_invariant = true;
        RouteTopKArgs choice = want.choice.args;
        choice.scores = logits.scores;
        ASSERT_OK(router_gemm(logits, stream));
        ASSERT_OK(route_top_k(choice, stream));
        if (stream.device == Device::cuda) {
          ASSERT_OK(GpuUnderTest::instance().synchronize(stream));
        }
        EXPECT_EQ(ids_of(got.choice.ids), ids_of(want.choice.ids));
        EXPECT_EQ(values_of(got.choice.weights), values_of(want.choice.weights));
        if (c.choice.zero_experts > 0) {
          EXPECT_EQ(values_of(got.choice.zero_weight), values_of(want.choice.zero_weight));
        }
        if (c.scores) {
          EXPECT_EQ(values_of(got.args.logits.scores), values_of(logits.scores));
        }
      });
    }
  }
}

// https://github.com/vllm-project/vllm/pull/39391: a row of NaN logits chose one expert in each slot.
TEST(ChooseExperts, H17OddRowsHaveDistinctIdsAndFiniteWeights) {
  const ChooseExpertsCase c{{"", 20, 128, 64, DType::bf16, DType::bf16},
                            {.name = "", .top_k = 6, .bias = true}};
  const ChooseExpertsProblem shapes(c, 1);
  for (const Stream& stream : test_streams()) {
    for_each_fitting_row(kChooseExperts, shapes.args, stream, [&](const auto& row) {
      SCOPED_TRACE(row.name);
      ChooseExpertsProblem p(c, 1);
      for (int64_t i = 0; i < 64; ++i) {
        store(DType::bf16, p.logits.x.as<void>(), i, NAN);
        store(DType::bf16, p.logits.x.as<void>(), 64 + i, i == 5 ? INFINITY : 0);
        store(DType::bf16, p.logits.x.as<void>(), 128 + i, 0);
      }
      p.choice.bias.zero();
      ASSERT_OK(row.run(p.args, stream));
      const std::vector<int32_t> ids = ids_of(p.choice.ids);
      for (int t = 0; t < 3; ++t) {
        std::set<int32_t> distinct(ids.begin() + 6 * t, ids.begin() + 6 * t + 6);
        EXPECT_EQ(distinct.size(), 6u) << t;
        EXPECT_TRUE(*distinct.begin() >= 0 && *distinct.rbegin() < 128) << t;
      }
      for (const double w : values_of(p.choice.weights)) EXPECT_TRUE(std::isfinite(w));
      EXPECT_EQ(std::vector<int32_t>(ids.begin() + 12, ids.begin() + 18),
                (std::vector<int32_t>{0, 1, 2, 3, 4, 5}))
          << "ties";
    });
  }
}

TEST(ChooseExperts, ScoresThatNobodyWantsTakeAWorkspace) {
  const ChooseExpertsCase c{{"", 5, 16, 64, DType::bf16}, {.name = "", .top_k = 2}};
  ChooseExpertsProblem p(c, 1);
  EXPECT_EQ(*choose_experts_workspace_bytes(p.args, Stream{}), 5 * 16 * 4 + 63);
  ASSERT_OK(choose_experts(p.args, Stream{}));
  p.args.workspace = Tensor();
  EXPECT_FAILS(choose_experts(p.args, Stream{}), Code::invalid_argument, "choose_experts: workspace");
  p.args.logits.scores = p.logits.scores;
  EXPECT_EQ(*choose_experts_workspace_bytes(p.args, Stream{}), 0);
  ASSERT_OK(choose_experts(p.args, Stream{}));
}

TEST(ChooseExperts, RefusesWhatTheTwoCallsRefuse) {
  ChooseExpertsProblem p({{"", 5, 16, 64, DType::bf16}, {.name = "", .top_k = 2}}, 1);
  const auto refuses = [&](auto&& change, const char* text) {
    ChooseExpertsArgs args = p.args;
    change(args);
    EXPECT_FAILS(choose_experts(args, Stream{}), Code::invalid_argument, text);
  };
  refuses([](auto& a) { ++a.logits.weight_version; }, "choose_experts: weight was prepared from version 1");
  refuses([](auto& a) { a.choice.groups = 3; },
          "choose_experts: groups is 3, needs a divisor of experts = 16");
  refuses([](auto& a) { a.choice.expert_ids = a.choice.expert_ids.rows(0, 4); }, "expert_ids.shape[0] is 4");
  refuses([&](auto& a) { a.choice.scores = p.logits.scores; }, "choice.scores is f32[5, 16], needs none");
  refuses([&](auto& a) { a.logits.scores = p.logits.x; }, "scores");
}

TEST(ChooseExperts, ThePlanHasAllExpertsAndAllSteps) {
  using router::ClusterPlan;
  for (const int64_t experts : {1, 16, 17, 64, 128, 149, 160, 192, 256, 384, 512}) {
    for (const int64_t hidden : {8, 64, 576, 2048, 3072, 4096, 7168, 65536}) {
      for (const int terms : {1, 2}) {
        if (router::cluster_warps(experts, hidden, terms) > ClusterPlan::kMostWarps) continue;
        for (const int64_t tokens : {1, 8, 17, 56, 57, 64}) {
          const ClusterPlan plan = router::cluster_plan({tokens, experts, hidden, terms}, 8, 1, 7);
          EXPECT_GE(2 * plan.experts_of_half(), experts);
          EXPECT_GE(plan.most_steps * 8, router::steps_of(hidden));
          EXPECT_LE(plan.parts * plan.most_steps, plan.warps) << experts << " " << hidden;
          EXPECT_GE(32 * plan.warps_of_crew, experts);
          EXPECT_LE(plan.warps_of_crew, plan.warps);
          EXPECT_LE(plan.warps, ClusterPlan::kMostWarps);
          EXPECT_LE(plan.bytes, 227 << 10);
          EXPECT_EQ(plan.token_tiles, tokens <= 56 ? 1 : 2);
        }
      }
    }
  }
  EXPECT_EQ(router::cluster_warps(192, 4096, 1), 16);
  EXPECT_EQ(router::cluster_plan({32, 192, 4096, 1}, 8, 1, 7).tiles, 3);
  EXPECT_EQ(router::cluster_plan({32, 128, 4096, 2}, 8, 1, 7).tiles, 2);
  EXPECT_GT(router::cluster_warps(192, 4096, 2), ClusterPlan::kMostWarps);
  EXPECT_GT(router::cluster_warps(256, 7168, 1), ClusterPlan::kMostWarps);
}

TEST(ChooseExperts, CountsTheTwoCallsByTheirNames) {
  const ChooseExpertsCase c{{"", 5, 16, 64, DType::bf16}, {.name = "", .top_k = 2}};
  ChooseExpertsProblem p(c, 1);
  Dispatch dispatch;
  Stream stream;
  stream.dispatch = &dispatch;
  ASSERT_OK(choose_experts(p.args, stream));
  std::map<std::string, int64_t> calls;
  for (const auto& count : dispatch.counts()) calls[std::string(count.op)] += count.calls;
  EXPECT_EQ(calls, (std::map<std::string, int64_t>{{"router_gemm", 1}, {"route_top_k", 1}}));
}

#if VIVACE_CUDA
/// On a GPU that is not here.
std::string row_on_hopper(int64_t tokens, int64_t experts, Dispatch* dispatch = nullptr) {
  const ChooseExpertsCase c{{"", tokens, experts, 4096, DType::bf16, DType::bf16}, {.name = "", .top_k = 8}};
  const ChooseExpertsProblem p(c, 1);
  Stream stream{.device = Device::cuda, .ordinal = -1, .compute_capability = 90};
  stream.dispatch = dispatch;
  return choose_experts_explain(p.args, stream).row;
}
TEST(ChooseExperts, OneKernelWhereItIsFaster) {
  for (const int64_t experts : {128, 149, 192}) {
    for (const int64_t tokens : {17, 32, 64}) EXPECT_EQ(row_on_hopper(tokens, experts), "sm90.cluster");
    for (const int64_t tokens : {1, 16, 65}) EXPECT_EQ(row_on_hopper(tokens, experts), "cuda.two_calls");
  }
  for (const int64_t experts : {127, 193}) EXPECT_EQ(row_on_hopper(32, experts), "cuda.two_calls");
  Dispatch dispatch;
  ASSERT_OK(dispatch.prefer("route_top_k=cuda"));
  EXPECT_EQ(row_on_hopper(32, 192, &dispatch), "cuda.two_calls");
}
#endif

// A preferred row of one of the two is not passed over in silence.
TEST(ChooseExperts, APreferenceForOneOfTheTwoCallsAsksForBoth) {
  const ChooseExpertsCase c{{"", 32, 192, 4096, DType::bf16, DType::bf16}, {.name = "", .top_k = 8}};
  ChooseExpertsProblem p(c, 1);
  for (Stream stream : test_streams()) {
    Dispatch dispatch;
    const bool gpu = stream.device == Device::cuda;
    ASSERT_OK(dispatch.prefer(gpu ? "router_gemm=cuda" : "router_gemm=reference"));
    stream.dispatch = &dispatch;
    EXPECT_TRUE(choose_experts_explain(p.args, stream).row.ends_with("two_calls"));
    ASSERT_OK(dispatch.prefer("choose_experts=reference"));
    if (!gpu) {
      EXPECT_EQ(choose_experts_explain(p.args, stream).row, "reference");
    }
  }
}

}  // namespace
}  // namespace vivace
