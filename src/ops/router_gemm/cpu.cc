// scores = x · weightᵀ (+ bias)         weight as bf16 terms, fp32 products, float64 sums of short fp32 sums
//
// Two numbers for m tokens, n experts and hidden size k
//   bytes  2 T n k     T terms, in cache from the second layer on; x and scores are small
//   flops  2 m n k     one product per weight whatever T is: the terms are added first, which is exact
//
// An fp32 sum over k steps errs by up to k roundings. Here a lane sums kBlock products in fp32 and adds that to a
// float64 lane, so the error does not grow with k: at most (kBlock + 2) 2^-24 of the sum of |x w|.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/router_gemm/cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "src/cpu/convert-inl.h"
#include "src/cpu/simd.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/router_gemm/table.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

namespace {

constexpr int64_t kBlock = 16;    // vectors between two additions in float64
constexpr int kTokensAtOnce = 4;  // share one read of the weight

using FloatTag = hn::ScalableTag<float>;
using DoubleTag = hn::Repartition<double, FloatTag>;

/// One row of a weight: T terms side by side.
template <int T>
struct WeightRow {
  const uint16_t* terms[T];
  float scale[T];

  HWY_INLINE hn::Vec<FloatTag> at(FloatTag d, int64_t k) const {
    auto w = load_as_f32(d, Bf16{}, terms[0] + k);
    for (int i = 1; i < T; ++i) {
      w = hn::MulAdd(load_as_f32(d, Bf16{}, terms[i] + k), hn::Set(d, scale[i]), w);
    }
    return w;
  }
  float one(int64_t k) const {
    float w = bf16_to_f32(terms[0][k]);
    for (int i = 1; i < T; ++i) w += bf16_to_f32(terms[i][k]) * scale[i];
    return w;
  }
};

/// sums[i] = x[i] · w for M rows of x. Each sum takes the same steps whatever M is.
template <int M, int T, class X>
void dot(const typename X::Element* const* x, const WeightRow<T>& w, int64_t hidden, double* sums) {
  const FloatTag d;
  const DoubleTag dd;
  const hn::Half<FloatTag> half;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<DoubleTag> total[M];
  hn::Vec<FloatTag> part[M];
  for (int i = 0; i < M; ++i) total[i] = hn::Zero(dd);
  int64_t k = 0;
  while (k + lanes <= hidden) {
    const int64_t end = std::min(hidden - lanes, k + (kBlock - 1) * lanes);
    for (int i = 0; i < M; ++i) part[i] = hn::Zero(d);
    for (; k <= end; k += lanes) {
      const auto weight = w.at(d, k);
      for (int i = 0; i < M; ++i) part[i] = hn::MulAdd(load_as_f32(d, X{}, x[i] + k), weight, part[i]);
    }
    for (int i = 0; i < M; ++i) {
      const auto low = hn::PromoteTo(dd, hn::LowerHalf(half, part[i]));
      total[i] = hn::Add(total[i], hn::Add(low, hn::PromoteTo(dd, hn::UpperHalf(half, part[i]))));
    }
  }
  for (int i = 0; i < M; ++i) {
    sums[i] = hn::GetLane(hn::SumOfLanes(dd, total[i]));
    for (int64_t j = k; j < hidden; ++j) sums[i] += double{load_one(X{}, x[i] + j)} * w.one(j);
  }
}

template <int T, class X>
void score_block(const RouterGemmArgs& args, int64_t t0, int64_t t1, int64_t e0, int64_t e1) {
  using Element = typename X::Element;
  const int64_t hidden = args.x.shape[1];
  for (int64_t e = e0; e < e1; ++e) {
    WeightRow<T> w;
    for (int i = 0; i < T; ++i) {
      w.terms[i] = args.weight.terms[i].at(e).template as<const uint16_t>();
      w.scale[i] = router_term_scale(args.weight, i);
    }
    const double bias = args.bias.present() ? args.bias.as<const float>()[e] : 0.0f;
    for (int64_t t = t0; t < t1;) {
      const int count = static_cast<int>(std::min<int64_t>(kTokensAtOnce, t1 - t));
      const Element* x[kTokensAtOnce];
      double sums[kTokensAtOnce];
      for (int i = 0; i < count; ++i) x[i] = args.x.at(t + i).template as<const Element>();
      if (count == kTokensAtOnce) {
        dot<kTokensAtOnce, T, X>(x, w, hidden, sums);
      } else {
        for (int i = 0; i < count; ++i) dot<1, T, X>(x + i, w, hidden, sums + i);
      }
      for (int i = 0; i < count; ++i) store(args.scores.dtype, args.scores.at(t + i).data, e, sums[i] + bias);
      t += count;
    }
  }
}

}  // namespace

void router_gemm_block(const RouterGemmArgs& args, int64_t t0, int64_t t1, int64_t e0, int64_t e1) {
  const auto with_terms = [&](auto x_type) {
    using X = decltype(x_type);
    switch (args.weight.term_count) {
      case 1:
        return score_block<1, X>(args, t0, t1, e0, e1);
      case 2:
        return score_block<2, X>(args, t0, t1, e0, e1);
      default:
        return score_block<3, X>(args, t0, t1, e0, e1);
    }
  };
  if (args.x.dtype == DType::f32) {
    with_terms(F32{});
  } else {
    with_terms(Bf16{});
  }
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vivace {

Status router_gemm_cpu(const RouterGemmArgs& args, const Stream& stream) {
  constexpr int64_t kTokens = 32, kExperts = 8;  // x and weight rows of a task stay in the second-level cache
  const auto block = VIVACE_SIMD(router_gemm_block);
  const int64_t tokens = args.x.shape[0], experts = args.scores.shape[1];
  const int64_t columns = (experts + kExperts - 1) / kExperts, rows = (tokens + kTokens - 1) / kTokens;
  cpu::parallel_for(stream.threads, rows * columns, [&](int64_t task, int) {
    const int64_t t = task / columns * kTokens, e = task % columns * kExperts;
    block(args, t, std::min(t + kTokens, tokens), e, std::min(e + kExperts, experts));
  });
  return {};
}

}  // namespace vivace
#endif
