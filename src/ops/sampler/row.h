#pragma once

#include <cstdint>
#include <span>

#include "vivace/sampler.h"

// One row of a call, read from its tensors on the host.

namespace vivace {

struct SampleRow {
  SampleParams params;
  uint64_t seed = 0;
  int64_t position = 0;
  const uint32_t* prompt_bits = nullptr;   ///< null: no prompt
  const int32_t* output_counts = nullptr;  ///< null: no output
  std::span<const int32_t> bias_ids;
  std::span<const float> bias_values;
  const uint32_t* allowed_bits = nullptr;  ///< null: all

  bool in_prompt(int64_t id) const {
    return prompt_bits != nullptr && (prompt_bits[id / 32] >> (id % 32) & 1) != 0;
  }
  int64_t count(int64_t id) const { return output_counts != nullptr ? output_counts[id] : 0; }
  bool is_allowed(int64_t id) const {
    return allowed_bits == nullptr || (allowed_bits[id / 32] >> (id % 32) & 1) != 0;
  }
  /// Without history a penalty has nothing to look at.
  bool penalised() const {
    return (prompt_bits != nullptr || output_counts != nullptr) &&
           (params.repetition_penalty != 1 || params.presence_penalty != 0 || params.frequency_penalty != 0);
  }
  bool changes_logits() const { return penalised() || !bias_ids.empty() || allowed_bits != nullptr; }
};

/// The row's state, -1 for none.
inline int64_t sample_state(const SamplerArgs& args, int64_t r) {
  if (!args.prompt_bits.present() && !args.output_counts.present()) return -1;
  return args.state.present() ? args.state.as<const int32_t>()[r] : r;
}

inline SampleRow sample_row_of(const SamplerArgs& args, int64_t r) {
  SampleRow row;
  const auto read = [&](const Tensor& t, double& field) {
    if (t.present()) field = double{t.as<const float>()[r]};
  };
  SampleParams& p = row.params;
  read(args.temperature, p.temperature);
  read(args.top_p, p.top_p);
  read(args.min_p, p.min_p);
  read(args.repetition_penalty, p.repetition_penalty);
  read(args.presence_penalty, p.presence_penalty);
  read(args.frequency_penalty, p.frequency_penalty);
  if (args.top_k.present()) p.top_k = args.top_k.as<const int32_t>()[r];
  if (args.seed.present()) {
    row.seed = static_cast<uint64_t>(args.seed.as<const int64_t>()[r]);
    row.position = args.position.as<const int64_t>()[r];
  }
  if (const int64_t state = sample_state(args, r); state >= 0) {
    if (args.prompt_bits.present()) row.prompt_bits = args.prompt_bits.at(state).as<const uint32_t>();
    if (args.output_counts.present()) row.output_counts = args.output_counts.at(state).as<const int32_t>();
  }
  if (args.bias_start.present()) {
    const int32_t* start = args.bias_start.as<const int32_t>() + r;
    const auto count = static_cast<size_t>(start[1] - start[0]);
    row.bias_ids = {args.bias_ids.as<const int32_t>() + start[0], count};
    row.bias_values = {args.bias_values.as<const float>() + start[0], count};
  }
  if (args.allowed_bits.present()) row.allowed_bits = args.allowed_bits.at(r).as<const uint32_t>();
  return row;
}

/// Step 2 for an id that stands in the prompt or was drawn `count` times: as in float64, rounded once per kind of penalty.
/// A repetition penalty is a float wherever it comes from, and the float product and quotient of floats are those
/// of float64, rounded.
constexpr float penalised_logit(float logit, const SampleParams& p, int64_t count, bool in_prompt) {
  if (count > 0 || in_prompt) {
    const auto penalty = static_cast<float>(p.repetition_penalty);
    logit = logit > 0 ? logit / penalty : logit * penalty;
  }
  if (count > 0) {
    logit = static_cast<float>(logit - p.frequency_penalty * static_cast<double>(count) - p.presence_penalty);
  }
  return logit;
}

/// Counts the drawn token of a valid row.
inline void count_drawn(const SamplerArgs& args, int64_t r, int32_t id) {
  const int64_t state = sample_state(args, r);
  if (args.count_ids && state >= 0) ++args.output_counts.at(state).as<int32_t>()[id];
}

}  // namespace vivace
