// Elementary functions of fp32 vectors. Included once per SIMD target by the cpu.cc files.
#if defined(VIVACE_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef VIVACE_CPU_MATH_INL_H_
#undef VIVACE_CPU_MATH_INL_H_
#else
#define VIVACE_CPU_MATH_INL_H_
#endif

#include <hwy/highway.h>

#include <limits>

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// e^x within 2 ulp (subnormal results: within 2^-149 more), 0 for -inf, inf for inf, NaN for NaN.
template <class D>
HWY_INLINE hn::Vec<D> exp(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  // Beyond these the result is 0 or infinity; within them n below fits two exponents.
  const auto inside = hn::Min(hn::Max(x, hn::Set(d, -104.0f)), hn::Set(d, 89.0f));
  // x = n ln 2 + r, |r| <= ln 2 / 2. The upper part of ln 2 has 9 bits, so n times it is exact.
  const auto n = hn::NearestInt(hn::Mul(inside, hn::Set(d, 1.44269504f)));
  const auto n_float = hn::ConvertTo(d, n);
  auto r = hn::NegMulAdd(n_float, hn::Set(d, 0.693359375f), inside);
  r = hn::NegMulAdd(n_float, hn::Set(d, -2.12194440e-4f), r);
  // (e^r - 1 - r) / r^2 interpolated at the five Chebyshev nodes of the interval; error of e^r 2^-26.5.
  auto p = hn::Set(d, 0x1.6d113ep-10f);
  p = hn::MulAdd(p, r, hn::Set(d, 0x1.120ba2p-7f));
  p = hn::MulAdd(p, r, hn::Set(d, 0x1.55551ap-5f));
  p = hn::MulAdd(p, r, hn::Set(d, 0x1.5554dcp-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::Add(hn::MulAdd(hn::Mul(r, r), p, r), hn::Set(d, 1.0f));
  // 2^n in two factors: it may lie outside the normal range when the result does not.
  const auto half = hn::ShiftRight<1>(n);
  const auto power = [&](auto e) { return hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(e, hn::Set(di, 127)))); };
  p = hn::Mul(hn::Mul(p, power(half)), power(hn::Sub(n, half)));
  return hn::IfThenElse(hn::IsNaN(x), x, p);
}

/// 1 / (1 + e^-x): 0 at -inf, 1 at inf.
template <class D>
HWY_INLINE hn::Vec<D> sigmoid(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exp(d, hn::Neg(x))));
}

/// x / (1 + e^-x): 0 at -inf.
template <class D>
HWY_INLINE hn::Vec<D> silu(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0f);
  const auto value = hn::Div(x, hn::Add(one, exp(d, hn::Neg(x))));
  const auto minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
  return hn::IfThenZeroElse(hn::Eq(x, minus_infinity), value);
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
