#include "src/model/rope.h"

#include <gtest/gtest.h>

#include <cmath>

namespace vivace::model {
namespace {

ModelConfig config_of(double theta, int64_t rotary_dim) {
  ModelConfig config;
  config.rope_theta = theta;
  config.rotary_dim = rotary_dim;
  return config;
}

TEST(Rope, DefaultFrequencies) {
  const auto f = rope_frequencies(config_of(10000, 8), {});
  ASSERT_TRUE(f.ok());
  ASSERT_EQ(f->size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR((*f)[i], std::pow(10.0, -static_cast<double>(i)), 1e-15);
}

TEST(Rope, LinearScalingDividesAllOfThem) {
  ModelConfig config = config_of(10000, 8);
  config.rope_scaling = {.type = "linear", .factor = 4};
  const auto f = rope_frequencies(config, {});
  ASSERT_TRUE(f.ok());
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR((*f)[i], std::pow(10.0, -static_cast<double>(i)) / 4, 1e-15);
}

TEST(Rope, Llama3KeepsShortWavelengthsAndStretchesLongOnes) {
  // theta 10^4, 8 dimensions: wavelengths 6.28, 62.8, 628, 6283. With an original context of 1,000 and the factors 1
  // and 4, wavelengths below 250 stay, above 1,000 are stretched by 8. Between: 1000/628.3 = 1.5915 turns, a share of
  // (1.5915 - 1) / 3 = 0.19718 stays: 0.01 (0.19718 + 0.80282 / 8) = 0.00297535.
  ModelConfig config = config_of(10000, 8);
  config.rope_scaling = {.type = "llama3",
                         .factor = 8,
                         .low_freq_factor = 1,
                         .high_freq_factor = 4,
                         .original_max_position = 1000};
  const auto f = rope_frequencies(config, {});
  ASSERT_TRUE(f.ok());
  EXPECT_NEAR((*f)[0], 1, 1e-15);
  EXPECT_NEAR((*f)[1], 0.1, 1e-15);
  EXPECT_NEAR((*f)[2], 0.00297535, 1e-8);
  EXPECT_NEAR((*f)[3], 0.001 / 8, 1e-15);
}

TEST(Rope, FactorsOfTheFileReplaceTheScalingOfTheConfiguration) {
  ModelConfig config = config_of(10000, 8);
  config.rope_scaling = {.type = "llama3", .factor = 8, .original_max_position = 1000};
  const auto f = rope_frequencies(config, {1, 1, 2, 8});
  ASSERT_TRUE(f.ok());
  EXPECT_NEAR((*f)[1], 0.1, 1e-15);
  EXPECT_NEAR((*f)[2], 0.005, 1e-15);
  EXPECT_NEAR((*f)[3], 0.000125, 1e-15);
}

TEST(Rope, RefusesOtherScalings) {
  ModelConfig config = config_of(10000, 8);
  config.rope_scaling.type = "yarn";
  const auto f = rope_frequencies(config, {});
  ASSERT_FALSE(f.ok());
  EXPECT_EQ(f.status().code(), Code::unsupported);
  EXPECT_NE(f.status().message().find("yarn"), std::string::npos);
}

TEST(Rope, RowsAreFilledUpToWhatWasAskedFor) {
  const int64_t positions = 1 << 20;
  auto table = RopeTable::create({1, 0.001}, positions);
  ASSERT_TRUE(table.ok());
  table->fill(100);
  table->fill(3);
  const Tensor& t = table->tensor();
  ASSERT_EQ(t.shape[0], positions);
  ASSERT_EQ(t.shape[1], 4);
  const float* row = t.at(99).as<float>();
  EXPECT_EQ(row[0], static_cast<float>(std::cos(99.0)));
  EXPECT_EQ(row[1], static_cast<float>(std::cos(0.099)));
  EXPECT_EQ(row[2], static_cast<float>(std::sin(99.0)));
  EXPECT_EQ(row[3], static_cast<float>(std::sin(0.099)));
  EXPECT_EQ(t.at(100).as<float>()[0], 0) << "not asked for yet";
}

}  // namespace
}  // namespace vivace::model
