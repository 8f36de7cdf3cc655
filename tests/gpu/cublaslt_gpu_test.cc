// Products by cuBLASLt in every type that it is asked for, against float64: what library rows of benchmarks stand on.

#include <algorithm>
#include <random>

#include "src/ops/linear/cublaslt.h"
#include "tests/ops/op_test.h"

namespace vivace {
namespace {

constexpr int64_t kTokens = 5, kOutputs = 48, kInner = 1024;

/// The largest |y - float64| over the sum of the absolute products, y in f32.
double worst_error(DType type, bool tf32, const Stream& stream) {
  std::mt19937 rng(7);
  Guarded x(type, {kTokens, kInner}), weight(type, {kOutputs, kInner}), y(DType::f32, {kTokens, kOutputs});
  Guarded x_scale(DType::f32, {1}), weight_scale(DType::f32, {1});
  Guarded workspace(DType::u8, {kCublasltWorkspaceBytes});
  x.random(rng);
  weight.random(rng);
  const bool fp8 = type == DType::fp8_e4m3;
  *x_scale.as<float>() = fp8 ? 0.5f : 1.f;
  *weight_scale.as<float>() = fp8 ? 3.f : 1.f;
  const CublasltProduct product{.x = x,
                                .weight = weight,
                                .y = y,
                                .x_scale = x_scale,
                                .weight_scale = weight_scale,
                                .tf32 = tf32,
                                .workspace = workspace.tensor().data};
  const Result<const CublasltPlan*> plan = cublaslt_plan(product, stream);
  EXPECT_TRUE(plan.ok() && *plan != nullptr && *plan == *cublaslt_plan(product, stream));
  EXPECT_OK(cublaslt_multiply(product, stream));
  EXPECT_OK(GpuUnderTest::instance().synchronize(stream));
  EXPECT_TRUE(y.canaries_intact() && workspace.canaries_intact());
  const double scale = double{*x_scale.as<float>()} * *weight_scale.as<float>();
  double worst = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t n = 0; n < kOutputs; ++n) {
      double want = 0, magnitude = 0;
      for (int64_t i = 0; i < kInner; ++i) {
        const double term = double{load(type, x.tensor().data, t * kInner + i)} *
                            load(type, weight.tensor().data, n * kInner + i) * scale;
        want += term;
        magnitude += std::abs(term);
      }
      const double error = std::abs(y.as<float>()[t * kOutputs + n] - want) / magnitude;
      worst = std::isnan(error) ? error : std::max(worst, error);
    }
  }
  return worst;
}

TEST(Cublaslt, MultipliesInTheTypeThatIsAskedFor) {
  if (!cublaslt_found()) GTEST_SKIP() << "cuBLASLt was not found";
  const CaseMemoryScope scope(GpuUnderTest::instance().memory);
  const Stream stream = test_streams()[0];
  const double fp32 = worst_error(DType::f32, false, stream), tf32 = worst_error(DType::f32, true, stream);
  EXPECT_LE(fp32, kInner * 0x1p-24);  // one rounding for each term, whatever their order
  EXPECT_LE(tf32, 0x1p-9);            // each factor within 2^-10 of itself
  EXPECT_GT(tf32, 8 * fp32) << "tf32 did not run";
  // 17 addends and a sum truncated for every 16 products.
  EXPECT_LE(worst_error(DType::bf16, false, stream), (17 * 0x1p-25 + 0x1p-23) * (kInner / 16 + 1) + 0x1p-24);
  if (stream.compute_capability < 89) GTEST_SKIP() << "this GPU has no fp8 products";
  // 33 addends of 13 fraction bits for every 32 products, added in fp32 at least every 128.
  EXPECT_LE(worst_error(DType::fp8_e4m3, false, stream), 33 * 0x1p-13 / 8 * 4);
}

}  // namespace
}  // namespace vivace
