#pragma once

// Values of a row as fp32, eight neighbours to a lane, and how they leave: as f32 or bf16, or quantised to fp8 with a given
// scale or one made of them.

#include <algorithm>

#include "src/core/dispatch.h"
#include "src/device/number.h"
#include "src/device/reduce.h"
#include "vivace/quantize_fp8.h"

namespace vivace::device {

/// max / 448 as one division rounds it, and at least the smallest normal number: what a made scale is. NaN stays NaN. The
/// remainder of a product with 1 / 448 corrects it to that for every float; infinity has none.
__device__ __forceinline__ float made_scale(float max) {
  constexpr float kLeast = 1.17549435e-38f, kInverse = 1.f / kFp8Max;
  const float product = max * kInverse;
  const float scale = fmaf(fmaf(-product, kFp8Max, max), kInverse, product);
  return scale < kLeast ? kLeast : product < INFINITY ? scale : product;
}

/// The larger magnitude; a NaN wins.
struct MaxMagnitude {
  __device__ __forceinline__ float operator()(float a, float b) const {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(fabsf(a)), "f"(fabsf(b)));
    return c;
  }
  static constexpr float kIdentity = 0.f;
};

/// v / scale for fp8: what e4m3 rounds is the quotient rounded to fp32. A reciprocal and one correction give that too, unless
/// the scale is far from 1 or its significand all ones, in a third of the time; quotients too small for that to hold become
/// zeros of e4m3 either way.
template <int kCount>
__device__ __forceinline__ void divide(float (&v)[kCount], float scale) {
  if (scale < 0x1p-90f || !(scale <= 0x1p90f) || (__float_as_uint(scale) & 0x7fffffu) == 0x7fffffu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = __fdiv_rn(v[i], scale);
    return;
  }
  const float inverse = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float quotient = v[i] * inverse;
    // Taken as what is too much, so that a zero keeps its sign. Infinities have no remainder.
    const float corrected = fmaf(-fmaf(quotient, scale, -v[i]), inverse, quotient);
    v[i] = fabsf(quotient) < INFINITY ? corrected : quotient;
  }
}

/// Where a row goes as fp8. `scales` is what made scales of this row begin at, `given` the scale that is not made.
struct Fp8Target {
  fp8* y;
  float* scales;
  Fp8Scaling scaling;
  float given;
};

/// Row `token` of y. A given scale is loaded here: made before the values are there, it costs no wait of its own.
__device__ __forceinline__ Fp8Target fp8_target(fp8* y, int64_t y_stride, float* scales, int64_t scale_stride,
                                                Fp8Scaling scaling, int64_t token) {
  const bool given = scaling == Fp8Scaling::tensor;
  return {y + token * y_stride, given ? scales : scales + token * scale_stride, scaling,
          given ? *scales : 0.f};
}

/// Values that a lane holds, and lanes that share a made scale.
inline constexpr int kOfLane = 8, kLanesPerScale = kScaleBlock / kOfLane;

/// On the host: whether rows of `width` are whole groups of eight in each of these tensors, aligned to 16 bytes or to a group's
/// size. Absent ones are.
template <class... T>
bool are_wide(int64_t width, const T&... tensors) {
  const auto aligned = [](const Tensor& t) {
    return !t.present() || alignment_of(t) % std::min<int64_t>(16, kOfLane * info_of(t.dtype).block_bytes) == 0;
  };
  return width % kOfLane == 0 && (aligned(tensors) && ...);
}

/// Elements [begin, begin + 8) of a row of `width`; those past its end are 0. kWide: groups of eight are whole and aligned
/// to 16 bytes, or to their size.
template <bool kWide, class T>
__device__ __forceinline__ void load_eight(const T* row, int64_t begin, int64_t width, float (&v)[kOfLane]) {
  constexpr int kAccess = sizeof(T) * kOfLane > 16 ? kVec<T> : kOfLane;
#pragma unroll
  for (int i = 0; i < kOfLane; i += kAccess) {
    float some[kAccess] = {};
    if constexpr (kWide) {  // no branch, so that loads of several rows are under way together
      load_floats(row + (begin < width ? begin : 0) + i, some);
#pragma unroll
      for (int j = 0; j < kAccess; ++j) some[j] = begin < width ? some[j] : 0.f;
    } else {
#pragma unroll
      for (int j = 0; j < kAccess; ++j) {
        if (begin + i + j < width) some[j] = to_float(row[begin + i + j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kAccess; ++j) v[i + j] = some[j];
  }
}

template <bool kWide, class T>
__device__ __forceinline__ void store_eight(const float (&v)[kOfLane], T* row, int64_t begin, int64_t width) {
  constexpr int kAccess = sizeof(T) * kOfLane > 16 ? kVec<T> : kOfLane;
#pragma unroll
  for (int i = 0; i < kOfLane; i += kAccess) {
    float some[kAccess];
#pragma unroll
    for (int j = 0; j < kAccess; ++j) some[j] = v[i + j];
    if constexpr (kWide) {
      if (begin < width) store_floats(some, row + begin + i);
    } else {
#pragma unroll
      for (int j = 0; j < kAccess; ++j) {
        if (begin + i + j < width) row[begin + i + j] = from_float<T>(some[j]);
      }
    }
  }
}

/// Stores eight values per lane quantised, with a given scale or one made of 128 neighbours. All lanes of a warp call it, the
/// first of them at a multiple of 256; values past the row's end are 0.
template <bool kWide>
__device__ __forceinline__ void store_quantised(float (&v)[kOfLane], int64_t begin, int64_t width,
                                                const Fp8Target& target) {
  float scale;
  if (target.scaling == Fp8Scaling::block) {
    float max = 0.f;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) max = MaxMagnitude{}(max, v[j]);
    scale = made_scale(warp_reduce<MaxMagnitude, kLanesPerScale>(max));
    if (begin % kScaleBlock == 0 && begin < width) target.scales[begin / kScaleBlock] = scale;
  } else {
    scale = target.given;
  }
  divide(v, scale);
  store_eight<kWide>(v, target.y, begin, width);
}

}  // namespace vivace::device
