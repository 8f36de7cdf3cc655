// fp32 vectors from and to memory of f32, bf16 or f16. Included once per SIMD target by the cpu.cc files.
#if defined(VIVACE_CPU_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef VIVACE_CPU_CONVERT_INL_H_
#undef VIVACE_CPU_CONVERT_INL_H_
#else
#define VIVACE_CPU_CONVERT_INL_H_
#endif

#include <hwy/highway.h>

#include "src/core/number.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// A storage type of plain tensors: Bf16 and F16 are bit patterns.
struct F32 {
  using Element = float;
};
struct Bf16 {
  using Element = uint16_t;
};
struct F16 {
  using Element = uint16_t;
};
/// e4m3, stored only.
struct Fp8 {
  using Element = uint8_t;
};

/// Lanes(d) elements from `p`, as fp32.
template <class D>
HWY_INLINE hn::Vec<D> load_as_f32([[maybe_unused]] D d, F32, const float* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> load_as_f32([[maybe_unused]] D d, Bf16, const uint16_t* p) {
  const hn::Repartition<uint32_t, D> d32;
  const hn::Rebind<uint16_t, D> d16;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, p))));
}
template <class D>
HWY_INLINE hn::Vec<D> load_as_f32([[maybe_unused]] D d, F16, const uint16_t* p) {
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
}

/// Stores fp32 lanes, rounded to nearest even.
template <class D>
HWY_INLINE void store_from_f32([[maybe_unused]] D d, F32, hn::Vec<D> v, float* p) {
  hn::StoreU(v, d, p);
}
template <class D>
HWY_INLINE void store_from_f32([[maybe_unused]] D d, Bf16, hn::Vec<D> v, uint16_t* p) {
  const hn::Repartition<uint32_t, D> d32;
  const hn::Repartition<int32_t, D> i32;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fff))));
  const auto quiet_nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d32, 0x40));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(v));
  const auto result = hn::IfThenElse(is_nan, quiet_nan, rounded);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(i32, result)), d16, p);
}
template <class D>
HWY_INLINE void store_from_f32([[maybe_unused]] D d, F16, hn::Vec<D> v, uint16_t* p) {
  const hn::Rebind<hwy::float16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
}
/// Saturates at 448, as f32_to_fp8 does.
template <class D>
HWY_INLINE void store_from_f32([[maybe_unused]] D d, Fp8, hn::Vec<D> v, uint8_t* p) {
  const hn::Repartition<uint32_t, D> d32;
  const hn::Repartition<int32_t, D> i32;
  const hn::Rebind<uint8_t, D> d8;
  const auto bits = hn::BitCast(d32, v);
  const auto magnitude = hn::And(bits, hn::Set(d32, 0x7fffffffu));
  const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(d32, 0x80u));
  const auto odd = hn::And(hn::ShiftRight<20>(magnitude), hn::Set(d32, 1u));
  const auto normal = hn::ShiftRight<20>(
      hn::Add(hn::Sub(magnitude, hn::Set(d32, 0x3c000000u)), hn::Add(odd, hn::Set(d32, 0x7ffffu))));
  const auto shift = hn::Set(d, 0x1p14f);  // below 2^-6: adding it rounds at 2^-9
  const auto small = hn::Sub(hn::BitCast(d32, hn::Add(hn::BitCast(d, magnitude), shift)), hn::BitCast(d32, shift));
  auto code = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 0x3c800000u)), small, normal);
  code = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x43dfffffu)), hn::Set(d32, 0x7eu), code);
  code = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x7f800000u)), hn::Set(d32, 0x7fu), code);
  hn::StoreU(hn::DemoteTo(d8, hn::BitCast(i32, hn::Or(code, sign))), d8, p);
}

HWY_INLINE float load_one(F32, const float* p) {
  return *p;
}
HWY_INLINE float load_one(Bf16, const uint16_t* p) {
  return bf16_to_f32(*p);
}
HWY_INLINE float load_one(F16, const uint16_t* p) {
  return f16_to_f32(*p);
}
HWY_INLINE void store_one(F32, float v, float* p) {
  *p = v;
}
HWY_INLINE void store_one(Bf16, float v, uint16_t* p) {
  *p = f32_to_bf16(v);
}
HWY_INLINE void store_one(F16, float v, uint16_t* p) {
  *p = f32_to_f16(v);
}

HWY_INLINE void store_one(Fp8, float v, uint8_t* p) {
  *p = f32_to_fp8(v);
}

/// Calls body(F32{}), body(Bf16{}) or body(F16{}) for a plain floating-point `dtype`.
template <class Body>
HWY_INLINE void with_storage(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32:
      body(F32{});
      break;
    case DType::bf16:
      body(Bf16{});
      break;
    case DType::f16:
      body(F16{});
      break;
    default:
      break;
  }
}

/// `count` elements of a plain floating-point array, from element `begin`, as fp32.
HWY_INLINE void load_floats(DType dtype, const void* data, int64_t begin, int64_t count, float* out) {
  with_storage(dtype, [&](auto type) {
    using T = decltype(type);
    const hn::ScalableTag<float> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    const auto* from = static_cast<const typename T::Element*>(data) + begin;
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) hn::StoreU(load_as_f32(d, T{}, from + i), d, out + i);
    for (; i < count; ++i) out[i] = load_one(T{}, from + i);
  });
}

/// The other way, rounded to nearest even.
HWY_INLINE void store_floats(DType dtype, const float* values, int64_t begin, int64_t count, void* data) {
  with_storage(dtype, [&](auto type) {
    using T = decltype(type);
    const hn::ScalableTag<float> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    auto* to = static_cast<typename T::Element*>(data) + begin;
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) store_from_f32(d, T{}, hn::LoadU(d, values + i), to + i);
    for (; i < count; ++i) store_one(T{}, values[i], to + i);
  });
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
