#include "src/ops/silu_mul/cases.h"
#include "src/ops/silu_mul/table.h"
#include "tests/ops/fp8_test.h"

namespace vivace {
namespace {

TEST(SiluMul, EveryRowAgreesWithTheReference) {
  for (const SiluMulCase& c : silu_mul_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    // Of an fp8 case the reference's y before it is quantised.
    SiluMulProblem want(c, 1);
    Guarded exact(c.fp8 ? DType::f32 : c.dtype, {c.tokens, c.intermediate});
    SiluMulArgs reference = want.args;
    reference.y = exact;
    reference.y_scale = {};
    ASSERT_OK(silu_mul_reference(reference, Stream{}));
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kSiluMul, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        SiluMulProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        // silu is within 5 ulp = 10 half ulps, the product rounds once more. For bf16 the fp32 value may fall
        // on the other side of a rounding boundary: one more half ulp of bf16.
        const Bound arithmetic{0x1p-126, 11 * 0x1p-24};
        if (c.fp8) {
          EXPECT_TRUE(quantised(got.y, got.y_scale, c.scaling, exact, arithmetic + Bound::store(DType::f32)));
        } else {
          EXPECT_TRUE(close(got.args.y, exact, arithmetic + Bound::store(c.dtype) + Bound::store(c.dtype)));
        }
        EXPECT_TRUE(got.y.canaries_intact());
        EXPECT_TRUE(got.y_scale.canaries_intact());
      });
    }
  }
}

TEST(SiluMul, HandWorkedAndLimits) {
  const float gate[] = {0, 1, -1, -INFINITY, INFINITY, -200, NAN}, up[] = {5, 2, 2, 3, 2, 1, 1};
  const SiluMulCase c{"", 1, 7};
  const SiluMulProblem shape(c, 1);
  for (const Stream& stream : test_streams()) {
    for_each_fitting_row(kSiluMul, shape.args, stream, [&](const auto& row) {
      SCOPED_TRACE(row.name);
      SiluMulProblem p(c, 1);
      std::copy(gate, gate + 7, p.gate.as<float>());
      std::copy(up, up + 7, p.up.as<float>());
      ASSERT_OK(row.run(p.args, stream));
      const float* y = p.y.as<float>();
      EXPECT_EQ(y[0], 0);
      EXPECT_NEAR(y[1], 2 * 0.7310585786300049, 1e-6);
      EXPECT_NEAR(y[2], -2 * 0.2689414213699951, 1e-6);
      EXPECT_EQ(y[3], 0);
      EXPECT_EQ(y[4], INFINITY);
      EXPECT_NEAR(y[5], 0, 1e-37);
      EXPECT_TRUE(std::isnan(y[6]));
    });
  }
}

TEST(SiluMul, AnElementDependsOnNothingElse) {
  SiluMulProblem whole({"", 3, 333}, 2);
  ASSERT_OK(silu_mul(whole.args, Stream{}));
  for (int64_t i = 0; i < 333; ++i) {
    float y;
    const auto element = [&](const Tensor& t) { return Tensor(t.at(1).as<float>() + i, DType::f32, {1, 1}); };
    ASSERT_OK(silu_mul({element(whole.args.gate), element(whole.args.up), Tensor(&y, DType::f32, {1, 1})},
                       Stream{}));
    ASSERT_EQ(y, whole.args.y.at(1).as<float>()[i]) << i;
  }
}

TEST(SiluMul, InPlace) {
  SiluMulProblem apart({"", 4, 100}, 3), over_gate({"", 4, 100}, 3), over_up({"", 4, 100}, 3);
  over_gate.args.y = over_gate.args.gate;
  over_up.args.y = over_up.args.up;
  for (SiluMulProblem* p : {&apart, &over_gate, &over_up}) ASSERT_OK(silu_mul(p->args, Stream{}));
  EXPECT_EQ(values_of(over_gate.args.y), values_of(apart.args.y));
  EXPECT_EQ(values_of(over_up.args.y), values_of(apart.args.y));
}

// https://github.com/flashinfer-ai/flashinfer/issues/634: vector code assumed an alignment that odd widths
// break.
TEST(SiluMul, H22BasePointerAndRowsOfAnyAlignment) {
  std::vector<uint16_t> memory(4 * 1300 + 1, f32_to_bf16(1.0f)), y(3 * 1285);
  for (int64_t width : {1280, 1285, 24, 5}) {
    Tensor x(memory.data() + 1, DType::bf16, {3, width});  // 2 bytes off, in rows of a wider buffer
    x.stride[0] = 1299;
    ASSERT_OK(silu_mul({x, x, Tensor(y.data(), DType::bf16, {3, width})}, Stream{}));
    for (int64_t i = 0; i < 3 * width; ++i) ASSERT_EQ(y[i], f32_to_bf16(0.731058578f));
  }
}

TEST(SiluMul, RefusesWhatDisagrees) {
  SiluMulProblem p({"", 2, 8}, 1);
  SiluMulArgs args = p.args;
  args.up.shape[1] = 7;
  EXPECT_FAILS(silu_mul(args, Stream{}), Code::invalid_argument,
               "silu_mul: up.shape[1] is 7, needs intermediate = 8 (from gate.shape[1])");
  args = p.args;
  args.y.dtype = DType::bf16;
  EXPECT_FAILS(silu_mul(args, Stream{}), Code::invalid_argument, "needs y of type f32 or fp8, got bf16");
  EXPECT_FAILS(silu_mul(p.args, Stream{.device = Device::cuda}), Code::invalid_argument,
               "gate is on cpu, needs cuda");
  args = p.args;
  args.y_scale = Tensor(p.y.as<float>(), DType::f32, {1});
  EXPECT_FAILS(silu_mul(args, Stream{}), Code::invalid_argument,
               "silu_mul: y_scale is f32[1], needs none: y is f32");
  SiluMulProblem fp8({"", 2, 300, DType::f32, false, 0, true, Fp8Scaling::token}, 1);
  args = fp8.args;
  args.y_scale.shape[0] = 3;
  EXPECT_FAILS(silu_mul(args, Stream{}), Code::invalid_argument, "y_scale.shape[0] is 3, needs tokens = 2");
}

}  // namespace
}  // namespace vivace
