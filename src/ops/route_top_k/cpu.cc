// experts of each token from its logits         fp32 scores, one scan for the k best, tokens over threads
//
// Two numbers for a token with E experts
//   bytes  4 E        in cache: router_gemm has just written them
//   flops  about 18 E  the exponential; then E comparisons and a few insertions

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/route_top_k/cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "src/cpu/math-inl.h"
#include "src/cpu/simd.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/route_top_k/table.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kVectorPad = 64;  // lanes past the last expert that a vector may touch

/// A number that orders as the float does, -0 equal to 0 and NaN below all. Selection by integers cannot choose
/// an expert twice, whatever the logits are.
uint32_t order_key(float value) {
  if (std::isnan(value)) return 0;
  const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct Candidate {
  uint32_t key;
  int32_t id;
};

/// The `k` largest in falling order; equal keys in order of arrival. Candidates arrive by rising id.
class TopList {
 public:
  TopList(Candidate* memory, int64_t k) : list_(memory), k_(k) {}
  void offer(uint32_t key, int64_t id) {
    if (size_ == k_ && (k_ == 0 || key <= list_[k_ - 1].key)) return;
    int64_t at = size_ < k_ ? size_++ : k_ - 1;
    for (; at > 0 && list_[at - 1].key < key; --at) list_[at] = list_[at - 1];
    list_[at] = {key, static_cast<int32_t>(id)};
  }
  int64_t size() const { return size_; }
  const Candidate& operator[](int64_t i) const { return list_[i]; }

 private:
  Candidate* list_;
  int64_t k_, size_ = 0;
};

/// scores = exp(logits - max), where equals of an infinite maximum count 1. The pad holds -inf, which adds 0.
float exponentials(const float* logits, float max, int64_t padded, float* scores) {
  const hn::ScalableTag<float> d;
  const auto top = hn::Set(d, max);
  auto sum = hn::Zero(d);
  for (int64_t i = 0; i < padded; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto v = hn::LoadU(d, logits + i);
    // With max = -inf the pad counts as its equals; the caller subtracts it.
    const auto e = hn::IfThenElse(hn::Eq(v, top), hn::Set(d, 1.0f), exp(d, hn::Sub(v, top)));
    hn::StoreU(e, d, scores + i);
    sum = hn::Add(sum, e);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

void sigmoids(const float* logits, int64_t padded, float* scores) {
  const hn::ScalableTag<float> d;
  for (int64_t i = 0; i < padded; i += static_cast<int64_t>(hn::Lanes(d))) {
    hn::StoreU(sigmoid(d, hn::LoadU(d, logits + i)), d, scores + i);
  }
}

}  // namespace

void route_top_k_row(const RouteTopKArgs& args, int64_t t) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t experts = args.scores.shape[1], top_k = args.expert_ids.shape[1];
  const int64_t padded = (experts + lanes - 1) / lanes * lanes;
  const float* source = args.scores.at(t).as<const float>();
  const float* bias = args.correction_bias.present() ? args.correction_bias.as<const float>() : nullptr;

  float logits[kMaxRouteExperts + kVectorPad], scores[kMaxRouteExperts + kVectorPad];
  float max = -kInfinity;
  for (int64_t e = 0; e < experts; ++e) {
    logits[e] = std::isnan(source[e]) ? -kInfinity : source[e];
    max = std::max(max, logits[e]);
  }
  std::fill(logits + experts, logits + padded, -kInfinity);
  float factor = 1;  // scores hold weights up to this factor
  if (args.scoring == RouteScoring::sigmoid) {
    sigmoids(logits, padded, scores);
  } else {
    float sum = exponentials(logits, max, padded, scores);
    if (max == -kInfinity) sum -= static_cast<float>(padded - experts);
    factor = 1 / sum;
  }

  const bool by_score = bias != nullptr || args.groups > 1;
  const auto key_of = [&](int64_t e) {
    if (!by_score || std::isnan(source[e])) return order_key(source[e]);
    return order_key(scores[e] * factor + (bias ? bias[e] : 0.0f));
  };
  Candidate chosen_memory[kMaxRouteExperts], group_memory[kMaxRouteExperts];
  TopList chosen(chosen_memory, top_k);
  if (args.groups == 1) {
    for (int64_t e = 0; e < experts; ++e) chosen.offer(key_of(e), e);
  } else {
    const int64_t size = experts / args.groups;
    TopList groups(group_memory, args.top_groups);
    for (int64_t g = 0; g < args.groups; ++g) {
      Candidate best_memory[2];
      TopList best(best_memory, 2);
      for (int64_t e = g * size; e < (g + 1) * size; ++e) best.offer(key_of(e), e);
      float value = 0;
      for (int64_t i = 0; i < best.size(); ++i) {
        const int32_t e = best[i].id;
        value += std::isnan(source[e]) ? source[e] : scores[e] * factor + (bias ? bias[e] : 0.0f);
      }
      groups.offer(order_key(value), g);
    }
    std::sort(group_memory, group_memory + groups.size(),
              [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    for (int64_t i = 0; i < groups.size(); ++i) {
      const int64_t first = groups[i].id * size;
      for (int64_t e = first; e < first + size; ++e) chosen.offer(key_of(e), e);
    }
  }

  // The weights, in float64: k additions and divisions.
  const bool softmax_chosen = args.scoring == RouteScoring::softmax_chosen;
  float chosen_max = -kInfinity;
  for (int64_t j = 0; j < chosen.size(); ++j) chosen_max = std::max(chosen_max, logits[chosen[j].id]);
  double weights[kMaxRouteExperts], sum = 0;
  for (int64_t j = 0; j < chosen.size(); ++j) {
    const int32_t e = chosen[j].id;
    weights[j] = !softmax_chosen           ? double{scores[e]} * factor
                 : logits[e] == chosen_max ? 1.0
                                           : std::exp(double{logits[e]} - chosen_max);
    sum += weights[j];
  }
  const double scale = args.renormalise || softmax_chosen ? args.scale / (sum + kRenormaliseEps) : args.scale;
  int32_t* ids = args.expert_ids.at(t).as<int32_t>();
  float* out = args.expert_weights.at(t).as<float>();
  double zero_weight = 0;
  for (int64_t j = 0; j < chosen.size(); ++j) {
    const bool zero = chosen[j].id >= experts - args.zero_experts;
    if (zero) zero_weight += weights[j] * scale;
    ids[j] = zero ? -1 : chosen[j].id;
    out[j] = zero ? 0.0f : static_cast<float>(weights[j] * scale);
  }
  if (args.zero_weight.present()) args.zero_weight.at(t).as<float>()[0] = static_cast<float>(zero_weight);
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vivace {

Status route_top_k_cpu(const RouteTopKArgs& args, const Stream& stream) {
  constexpr int64_t kTokens = 8;  // of a task: a microsecond each
  const auto row = VIVACE_SIMD(route_top_k_row);
  const int64_t tokens = args.scores.shape[0];
  cpu::parallel_for(stream.threads, (tokens + kTokens - 1) / kTokens, [&](int64_t task, int) {
    const int64_t end = std::min(tokens, (task + 1) * kTokens);
    for (int64_t t = task * kTokens; t < end; ++t) {
      if (!chooses_nobody(args, t)) row(args, t);
    }
  });
  return {};
}

}  // namespace vivace
#endif
