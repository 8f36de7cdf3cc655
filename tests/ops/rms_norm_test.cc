#include "src/ops/rms_norm/cases.h"

#include "src/ops/rms_norm/table.h"
#include "tests/ops/op_test.h"

namespace vivace {
namespace {

TEST(RmsNorm, EveryRowAgreesWithTheReference) {
  for (const RmsNormCase& c : rms_norm_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    RmsNormProblem want(c, 1);
    ASSERT_OK(rms_norm_reference(want.args, Stream{}));
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kRmsNorm, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        RmsNormProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        // The norm's relative error is half that of the sum of squares, whose terms are all positive.
        const Bound sum{0, 4 * 0x1p-24 * std::sqrt(static_cast<double>(c.hidden)) + 8 * 0x1p-24};
        // y is computed from the stored residual, which is rounded to the row's type.
        const Bound input =
            c.residual ? Bound{2 * Bound::store(c.dtype).relative * 4, Bound::store(c.dtype).relative}
                       : Bound{};
        EXPECT_TRUE(close(got.y, want.y, Bound::store(c.dtype) + sum + input));
        if (c.residual) {
          EXPECT_TRUE(close(got.residual, want.residual, Bound::store(c.dtype) + Bound{0, 0x1p-23}));
        }
        EXPECT_TRUE(got.y.canaries_intact());
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
  EXPECT_FAILS(rms_norm(args, Stream{.device = Device::cuda}), Code::unsupported, "reference: runs on cpu");
}

}  // namespace
}  // namespace vivace
