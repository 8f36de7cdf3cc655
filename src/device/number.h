#pragma once

// Element types of tensors on the device, and 16-byte vectors of them as fp32.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "vivace/tensor.h"

namespace vivace::device {

using bf16 = __nv_bfloat16;
using f16 = __half;
using fp8 = __nv_fp8_e4m3;

inline constexpr float kFp8Max = 448.f;  ///< largest finite e4m3
inline constexpr int kScaleBlock = 128;  ///< width of a block of activations that shares a scale

__device__ __forceinline__ float to_float(float v) {
  return v;
}
__device__ __forceinline__ float to_float(bf16 v) {
  return __bfloat162float(v);
}
__device__ __forceinline__ float to_float(f16 v) {
  return __half2float(v);
}
__device__ __forceinline__ float to_float(fp8 v) {
  return static_cast<float>(v);
}

/// Rounded to nearest even; fp8 saturates.
template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ fp8 from_float<fp8>(float v) {
  return fp8(v);
}

/// The bits of two neighbours, the first in the lowest, rounded as from_float does.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
template <>
__device__ __forceinline__ uint32_t pack<f16>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
template <>
__device__ __forceinline__ uint32_t pack<fp8>(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

/// Element `i` of an array of f32, f16 or bf16, the type known when it runs: for small operands such as norm weights, where
/// a kernel per type would only cost size.
__device__ __forceinline__ float load_any(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[i];
  if (dtype == DType::bf16) return to_float(static_cast<const bf16*>(data)[i]);
  return to_float(static_cast<const f16*>(data)[i]);
}

/// `kCount` neighbouring elements, loaded and stored as one access of up to 16 bytes.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vec {
  static_assert(sizeof(T) * kCount <= 16, "one access is at most 16 bytes");
  T v[kCount];
};

/// As many elements as 16 bytes hold.
template <class T>
inline constexpr int kVec = 16 / static_cast<int>(sizeof(T));

template <int kCount, class T>
__device__ __forceinline__ void load_floats(const T* p, float (&out)[kCount]) {
  const Vec<T, kCount> vec = *reinterpret_cast<const Vec<T, kCount>*>(p);
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] = to_float(vec.v[i]);
}

template <int kCount, class T>
__device__ __forceinline__ void store_floats(const float (&in)[kCount], T* p) {
  Vec<T, kCount> vec;
#pragma unroll
  for (int i = 0; i < kCount; ++i) vec.v[i] = from_float<T>(in[i]);
  *reinterpret_cast<Vec<T, kCount>*>(p) = vec;
}

/// 2^x to 2 ulp; subnormal numbers are 0.
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Calls body(T{}) with the device type of `dtype`, one of the listed ones; false when it is none of them.
template <class... T, class Body>
bool with_type(DType dtype, Body&& body);

template <class T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::f32;
}
template <>
constexpr DType dtype_of<bf16>() {
  return DType::bf16;
}
template <>
constexpr DType dtype_of<f16>() {
  return DType::f16;
}
template <>
constexpr DType dtype_of<fp8>() {
  return DType::fp8_e4m3;
}

template <class... T, class Body>
bool with_type(DType dtype, Body&& body) {
  return ((dtype == dtype_of<T>() && (body(T{}), true)) || ...);
}

}  // namespace vivace::device
