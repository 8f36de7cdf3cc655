// The vector functions of src/cpu/math-inl.h against float64, for every instruction set.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/cpu/math_test.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "src/cpu/math-inl.h"
#include "src/cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

/// y[i] = f(x[i]) for `count` values, a multiple of 16; function 0: exp, 1: sigmoid, 2: silu.
void apply(int function, const float* x, int64_t count, float* y) {
  const hn::ScalableTag<float> d;
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto v = hn::LoadU(d, x + i);
    hn::StoreU(function == 0 ? exp(d, v) : function == 1 ? sigmoid(d, v) : silu(d, v), d, y + i);
  }
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

namespace vivace {
namespace {

using Apply = void (*)(int, const float*, int64_t, float*);
std::vector<Apply> variants() {
  std::vector<Apply> all = {&HWY_STATIC_DISPATCH(apply)};
  if (VIVACE_SIMD(apply) != all[0]) all.push_back(VIVACE_SIMD(apply));
  return all;
}

double ulp_of(double value) {
  const float f = static_cast<float>(std::abs(value));
  return f < 0x1p-126f ? 0x1p-149 : std::ldexp(1.0, std::ilogb(f) - 23);
}

/// Every 97th fp32 number in [-limit, limit], both signs.
std::vector<float> sweep(float limit) {
  std::vector<float> x;
  for (uint32_t bits = 0; bits <= std::bit_cast<uint32_t>(limit); bits += 97 * 64) {
    x.push_back(std::bit_cast<float>(bits));
    x.push_back(-x.back());
  }
  while (x.size() % 16 != 0) x.push_back(0);
  return x;
}

TEST(Math, ExpWithinTwoUlp) {
  const std::vector<float> x = sweep(110);
  for (Apply apply : variants()) {
    std::vector<float> y(x.size());
    apply(0, x.data(), static_cast<int64_t>(x.size()), y.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const double want = std::exp(double{x[i]});
      if (want > 0x1.fffffep127) {
        ASSERT_EQ(y[i], INFINITY) << x[i];
      } else {
        ASSERT_LE(std::abs(y[i] - want), 2 * ulp_of(want)) << "x = " << x[i] << ", got " << y[i];
      }
    }
  }
}

TEST(Math, SigmoidAndSiluWithinFiveUlp) {
  // exp 2, then a rounding each of the sum, the division and (silu) nothing more; the sum halves exp's share
  // at most.
  const std::vector<float> x = sweep(80);
  for (Apply apply : variants()) {
    std::vector<float> y(x.size());
    for (int function : {1, 2}) {
      apply(function, x.data(), static_cast<int64_t>(x.size()), y.data());
      for (size_t i = 0; i < x.size(); ++i) {
        const double want = (function == 1 ? 1.0 : double{x[i]}) / (1 + std::exp(-double{x[i]}));
        ASSERT_LE(std::abs(y[i] - want), 5 * ulp_of(want)) << function << " of " << x[i] << ", got " << y[i];
      }
    }
  }
}

TEST(Math, Limits) {
  std::vector<float> x(16, 0), y(16);
  x[0] = INFINITY, x[1] = -INFINITY, x[2] = NAN, x[3] = 3e38f, x[4] = -3e38f, x[5] = 88.72283f,
  x[6] = -103.9f;
  for (Apply apply : variants()) {
    apply(0, x.data(), 16, y.data());
    EXPECT_EQ(y[0], INFINITY);
    EXPECT_EQ(y[1], 0);
    EXPECT_TRUE(std::isnan(y[2]));
    EXPECT_EQ(y[3], INFINITY);
    EXPECT_EQ(y[4], 0);
    EXPECT_TRUE(std::isfinite(y[5]));
    EXPECT_EQ(y[6], 0x1p-149f);
    EXPECT_EQ(y[7], 1);
    apply(1, x.data(), 16, y.data());
    EXPECT_EQ(y[0], 1);
    EXPECT_EQ(y[1], 0);
    EXPECT_TRUE(std::isnan(y[2]));
    EXPECT_EQ(y[7], 0.5f);
    apply(2, x.data(), 16, y.data());
    EXPECT_EQ(y[0], INFINITY);
    EXPECT_EQ(y[1], 0);
    EXPECT_TRUE(std::isnan(y[2]));
    EXPECT_EQ(y[4], 0);
    EXPECT_EQ(y[7], 0);
  }
}

}  // namespace
}  // namespace vivace
#endif
