#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <span>

#include "src/ops/router_gemm/cases.h"
#include "src/ops/router_gemm/sm90_plan.h"
#include "src/ops/router_gemm/table.h"
#include "tests/ops/op_test.h"

namespace vivace {
namespace {

/// The value that the terms stand for, in float64.
double represented(const RouterWeight& w, int64_t e, int64_t k) {
  double value = 0;
  for (int i = 0; i < w.term_count; ++i) {
    value += double{load(DType::bf16, w.terms[i].at(e).data, k)} * router_term_scale(w, i);
  }
  return value;
}

/// Prepares a contiguous f32 weight; `storage` keeps the terms.
RouterWeight prepare(std::vector<float>& values, int64_t experts, RouterMode mode,
                     std::vector<uint8_t>& storage) {
  const int64_t hidden = static_cast<int64_t>(values.size()) / experts;
  RouterWeightSource source{.weight = Tensor(values.data(), DType::f32, {experts, hidden}), .mode = mode};
  storage.assign(router_weight_bytes(source), 0xA5);
  source.storage = Tensor(storage.data(), DType::u8, {static_cast<int64_t>(storage.size())});
  Result<RouterWeight> result = prepare_router_weight(source);
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? *result : RouterWeight{};
}

/// The reference's scores with, for each, the sum of |x w|.
struct Oracle {
  std::vector<double> scores, magnitude;
};
Oracle oracle(const RouterGemmArgs& args) {
  Oracle result;
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    for (int64_t e = 0; e < args.scores.shape[1]; ++e) {
      double sum = args.bias.present() ? args.bias.as<float>()[e] : 0.0, magnitude = std::abs(sum);
      for (int64_t k = 0; k < args.x.shape[1]; ++k) {
        const double product = load(args.x.dtype, args.x.at(t).data, k) * represented(args.weight, e, k);
        sum += product;
        magnitude += std::abs(product);
      }
      result.scores.push_back(sum);
      result.magnitude.push_back(magnitude);
    }
  }
  return result;
}

/// At most 16 products in one fp32 lane, and two roundings of each product without fused multiply-add; cuda.*: 10 for 16
/// products of a tensor core, 3 to add up 32 of k and the terms, 1 after all. In sm90.* four such products of 16 are
/// added on the tensor core, steps of 64 in fp32, and then up to 8 pieces; 2 for what the last addition gives back.
double roundings(std::string_view row, const RouterGemmCase& c) {
  if (!row.starts_with("sm90.")) return 18;
  return 4 * 10.5 + 2 + static_cast<double>((c.hidden + 63) / 64) + 3 + 2;
}

TEST(RouterGemm, EveryRowAgreesWithTheReference) {
  for (const RouterGemmCase& c : router_gemm_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    const RouterGemmProblem problem(c, 1);
    const Oracle want = oracle(problem.args);
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kRouterGemm, problem.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        RouterGemmProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        const std::vector<double> scores = values_of(got.args.scores);
        ASSERT_EQ(scores.size(), want.scores.size());
        for (size_t i = 0; i < scores.size(); ++i) {
          // Roundings of a sum as large as that of |x w|, then the store (twice: a sum next to a rounding boundary may
          // fall to its other side).
          const double allowed = roundings(row.name, c) * 0x1p-24 * want.magnitude[i] +
                                 2 * Bound::store(c.scores).relative * std::abs(want.scores[i]);
          ASSERT_LE(std::abs(scores[i] - want.scores[i]), allowed) << i;
        }
        EXPECT_TRUE(got.scores.canaries_intact());
        EXPECT_TRUE(got.storage.canaries_intact());
      });
    }
  }
}

TEST(RouterGemm, HandWorked) {
  float x[] = {1, 2}, bias[] = {0.5f, 0}, scores[4];
  std::vector<float> w = {3, 4, -1, 0.25f};
  std::vector<uint8_t> storage;
  RouterGemmArgs args{.x = Tensor(x, DType::f32, {1, 2}),
                      .weight = prepare(w, 2, RouterMode::exact, storage),
                      .bias = Tensor(bias, DType::f32, {2}),
                      .scores = Tensor(scores, DType::f32, {1, 2})};
  EXPECT_EQ(args.weight.term_count, 1);  // all four are bf16 numbers
  for (const Row<RouterGemmArgs>& row : kRouterGemmRows) {
    if (row.device != Device::cpu) continue;
    ASSERT_OK(row.run(args, Stream{}));
    EXPECT_EQ(scores[0], 11.5f);
    EXPECT_EQ(scores[1], -0.5f);
  }
}

TEST(RouterWeight, ThreeTermsAreExactForEveryMagnitude) {
  std::vector<float> values;
  for (uint64_t bits = 0; bits < 0x7f800000u; bits += 1021) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
  for (uint32_t bits = 0; bits < 4096; ++bits) {
    values.push_back(std::bit_cast<float>(bits));                 // subnormals
    values.push_back(-std::bit_cast<float>(0x7f7fffffu - bits));  // rounding to nearest would overflow
  }
  std::vector<uint8_t> storage;
  const auto expect_exact = [&](bool scaled) {
    const RouterWeight w = prepare(values, 1, RouterMode::exact, storage);
    ASSERT_EQ(w.term_count, 3);
    EXPECT_EQ(w.scaled, scaled);
    for (size_t k = 0; k < values.size(); ++k) {
      ASSERT_EQ(represented(w, 0, static_cast<int64_t>(k)), values[k]) << std::bit_cast<uint32_t>(values[k]);
    }
  };
  expect_exact(true);
  std::erase_if(values, [](float v) { return v != 0 && std::abs(v) < 0x1p-110f; });
  expect_exact(false);
}

TEST(RouterGemm, TermsThatAreScaledAndThoseThatAreNotGiveTheSameScores) {
  const RouterGemmCase c{"", 5, 9, 96};
  RouterGemmProblem shapes(c, 3);
  shapes.args.weight.scaled = true;
  const auto prepare_with = [](RouterGemmProblem& p, float first) {
    p.weight.as<float>()[0] = first;
    RouterWeightSource source{.weight = p.weight, .version = 3, .storage = p.storage};
    source.weight.device = source.storage.device = Device::cpu;
    const Result<RouterWeight> weight = prepare_router_weight(source);
    ASSERT_TRUE(weight.ok());
    p.args.weight.scaled = weight->scaled;
  };
  for (const Stream& stream : test_streams()) {
    for_each_fitting_row(kRouterGemm, shapes.args, stream, [&](const auto& row) {
      SCOPED_TRACE(row.name);
      RouterGemmProblem plain(c, 3), scaled(c, 3);
      prepare_with(plain, 0);
      prepare_with(scaled, 0x1p-120f);  // beside the others it is too small to be seen
      EXPECT_FALSE(plain.args.weight.scaled);
      EXPECT_TRUE(scaled.args.weight.scaled);
      ASSERT_OK(row.run(scaled.args, stream));
      const std::vector<double> want = values_of(scaled.args.scores);
      ASSERT_OK(row.run(plain.args, stream));
      EXPECT_EQ(values_of(plain.args.scores), want);
    });
  }
}

TEST(RouterWeight, TwoTermsKeepSixteenBitsForResidualsOfBothSigns) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  std::vector<float> values(40000);
  for (float& v : values) v = normal(rng);
  std::vector<uint8_t> storage;
  const RouterWeight w = prepare(values, 4, RouterMode::two_term, storage);
  ASSERT_EQ(w.term_count, 2);
  double worst = 0;
  int above = 0, below = 0;
  for (int64_t k = 0; k < 40000; ++k) {
    const double left = values[k] - represented(w, k / 10000, k % 10000);
    worst = std::max(worst, std::abs(left / values[k]));
    const float high = bf16_to_f32(w.terms[0].as<uint16_t>()[k]);
    above += values[k] > high;
    below += values[k] < high;
  }
  EXPECT_LE(worst, 0x1p-17);  // 8 bits, then 8 more and a sign
  EXPECT_GT(above, 10000);
  EXPECT_GT(below, 10000);
}

TEST(RouterWeight, NonFiniteValuesStandInTheFirstTerm) {
  std::vector<float> values = {INFINITY, -INFINITY, NAN, 1 + 0x1p-10f + 0x1p-21f};
  std::vector<uint8_t> storage;
  const RouterWeight w = prepare(values, 1, RouterMode::exact, storage);
  ASSERT_EQ(w.term_count, 3);
  EXPECT_EQ(represented(w, 0, 0), INFINITY);
  EXPECT_EQ(represented(w, 0, 1), -INFINITY);
  EXPECT_TRUE(std::isnan(represented(w, 0, 2)));
  EXPECT_EQ(represented(w, 0, 3), values[3]);
}

TEST(RouterWeight, ZeroTermsAreDroppedWithTheSameResult) {
  std::mt19937 rng(4);
  Guarded bf16(DType::bf16, {6, 200}), x(DType::f32, {5, 200}), a(DType::f32, {5, 6}), b(DType::f32, {5, 6});
  bf16.random(rng, 0.1);
  x.random(rng);
  std::vector<float> as_f32;
  for (double v : values_of(bf16)) as_f32.push_back(static_cast<float>(v));
  std::vector<uint8_t> storage;
  for (RouterMode mode : {RouterMode::two_term, RouterMode::exact}) {
    // The same numbers as bf16 and as f32: one term each, and no copy of the first.
    const Result<RouterWeight> in_place = prepare_router_weight({.weight = bf16, .mode = mode});
    ASSERT_TRUE(in_place.ok());
    EXPECT_EQ(in_place->terms[0].data, bf16.tensor().data);
    RouterWeight dropped = prepare(as_f32, 6, mode, storage);
    EXPECT_EQ(dropped.term_count, 1);
    EXPECT_FALSE(dropped.terms[1].present());
    ASSERT_OK(router_gemm({.x = x, .weight = *in_place, .scores = a}, Stream{}));
    // With the zero terms kept: the same bits.
    std::vector<uint16_t> zeros(6 * 200, 0);
    for (int count : {1, 2, 3}) {
      dropped.term_count = count;
      dropped.terms[1] = dropped.terms[2] = Tensor(zeros.data(), DType::bf16, {6, 200});
      b.poison();
      ASSERT_OK(router_gemm({.x = x, .weight = dropped, .scores = b}, Stream{}));
      EXPECT_EQ(values_of(a), values_of(b));
    }
  }
}

TEST(RouterGemm, ATokenDoesNotDependOnItsCompany) {
  RouterGemmProblem p({"", 70, 33, 300, DType::f32}, 5);
  ASSERT_OK(router_gemm(p.args, cpu_streams()[1]));
  for (int64_t t = 0; t < 70; ++t) {
    std::vector<float> alone(33);
    RouterGemmArgs args = p.args;
    args.x = p.args.x.rows(t, 1);
    args.scores = Tensor(alone.data(), DType::f32, {1, 33});
    ASSERT_OK(router_gemm(args, Stream{}));
    ASSERT_EQ(values_of(args.scores), values_of(p.args.scores.rows(t, 1))) << t;
  }
}

TEST(RouterGemm, EveryRowGivesATokenTheSameBitsInAnyCompany) {
  // On Hopper these numbers of tokens take clusters of 2, 4 and 8, with few tokens a CTA and with tiles of them.
  for (const RouterGemmCase& c :
       {RouterGemmCase{"", 640, 17, 520}, RouterGemmCase{"", 640, 17, 520, DType::f32},
        RouterGemmCase{"", 640, 72, 520, DType::bf16, DType::bf16}, RouterGemmCase{"", 640, 24, 4104},
        RouterGemmCase{"", 640, 192, 1096}}) {
    SCOPED_TRACE(testing::Message() << c.experts << " x " << c.hidden);
    RouterGemmProblem shapes(c, 9);
    shapes.args.batch_invariant = true;
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kRouterGemm, shapes.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        RouterGemmProblem all(c, 9), few(c, 9);
        ASSERT_OK(row.run(all.args, stream));
        for (const int64_t count : {1, 20, 48, 100, 300, 560}) {
          RouterGemmArgs args = few.args;
          args.x = few.args.x.rows(37, count);
          args.scores = few.args.scores.rows(37, count);
          ASSERT_OK(row.run(args, stream));
          ASSERT_EQ(values_of(args.scores), values_of(all.args.scores.rows(37, count))) << count;
        }
      });
    }
  }
}

/// The `count` largest of a row.
std::set<int64_t> largest(std::span<const double> row, size_t count) {
  std::vector<int64_t> order(row.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::partial_sort(order, order.begin() + static_cast<int64_t>(count),
                            [&](int64_t a, int64_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
  return {order.begin(), order.begin() + static_cast<int64_t>(count)};
}

// Where two logits are further apart than fp32 tells, the exact mode chooses as float64 does. two_term errs by the residual
// of its weight.
TEST(RouterGemm, EveryRowChoosesTheExpertsOfFloat64) {
  constexpr size_t kTop = 8;
  for (const RouterMode mode : {RouterMode::exact, RouterMode::two_term}) {
    const RouterGemmCase c{"", 600, 40, 320, DType::bf16, DType::f32, mode};
    RouterGemmProblem whole({"", 600, 40, 320},
                            11);  // the same numbers with all three terms: float64 of the weight
    const Oracle want = oracle(whole.args);
    const double residual = mode == RouterMode::exact ? 0 : 0x1p-16;
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kRouterGemm, whole.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        RouterGemmProblem got(c, 11);
        ASSERT_OK(row.run(got.args, stream));
        const std::vector<double> scores = values_of(got.args.scores);
        int64_t told_apart = 0;
        for (int64_t t = 0; t < c.tokens; ++t) {
          const std::span exact = std::span(want.scores).subspan(t * c.experts, c.experts);
          std::vector<double> falling(exact.begin(), exact.end());
          std::ranges::sort(falling, std::greater());
          const std::span magnitude = std::span(want.magnitude).subspan(t * c.experts, c.experts);
          const double error = (roundings(row.name, c) * 0x1p-24 + residual) * std::ranges::max(magnitude);
          if (falling[kTop - 1] - falling[kTop] < 2 * error) continue;
          ++told_apart;
          ASSERT_EQ(largest(std::span(scores).subspan(t * c.experts, c.experts), kTop), largest(exact, kTop))
              << t;
        }
        EXPECT_GT(told_apart, c.tokens * 9 / 10);
      });
    }
  }
}

// https://github.com/sgl-project/sglang/pull/33764: logits or weights rounded to bf16 chose other experts.
TEST(RouterGemm, H18KeepsWhatBf16Drops) {
  struct Row18 {
    float a;
    double score;
    RouterMode mode;
  };
  std::vector<uint16_t> x(512, f32_to_bf16(1.0f));
  for (const Row18& c :
       {Row18{1 + 0x1p-12f, 512.125, RouterMode::exact}, Row18{1 + 0x1p-12f, 512.125, RouterMode::two_term},
        Row18{1 + 0x1p-9f + 0x1p-18f, 513.001953125, RouterMode::exact},
        Row18{1 + 0x1p-9f + 0x1p-18f, 513.001953125, RouterMode::two_term}}) {
    std::vector<float> w(1024, 1.0f);
    std::fill(w.begin(), w.begin() + 512, c.a);
    std::vector<uint8_t> storage;
    float scores[2];
    const RouterGemmArgs args{.x = Tensor(x.data(), DType::bf16, {1, 512}),
                              .weight = prepare(w, 2, c.mode, storage),
                              .scores = Tensor(scores, DType::f32, {1, 2})};
    for (const Row<RouterGemmArgs>& row : kRouterGemmRows) {
      if (row.device != Device::cpu) continue;
      SCOPED_TRACE(row.name);
      ASSERT_OK(row.run(args, Stream{}));
      // two_term: |error| <= 2^-16 of the sum of |x w|, and fp32 rounding.
      const double allowed = (c.mode == RouterMode::exact ? 0 : 0x1p-16 * c.score) + 0x1p-24 * c.score;
      EXPECT_NEAR(scores[0], c.score, allowed);
      EXPECT_EQ(scores[1], 512.0f);
      EXPECT_GT(scores[0], scores[1]);
    }
  }
}

TEST(RouterGemm, PlansForHopperUseWholeWavesAndEveryCta) {
  using namespace router;
  const Residents h200{{0, 132, 132, 126, 120, 110, 120, 105, 120}};
  for (const int64_t experts : {1, 8, 60, 128, 192, 256, 384, 768, 2048}) {
    for (const int64_t hidden : {8, 64, 1000, 2048, 4096, 7168, 65536}) {
      for (const int64_t tokens : {1, 2, 16, 17, 48, 100, 300, 511, 512, 1000, 4096, 8192, 100000}) {
        for (const int terms : {1, 2, 3}) {
          const Problem p{tokens, experts, hidden, terms};
          const FewPlan few = few_plan(p);
          if (few.ctas > 0) {
            EXPECT_TRUE(few.ctas == 2 || few.ctas == 4 || few.ctas == 8);
            EXPECT_LE((steps_of(hidden) + few.ctas - 1) / few.ctas * 512,
                      100 << 10);  // bytes of shared memory
          }
          EXPECT_EQ(pieces_plan(p, h200).ctas, kPieces);
          EXPECT_GT(prompt_plan(p, h200).columns, 0);
        }
      }
    }
  }
  EXPECT_EQ(few_plan({1, 192, 4096, 2}).ctas, 4);
  EXPECT_EQ(few_plan({48, 192, 4096, 2}).ctas, 0);
  EXPECT_EQ(pieces_plan({96, 256, 7168, 2}, h200).columns, 64);
  const TilePlan wide = prompt_plan({8192, 192, 4096, 2}, h200);
  EXPECT_EQ(wide.columns, 192);
  EXPECT_LE(prompt_plan({8192, 192, 4096, 3}, h200).columns, 128);  // with room for totals
  EXPECT_EQ(wide.tiles({8192, 192, 4096, 2}) * wide.ctas, 128);
  // What cases of the same sizes are there for.
  constexpr int64_t kStages = 8;  // at most
  for (const auto& [problem, columns] : {std::pair(Problem{3000, 100, 1032, 1}, 96),
                                         {{1000, 200, 3080, 1}, 128},
                                         {{6000, 260, 520, 1}, 192}}) {
    const TilePlan plan = prompt_plan(problem, h200);
    EXPECT_EQ(plan.columns, columns);
    EXPECT_GT((steps_of(problem.hidden) + plan.ctas - 1) / plan.ctas, kStages);
  }
}

TEST(RouterGemm, RefusesAStaleWeight) {
  RouterGemmProblem p({"", 2, 4, 8}, 7);
  p.args.weight_version = 8;
  EXPECT_FAILS(router_gemm(p.args, Stream{}), Code::invalid_argument,
               "prepared from version 7, weight_version is 8");
}

TEST(RouterGemm, RefusesWhatDisagrees) {
  RouterGemmProblem p({"", 2, 4, 8}, 1);
  RouterGemmArgs args = p.args;
  args.weight = {};
  args.weight_version = 0;
  EXPECT_FAILS(router_gemm(args, Stream{}), Code::invalid_argument, "weight.term_count is 0, needs 1 to 3");
  args = p.args;
  args.weight.terms[1].shape[1] = 7;
  EXPECT_FAILS(router_gemm(args, Stream{}), Code::invalid_argument,
               "weight.terms[1].shape[1] is 7, needs hidden = 8 (from x.shape[1])");
  args = p.args;
  args.scores.dtype = DType::f16;
  EXPECT_FAILS(router_gemm(args, Stream{}), Code::invalid_argument,
               "needs scores of type f32 or bf16, got f16");
  EXPECT_FAILS(router_gemm(p.args, Stream{.device = Device::cuda}), Code::invalid_argument,
               "x is on cpu, needs cuda (the stream's device)");

  uint8_t small[16];
  float w[8] = {};
  RouterWeightSource source{.weight = Tensor(w, DType::f32, {1, 8})};
  EXPECT_FAILS(prepare_router_weight(source).status(), Code::invalid_argument, "storage is absent");
  source.storage = Tensor(small, DType::u8, {16});
  EXPECT_FAILS(prepare_router_weight(source).status(), Code::invalid_argument,
               "storage.shape[0] is 16, needs at least 48 bytes");
  source.weight.dtype = DType::i32;
  EXPECT_FAILS(prepare_router_weight(source).status(), Code::invalid_argument, "needs weight of type");
}

}  // namespace
}  // namespace vivace
