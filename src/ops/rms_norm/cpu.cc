// residual += x;  y = v / sqrt(mean(v * v) + eps) * weight         fp32 arithmetic, rows over threads
//
// Two numbers for a row of width H in fp32
//   bytes  8 H, 16 H with a residual     the row stays in the first-level cache between the sum and the
//   scaling flops  6 H                           0.4 to 0.75 flop per byte: memory is the only roof

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/rms_norm/cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>

#include "src/cpu/convert-inl.h"
#include "src/cpu/simd.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/rms_norm/table.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

namespace {

/// v = x (+ residual, which becomes v); returns the sum of squares. Four sums of fixed order: a row repeats
/// bit for bit.
template <class T>
float add_and_square(const typename T::Element* x, typename T::Element* residual, int64_t hidden) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  const auto step = [&](int64_t i, auto& sum) {
    auto v = load_as_f32(d, T{}, x + i);
    if (residual != nullptr) {
      v = hn::Add(v, load_as_f32(d, T{}, residual + i));
      store_from_f32(d, T{}, v, residual + i);
    }
    sum = hn::MulAdd(v, v, sum);
  };
  int64_t i = 0;
  for (; i + 2 * lanes <= hidden; i += 2 * lanes) {
    step(i, sum0);
    step(i + lanes, sum1);
  }
  float tail = 0;
  for (; i < hidden; ++i) {
    float v = load_one(T{}, x + i);
    if (residual != nullptr) {
      v += load_one(T{}, residual + i);
      store_one(T{}, v, residual + i);
    }
    tail += v * v;
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1))) + tail;
}

template <class T, class W>
void scale_row(const typename T::Element* v, const typename W::Element* weight, float scale, int64_t hidden,
               typename T::Element* y) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= hidden; i += lanes) {
    const auto scaled = hn::Mul(load_as_f32(d, T{}, v + i), hn::Set(d, scale));
    store_from_f32(d, T{}, hn::Mul(scaled, load_as_f32(d, W{}, weight + i)), y + i);
  }
  for (; i < hidden; ++i) store_one(T{}, load_one(T{}, v + i) * scale * load_one(W{}, weight + i), y + i);
}

}  // namespace

void rms_norm_row(const RmsNormArgs& args, int64_t t) {
  const int64_t hidden = args.x.shape[1];
  with_storage(args.x.dtype, [&](auto type) {
    using T = decltype(type);
    using Element = typename T::Element;
    const auto* x = args.x.at(t).as<const Element>();
    auto* residual = args.residual.present() ? args.residual.at(t).as<Element>() : nullptr;
    const float squares = add_and_square<T>(x, residual, hidden);
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(hidden) + static_cast<float>(args.eps));
    with_storage(args.weight.dtype, [&](auto weight_type) {
      using W = decltype(weight_type);
      scale_row<T, W>(residual ? residual : x, args.weight.as<const typename W::Element>(), scale, hidden,
                      args.y.at(t).as<Element>());
    });
  });
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vivace {

Status rms_norm_cpu(const RmsNormArgs& args, const Stream& stream) {
  const auto row = VIVACE_SIMD(rms_norm_row);
  cpu::parallel_for(stream.threads, args.x.shape[0], [&](int64_t t, int) { row(args, t); });
  return {};
}

}  // namespace vivace
#endif
