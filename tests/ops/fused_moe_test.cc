#include "src/ops/fused_moe/cases.h"
#include "src/ops/fused_moe/table.h"
#include "src/ops/linear/block_formats.h"
#include "tests/large.h"
#include "tests/ops/op_test.h"

namespace vivace {
namespace {

/// The largest values inside the layer, over all tokens and the experts they visit.
struct Magnitudes {
  double gate = 0, up = 0, hidden = 0, out = 0, down_norm = 0;
};

Magnitudes magnitudes_of(const FusedMoeArgs& args) {
  Magnitudes m;
  const auto visit = [&](const ExpertWeights& w, const std::vector<double>& x) {
    const auto dot = [](const Tensor& matrix, int64_t row, const std::vector<double>& v, double* norm) {
      std::vector<float> weights(v.size());
      dequantize_row(matrix.dtype, matrix.at(row).data, static_cast<int64_t>(v.size()), weights.data());
      double sum = 0, squares = 0;
      for (size_t i = 0; i < v.size(); ++i)
        sum += weights[i] * v[i], squares += double{weights[i]} * weights[i];
      *norm = std::max(*norm, std::sqrt(squares));
      return sum;
    };
    std::vector<double> h;
    double unused = 0;
    for (int64_t i = 0; i < w.gate.shape[0]; ++i) {
      const double g = dot(w.gate, i, x, &unused), u = dot(w.up, i, x, &unused);
      h.push_back(g / (1 + std::exp(-g)) * u);
      m.gate = std::max(m.gate, std::abs(g));
      m.up = std::max(m.up, std::abs(u));
      m.hidden = std::max(m.hidden, std::abs(h.back()));
    }
    for (int64_t i = 0; i < w.down.shape[0]; ++i)
      m.out = std::max(m.out, std::abs(dot(w.down, i, h, &m.down_norm)));
  };
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    const std::vector<double> x = values_of(args.x.rows(t, 1));
    for (int64_t j = 0; j < args.expert_ids.shape[1]; ++j) {
      const int32_t id = args.expert_ids.at(t).as<int32_t>()[j];
      if (has_work(id, expert_count(args))) visit(expert_at(args, id), x);
    }
    if (args.shared.present()) visit(args.shared, x);
  }
  return m;
}

/// How far fp32 arithmetic may be from float64. A dot product's partial sums stay near the largest result (signs are
/// random), so sqrt(n) roundings of that with a factor of 4 for the spread; errors of the columns of `hidden` are
/// independent, so `down` adds them in squares; |silu'| <= 1.1 and |silu(g)| <= |g|.
Bound bound_of(const FusedMoeArgs& args) {
  constexpr double kUlp = 0x1p-24;
  const Magnitudes m = magnitudes_of(args);
  const double shared = args.shared.present() ? static_cast<double>(args.shared.gate.shape[0]) : 0;
  const double columns = std::max(shared, static_cast<double>(expert_intermediate(args)));
  const double terms = static_cast<double>(args.x.shape[1]);
  const double product = 4 * kUlp * std::sqrt(terms) * std::max(m.gate, m.up);
  const double hidden = product * (1.1 * m.up + m.gate) + 12 * kUlp * m.hidden;
  const double out = 4 * hidden * m.down_norm + 4 * kUlp * std::sqrt(columns) * m.out;
  double factors = args.shared.present() ? 1 : 0;
  for (double w : values_of(args.expert_weights)) factors = std::max(factors, std::abs(w));
  const double visits = static_cast<double>(args.expert_ids.shape[1]) + 1;
  return {visits * factors * (out + visits * kUlp * m.out) + 1e-30, Bound::store(args.y.dtype).relative};
}

TEST(FusedMoe, EveryRowAgreesWithTheReference) {
  for (const FusedMoeCase& c : fused_moe_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    FusedMoeProblem want(c, 1);
    ASSERT_OK(fused_moe_reference(want.args, Stream{}));
    const Bound bound = bound_of(want.args);
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kFusedMoe, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        FusedMoeProblem got(c, 1, stream);
        if (c.tokens > 0) ASSERT_OK(row.run(got.args, stream));
        EXPECT_TRUE(close(got.args.y, want.args.y, bound));
        EXPECT_TRUE(got.y.canaries_intact() && got.workspace.canaries_intact());
      });
    }
  }
}

TEST(FusedMoe, BlockFormatWeights) {
  // Random bytes are valid blocks once their f16 scales are finite and small.
  for (DType type : {DType::q8_0, DType::q4_0, DType::q4_1}) {
    SCOPED_TRACE(name_of(type));
    FusedMoeProblem want({"", 5, 64, 32, 4, 2, DType::f32, MoeRouting::any, 0}, 2),
        got({"", 5, 64, 32, 4, 2, DType::f32, MoeRouting::any, 0}, 2);
    std::mt19937 rng(3);
    const auto blocks = [&](std::vector<int64_t> shape) {
      Guarded m(type, shape);
      const int64_t size = info_of(type).block_bytes;
      for (int64_t i = 0; i < m.bytes(); ++i) m.as<uint8_t>()[i] = static_cast<uint8_t>(rng());
      for (int64_t b = 0; b < m.bytes(); b += size) {
        const uint16_t scale = f32_to_f16(type == DType::q8_0 ? 0.001f : 0.02f), min = f32_to_f16(-0.15f);
        std::memcpy(m.as<uint8_t>() + b, &scale, 2);
        if (type == DType::q4_1) std::memcpy(m.as<uint8_t>() + b + 2, &min, 2);
      }
      return m;
    };
    const Guarded gate_up = blocks({4, 64, 64}), down = blocks({4, 64, 32});
    for (FusedMoeProblem* p : {&want, &got}) {
      p->args.gate_up = gate_up;
      p->args.down = down;
    }
    ASSERT_OK(fused_moe_reference(want.args, Stream{}));
    ASSERT_OK(fused_moe(got.args, Stream{}));
    EXPECT_TRUE(close(got.y, want.y, bound_of(want.args)));
  }
}

/// Experts of one number: expert e multiplies by factors[e], since silu(100) is 100 in fp32.
struct TinyExperts {
  std::vector<float> gate_up, down;
  std::vector<uint8_t> workspace;
  FusedMoeArgs args;

  explicit TinyExperts(std::vector<float> factors) {
    for (float f : factors) gate_up.insert(gate_up.end(), {100, f / 100}), down.push_back(1);
    const int64_t experts = static_cast<int64_t>(factors.size());
    args.gate_up = Tensor(gate_up.data(), DType::f32, {experts, 2, 1});
    args.down = Tensor(down.data(), DType::f32, {experts, 1, 1});
  }
  std::vector<float> run(std::vector<float> x, std::vector<int32_t> ids, std::vector<float> weights,
                         const Row<FusedMoeArgs>& row) {
    const int64_t tokens = static_cast<int64_t>(x.size()), top_k = static_cast<int64_t>(ids.size()) / tokens;
    std::vector<float> y(x.size(), NAN);
    args.x = Tensor(x.data(), DType::f32, {tokens, 1});
    args.y = Tensor(y.data(), DType::f32, {tokens, 1});
    args.expert_ids = Tensor(ids.data(), DType::i32, {tokens, top_k});
    args.expert_weights = Tensor(weights.data(), DType::f32, {tokens, top_k});
    const Result<int64_t> bytes = fused_moe_workspace_bytes(args, Stream{});
    EXPECT_TRUE(bytes.ok());
    workspace.assign(*bytes, 0xFF);  // NaN in every float
    args.workspace = Tensor(workspace.data(), DType::u8, {*bytes});
    EXPECT_OK(row.run(args, Stream{}));
    return y;
  }
};

// https://github.com/vllm-project/vllm/pull/46408: -1 was used as an index, and slots nobody wrote were summed.
TEST(FusedMoe, H16IdsWithoutWork) {
  for (const Row<FusedMoeArgs>& row : kFusedMoeRows) {
    SCOPED_TRACE(row.name);
    TinyExperts experts({1, 2, 3, 4});
    const std::vector<float> y =
        experts.run({1, 1, 1}, {-1, 2, -1, -1, 0, 3}, {0.9f, 0.1f, 0.5f, 0.5f, 0.25f, 0.75f}, row);
    EXPECT_NEAR(y[0], 0.3, 1e-6);
    EXPECT_EQ(y[1], 0.0f);
    EXPECT_NEAR(y[2], 3.25, 1e-6);
    // Ids outside the experts are ignored, and so are their weights, NaN included.
    const std::vector<float> odd =
        experts.run({1, 1}, {4, 1, INT32_MIN, INT32_MAX}, {NAN, 0.5f, NAN, NAN}, row);
    EXPECT_NEAR(odd[0], 1.0, 1e-6);
    EXPECT_EQ(odd[1], 0.0f);
  }
}

TEST(FusedMoe, ARepeatedExpertCountsTwice) {
  for (const Row<FusedMoeArgs>& row : kFusedMoeRows) {
    SCOPED_TRACE(row.name);
    TinyExperts experts({1, 2});
    for (size_t tokens : {1, 4096}) {
      const std::vector<float> y =
          experts.run(std::vector<float>(tokens, 1), std::vector<int32_t>(3 * tokens, 1),
                      std::vector<float>(3 * tokens, 0.5f), row);
      for (float v : y) ASSERT_NEAR(v, 3, 1e-5);
    }
  }
}

TEST(FusedMoe, SharedExpertIsAddedWithoutAFactor) {
  for (const Row<FusedMoeArgs>& row : kFusedMoeRows) {
    SCOPED_TRACE(row.name);
    TinyExperts experts({1, 2});
    float gate[] = {100, 100}, up[] = {0.01f, 0.02f}, down[] = {1, 10};  // 1 + 20 = 21 times
    experts.args.shared = {Tensor(gate, DType::f32, {2, 1}), Tensor(up, DType::f32, {2, 1}),
                           Tensor(down, DType::f32, {1, 2})};
    const std::vector<float> y = experts.run({1, 1}, {1, -1}, {0.25f, 0.25f}, row);
    EXPECT_NEAR(y[0], 21.5, 1e-4);
    EXPECT_NEAR(y[1], 21, 1e-4);
  }
}

// https://github.com/sgl-project/sglang/issues/38773: a layer that receives no tokens aborts on a null pointer.
TEST(FusedMoe, H04NoTokensThenOneThenNone) {
  FusedMoeProblem p({"", 1, 512, 256, 16, 4}, 4), fresh({"", 1, 512, 256, 16, 4}, 4);
  FusedMoeArgs none = p.args;
  none.x = none.y = Tensor(nullptr, DType::f32, {0, 512});
  none.expert_ids = Tensor(nullptr, DType::i32, {0, 4});
  none.expert_weights = Tensor(nullptr, DType::f32, {0, 4});
  none.workspace = Tensor();
  ASSERT_OK(fused_moe(none, Stream{}));
  ASSERT_OK(fused_moe(p.args, Stream{}));
  ASSERT_OK(fused_moe(none, Stream{}));
  ASSERT_OK(fused_moe(fresh.args, Stream{}));
  EXPECT_EQ(values_of(p.y), values_of(fresh.y));
  EXPECT_TRUE(p.y.canaries_intact() && p.workspace.canaries_intact());
}

TEST(FusedMoe, ATokenDoesNotDependOnItsCompany) {
  const FusedMoeCase c{"", 600, 40, 72, 6, 8, DType::bf16, MoeRouting::any, 24};
  const Stream pool = cpu_streams()[1];
  FusedMoeProblem p(c, 5, pool);
  ASSERT_OK(fused_moe(p.args, pool));
  for (int64_t t = 0; t < c.tokens; t += 7) {
    std::vector<float> alone(40);
    FusedMoeArgs args = p.args;
    args.x = p.args.x.rows(t, 1);
    args.expert_ids = p.args.expert_ids.rows(t, 1);
    args.expert_weights = p.args.expert_weights.rows(t, 1);
    args.y = Tensor(alone.data(), DType::f32, {1, 40});
    ASSERT_OK(fused_moe(args, Stream{}));
    ASSERT_EQ(values_of(args.y), values_of(p.args.y.rows(t, 1))) << t;
  }
}

TEST(FusedMoe, BothFormsGiveTheSameBits) {
  FusedMoeCase c{"", 9, 48, 40, 6, 3, DType::bf16, MoeRouting::any, 16};
  FusedMoeProblem stacked(c, 6);
  c.separate = true;
  FusedMoeProblem apart(c, 6);
  for (FusedMoeProblem* p : {&stacked, &apart}) {
    ASSERT_OK(fused_moe(p->args, Stream{}));
  }
  EXPECT_EQ(values_of(stacked.y), values_of(apart.y));
}

TEST(FusedMoe, ScratchDoesNotGrowWithoutBound) {
  FusedMoeProblem p({"", 1, 64, 32, 4, 2}, 1);
  const auto bytes_for = [&](int64_t tokens) {
    FusedMoeArgs args = p.args;
    args.x.shape[0] = args.y.shape[0] = args.expert_ids.shape[0] = args.expert_weights.shape[0] = tokens;
    const Result<int64_t> bytes = fused_moe_workspace_bytes(args, Stream{});
    return bytes.ok() ? *bytes : -1;
  };
  EXPECT_LT(bytes_for(1), bytes_for(100));
  EXPECT_EQ(bytes_for(2048), bytes_for(1000000));
}

// https://github.com/sgl-project/sglang/pull/4727: (row of token * top_k) * hidden was a 32-bit product.
TEST(FusedMoe, H07_large_MoreThanTwoToThe31Elements) {
  VIVACE_LARGE_TEST("needs 1.1 GB and a minute");
  constexpr int64_t kTokens = 65600, kHidden = 4096, kTopK = 8;
  FusedMoeProblem p({"", 1, kHidden, 128, 8, kTopK, DType::bf16}, 7);
  std::vector<float> y(kTokens * kHidden, NAN);
  FusedMoeArgs args = p.args;
  // All tokens are the first: rows with stride 0.
  for (Tensor* t : {&args.x, &args.expert_ids, &args.expert_weights}) {
    t->shape[0] = kTokens;
    t->stride[0] = 0;
  }
  args.y = Tensor(y.data(), DType::f32, {kTokens, kHidden});
  const Stream pool = cpu_streams()[1];
  p.args = args;
  p.take_workspace(pool);
  ASSERT_OK(fused_moe(p.args, pool));
  for (int64_t t : {int64_t{1}, int64_t{65535}, kTokens - 1}) {
    EXPECT_EQ(std::memcmp(y.data(), y.data() + t * kHidden, kHidden * sizeof(float)), 0) << t;
  }
  EXPECT_FALSE(std::isnan(y[0]));
}

TEST(FusedMoe, RefusesWhatDisagrees) {
  FusedMoeProblem p({"", 2, 16, 8, 4, 2, DType::f32, MoeRouting::distinct, 8}, 1);
  const auto refuses = [](const FusedMoeArgs& base, auto&& change, const char* text) {
    FusedMoeArgs args = base;
    change(args);
    EXPECT_FAILS(fused_moe(args, Stream{}), Code::invalid_argument, text);
  };
  refuses(
      p.args, [](auto& a) { a.down.shape[2] = 7; },
      "2 * down.shape[2] is 14, needs intermediate * 2 = 16 (from gate_up.shape[1])");
  refuses(
      p.args, [](auto& a) { a.gate_up = Tensor(); }, "gate_up is absent with 0 experts given one by one");
  refuses(
      p.args, [](auto& a) { a.expert_ids.shape[1] = 1; }, "expert_weights.shape[1] is 2, needs top_k = 1");
  refuses(
      p.args, [](auto& a) { a.expert_ids.dtype = DType::i64; }, "needs expert_ids of type i32, got i64");
  refuses(
      p.args, [](auto& a) { a.shared.up.shape[0] = 9; },
      "shared.up.shape[0] is 9, needs shared intermediate = 8");
  refuses(
      p.args, [](auto& a) { a.shared.up = Tensor(); }, "shared.up is absent");
  refuses(
      p.args, [](auto& a) { a.workspace = Tensor(); }, "workspace is absent");
  refuses(
      p.args, [](auto& a) { a.workspace.shape[0] = 64; }, "workspace.shape[0] is 64, needs at least");
  FusedMoeProblem apart({"", 2, 16, 8, 4, 2, DType::f32, MoeRouting::distinct, 0, true}, 1);
  apart.experts[2].down.shape[0] = 15;
  refuses(
      apart.args, [](auto&) {}, "experts[2].down is f32[15, 8]");
  EXPECT_FAILS(fused_moe_workspace_bytes(p.args, Stream{.device = Device::cuda}).status(), Code::unsupported,
               "reference: runs on cpu");
}

}  // namespace
}  // namespace vivace
