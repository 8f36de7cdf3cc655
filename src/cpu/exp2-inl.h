// 2^x of fp32 vectors. Included once per SIMD target by the cpu.cc files.
#if defined(VIVACE_CPU_EXP2_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef VIVACE_CPU_EXP2_INL_H_
#undef VIVACE_CPU_EXP2_INL_H_
#else
#define VIVACE_CPU_EXP2_INL_H_
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// 2^x with an error below 1.5 ulp for x in [-126, 127.49]; 0 below -126, so that a weight of -infinity is
/// exactly 0; infinity above; NaN stays NaN. 2^0 is exactly 1.
template <class D>
HWY_INLINE hn::Vec<D> exp2([[maybe_unused]] D d, hn::Vec<D> x) {
  const hn::Repartition<int32_t, D> di;
  const auto n = hn::Round(x);
  const auto f = hn::Sub(x, n);  // exact, in [-0.5, 0.5]
  // Minimax in relative error on that interval: 0.03 * 2^-24 before the roundings of this evaluation.
  auto p = hn::Set(d, 0.0001534581242594868f);
  p = hn::MulAdd(p, f, hn::Set(d, 0.0013399930903688073f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.009618489071726799f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.05550328642129898f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.24022646248340607f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.6931471824645996f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto power = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127))));
  auto y = hn::Mul(p, power);
  y = hn::IfThenElse(hn::Ge(x, hn::Set(d, 127.5f)), hn::Set(d, __builtin_inff()), y);
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -126.0f)), y);
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
