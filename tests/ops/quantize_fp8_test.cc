#include "src/ops/quantize_fp8/cases.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "src/ops/quantize_fp8/table.h"
#include "tests/ops/fp8_test.h"
#include "vivace/rms_norm.h"
#include "vivace/silu_mul.h"

namespace vivace {
namespace {

/// The stored codes of a matrix; NaN by one code.
std::vector<int> codes_of(const Tensor& y) {
  std::vector<int> codes;
  for (int64_t t = 0; t < y.shape[0]; ++t) {
    for (int64_t i = 0; i < y.shape[1]; ++i) {
      const uint8_t code = y.at(t).as<const uint8_t>()[i];
      codes.push_back((code & 0x7f) == 0x7f ? 0x7f : code);
    }
  }
  return codes;
}

TEST(QuantizeFp8, EveryRowGivesTheReferencesBits) {
  for (const QuantizeFp8Case& c : quantize_fp8_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    QuantizeFp8Problem want(c, 1);
    ASSERT_OK(quantize_fp8_reference(want.args, Stream{}));
    EXPECT_TRUE(quantised(want.y, want.scale, c.scaling, want.x, Bound{}));
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kQuantizeFp8, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        QuantizeFp8Problem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        EXPECT_EQ(values_of(got.scale), values_of(want.scale));
        EXPECT_EQ(codes_of(got.y), codes_of(want.y));
        EXPECT_TRUE(got.y.canaries_intact());
        EXPECT_TRUE(got.scale.canaries_intact());
      });
    }
  }
}

// NaN, infinities, zeros and the smallest numbers, in rows of company that they must not touch.
TEST(QuantizeFp8, OddValues) {
  constexpr int64_t kWidth = 300;
  const float odd[] = {NAN, INFINITY, -INFINITY, -0.0f, 0x1p-149f, 0x1p-126f, 3e38f, -3e38f};
  for (const Fp8Scaling scaling : {Fp8Scaling::tensor, Fp8Scaling::token, Fp8Scaling::block}) {
    const QuantizeFp8Case c{"", static_cast<int64_t>(std::size(odd)) + 2, kWidth, DType::f32, scaling};
    const auto make = [&] {
      auto p = std::make_unique<QuantizeFp8Problem>(c, 3);
      for (int64_t t = 0; t < c.tokens; ++t) {
        float* x = p->x.tensor().at(t).as<float>();
        if (t < static_cast<int64_t>(std::size(odd))) x[t * 37 % kWidth] = odd[t];
        if (t == c.tokens - 1) std::fill(x, x + kWidth, 0.0f);
      }
      return p;
    };
    const auto want = make();
    ASSERT_OK(quantize_fp8_reference(want->args, Stream{}));
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kQuantizeFp8, want->args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        const auto got = make();
        ASSERT_OK(row.run(got->args, stream));
        EXPECT_EQ(codes_of(got->y), codes_of(want->y)) << static_cast<int>(scaling);
        const std::vector<double> a = values_of(got->scale), b = values_of(want->scale);
        for (size_t i = 0; i < a.size(); ++i) {
          EXPECT_TRUE(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])))
              << i << ": " << a[i] << ", " << b[i];
        }
      });
    }
  }
}

TEST(QuantizeFp8, HandWorked) {
  // 17 and 19 are ties between multiples of 2; 464 and more saturate.
  float x[] = {1, -17, 19, 1000, -INFINITY, 0x1p-10f, 0, NAN}, scale = 1;
  uint8_t y[8];
  QuantizeFp8Args args{.x = Tensor(x, DType::f32, {1, 8}),
                       .y = Tensor(y, DType::fp8_e4m3, {1, 8}),
                       .scale = Tensor(&scale, DType::f32, {1})};
  ASSERT_OK(quantize_fp8(args, Stream{}));
  const float want[] = {1, -16, 20, 448, -448, 0, 0};
  for (int i = 0; i < 7; ++i) EXPECT_EQ(fp8_to_f32(y[i]), want[i]) << i;
  EXPECT_EQ(y[7] & 0x7f, 0x7f);

  float small[] = {-896, 448, 2};
  args = {.x = Tensor(small, DType::f32, {1, 3}),
          .y = Tensor(y, DType::fp8_e4m3, {1, 3}),
          .scale = Tensor(&scale, DType::f32, {1}),
          .scaling = Fp8Scaling::token};
  ASSERT_OK(quantize_fp8(args, Stream{}));
  EXPECT_EQ(scale, 2);
  EXPECT_EQ(fp8_to_f32(y[0]), -448);
  EXPECT_EQ(fp8_to_f32(y[1]), 224);
  EXPECT_EQ(fp8_to_f32(y[2]), 1);
}

TEST(QuantizeFp8, RefusesWhatDisagrees) {
  QuantizeFp8Problem p({"", 2, 300, DType::bf16, Fp8Scaling::block}, 1);
  QuantizeFp8Args args = p.args;
  args.scale.shape[1] = 2;
  EXPECT_FAILS(quantize_fp8(args, Stream{}), Code::invalid_argument,
               "quantize_fp8: scale.shape[1] is 2, needs blocks = 3 (from ceil(width / 128))");
  args = p.args;
  args.scaling = Fp8Scaling::token;
  EXPECT_FAILS(quantize_fp8(args, Stream{}), Code::invalid_argument, "needs 1 dimension");
  args = p.args;
  args.scale = Tensor();
  EXPECT_FAILS(quantize_fp8(args, Stream{}), Code::invalid_argument, "scale is absent");
  args = p.args;
  args.y.dtype = DType::u8;
  EXPECT_FAILS(quantize_fp8(args, Stream{}), Code::invalid_argument, "needs y of type fp8, got u8");
  args = p.args;
  args.scaling = static_cast<Fp8Scaling>(7);
  EXPECT_FAILS(quantize_fp8(args, Stream{}), Code::invalid_argument, "scaling is 7, needs tensor (0)");
  EXPECT_FAILS(quantize_fp8(p.args, Stream{.device = Device::cuda}), Code::invalid_argument,
               "x is on cpu, needs cuda");
}

/// Under such a scale nothing could be told from the result.
TEST(QuantizeFp8, RefusesAGivenScaleThatIsNone) {
  float scale = 1;
  float x[4] = {1, 2, 3, 4};
  uint8_t y[4] = {7, 7, 7, 7};
  const Tensor numbers(x, DType::f32, {1, 4}), weight(x, DType::f32, {4}), fp8(y, DType::fp8_e4m3, {1, 4}),
      given(&scale, DType::f32, {1});
  const std::pair<float, const char*> wrong[] = {{0.f, "0"},   {-0.f, "-0"},   {-1.f, "-1"},
                                                 {NAN, "nan"}, {-NAN, "-nan"}, {INFINITY, "inf"}};
  const auto calls = [&](auto&& expect) {
    expect(quantize_fp8({.x = numbers, .y = fp8, .scale = given}, Stream{}), "quantize_fp8: scale[0] is ");
    expect(rms_norm({.x = numbers, .weight = weight, .y = fp8, .y_scale = given}, Stream{}),
           "rms_norm: y_scale[0] is ");
    expect(silu_mul({.gate = numbers, .up = numbers, .y = fp8, .y_scale = given}, Stream{}),
           "silu_mul: y_scale[0] is ");
  };
  for (const auto& [value, said] : wrong) {
    scale = value;
    calls([&, said = said](const Status& status, const std::string& place) {
      EXPECT_FAILS(status, Code::invalid_argument, place + said + ", needs a finite number > 0");
    });
    EXPECT_TRUE(std::all_of(y, y + 4, [](uint8_t code) { return code == 7; }));
    // A question does not look at it.
    Stream question;
    question.check_only = true;
    EXPECT_OK(quantize_fp8({.x = numbers, .y = fp8, .scale = given}, question));
  }
  scale = 0x1p-149f;
  calls([](const Status& status, const std::string&) { EXPECT_OK(status); });
}

}  // namespace
}  // namespace vivace
