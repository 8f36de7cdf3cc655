#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "src/ops/route_top_k/table.h"

namespace vivace {

namespace {

/// NaN is below every number; equals keep their order under a stable sort.
bool larger(double a, double b) {
  return std::isnan(b) ? !std::isnan(a) : a > b;
}

/// exp(v - max), where equals of an infinite maximum count 1.
double weight_below(double v, double max) {
  return v == max ? 1.0 : std::exp(v - max);
}

}  // namespace

Status route_top_k_reference(const RouteTopKArgs& args, const Stream&) {
  const int64_t experts = args.scores.shape[1], top_k = args.expert_ids.shape[1];
  const int64_t group_size = experts / args.groups;
  const bool has_bias = args.correction_bias.present();
  for (int64_t t = 0; t < args.scores.shape[0]; ++t) {
    if (chooses_nobody(args, t)) continue;
    const float* logits = args.scores.at(t).as<const float>();
    std::vector<double> logit(experts), score(experts), choice(experts);
    for (int64_t e = 0; e < experts; ++e) logit[e] = std::isnan(logits[e]) ? -INFINITY : logits[e];
    const double max = experts ? *std::max_element(logit.begin(), logit.end()) : 0;
    double sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += weight_below(logit[e], max);
    for (int64_t e = 0; e < experts; ++e) {
      score[e] = args.scoring == RouteScoring::sigmoid ? 1 / (1 + std::exp(-logit[e]))
                                                       : weight_below(logit[e], max) / sum;
      const double basis = has_bias || args.groups > 1 ? score[e] : logit[e];
      const double bias = has_bias ? args.correction_bias.as<const float>()[e] : 0;
      choice[e] = std::isnan(logits[e]) ? NAN : basis + bias;
    }

    std::vector<double> group_value(args.groups);
    for (int64_t g = 0; g < args.groups; ++g) {
      std::vector<double> of_group(choice.begin() + g * group_size, choice.begin() + (g + 1) * group_size);
      std::stable_sort(of_group.begin(), of_group.end(), larger);
      group_value[g] = group_size > 1 ? of_group[0] + of_group[1] : group_size == 1 ? of_group[0] : 0;
    }
    std::vector<int64_t> groups(args.groups);
    std::iota(groups.begin(), groups.end(), 0);
    std::stable_sort(groups.begin(), groups.end(),
                     [&](int64_t a, int64_t b) { return larger(group_value[a], group_value[b]); });
    groups.resize(args.top_groups);
    std::sort(groups.begin(), groups.end());
    std::vector<int64_t> order;
    for (int64_t g : groups) {
      for (int64_t i = 0; i < group_size; ++i) order.push_back(g * group_size + i);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return larger(choice[a], choice[b]); });

    std::vector<double> weight(top_k);
    double chosen_max = -INFINITY;
    for (int64_t j = 0; j < top_k; ++j) chosen_max = std::max(chosen_max, logit[order[j]]);
    for (int64_t j = 0; j < top_k; ++j) {
      weight[j] = args.scoring == RouteScoring::softmax_chosen ? weight_below(logit[order[j]], chosen_max)
                                                               : score[order[j]];
    }
    const double chosen_sum = std::accumulate(weight.begin(), weight.end(), 0.0);
    double factor = args.scale;
    if (args.renormalise || args.scoring == RouteScoring::softmax_chosen) {
      factor /= chosen_sum + kRenormaliseEps;
    }
    double zero_weight = 0;
    for (int64_t j = 0; j < top_k; ++j) {
      const bool zero = order[j] >= experts - args.zero_experts;
      if (zero) zero_weight += weight[j] * factor;
      args.expert_ids.at(t).as<int32_t>()[j] = zero ? -1 : static_cast<int32_t>(order[j]);
      args.expert_weights.at(t).as<float>()[j] = zero ? 0.0f : static_cast<float>(weight[j] * factor);
    }
    if (args.zero_weight.present()) args.zero_weight.at(t).as<float>()[0] = static_cast<float>(zero_weight);
  }
  return {};
}

}  // namespace vivace
