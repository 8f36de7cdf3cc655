// Perplexity of FP8 models beside a float64 model of the same rounding: the same graph on the reference rows alone,
// which compute in float64 and round where the fp8 formats round. What they differ by is ours; what the float64
// model differs by from bf16 is the quantisation's own.

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <thread>

#include "tests/large.h"
#include "tests/model/quantised_copies.h"
#include "tests/model/sanitizer.h"

namespace vivace::testing {
namespace {

using model::WeightFormat;

/// How much of the text is read: windows spread evenly over it. The float64 model takes 20 to 30 ms for a token.
///
/// Ours and the float64 model round the same numbers but for a last bit of fp32. Now and then one of them lands on the
/// other side of a step of e4m3; what follows in the window then has roundings of its own, of the same size, and so
/// another perplexity. That noise becomes smaller with the text alone: `tolerance` is what this much text can hold.
struct Amount {
  int64_t calibration, window, windows;
  double tolerance;
};

/// Every operator's float64 row.
std::string reference_rows() {
  std::string text;
  for (const OpInfo& op : operators()) {
    for (const RowInfo& row : op.rows) {
      if (row.name == "reference") text += (text.empty() ? "" : ",") + std::string(op.name) + "=reference";
    }
  }
  return text;
}

/// The mean negative log-probability of each window. Windows are shared among threads, each with a model of its own.
std::vector<double> losses(const std::string& path, DType kv_dtype, std::span<const int32_t> ids,
                           const Amount& amount, bool reference) {
  std::vector<double> result(static_cast<size_t>(amount.windows), NAN);
  const int64_t step = (std::ssize(ids) - amount.window) / amount.windows;
  std::atomic<int64_t> next = 0;
  const auto work = [&] {
    cpu::ThreadPool threads(1);
    Dispatch dispatch;
    if (reference) {
      EXPECT_TRUE(dispatch.prefer(reference_rows()).ok());
    }
    const Stream stream{.threads = &threads, .dispatch = &dispatch};
    const auto checkpoint = open_checkpoint(path);
    auto model = model::Model::load(*checkpoint, {.kv_dtype = kv_dtype});
    EXPECT_TRUE(model.ok()) << model.status().message();
    for (int64_t w = next++; model.ok() && w < amount.windows; w = next++) {
      const auto scored =
          model::score(**model, ids.subspan(w * step, amount.window), {.window = amount.window}, stream);
      EXPECT_TRUE(scored.ok()) << scored.status().message();
      if (scored.ok()) result[w] = std::log(scored->perplexity);
    }
    for (const RowCount& count : dispatch.counts())
      EXPECT_EQ(count.row == "reference", reference) << count.op;
  };
  {
    std::vector<std::jthread> workers(std::min<size_t>(result.size(), std::thread::hardware_concurrency()));
    for (std::jthread& worker : workers) worker = std::jthread(work);
  }
  return result;
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

/// The standard error of the mean of a - b.
double error_of_difference(const std::vector<double>& a, const std::vector<double>& b) {
  const double center = mean(a) - mean(b);
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) squares += (a[i] - b[i] - center) * (a[i] - b[i] - center);
  const auto count = static_cast<double>(a.size());
  return std::sqrt(squares / (count - 1) / count);
}

/// Prints a table of `amount` of the text and holds ours against the float64 model.
void expect_the_rounding_alone(const std::string& source, const Amount& amount) {
  std::vector<int32_t> ids = text_of(source);
  if (source == kHy3) {  // its weights are random: any text is as good
    std::mt19937 random(1);
    while (std::ssize(ids) < amount.window * amount.windows)
      ids.push_back(static_cast<int32_t>(random() % 512));
  }
  ASSERT_GE(std::ssize(ids), amount.window * amount.windows);
  QuantisedCopies copies(source, std::span(ids).first(std::min<size_t>(ids.size(), amount.calibration)));
  const std::vector<double> plain = losses(source, DType::f32, ids, amount, false);
  std::printf(
      "| %s | keys and values | perplexity | / bf16 | float64 model | / bf16 | ours / model | noise |\n"
      "|---|---|---|---|---|---|---|---|\n",
      source.substr(source.rfind('/') + 1).c_str());
  std::printf("| bf16 | f32 | %.3f | 1 | | | | |\n", std::exp(mean(plain)));
  for (const WeightFormat format :
       {WeightFormat::plain, WeightFormat::fp8_static, WeightFormat::fp8_block128}) {
    const std::string path = copies.path(format);
    for (const DType kv : {DType::f32, DType::fp8_e4m3}) {
      if (format == WeightFormat::plain && kv == DType::f32) continue;
      const std::vector<double> ours = losses(path, kv, ids, amount, false);
      const std::vector<double> rounding = losses(path, kv, ids, amount, true);
      const double ratio = std::exp(mean(ours) - mean(rounding)), noise = error_of_difference(ours, rounding);
      const std::string name(format == WeightFormat::plain ? "bf16" : name_of(format));
      std::printf("| %s | %s | %.3f | %.4f | %.3f | %.4f | %.5f | %.5f |\n", name.c_str(),
                  std::string(vivace::name_of(kv)).c_str(), std::exp(mean(ours)),
                  std::exp(mean(ours) - mean(plain)), std::exp(mean(rounding)),
                  std::exp(mean(rounding) - mean(plain)), ratio, noise);
      std::fflush(stdout);
      EXPECT_NEAR(ratio, 1, amount.tolerance) << name << ", " << vivace::name_of(kv);
      EXPECT_NE(mean(ours), mean(plain));
    }
  }
}

// On 24 tokens the noise is up to 1 %: this much text shows a scale or a rounding that is in the wrong place, no less.
TEST(Fp8Quality, OursIsTheRoundingAloneOnAShortText) {
  if (kSanitized) GTEST_SKIP() << "the float64 rows take minutes under a sanitizer";
  for (const std::string& source : {kQwen, kHy3}) expect_the_rounding_alone(source, {1024, 4, 6, 0.03});
}

TEST(Fp8Quality, largeTableOfTinyQwen3Moe) {
  VIVACE_LARGE_TEST("takes about 40 minutes of a core");
  expect_the_rounding_alone(kQwen, {16384, 256, 64, 0.003});
}

TEST(Fp8Quality, largeTableOfTinyHy3) {
  VIVACE_LARGE_TEST("takes about 40 minutes of a core");
  expect_the_rounding_alone(kHy3, {16384, 256, 64, 0.003});
}

}  // namespace
}  // namespace vivace::testing
