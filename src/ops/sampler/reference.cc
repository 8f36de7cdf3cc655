#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "src/core/number.h"
#include "src/ops/sampler/random.h"
#include "src/ops/sampler/table.h"

namespace vivace {

namespace {

using Logits = std::vector<double>;

/// exp((l - max) / temperature), where equals of an infinite maximum count 1.
double weight_of(double logit, double max, double temperature) {
  return logit == max ? 1.0 : std::exp((logit - max) / temperature);
}

/// False for NaN anywhere and for a row without a token of positive probability.
bool is_distribution(const Logits& logits) {
  bool any = false;
  for (double l : logits) {
    if (std::isnan(l)) return false;
    any = any || l > -INFINITY;
  }
  return any;
}

void bias_and_penalise(const SampleRow& row, Logits& logits) {
  const int64_t vocab = static_cast<int64_t>(logits.size());
  for (size_t i = 0; i < row.bias_ids.size(); ++i) {
    const int32_t id = row.bias_ids[i];
    if (id < 0 || id >= vocab) continue;
    // A ban holds whatever the logit.
    logits[id] = row.bias_values[i] == -INFINITY ? -INFINITY : logits[id] + row.bias_values[i];
  }
  const SampleParams& p = row.params;
  for (int64_t id = 0; id < vocab; ++id) {
    double& l = logits[id];
    if (!row.is_allowed(id)) l = -INFINITY;
    const int64_t count = row.count(id);
    if (count > 0 || row.in_prompt(id)) l = l > 0 ? l / p.repetition_penalty : l * p.repetition_penalty;
    if (count > 0) l -= p.frequency_penalty * static_cast<double>(count) + p.presence_penalty;
  }
}

/// Ids from the most likely to the least; ties by ascending id.
std::vector<int32_t> falling(const Logits& logits) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  return order;
}

int32_t choose_token(const SampleRow& row, const Logits& logits) {
  std::vector<int32_t> kept = falling(logits);
  if (row.params.temperature == 0) return kept[0];
  const double max = logits[kept[0]];
  if (row.params.top_k > 0) kept.resize(std::min<size_t>(kept.size(), row.params.top_k));
  const auto weight = [&](int32_t id) { return weight_of(logits[id], max, row.params.temperature); };
  const auto total = [&] {
    double sum = 0;
    for (int32_t id : kept) sum += weight(id);
    return sum;
  };
  if (row.params.top_p < 1) {
    const double wanted = row.params.top_p * total();
    double before = 0;
    size_t count = 0;
    while (count < kept.size() && (count == 0 || before < wanted)) before += weight(kept[count++]);
    kept.resize(count);
  }
  std::erase_if(kept, [&](int32_t id) { return weight(id) < row.params.min_p; });
  std::sort(kept.begin(), kept.end());
  const double target = draw_uniform(row.seed, row.position) * total();
  double sum = 0;
  int32_t last = kept[0];
  for (int32_t id : kept) {
    if (weight(id) == 0) continue;
    sum += weight(id);
    last = id;
    if (sum > target) break;
  }
  return last;
}

}  // namespace

Status sampler_reference(const SamplerArgs& args, const Stream&) {
  const int64_t vocab = args.logits.shape[1];
  for (int64_t r = 0; r < args.logits.shape[0]; ++r) {
    const SampleRow row = sample_row_of(args, r);
    const Tensor source = args.logits.at(r);
    Logits raw(vocab);
    for (int64_t id = 0; id < vocab; ++id) raw[id] = load(source.dtype, source.data, id);
    Logits logits = raw;
    bias_and_penalise(row, logits);
    const bool valid = is_distribution(raw) && is_distribution(logits);
    const int32_t id = valid ? choose_token(row, logits) : 0;
    args.ids.as<int32_t>()[r] = id;
    args.valid.as<uint8_t>()[r] = valid;
    if (valid) count_drawn(args, r, id);

    double max = 0, log_sum = 0;
    if (valid) {
      max = *std::max_element(raw.begin(), raw.end());
      double sum = 0;
      for (double l : raw) sum += weight_of(l, max, 1);
      log_sum = std::log(sum);
    }
    const auto logprob = [&](int32_t of) {
      if (!valid) return -INFINITY;
      return static_cast<float>((raw[of] == max ? 0 : raw[of] - max) - log_sum);
    };
    if (args.logprobs.present()) args.logprobs.as<float>()[r] = logprob(id);
    if (!args.top_ids.present()) continue;
    const std::vector<int32_t> order = valid ? falling(raw) : std::vector<int32_t>();
    for (int64_t n = 0; n < args.top_ids.shape[1]; ++n) {
      const bool wanted = n < static_cast<int64_t>(order.size());
      args.top_ids.at(r).as<int32_t>()[n] = wanted ? order[n] : -1;
      args.top_logprobs.at(r).as<float>()[n] = wanted ? logprob(order[n]) : -INFINITY;
    }
  }
  return {};
}

}  // namespace vivace
