#include "src/model/rope.h"

#include <cmath>
#include <numbers>
#include <utility>

#include "src/core/error.h"

namespace vivace::model {

namespace {

/// Llama 3: long wavelengths are stretched by `factor`, short ones stay, and those between are blended by how many
/// turns they make in the original context.
double llama3_scaled(double frequency, const RopeScaling& scaling) {
  const double turns =
      static_cast<double>(scaling.original_max_position) * frequency / (2 * std::numbers::pi);
  if (turns < scaling.low_freq_factor) return frequency / scaling.factor;
  if (turns > scaling.high_freq_factor) return frequency;
  const double keep =
      (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  return keep * frequency + (1 - keep) * frequency / scaling.factor;
}

}  // namespace

Result<std::vector<double>> rope_frequencies(const ModelConfig& config, const std::vector<double>& factors) {
  const RopeScaling& scaling = config.rope_scaling;
  const bool linear = scaling.type == "linear", llama3 = scaling.type == "llama3";
  if (!linear && !llama3 && scaling.type != "default") {
    return unsupported("rope_scaling type is '{}', needs default, linear or llama3", scaling.type);
  }
  std::vector<double> frequencies(static_cast<size_t>(config.rotary_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    double f =
        std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(config.rotary_dim));
    if (linear) f /= scaling.factor;
    if (i < factors.size()) {
      f /= factors[i];
    } else if (llama3) {
      f = llama3_scaled(f, scaling);
    }
    frequencies[i] = f;
  }
  return frequencies;
}

Result<RopeTable> RopeTable::create(std::vector<double> frequencies, int64_t positions) {
  RopeTable table;
  const auto rotary = static_cast<int64_t>(2 * frequencies.size());
  VIVACE_TRY_ASSIGN(table.memory_, ZeroMemory::reserve(positions * rotary * 4, "RoPE table"));
  table.tensor_ = Tensor(table.memory_.data(), DType::f32, {positions, rotary});
  table.frequencies_ = std::move(frequencies);
  return table;
}

void RopeTable::fill(int64_t positions) {
  const size_t pairs = frequencies_.size();
  for (; filled_ < positions; ++filled_) {
    auto* row = tensor_.at(filled_).as<float>();
    for (size_t i = 0; i < pairs; ++i) {
      const double angle = static_cast<double>(filled_) * frequencies_[i];
      row[i] = static_cast<float>(std::cos(angle));
      row[pairs + i] = static_cast<float>(std::sin(angle));
    }
  }
}

}  // namespace vivace::model
