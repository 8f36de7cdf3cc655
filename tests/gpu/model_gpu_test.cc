// Real models on the GPU in bf16, against the references that float32 gave.

#include <filesystem>
#include <random>

#include "src/model/score.h"
#include "tests/large.h"
#include "tests/model/padded_steps.h"
#include "tests/model/quantised_copies.h"
#include "tests/ops/op_test.h"

namespace vivace::testing {
namespace {

/// Models of this test run on the GPU.
class GpuModel : public ::testing::Test {
 protected:
  void SetUp() override { ModelDevice::current().stream = GpuUnderTest::instance().streams.front(); }
  void TearDown() override { ModelDevice::current().stream = {}; }
};

struct Agreement {
  int64_t clear = 0, agreed = 0;  ///< positions with a gap of at least 0.1, and those with the reference's argmax
  double worst_mean = 0;          ///< mean |difference| of the continuation's log-probabilities, of the worst case
};

/// Feeds each case's prompt, then the reference's own continuation token by token.
Agreement follow(LoadedModel& loaded, const nlohmann::json& references) {
  Agreement agreement;
  for (const nlohmann::json& c : references.at("cases")) {
    Conversation request = loaded.conversation();
    const auto prompt = c.at("prompt_ids").get<std::vector<int32_t>>();
    std::vector<float> logits = loaded.feed(request, prompt, loaded.model().options().max_tokens);
    if (logits.empty()) return {};
    double sum = 0;
    const auto greedy = c.at("greedy_ids").get<std::vector<int32_t>>();
    const auto greedy_logprobs = c.at("greedy_logprobs").get<std::vector<double>>();
    const auto gaps = c.at("greedy_gap").get<std::vector<double>>();
    for (size_t i = 0; i < greedy.size(); ++i) {
      sum += std::abs(log_probabilities(logits)[greedy[i]] - greedy_logprobs[i]);
      if (gaps[i] >= 0.1) {
        ++agreement.clear;
        agreement.agreed += argmax(logits) == greedy[i];
      }
      if (i + 1 < greedy.size()) logits = loaded.feed(request, std::span(&greedy[i], 1), 1, true);
    }
    const double mean = sum / static_cast<double>(greedy.size());
    std::printf("prompt of %zu: mean difference %.4f", prompt.size(), mean);
    if (const auto other = c.find("bf16_forced_mean_abs_dlogprob"); other != c.end()) {
      std::printf("; another bf16 implementation's %.4f", other->get<double>());
    }
    std::printf("\n");
    agreement.worst_mean = std::max(agreement.worst_mean, mean);
  }
  return agreement;
}

/// The rule for bf16: the reference's argmax at 97 % of the clear positions, and a mean difference of 0.05 at most.
void expect_bf16_rule(const std::string& model, const std::string& references, int64_t max_tokens) {
  SCOPED_TRACE(model);
  LoadedModel loaded(open_checkpoint(model), {.max_model_len = max_tokens}, max_tokens);
  ASSERT_TRUE(loaded.ok());
  const Agreement agreement = follow(loaded, read_json(references));
  std::printf("%s: %ld of %ld clear positions agree, worst mean difference %.4f\n", model.c_str(),
              static_cast<long>(agreement.agreed), static_cast<long>(agreement.clear), agreement.worst_mean);
  EXPECT_GT(agreement.clear, 40);
  EXPECT_GE(static_cast<double>(agreement.agreed), 0.97 * static_cast<double>(agreement.clear));
  EXPECT_LE(agreement.worst_mean, 0.05);
}

TEST_F(GpuModel, FollowsItsReferences) {
  for (const std::string& path : {kQwen, kHy3}) expect_bf16_rule(path, path + "/references.json", 1200);
}

TEST_F(GpuModel, SmolLm2FollowsItsReferences) {
  const std::string path = std::string(VIVACE_SOURCE_DIR) + "/build/models/SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no " << path << ": `./run demo` or `./run test` fetches it";
  expect_bf16_rule(path, std::string(VIVACE_TEST_DATA) + "/smollm2/references.json", 512);
}

TEST_F(GpuModel, PaddingOfDecodeStepsChangesNothing) {
  for (const std::string& path : {kQwen, kHy3}) {
    for (const DType kv_dtype : {DType::bf16, DType::fp8_e4m3}) {
      SCOPED_TRACE(path + ", " + std::string(name_of(kv_dtype)));
      expect_padding_changes_nothing(path, {.kv_dtype = kv_dtype, .deterministic = true});
    }
  }
}

/// Perplexity of the first `windows` windows on the current device.
double perplexity(const std::string& path, DType kv_dtype, std::span<const int32_t> ids, int64_t window,
                  int64_t windows) {
  LoadedModel loaded(open_checkpoint(path), {.kv_dtype = kv_dtype}, window);
  if (!loaded.ok()) return NAN;
  const auto result =
      model::score(loaded.model(), ids, {.window = window, .max_windows = windows}, loaded.stream());
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? result->perplexity : NAN;
}

// Here activations are bf16 between the operators. A value that lands on the other side of an e4m3 step changes what
// follows in its window, so two right implementations differ by noise: about 0.4 % over 4,096 tokens. The large test reads
// sixteen times as many.
TEST_F(GpuModel, Fp8PerplexityIsTheCpus) {
  const bool large = large_tests();
  const Stream gpu = ModelDevice::current().stream;
  for (const std::string& source : {kQwen, kHy3}) {
    std::vector<int32_t> ids = text_of(source);
    if (large && source == kHy3) {  // its weights are random: any text is as good
      std::mt19937 random(1);
      while (ids.size() < 64 * 1024) ids.push_back(static_cast<int32_t>(random() % 512));
    }
    const int64_t window = large ? 1024 : 256, windows = std::min<int64_t>(large ? 64 : 16, std::ssize(ids) / window);
    QuantisedCopies copies(source, std::span(ids).last(std::min<size_t>(ids.size(), 4096)));
    for (const model::WeightFormat format :
         {model::WeightFormat::plain, model::WeightFormat::fp8_static, model::WeightFormat::fp8_block128}) {
      for (const bool fp8_cache : {false, true}) {
        const DType kv = fp8_cache ? DType::fp8_e4m3 : DType::none;
        ModelDevice::current().stream = {};
        const double cpu = perplexity(copies.path(format), kv, ids, window, windows);
        ModelDevice::current().stream = gpu;
        const double ours = perplexity(copies.path(format), kv, ids, window, windows);
        std::printf("%s, %s%s: cpu %.4f, gpu %.4f, ratio %.5f\n",
                    source.substr(source.rfind('/') + 1).c_str(), std::string(name_of(format)).c_str(),
                    fp8_cache ? ", fp8 cache" : "", cpu, ours, ours / cpu);
        EXPECT_NEAR(ours / cpu, 1, large ? 0.003 : 0.01);
      }
    }
  }
}

}  // namespace
}  // namespace vivace::testing
