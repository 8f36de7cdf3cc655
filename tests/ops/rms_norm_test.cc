#include "src/ops/rms_norm/cases.h"

#include "src/ops/rms_norm/table.h"
#include "tests/ops/fp8_test.h"

namespace vivace {
namespace {

TEST(RmsNorm, EveryRowAgreesWithTheReference) {
  for (const RmsNormCase& c : rms_norm_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    // The reference's y before it is stored: of an fp8 case the same case with f32 x, which holds the same values.
    RmsNormProblem want(c, 1);
    const bool fp8 = c.y == DType::fp8_e4m3;
    Guarded exact(fp8 ? DType::f32 : want.y.tensor().dtype, {c.tokens, c.hidden});
    RmsNormArgs reference = want.args;
    reference.y = exact;
    reference.y_scale = {};
    reference.y_fp8 = {};
    ASSERT_OK(rms_norm_reference(reference, Stream{}));
    // The norm's relative error is half that of the sum of squares, whose terms are all positive; the sum with the
    // residual, the root and two products round once each.
    const Bound sum{0, 4 * 0x1p-24 * std::sqrt(static_cast<double>(c.hidden)) + 8 * 0x1p-24};
    // A sum of x and residual may cancel: its rounding is absolute, scaled by a norm near 1 and weights below 3.
    const Bound input = c.residual ? Bound{0x1p-24 * 8 * 4, 0} : Bound{};
    const auto compare = [&](RmsNormProblem& got, const Stream& stream) {
      if (fp8) {
        EXPECT_TRUE(quantised(got.y, got.y_scale, c.scaling, exact, sum + input + Bound::store(DType::f32)));
        EXPECT_TRUE(got.y_scale.canaries_intact());
      } else {
        // The fp32 value may fall on the other side of a tie: one more half ulp.
        EXPECT_TRUE(
            close(got.y, exact,
                  Bound::store(got.y.tensor().dtype) + Bound::store(got.y.tensor().dtype) + sum + input));
      }
      if (c.residual) {
        const Bound store = Bound::store(got.residual.tensor().dtype);
        EXPECT_TRUE(close(got.residual, want.residual, store + store));
        EXPECT_TRUE(got.residual.canaries_intact());
      }
      EXPECT_TRUE(got.y.canaries_intact());
      if (!c.both) return;
      std::mt19937 rng(2);
      const Guarded y_fp8(DType::fp8_e4m3, {c.tokens, c.hidden});
      const Guarded scale = random_scales(c.scaling, c.tokens, c.hidden, rng, 0.02);
      if (c.scaling == Fp8Scaling::tensor) *scale.as<float>() = *got.y_scale.as<float>();
      ASSERT_OK(quantize_fp8({.x = got.y, .y = y_fp8, .scale = scale, .scaling = c.scaling}, stream));
      ASSERT_OK(finish(stream));
      EXPECT_TRUE(same_bits(got.y_fp8, y_fp8));
      EXPECT_TRUE(same_bits(got.y_scale, scale));
      EXPECT_TRUE(got.y_fp8.canaries_intact() && got.y_scale.canaries_intact());
    };
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kRmsNorm, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        RmsNormProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        compare(got, stream);
      });
    }
  }
}

TEST(RmsNorm, HandWorked) {
  float x[] = {3, 4}, weight[] = {1, 2}, y[2];
  RmsNormArgs args{.x = Tensor(x, DType::f32, {1, 2}),
                   .weight = Tensor(weight, DType::f32, {2}),
                   .y = Tensor(y, DType::f32, {1, 2}),
                   .eps = 0};
  ASSERT_OK(rms_norm(args, Stream{}));
  EXPECT_NEAR(y[0], 3 / std::sqrt(12.5), 1e-6);
  EXPECT_NEAR(y[1], 8 / std::sqrt(12.5), 1e-6);
}

/// Whose squares fp32 does not hold.
TEST(RmsNorm, HugeValues) {
  for (const int64_t hidden : {3, 300, 4096}) {
    const RmsNormCase c{"", 3, hidden, DType::f32, DType::f32, true};
    const auto made = [&] {
      RmsNormProblem p(c, 2);
      for (const int64_t i : {int64_t{0}, hidden, 2 * hidden - 1})
        p.args.x.as<float>()[i] = 3e38f;  // in two rows of the three
      return p;
    };
    RmsNormProblem want = made();
    ASSERT_OK(rms_norm_reference(want.args, Stream{}));
    const Bound sum{0x1p-24 * 8 * 4, 4 * 0x1p-24 * std::sqrt(static_cast<double>(hidden)) + 16 * 0x1p-24};
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kRmsNorm, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        RmsNormProblem got = made();
        ASSERT_OK(row.run(got.args, stream));
        EXPECT_TRUE(close(got.y, want.y, sum + Bound::store(DType::f32)));
      });
    }
  }
}

TEST(RmsNorm, RefusesWhatDisagrees) {
  RmsNormProblem p({"", 2, 8}, 1);
  RmsNormArgs args = p.args;
  args.weight.shape[0] = 7;
  EXPECT_FAILS(rms_norm(args, Stream{}), Code::invalid_argument,
               "rms_norm: weight.shape[0] is 7, needs hidden = 8 (from x.shape[1])");
  args = p.args;
  args.eps = NAN;
  EXPECT_FAILS(rms_norm(args, Stream{}), Code::invalid_argument, "eps is nan, needs a finite number");
  args = p.args;
  args.x.dtype = DType::i32;
  EXPECT_FAILS(rms_norm(args, Stream{}), Code::invalid_argument, "needs x of type f32 or bf16, got i32");
  args = p.args;
  EXPECT_FAILS(rms_norm(args, Stream{.device = Device::cuda}), Code::invalid_argument,
               "x is on cpu, needs cuda");
}

TEST(RmsNorm, RefusesAnFp8OutputThatDisagrees) {
  RmsNormProblem p({"", 2, 300, DType::bf16, DType::f32, false, 0, 1e-6, DType::none, DType::none,
                    Fp8Scaling::block, true},
                   1);
  ASSERT_OK(rms_norm(p.args, Stream{}));
  RmsNormArgs args = p.args;
  args.y_scale = Tensor();
  EXPECT_FAILS(rms_norm(args, Stream{}), Code::invalid_argument, "rms_norm: y_scale is absent");
  args = p.args;
  args.y_fp8 = args.y;
  EXPECT_FAILS(rms_norm(args, Stream{}), Code::invalid_argument, "needs y_fp8 of type fp8, got bf16");
  args = p.args;
  args.y_fp8.shape[1] = 299;
  EXPECT_FAILS(rms_norm(args, Stream{}), Code::invalid_argument, "y_fp8.shape[1] is 299, needs hidden = 300");
  args = p.args;
  args.y = args.y_fp8;
  EXPECT_FAILS(rms_norm(args, Stream{}), Code::invalid_argument, "needs y of type f32 or bf16, got fp8");
}

TEST(RmsNorm, RefusesScalesThatDisagree) {
  RmsNormProblem p(
      {"", 2, 300, DType::bf16, DType::f32, false, 0, 1e-6, DType::none, DType::fp8_e4m3, Fp8Scaling::block},
      1);
  ASSERT_OK(rms_norm(p.args, Stream{}));
  RmsNormArgs args = p.args;
  args.y_scale = Tensor();
  EXPECT_FAILS(rms_norm(args, Stream{}), Code::invalid_argument, "rms_norm: y_scale is absent");
  args = p.args;
  args.y_scaling = Fp8Scaling::tensor;
  EXPECT_FAILS(rms_norm(args, Stream{}), Code::invalid_argument, "y_scale is f32[2, 3]");
  args = p.args;
  args.y_scale.shape[1] = 4;
  EXPECT_FAILS(rms_norm(args, Stream{}), Code::invalid_argument,
               "y_scale.shape[1] is 4, needs blocks = 3 (from ceil(width / 128))");
  args = p.args;
  args.y_scale.dtype = DType::i32;
  EXPECT_FAILS(rms_norm(args, Stream{}), Code::invalid_argument, "needs y_scale of type f32, got i32");
  RmsNormProblem plain({"", 2, 300}, 1);
  args = plain.args;
  args.y_scale = p.args.y_scale;
  EXPECT_FAILS(rms_norm(args, Stream{}), Code::invalid_argument, "needs none: y is f32");
}

}  // namespace
}  // namespace vivace
