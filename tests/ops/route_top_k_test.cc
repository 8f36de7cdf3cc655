#include <algorithm>
#include <set>

#include "src/ops/route_top_k/cases.h"
#include "src/ops/route_top_k/table.h"
#include "tests/ops/op_test.h"

namespace vivace {
namespace {

std::vector<int32_t> ids_of(const Tensor& t) {
  const auto* ids = t.as<int32_t>();
  return {ids, ids + t.elements()};
}

TEST(RouteTopK, EveryRowAgreesWithTheReference) {
  for (const RouteTopKCase& c : route_top_k_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    RouteTopKProblem want(c, 1);
    ASSERT_OK(route_top_k_reference(want.args, Stream{}));
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kRouteTopK, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        RouteTopKProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        // The logits of this seed are further apart than fp32 scores err: the same experts in the same order.
        EXPECT_EQ(ids_of(got.args.expert_ids), ids_of(want.args.expert_ids));
        // Relative error of a weight: the rounding of (logit - max), which is below 20 here, then exp (2 ulp), the sum
        // over the experts' lanes and a few roundings; once more for the sum that renormalises.
        const double lanes = static_cast<double>(c.experts) / 4;
        const Bound weight{1e-30, 2 * (20 + 4 + lanes + 8) * 0x1p-24};
        EXPECT_TRUE(close(got.args.expert_weights, want.args.expert_weights, weight));
        if (c.zero_experts > 0) {
          EXPECT_TRUE(close(got.args.zero_weight, want.args.zero_weight, weight));
        }
        EXPECT_TRUE(got.ids.canaries_intact() && got.weights.canaries_intact());
      });
    }
  }
}

TEST(RouteTopK, PaddingChoosesNobodyAndItsLogitsDoNotMatter) {
  RouteTopKProblem shapes({"", 7, 64, 4, RouteScoring::softmax, true, false, 6, 1, 1, 16, 0, 3}, 1);
  for (const Stream& stream : test_streams()) {
    for_each_fitting_row(kRouteTopK, shapes.args, stream, [&](const auto& row) {
      SCOPED_TRACE(row.name);
      RouteTopKProblem all({"", 3, 64, 4, RouteScoring::softmax, true, false, 6, 1, 1, 16}, 1);
      RouteTopKProblem padded({"", 7, 64, 4, RouteScoring::softmax, true, false, 6, 1, 1, 16, 0, 3}, 1);
      std::copy_n(all.scores.as<float>(), 3 * 64, padded.scores.as<float>());
      std::copy_n(all.bias.as<float>(), 64, padded.bias.as<float>());
      std::fill_n(padded.scores.as<float>() + 3 * 64, 4 * 64, NAN);
      ASSERT_OK(row.run(all.args, stream));
      ASSERT_OK(row.run(padded.args, stream));
      const auto first = [](const Tensor& t) { return t.rows(0, 3); };
      EXPECT_EQ(ids_of(first(padded.args.expert_ids)), ids_of(all.args.expert_ids));
      EXPECT_EQ(values_of(first(padded.args.expert_weights)), values_of(all.args.expert_weights));
      EXPECT_EQ(values_of(first(padded.args.zero_weight)), values_of(all.args.zero_weight));
      EXPECT_EQ(ids_of(padded.args.expert_ids.rows(3, 4)), std::vector<int32_t>(16, -1));
      for (const double w : values_of(padded.args.expert_weights.rows(3, 4))) EXPECT_EQ(w, 0);
      for (const double w : values_of(padded.args.zero_weight.rows(3, 4))) EXPECT_EQ(w, 0);
    });
  }
}

/// One token's choice by each row that accepts it.
struct Choices {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  float zero_weight = 0;
};
struct OneToken {
  Guarded scores, bias, ids, weights, zero_weight;
  RouteTopKArgs args;

  OneToken(const std::vector<float>& logits, int64_t top_k, const RouteTopKArgs& rule,
           const std::vector<float>& biases)
      : args(rule) {
    const int64_t experts = static_cast<int64_t>(logits.size());
    scores = Guarded(DType::f32, {1, experts});
    std::copy(logits.begin(), logits.end(), scores.as<float>());
    if (!biases.empty()) {
      bias = Guarded(DType::f32, {experts});
      std::copy(biases.begin(), biases.end(), bias.as<float>());
    }
    ids = Guarded(DType::i32, {1, top_k});
    weights = Guarded(DType::f32, {1, top_k});
    if (rule.zero_experts > 0) zero_weight = Guarded(DType::f32, {1});
    args.scores = scores;
    args.correction_bias = bias;
    args.expert_ids = ids;
    args.expert_weights = weights;
    args.zero_weight = zero_weight;
  }
};
template <class Body>
void with_each_row(const std::vector<float>& logits, int64_t top_k, const RouteTopKArgs& rule,
                   const std::vector<float>& bias, Body&& body) {
  const OneToken shape(logits, top_k, rule, bias);
  for (const Stream& stream : test_streams()) {
    for_each_fitting_row(kRouteTopK, shape.args, stream, [&](const auto& row) {
      SCOPED_TRACE(row.name);
      OneToken token(logits, top_k, rule, bias);
      ASSERT_OK(row.run(token.args, stream));
      const float* weights = token.weights.as<float>();
      body(Choices{ids_of(token.ids), std::vector<float>(weights, weights + top_k),
                   rule.zero_experts > 0 ? token.zero_weight.as<float>()[0] : NAN});
    });
  }
}
void expect_near(const std::vector<float>& got, const std::vector<double>& want, double tolerance = 1e-5) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << i;
}

TEST(RouteTopK, HandWorked) {
  const std::vector<float> logits = {0, std::log(2.0f), std::log(5.0f),
                                     0};  // probabilities 1/9, 2/9, 5/9, 1/9
  with_each_row(logits, 2, {.renormalise = false}, {}, [](const Choices& got) {
    EXPECT_EQ(got.ids, (std::vector<int32_t>{2, 1}));
    expect_near(got.weights, {5.0 / 9, 2.0 / 9});
  });
  with_each_row(logits, 2, {.scale = 2}, {}, [](const Choices& got) {
    expect_near(got.weights, {10.0 / 7, 4.0 / 7});
  });
  with_each_row(logits, 2, {.scoring = RouteScoring::softmax_chosen}, {}, [](const Choices& got) {
    expect_near(got.weights, {5.0 / 7, 2.0 / 7});
  });
  // sigmoid: 1/2, 2/3, 5/6, 1/2. The bias makes expert 3 win; its weight stays 1/2.
  with_each_row(logits, 2, {.scoring = RouteScoring::sigmoid}, {0, 0, 0, 1}, [](const Choices& got) {
    EXPECT_EQ(got.ids, (std::vector<int32_t>{3, 2}));
    expect_near(got.weights, {0.375, 0.625});
  });
}

TEST(RouteTopK, TiesGoToTheLowerId) {
  with_each_row({1, 3, 3, 3, 3, 0}, 3, {}, {}, [](const Choices& got) {
    EXPECT_EQ(got.ids, (std::vector<int32_t>{1, 2, 3}));
  });
  with_each_row({0.0f, -0.0f, 0.0f, -1}, 2, {}, {}, [](const Choices& got) {
    EXPECT_EQ(got.ids, (std::vector<int32_t>{0, 1}));
  });
  // Groups of equal value: the first ones.
  with_each_row({1, 2, 2, 1, 1, 2}, 2, {.scoring = RouteScoring::sigmoid, .groups = 3, .top_groups = 1}, {},
                [](const Choices& got) {
                  EXPECT_EQ(got.ids, (std::vector<int32_t>{1, 0}));
                });
}

TEST(RouteTopK, ManyTiesAgreeWithTheReference) {
  for (const int64_t groups : {1, 8}) {
    RouteTopKCase c{"", 200, 64, 8};
    c.groups = groups;
    c.top_groups = groups == 1 ? 1 : 3;
    const auto make = [&] {
      auto p = std::make_unique<RouteTopKProblem>(c, 1);
      std::mt19937 rng(9);
      for (int64_t i = 0; i < 200 * 64; ++i) p->scores.as<float>()[i] = static_cast<float>(rng() % 5);
      return p;
    };
    const auto want = make();
    ASSERT_OK(route_top_k_reference(want->args, Stream{}));
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kRouteTopK, want->args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        const auto got = make();
        ASSERT_OK(row.run(got->args, stream));
        ASSERT_EQ(ids_of(got->args.expert_ids), ids_of(want->args.expert_ids));
      });
    }
  }
}

TEST(RouteTopK, TheLargestMayBeNeighboursOrFarApart) {
  // A warp's lane has every 32nd expert: its own may be the largest of all, or all lanes may hold as many.
  for (const int stride : {1, 2, 32, 33, 64}) {
    for (const float step : {0.0f, 0.01f}) {  // the others tie, more of them than candidates, or do not
      std::vector<float> logits(384);
      for (int e = 0; e < 384; ++e) logits[e] = -1 - step * static_cast<float>(e);
      std::vector<int32_t> want;
      for (int j = 0; j < 6; ++j) {
        want.push_back(5 + stride * j);
        logits[want.back()] = static_cast<float>(10 - j);
      }
      want.insert(want.end(), {0, 1, 2});
      with_each_row(logits, 9, {}, {}, [&](const Choices& got) { EXPECT_EQ(got.ids, want) << stride; });
    }
  }
}

TEST(RouteTopK, GroupsNegativeBiasedScoresBeatAMaskOfZero) {
  // Choices: group 0 {-0.2, -0.3}, group 1 {-0.9, -0.9}. With a mask of 0 instead of leaving group 1 out, its experts
  // would win.
  const float half = 0.5f;
  with_each_row({0, 0, 0, 0}, 2, {.scoring = RouteScoring::sigmoid, .groups = 2, .top_groups = 1},
                {-0.2f - half, -0.3f - half, -0.9f - half, -0.9f - half}, [](const Choices& got) {
                  EXPECT_EQ(got.ids, (std::vector<int32_t>{0, 1}));
                  expect_near(got.weights, {0.5, 0.5});
                });
}

TEST(RouteTopK, ZeroExpertsAreNoWorkAndTheirWeightsAreSummed) {
  // Experts 2 and 3 are identities. Probabilities 1/10, 2/10, 3/10, 4/10.
  with_each_row({0, std::log(2.0f), std::log(3.0f), std::log(4.0f)}, 3,
                {.renormalise = false, .scale = 6, .zero_experts = 2}, {}, [](const Choices& got) {
                  EXPECT_EQ(got.ids, (std::vector<int32_t>{-1, -1, 1}));
                  expect_near(got.weights, {0, 0, 1.2});
                  EXPECT_NEAR(got.zero_weight, 4.2, 1e-5);
                });
}

// https://github.com/vllm-project/vllm/pull/39391: a row of NaN logits chose one expert in each slot.
TEST(RouteTopK, H17OddRowsHaveDistinctIdsAndFiniteWeights) {
  std::vector<float> nan(64, NAN), inf(64, 0.0f), minus(64, -INFINITY), rising(64);
  inf[17] = INFINITY;
  for (int e = 0; e < 64; ++e) rising[e] = static_cast<float>(e);
  const std::vector<float> some_bias(64, 0.25f);
  for (RouteScoring scoring : {RouteScoring::softmax, RouteScoring::softmax_chosen, RouteScoring::sigmoid}) {
    for (int64_t groups : {1, 8}) {
      for (const std::vector<float>& bias : {std::vector<float>{}, some_bias}) {
        for (const std::vector<float>* logits : {&nan, &inf, &minus, &rising}) {
          with_each_row(*logits, 6, {.scoring = scoring, .groups = groups, .top_groups = groups}, bias,
                        [&](const Choices& got) {
                          EXPECT_EQ(std::set<int32_t>(got.ids.begin(), got.ids.end()).size(), 6u);
                          for (int32_t id : got.ids) EXPECT_TRUE(id >= 0 && id < 64) << id;
                          for (float w : got.weights) EXPECT_TRUE(std::isfinite(w)) << w;
                          if (logits == &nan || logits == &minus) {
                            EXPECT_EQ(got.ids, (std::vector<int32_t>{0, 1, 2, 3, 4, 5}));
                          }
                          if (logits == &inf) {
                            EXPECT_EQ(got.ids[0], 17);
                          }
                        });
        }
      }
    }
  }
  with_each_row(rising, 6, {}, {}, [](const Choices& got) {
    EXPECT_EQ(got.ids, (std::vector<int32_t>{63, 62, 61, 60, 59, 58}));
    expect_near(got.weights, {0.63369, 0.23312, 0.08576, 0.03155, 0.01161, 0.00427}, 6e-6);
  });
  with_each_row(inf, 2, {}, {}, [](const Choices& got) { expect_near(got.weights, {1, 0}); });
  with_each_row(minus, 2, {}, {}, [](const Choices& got) { expect_near(got.weights, {0.5, 0.5}); });
  with_each_row(nan, 2, {.scoring = RouteScoring::sigmoid}, {}, [](const Choices& got) {
    expect_near(got.weights, {0, 0});
  });
}

TEST(RouteTopK, NanIsChosenOnlyWhenNothingElseIsLeft) {
  with_each_row({NAN, 1, NAN, -INFINITY, 2}, 4, {}, {}, [](const Choices& got) {
    EXPECT_EQ(got.ids, (std::vector<int32_t>{4, 1, 3, 0}));
    expect_near(got.weights, {0.7310586, 0.2689414, 0, 0});
  });
}

TEST(RouteTopK, ATokenDoesNotDependOnItsCompany) {
  RouteTopKProblem p({"", 70, 100, 5, RouteScoring::sigmoid, true, true, 2.5}, 6);
  p.scores.as<float>()[100] = NAN;
  ASSERT_OK(route_top_k(p.args, cpu_streams()[1]));
  for (int64_t t = 0; t < 70; ++t) {
    int32_t ids[5];
    float weights[5];
    RouteTopKArgs args = p.args;
    args.scores = p.args.scores.rows(t, 1);
    args.expert_ids = Tensor(ids, DType::i32, {1, 5});
    args.expert_weights = Tensor(weights, DType::f32, {1, 5});
    ASSERT_OK(route_top_k(args, Stream{}));
    ASSERT_EQ(ids_of(args.expert_ids), ids_of(p.args.expert_ids.rows(t, 1)));
    ASSERT_EQ(values_of(args.expert_weights), values_of(p.args.expert_weights.rows(t, 1)));
  }
}

TEST(RouteTopK, ATokenHasTheSameBitsAloneAndAmongThousands) {
  using enum RouteScoring;
  const RouteTopKCase cases[] = {{"", 700, 64, 8},
                                 {"", 700, 100, 4, softmax_chosen},
                                 {"", 700, 100, 4, softmax_chosen, true},
                                 {"", 700, 192, 8, sigmoid, true, true, 2.826},
                                 {"", 700, 256, 8, sigmoid, true, true, 2.5, 8, 4},
                                 {"", 700, 384, 12, softmax, true, false, 6, 1, 1, 128},
                                 {"", 700, 768, 12, softmax, true, false, 6, 1, 1, 256},
                                 {"", 700, 1000, 10, softmax, false, false, 1, 25, 6},
                                 {"", 700, 1024, 40}};
  for (const RouteTopKCase& c : cases) {
    RouteTopKProblem shape(c, 3);
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kRouteTopK, shape.args, stream, [&](const auto& row) {
        SCOPED_TRACE(testing::Message() << row.name << ", " << c.experts << " experts");
        RouteTopKProblem all(c, 3), alone(c, 3);
        ASSERT_OK(row.run(all.args, stream));
        for (int64_t t = 0; t < c.tokens; t += 37) {
          RouteTopKArgs args = alone.args;
          args.scores = args.scores.rows(t, 1);
          args.expert_ids = args.expert_ids.rows(t, 1);
          args.expert_weights = args.expert_weights.rows(t, 1);
          if (c.zero_experts > 0) args.zero_weight = args.zero_weight.rows(t, 1);
          ASSERT_OK(row.run(args, stream));
          ASSERT_EQ(ids_of(args.expert_ids), ids_of(all.args.expert_ids.rows(t, 1)));
          ASSERT_EQ(values_of(args.expert_weights), values_of(all.args.expert_weights.rows(t, 1)));
          if (c.zero_experts > 0)
            ASSERT_EQ(values_of(args.zero_weight), values_of(all.args.zero_weight.rows(t, 1)));
        }
      });
    }
  }
}

TEST(RouteTopK, RefusesWhatDisagrees) {
  RouteTopKProblem p({"", 2, 8, 2}, 1);
  const auto refuses = [&](auto&& change, const char* text) {
    RouteTopKArgs args = p.args;
    change(args);
    EXPECT_FAILS(route_top_k(args, Stream{}), Code::invalid_argument, text);
  };
  refuses([](auto& a) { a.expert_weights.shape[1] = 3; }, "expert_weights.shape[1] is 3, needs top_k = 2");
  refuses([](auto& a) { a.groups = 3; }, "groups is 3, needs a divisor of experts = 8");
  refuses([](auto& a) { a.groups = 0; }, "groups is 0");
  refuses([](auto& a) { a.groups = 8, a.top_groups = 9; }, "top_groups is 9, needs 1 to groups = 8");
  refuses([](auto& a) { a.groups = 8, a.top_groups = 1; }, "expert_ids.shape[1] is 2, needs at most 1");
  refuses([](auto& a) { a.zero_experts = 9; }, "zero_experts is 9, needs 0 to experts = 8");
  refuses([](auto& a) { a.zero_experts = 1; }, "zero_weight is absent with zero_experts = 1");
  refuses([](auto& a) { a.scale = NAN; }, "scale is nan, needs a finite number");
  RouteTopKProblem padded({"", 2, 8, 2, RouteScoring::softmax, false, true, 1, 1, 1, 0, 0, 1}, 1);
  refuses([&](auto& a) { a.live_tokens = padded.args.live_tokens, a.live_tokens.shape[0] = 2; },
          "live_tokens.shape[0] is 2, needs 1");
  refuses([&](auto& a) { a.live_tokens = padded.args.live_tokens, a.live_tokens.dtype = DType::f32; },
          "needs live_tokens of type i32, got f32");
  refuses([](auto& a) { a.scores.dtype = DType::bf16; }, "needs scores of type f32, got bf16");
  EXPECT_FAILS(route_top_k(p.args, Stream{.device = Device::cuda}), Code::invalid_argument,
               "scores is on cpu, needs cuda");
  RouteTopKProblem wide({"", 1, 1025, 2}, 1);
  EXPECT_EQ(route_top_k_explain(wide.args, Stream{}).refused.back().reason,
            "needs experts <= 1024, got 1025");
}

}  // namespace
}  // namespace vivace
