#include "src/ops/fused_moe/cases.h"
#include "src/ops/fused_moe/table.h"
#include "src/ops/gemm/sm90_wide_plan.h"
#include "src/ops/linear/block_formats.h"
#include "tests/large.h"
#include "tests/ops/op_test.h"

namespace vivace {
namespace {

/// The largest values inside the layer, over all tokens and the experts they visit.
struct Magnitudes {
  double gate = 0, up = 0, hidden = 0, out = 0, down_norm = 0, down_most = 0;
};

Magnitudes magnitudes_of(const FusedMoeArgs& args) {
  Magnitudes m;
  const auto visit = [&](const ExpertWeights& w, const std::vector<double>& x) {
    const auto dot = [](const Tensor& matrix, const Fp8Scales& scales, int64_t row,
                        const std::vector<double>& v, double* norm, double* most) {
      std::vector<float> weights(v.size());
      dequantize_row(matrix.dtype, matrix.at(row).data, static_cast<int64_t>(v.size()), weights.data());
      double sum = 0, squares = 0;
      for (size_t i = 0; i < v.size(); ++i) {
        const double weight = double{weights[i]} * scales.at(row, static_cast<int64_t>(i));
        sum += weight * v[i], squares += weight * weight;
        *most = std::max(*most, std::abs(weight));
      }
      *norm = std::max(*norm, std::sqrt(squares));
      return sum;
    };
    std::vector<double> h;
    double unused = 0;
    for (int64_t i = 0; i < w.gate.shape[0]; ++i) {
      const double g = dot(w.gate, up_scales(args, w.gate_scale), i, x, &unused, &unused);
      const double u = dot(w.up, up_scales(args, w.up_scale), i, x, &unused, &unused);
      h.push_back(gate_of<double>(args.swiglu)(g, u));
      m.gate = std::max(m.gate, std::abs(g));
      m.up = std::max(m.up, std::abs(u) + args.swiglu.beta);
      m.hidden = std::max(m.hidden, std::abs(h.back()));
    }
    for (int64_t i = 0; i < w.down.shape[0]; ++i) {
      const double out = dot(w.down, down_scales(args, w.down_scale), i, h, &m.down_norm, &m.down_most);
      m.out = std::max(m.out, std::abs(out));
    }
  };
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    std::vector<double> x = values_of(args.x.rows(t, 1));
    for (size_t i = 0; i < x.size(); ++i)
      x[i] *= activation_scales(args.x_scale).at(t, static_cast<int64_t>(i));
    for (int64_t j = 0; j < args.expert_ids.shape[1]; ++j) {
      const int32_t e = local_experts(args).of(args.expert_ids.at(t).as<int32_t>()[j]);
      if (e >= 0) visit(expert_at(args, e), x);
    }
    if (args.shared.present()) visit(args.shared, x);
  }
  return m;
}

/// How far a row may be from float64. A dot product's partial sums stay near the largest result (signs are random). In
/// fp32: sqrt(n) roundings of that with a factor of 4 for the spread. On tensor cores: n / 16 truncations, each by at
/// most 2^-23 of the sum and 17 / 4 times that in its addends. Errors of the columns of `hidden` are independent, so
/// `down` adds them in squares; |silu'| <= 1.1 and |silu(g)| <= |g|. GPU rows round `hidden` (bf16 weights) and
/// out(t, e) to bf16. fp8 products of warp groups lose 13 bits below the largest of 33 addends in steps of 32, at random.
struct MoeBound {
  Bound tight;
  /// fp8: a value between the products that lies next to a rounding boundary may fall to its other side, which moves
  /// it by a step, an eighth of it at most. Two of one token is rare.
  double step = 0;
};

MoeBound bound_of(const FusedMoeArgs& args, const Magnitudes& m, bool tensor_cores, bool warp_groups) {
  constexpr double kUlp = 0x1p-24;
  const double shared = args.shared.present() ? static_cast<double>(args.shared.gate.shape[0]) : 0;
  const double columns = std::max(shared, static_cast<double>(expert_intermediate(args)));
  const auto sum = [&](double terms) {
    if (warp_groups && is_fp8(args)) return 4 * 0x1p-13 * std::sqrt(33 * (terms / 32 + 1));
    return tensor_cores ? 5.25 * 0x1p-23 * (terms / 16 + 2) : 4 * kUlp * std::sqrt(terms);
  };
  const double product = sum(static_cast<double>(args.x.shape[1])) * std::max(m.gate, m.up);
  double hidden = product * (1.1 * m.up + m.gate) + 12 * kUlp * m.hidden;
  double rounding = 0;
  if (tensor_cores) {
    if (!is_fp8(args)) hidden += 0x1p-8 * m.hidden;
    rounding = 0x1p-8 * m.out * (is_fp8(args) ? 1.2 : 1.01);  // fp8 of the values between moves out, too
  }
  const double out = 4 * hidden * m.down_norm + sum(columns) * m.out + rounding;
  double factors = args.shared.present() ? 1 : 0;
  for (double w : values_of(args.expert_weights)) factors = std::max(factors, std::abs(w));
  const double visits = static_cast<double>(args.expert_ids.shape[1]) + 1;
  MoeBound bound{
      {visits * factors * (out + visits * kUlp * m.out) + 1e-30, Bound::store(args.y.dtype).relative}};
  if (is_fp8(args)) bound.step = 2 * factors * m.hidden / 8 * m.down_most;
  return bound;
}

/// The distance from what it should be, as a share of it, of each token and of all: what the largest values of a layer do not
/// allow to see. Values between the products that fp8 moves by a step move by up to an eighth of themselves, and a token may
/// owe most of its sum to one of them; bf16 moves them by less.
void expect_near_in_all(const Tensor& got, const Tensor& want, bool fp8) {
  constexpr double kShare = 0.05;
  const double share_of_token = fp8 ? 0.125 : kShare;
  double off_of_all = 0, all_of_all = 0;
  for (int64_t t = 0; t < want.shape[0]; ++t) {
    const std::vector<double> g = values_of(got.rows(t, 1)), w = values_of(want.rows(t, 1));
    double off = 0, all = 0;
    for (size_t i = 0; i < w.size(); ++i) off += (g[i] - w[i]) * (g[i] - w[i]), all += w[i] * w[i];
    EXPECT_LE(std::sqrt(off), share_of_token * std::sqrt(all)) << "token " << t;
    off_of_all += off, all_of_all += all;
  }
  EXPECT_LE(std::sqrt(off_of_all), kShare * std::sqrt(all_of_all));
}

/// Every element within the tight bound, but for a few tokens that fp8 moved by a step.
void expect_close(const Tensor& got, const Tensor& want, const MoeBound& bound) {
  if (bound.step == 0) {
    EXPECT_TRUE(close(got, want, bound.tight));
    return;
  }
  EXPECT_TRUE(close(got, want, bound.tight + Bound{bound.step, 0}));
  int64_t moved = 0;
  for (int64_t t = 0; t < want.shape[0]; ++t) moved += !close(got.rows(t, 1), want.rows(t, 1), bound.tight);
  EXPECT_LE(moved, 1 + want.shape[0] / 50);
}

TEST(FusedMoe, EveryRowAgreesWithTheReference) {
  for (const FusedMoeCase& c : fused_moe_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    FusedMoeProblem want(c, 1);
    ASSERT_OK(fused_moe_reference(want.args, Stream{}));
    const Magnitudes magnitudes = magnitudes_of(want.args);
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kFusedMoe, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        FusedMoeProblem got(c, 1, stream);
        if (c.tokens > 0) ASSERT_OK(row.run(got.args, stream));
        const bool tensor_cores = stream.device == Device::cuda;
        expect_near_in_all(got.args.y, want.args.y, is_fp8(want.args));
        expect_close(got.args.y, want.args.y,
                     bound_of(want.args, magnitudes, tensor_cores, row.name == "sm90.wide"));
        EXPECT_TRUE(got.y.canaries_intact() && got.workspace.canaries_intact());
      });
    }
  }
}

// Gate and up are one tensor to sm90.wide, whichever comes first in memory; the same matrix twice is none.
TEST(FusedMoe, GateAndUpOfTheSharedExpertLieAnywhere) {
  for (const FusedMoeCase& c : fused_moe_cases(CaseSize::test)) {
    if (c.shared == 0 || c.tokens == 0 || c.tokens > 60 || c.experts > 100 || c.separate) continue;
    SCOPED_TRACE(c.name);
    for (const bool same : {false, true}) {
      const auto change = [&](FusedMoeArgs& args) {
        if (same) {
          args.shared.up = args.shared.gate;
          args.shared.up_scale = args.shared.gate_scale;
        } else {
          std::swap(args.shared.gate, args.shared.up);
          std::swap(args.shared.gate_scale, args.shared.up_scale);
        }
      };
      FusedMoeProblem want(c, 3);
      change(want.args);
      ASSERT_OK(fused_moe_reference(want.args, Stream{}));
      for (const Stream& stream : test_streams()) {
        for_each_fitting_row(kFusedMoe, want.args, stream, [&](const auto& row) {
          SCOPED_TRACE(row.name);
          FusedMoeProblem got(c, 3, stream);
          change(got.args);
          ASSERT_OK(row.run(got.args, stream));
          expect_near_in_all(got.args.y, want.args.y, is_fp8(want.args));
        });
      }
    }
  }
}

TEST(FusedMoe, GpuRowsWantTheSharedExpertsRowsAlike) {
  FusedMoeProblem p({"", 3, 64, 32, 4, 2, DType::bf16, MoeRouting::any, 16, false, 0, DType::bf16}, 1);
  const auto chosen = [&] {
    return fused_moe_explain(p.args, {.device = Device::cuda, .compute_capability = 90});
  };
  const std::string before(chosen().row);
  if (before.empty()) GTEST_SKIP() << "a build without nvcc";
  EXPECT_EQ(before, "sm90.split");
  p.args.shared.gate.stride[0] = 2 * p.args.shared.up.stride[0];
  EXPECT_TRUE(chosen().row.empty()) << chosen().row;
}

// A rank's share of the rows, not all of them, says how many an expert has.
TEST(FusedMoe, ARankOfManyStreamsItsWeights) {
  FusedMoeProblem p({"", 32, 64, 32, 24, 8, DType::bf16, MoeRouting::any, 0, false, 0, DType::bf16}, 1);
  const Stream hopper{.device = Device::cuda, .compute_capability = 90};
  if (fused_moe_explain(p.args, hopper).row.empty()) GTEST_SKIP() << "a build without nvcc";
  EXPECT_EQ(fused_moe_explain(p.args, hopper).row, "sm90.wide");
  p.args.total_experts = 192;
  EXPECT_EQ(fused_moe_explain(p.args, hopper).row, "sm90.split");
  p.args.total_experts = 0;
  const Guarded map(DType::i32, {192});
  p.args.expert_map = map;
  EXPECT_EQ(fused_moe_explain(p.args, hopper).row, "sm90.split");
  p.args.batch_invariant = true;
  EXPECT_EQ(fused_moe_explain(p.args, hopper).row, "sm90.stream");
}

// The number of tokens must not choose among rows of other bits.
TEST(FusedMoe, BatchInvariantCallsHaveRowsOfTheSameBits) {
  FusedMoeProblem p({"", 300, 64, 32, 4, 2, DType::bf16, MoeRouting::any, 0, false, 0, DType::bf16}, 1);
  const Stream hopper{.device = Device::cuda, .compute_capability = 90};
  if (fused_moe_explain(p.args, hopper).row.empty()) GTEST_SKIP() << "a build without nvcc";
  EXPECT_EQ(fused_moe_explain(p.args, hopper).row, "sm90.wide");
  p.args.batch_invariant = true;
  EXPECT_EQ(fused_moe_explain(p.args, hopper).row, "cuda.grouped");
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
    expect_close(got.y, want.y, bound_of(want.args, magnitudes_of(want.args), false, false));
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
    if (row.device != Device::cpu) continue;
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
    if (row.device != Device::cpu) continue;
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
    if (row.device != Device::cpu) continue;
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

// Long products of many rows, which have tiles of their own on Hopper: rows of x where they are, and in order. In float64 they would
// take minutes; their bits are those of low tiles.
constexpr FusedMoeCase kThreeWarpGroups{
    "fp8, three warp groups", 2500, 1024, 192, 45, 2, DType::fp8_e4m3, MoeRouting::any, 0, false, 0,
    DType::fp8_e4m3};
constexpr FusedMoeCase kThreeWarpGroupsInOrder{"fp8, rows in order, three warp groups",
                                               550,
                                               1024,
                                               776,
                                               11,
                                               2,
                                               DType::fp8_e4m3,
                                               MoeRouting::any,
                                               0,
                                               false,
                                               0,
                                               DType::fp8_e4m3};
constexpr FusedMoeCase kPairs{
    "fp8, pairs of CTAs", 2000, 1008, 520, 8, 2, DType::fp8_e4m3, MoeRouting::any, 0, false, 0,
    DType::fp8_e4m3};
constexpr FusedMoeCase kPairsOfThree{"fp8, pairs of CTAs, three warp groups",
                                     1400,
                                     1040,
                                     520,
                                     8,
                                     2,
                                     DType::fp8_e4m3,
                                     MoeRouting::any,
                                     0,
                                     false,
                                     0,
                                     DType::fp8_e4m3};
constexpr FusedMoeCase kBlocksByPairs{"fp8 blocks, pairs of CTAs",
                                      2000,
                                      1008,
                                      520,
                                      8,
                                      2,
                                      DType::fp8_e4m3,
                                      MoeRouting::any,
                                      0,
                                      false,
                                      0,
                                      DType::fp8_e4m3,
                                      true};
constexpr FusedMoeCase kBlocksByPairsOfThree{"fp8 blocks, pairs of CTAs, three warp groups",
                                             560,
                                             1040,
                                             520,
                                             8,
                                             2,
                                             DType::fp8_e4m3,
                                             MoeRouting::any,
                                             0,
                                             false,
                                             0,
                                             DType::fp8_e4m3,
                                             true};
constexpr FusedMoeCase of_bf16(FusedMoeCase c) {
  c.name = "bf16, three warp groups";
  c.hidden /= 2;
  c.weight = c.x = DType::bf16;
  return c;
}

constexpr float kOne = 1;
/// The tile that a case's gate and up have on a GPU of 132 SMs.
gemm::WidePlan wide_plan_of(const FusedMoeCase& c) {
  return gemm::wide_plan({.type = c.x,
                          .block_scales = c.blocks,
                          .gated = true,
                          .rows = c.tokens * c.top_k,
                          .n = c.intermediate,
                          .k = c.hidden,
                          .groups = c.experts,
                          .rows_of_group = (c.tokens * c.top_k + c.experts - 1) / c.experts,
                          .n_offset = c.block_offset,
                          .y_type = c.x,
                          .y_scale = c.blocks ? nullptr : &kOne},
                         132);
}
TEST(FusedMoe, CasesReachEveryTileOfHopper) {
  using Plan = gemm::WidePlan;
  EXPECT_EQ(wide_plan_of(kPairs), (Plan{2, 256, true}));
  EXPECT_EQ(wide_plan_of(kPairsOfThree), (Plan{3, 192, true}));
  EXPECT_EQ(wide_plan_of(kBlocksByPairs), (Plan{2, 256, true}));
  EXPECT_EQ(wide_plan_of(kBlocksByPairsOfThree), (Plan{3, 192, true}));
  for (const FusedMoeCase& c : {kThreeWarpGroups, kThreeWarpGroupsInOrder}) {
    EXPECT_EQ(wide_plan_of(c), (Plan{3, 192})) << c.name;
    EXPECT_EQ(wide_plan_of(of_bf16(c)), (Plan{3, 192})) << c.name;
  }
  const auto count = [](DType x, bool blocks, const Plan& plan) {
    return std::ranges::count_if(fused_moe_cases(CaseSize::test), [&](const FusedMoeCase& c) {
      return c.x == x && c.blocks == blocks && c.experts > 0 && c.tokens * c.top_k > 0 &&
             wide_plan_of(c) == plan;
    });
  };
  for (const DType x : {DType::bf16, DType::fp8_e4m3}) {
    for (const bool blocks : {false, true}) {
      if (blocks && x == DType::bf16) continue;
      EXPECT_GT(count(x, blocks, {2, 64}), 0);
      EXPECT_GT(count(x, blocks, {3, 64}), 0) << name_of(x) << blocks;
      EXPECT_GT(count(x, blocks, blocks ? Plan{2, 192} : Plan{2, 256}), 0);
      if (x == DType::fp8_e4m3) EXPECT_GT(count(x, blocks, {2, 256, true}), 0) << blocks;
    }
  }
}

// A token's bits, alone and among others: other rows of a tile, and tiles of other sizes.
TEST(FusedMoe, EveryRowGivesATokenTheSameBitsInAnyCompany) {
  for (const FusedMoeCase& c :
       {FusedMoeCase{"bf16", 700, 264, 72, 3, 2, DType::bf16, MoeRouting::any, 40, false, 0, DType::bf16},
        FusedMoeCase{"fp8", 300, 272, 80, 3, 2, DType::fp8_e4m3, MoeRouting::any, 48, false, 0,
                     DType::fp8_e4m3},
        FusedMoeCase{"fp8, decode", 64, 272, 80, 16, 2, DType::fp8_e4m3, MoeRouting::any, 48, false, 0,
                     DType::fp8_e4m3},
        FusedMoeCase{"fp8 blocks, decode", 64, 272, 192, 16, 2, DType::fp8_e4m3, MoeRouting::any, 48, false,
                     0, DType::fp8_e4m3, true, 64},
        FusedMoeCase{"fp8 blocks", 300, 272, 192, 3, 2, DType::fp8_e4m3, MoeRouting::any, 48, false, 0,
                     DType::fp8_e4m3, true, 64},
        kPairs, kPairsOfThree, kBlocksByPairs, kBlocksByPairsOfThree, kThreeWarpGroups,
        kThreeWarpGroupsInOrder, of_bf16(kThreeWarpGroups), of_bf16(kThreeWarpGroupsInOrder)}) {
    SCOPED_TRACE(c.name);
    const FusedMoeProblem shapes(c, 8);
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kFusedMoe, shapes.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        if (row.name == "reference") return;
        FusedMoeProblem all(c, 8, stream), few(c, 8, stream);
        ASSERT_OK(row.run(all.args, stream));
        for (const int64_t count : {1, 20, 100}) {
          const int64_t t = 37;
          if (t + count > c.tokens) continue;
          FusedMoeArgs args = few.args;
          args.x = few.args.x.rows(t, count);
          if (args.x_scale.rank == 2) args.x_scale = few.args.x_scale.rows(t, count);
          args.expert_ids = few.args.expert_ids.rows(t, count);
          args.expert_weights = few.args.expert_weights.rows(t, count);
          args.y = few.args.y.rows(t, count);
          ASSERT_OK(row.run(args, stream));
          ASSERT_EQ(values_of(args.y), values_of(all.args.y.rows(t, count))) << count;
        }
      });
    }
  }
}

// The number of tokens chooses the row, so rows of one device that take a call for which it must not count agree on its bits.
TEST(FusedMoe, GpuRowsGiveTheSameBits) {
  for (const FusedMoeCase& c : fused_moe_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    FusedMoeProblem shapes(c, 9);
    shapes.args.batch_invariant = true;
    for (const Stream& stream : test_streams()) {
      if (stream.device == Device::cpu || c.tokens == 0) continue;
      std::vector<double> first;
      for_each_fitting_row(kFusedMoe, shapes.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        FusedMoeProblem p(c, 9, stream);
        ASSERT_OK(row.run(p.args, stream));
        if (first.empty()) first = values_of(p.y);
        EXPECT_EQ(first, values_of(p.y));
      });
    }
  }
}

// One number: x = 2 * 0.5, gate = 64 * 0.5, up = 1 * 0.25: silu(32) * 0.25 = 8, which act_scale 3 stores as e4m3(2.67) =
// 2.75; down = 4 * 2.
TEST(FusedMoe, Fp8HandWorked) {
  uint8_t x = f32_to_fp8(2), gate_up[] = {f32_to_fp8(64), f32_to_fp8(1)}, down = f32_to_fp8(4);
  float x_scale = 0.5f, gate_up_scale[] = {0.5f, 0.25f}, down_scale = 2, act_scale = 3, factor = 0.5f, y = 0;
  int32_t id = 0;
  std::vector<uint8_t> workspace(1 << 16);
  FusedMoeArgs args{.x = Tensor(&x, DType::fp8_e4m3, {1, 1}),
                    .x_scale = Tensor(&x_scale, DType::f32, {1}),
                    .gate_up = Tensor(gate_up, DType::fp8_e4m3, {1, 2, 1}),
                    .down = Tensor(&down, DType::fp8_e4m3, {1, 1, 1}),
                    .gate_up_scale = Tensor(gate_up_scale, DType::f32, {1, 2}),
                    .down_scale = Tensor(&down_scale, DType::f32, {1}),
                    .act_scale = Tensor(&act_scale, DType::f32, {1}),
                    .expert_ids = Tensor(&id, DType::i32, {1, 1}),
                    .expert_weights = Tensor(&factor, DType::f32, {1, 1}),
                    .y = Tensor(&y, DType::f32, {1, 1}),
                    .workspace = Tensor(workspace.data(), DType::u8, {1 << 16})};
  for (const Row<FusedMoeArgs>& row : kFusedMoeRows) {
    if (row.device != Device::cpu) continue;
    SCOPED_TRACE(row.name);
    ASSERT_OK(row.run(args, Stream{}));
    EXPECT_EQ(y, 0.5f * 2.75f * 3 * 8);
  }
  // One block instead: the made scale is 8 / 448, so 8 survives.
  args.x_scale = Tensor(&x_scale, DType::f32, {1, 1});
  args.gate_up_scale = Tensor(gate_up_scale, DType::f32, {1, 2, 1, 1});
  args.down_scale = Tensor(&down_scale, DType::f32, {1, 1, 1});
  args.act_scale = Tensor();
  ASSERT_OK(fused_moe(args, Stream{}));
  EXPECT_NEAR(y, 0.5f * 8 * 8, 1e-5);
}

// Expert 0 and 1 multiply by 1 and 2 and are the ids 7 and 8 of a slice; by a map 3 is expert 1 and 0 nobody.
TEST(FusedMoe, IdsOfASliceAndOfAMap) {
  for (const Row<FusedMoeArgs>& row : kFusedMoeRows) {
    if (row.device != Device::cpu) continue;
    SCOPED_TRACE(row.name);
    TinyExperts slice({1, 2});
    slice.args.first_expert = 7;
    std::vector<float> y = slice.run({1, 1, 1}, {7, 8, 6, 9, -1, INT32_MIN}, std::vector<float>(6, 1), row);
    EXPECT_NEAR(y[0], 3, 1e-6);
    EXPECT_EQ(y[1], 0);
    EXPECT_EQ(y[2], 0);
    TinyExperts by_map({1, 2});
    int32_t map[] = {-1, 2, 0, 1};  // 2 is no expert here
    by_map.args.expert_map = Tensor(map, DType::i32, {4});
    y = by_map.run({1, 1, 1}, {3, 2, 0, 3, 1, 4}, std::vector<float>(6, 1), row);
    EXPECT_NEAR(y[0], 3, 1e-6);
    EXPECT_NEAR(y[1], 2, 1e-6);
    EXPECT_EQ(y[2], 0);
    by_map.args.expert_map = Tensor(nullptr, DType::i32, {0});  // which has nobody, not no map
    EXPECT_EQ(by_map.run({1}, {0, 1}, {1, 1}, row)[0], 0);
  }
}

// One number: gate = 10 at most 7, up = -9 at least -7: 7 sigmoid(1.702 * 7) (1 - 7).
TEST(FusedMoe, SwiGluHandWorked) {
  for (const Row<FusedMoeArgs>& row : kFusedMoeRows) {
    if (row.device != Device::cpu) continue;
    SCOPED_TRACE(row.name);
    TinyExperts experts({1});
    experts.gate_up = {10, -9};
    experts.args.swiglu = {1.702, 7, 1};
    EXPECT_NEAR(experts.run({1}, {0}, {1}, row)[0], 7 / (1 + std::exp(-1.702 * 7)) * (1 - 7), 1e-5);
    EXPECT_NEAR(experts.run({-1}, {0}, {1}, row)[0], -10 / (1 + std::exp(17.02)) * (1 + 7), 1e-9);
    EXPECT_TRUE(std::isnan(experts.run({NAN}, {0}, {1}, row)[0]));
    experts.args.swiglu = {.limit = 2};
    EXPECT_NEAR(experts.run({1}, {0}, {1}, row)[0], 2 / (1 + std::exp(-2.0)) * -2, 1e-5);
  }
}

// What a caller would do with quantize_fp8 before.
TEST(FusedMoe, XIsQuantisedWhereWeightsAreFp8) {
  for (const DType x_type : {DType::bf16, DType::f32}) {
    for (const bool blocks : {false, true}) {
      for (const int64_t tokens : {1, 40, 300}) {
        SCOPED_TRACE(::testing::Message() << name_of(x_type) << (blocks ? ", blocks, " : ", ") << tokens);
        const FusedMoeCase c{
            "", tokens,          144,   48, 4, 2, DType::fp8_e4m3, MoeRouting::any, 16, false,
            0,  DType::fp8_e4m3, blocks};
        for (const Stream& stream : test_streams()) {
          const CaseMemoryScope scope(memory_for(stream));
          FusedMoeProblem want(c, 1, stream), got(c, 1, stream);
          std::mt19937 rng(4);
          Guarded x(x_type, {tokens, 144}, 147);
          x.random(rng, 1);
          got.args.x = x;
          if (blocks) got.args.x_scale = Tensor();
          got.take_workspace(stream);
          ASSERT_OK(fused_moe(got.args, stream));
          ASSERT_OK(quantize_fp8({.x = x,
                                  .y = want.args.x,
                                  .scale = want.args.x_scale,
                                  .scaling = blocks ? Fp8Scaling::block : Fp8Scaling::tensor},
                                 stream));
          ASSERT_OK(fused_moe(want.args, stream));
          ASSERT_OK(finish(stream));
          EXPECT_EQ(values_of(got.y), values_of(want.y));
          EXPECT_TRUE(got.y.canaries_intact() && got.workspace.canaries_intact());
          EXPECT_EQ(fused_moe_explain(got.args, stream).row, fused_moe_explain(want.args, stream).row);
          EXPECT_GT(fused_moe_cost(got.args).bytes, fused_moe_cost(want.args).bytes);
        }
      }
    }
  }
}

TEST(FusedMoe, RefusesScalesThatDisagree) {
  const auto refuses = [](const FusedMoeArgs& base, auto&& change, const char* text) {
    FusedMoeArgs args = base;
    change(args);
    EXPECT_FAILS(fused_moe(args, Stream{}), Code::invalid_argument, text);
  };
  FusedMoeProblem p(
      {"", 2, 144, 48, 4, 2, DType::fp8_e4m3, MoeRouting::distinct, 8, false, 0, DType::fp8_e4m3}, 1);
  EXPECT_OK(fused_moe(p.args, Stream{}));
  refuses(
      p.args, [](auto& a) { a.x_scale = Tensor(); }, "x_scale is absent, needs scales with fp8 x");
  refuses(
      p.args, [](auto& a) { a.gate_up_scale = Tensor(); },
      "gate_up_scale is absent, needs scales with fp8 weights");
  refuses(
      p.args, [](auto& a) { a.act_scale = Tensor(); }, "act_scale is absent, needs a scale");
  refuses(
      p.args, [](auto& a) { a.act_scale.shape[0] = 3; }, "act_scale.shape[0] is 3, needs experts = 4");
  refuses(
      p.args, [](auto& a) { a.block_offset = 128; }, "block_offset is 128, needs 0 to 127");
  refuses(
      p.args, [](auto& a) { a.shared.act_scale = Tensor(); }, "shared.act_scale is absent, needs a scale");
  refuses(
      p.args, [](auto& a) { a.down.dtype = DType::bf16; }, "needs down of type fp8, got bf16");
  FusedMoeProblem blocks(
      {"", 2, 144, 48, 4, 2, DType::fp8_e4m3, MoeRouting::distinct, 8, false, 0, DType::fp8_e4m3, true, 96},
      1);
  EXPECT_OK(fused_moe(blocks.args, Stream{}));
  refuses(
      blocks.args, [](auto& a) { a.x_scale.shape[1] = 1; },
      "x_scale.shape[1] is 1, needs hidden blocks = 2 (from ceil(hidden / 128))");
  refuses(
      blocks.args, [](auto& a) { a.block_offset = 0; },
      "gate_up_scale.shape[2] is 2, needs intermediate blocks = 1");
  refuses(
      blocks.args, [&](auto& a) { a.act_scale = p.args.act_scale; }, "act_scale is f32[4], needs none");
  refuses(
      blocks.args, [&](auto& a) { a.down_scale = p.args.down_scale, a.act_scale = p.args.act_scale; },
      "down_scale is f32[4], needs 3 dimensions: x_scale has blocks of 128");
  refuses(
      p.args, [&](auto& a) { a.gate_up_scale = blocks.args.gate_up_scale, a.act_scale = Tensor(); },
      "gate_up_scale is f32[4, 2, 2, 2], needs 2 dimensions: x_scale has no blocks of 128");
  refuses(
      p.args, [](auto& a) { a.block_offset = 16; }, "block_offset is 16, needs 0 without scales of blocks");
  const Guarded f32(DType::f32, {2, 144});
  refuses(
      p.args,
      [&](auto& a) { a.x = f32, a.x_scale = a.gate_up_scale = a.down_scale = a.act_scale = Tensor(); },
      "gate_up_scale is absent, needs scales with fp8 weights");
  refuses(
      blocks.args,
      [&](auto& a) {
        a.x = f32, a.x_scale = Tensor(), a.down_scale = p.args.down_scale, a.act_scale = p.args.act_scale;
      },
      "down_scale is f32[4], needs 3 dimensions: gate_up_scale has blocks of 128");
  refuses(
      p.args, [&](auto& a) { a.x = f32, a.x_scale = Tensor(), a.down_scale = blocks.args.down_scale; },
      "down_scale is f32[4, 2, 2], needs 1 dimension: gate_up_scale has no blocks of 128");
  refuses(
      p.args, [&](auto& a) { a.x = f32, a.x_scale = Tensor(), a.gate_up_scale = a.down_scale; },
      "gate_up_scale is f32[4], needs 2 dimensions, or 4 with blocks of 128");
  refuses(
      blocks.args, [&](auto& a) { a.x = f32; },
      "x_scale is f32[2, 2], needs none where x is quantised with made scales");
  refuses(
      p.args, [&](auto& a) { a.x = f32, a.x_scale = Tensor(); },
      "x_scale is absent, needs a scale [1] that x is quantised by");
  FusedMoeProblem plain({"", 2, 16, 8, 4, 2}, 1);
  refuses(
      plain.args, [&](auto& a) { a.x_scale = p.args.x_scale; }, "x_scale is f32[1], needs none");
  FusedMoeProblem apart(
      {"", 2, 16, 8, 4, 2, DType::fp8_e4m3, MoeRouting::distinct, 0, true, 0, DType::fp8_e4m3}, 1);
  const Guarded narrow(DType::f32, {2, 16});
  refuses(
      apart.args,
      [&](auto& a) { a.x = narrow, a.x_scale = Tensor(), apart.experts[0].gate_scale = Tensor(); },
      "experts[0].gate_scale is absent, needs a scale with fp8 weights");
  apart.experts[0].gate_scale = apart.experts[1].gate_scale;
  apart.experts[2].up_scale = Tensor();
  refuses(
      apart.args, [](auto&) {}, "experts[2] has scales");
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
      p.args, [](auto& a) { a.first_expert = -1; }, "first_expert is -1, needs 0 to 2147483647");
  refuses(
      p.args, [](auto& a) { a.first_expert = 3, a.total_experts = 6; },
      "total_experts is 6, needs 0, or 7 to 2147483647");
  refuses(
      p.args, [](auto& a) { a.total_experts = int64_t{1} << 62; },
      "total_experts is 4611686018427387904, needs 0, or 4 to 2147483647");
  refuses(
      p.args, [](auto& a) { a.first_expert = INT64_MAX; },
      "first_expert is 9223372036854775807, needs 0 to 2147483647");
  refuses(
      p.args, [](auto& a) { a.block_offset = 16; }, "block_offset is 16, needs 0 without scales of blocks");
  refuses(
      p.args, [&](auto& a) { a.expert_map = a.expert_ids; }, "expert_map");
  const Guarded map(DType::i32, {9});
  refuses(
      p.args, [&](auto& a) { a.expert_map = map, a.first_expert = 2; },
      "first_expert is 2, needs 0 with an expert_map");
  refuses(
      p.args, [](auto& a) { a.swiglu.alpha = 0; }, "swiglu.alpha is 0, needs 1e-30 to 1e30");
  refuses(
      p.args, [](auto& a) { a.swiglu.limit = NAN; }, "swiglu.limit is nan, needs 1e-30 to 1e30, or infinity");
  refuses(
      p.args, [](auto& a) { a.swiglu.beta = INFINITY; }, "swiglu.beta is inf, needs -1e30 to 1e30");
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
