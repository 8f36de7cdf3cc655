// y = x · weightᵀ on one thread, in int8/int16 for block formats and in fp32 for all types.
//
// Two numbers for one weight row of length k, m tokens
//   bytes   k · (bytes per weight)  0.625 for q4_1: 20 bytes hold 32 weights; activations stay in the caches
//   products  m · k                 32 int8 products per 2.5 AVX2 instructions, 32 int16 per 4, 32 fp32 per 4
// One token is bound by memory, eight and more by arithmetic; the crossover lies near four.
//
// Integers: eight weight rows are unpacked once into a Panel in the first-level cache and multiplied by all
// tokens, so that unpacking (about 9 instructions per 32 weights) is paid once. A lane is a weight row.
// Products of a group of 32 are exact, and groups are added in order in fp32, so the shape of a tile does not
// change a bit. fp32: four weight rows at a time become floats in the first-level cache; lanes run along k.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/linear/cpu_gemm.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "src/cpu/convert-inl.h"
#include "src/ops/linear/cpu_gemm.h"
#include "src/ops/linear/dequantize-inl.h"
#include "src/ops/linear/panel-inl.h"
#include "src/ops/linear/panel.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

using cpu::Panel;
using cpu::QuantizedRows;
using cpu::QuantizedType;
using cpu::XRows;
using cpu::YRows;

namespace {

const uint8_t* row_of(const Tensor& weight, int64_t n) {
  return static_cast<const uint8_t*>(weight.data) + weight.row_offset_bytes(n);
}

float bias_of(const Tensor& bias, int64_t n) {
  return bias.present() ? load(bias.dtype, bias.data, n) : 0.0f;
}

/// Four weight rows as floats times kTokens rows of x, for a stretch of k. Adds to sums[token][row].
template <int kTokens>
HWY_INLINE void multiply_f32(const float* const* w, const float* const* x, int64_t k, float (*sums)[4]) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  using V = hn::Vec<decltype(d)>;
  V acc[kTokens][4];
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) acc[t][r] = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= k; i += lanes) {
    V xs[kTokens];
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) xs[t] = hn::LoadU(d, x[t] + i);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const V row = hn::LoadU(d, w[r] + i);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) acc[t][r] = hn::MulAdd(row, xs[t], acc[t][r]);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      float sum = hn::GetLane(hn::SumOfLanes(d, acc[t][r]));
      for (int64_t tail = i; tail < k; ++tail) sum += w[r][tail] * x[t][tail];
      sums[t][r] += sum;
    }
  }
}

}  // namespace

void gemm_f32_rows(const XRows& x, int64_t m, const Tensor& weight, int64_t n0, int64_t n1,
                   const Tensor& bias, const YRows& y, const Fp8Scales& scales) {
  constexpr int64_t kRows = 4, kChunk = 1024;  // 16 KB of floats
  alignas(64) float unpacked[kRows][kChunk];
  const int64_t k = weight.shape[1];
  const DTypeInfo info = info_of(weight.dtype);
  for (int64_t n = n0; n < n1; n += kRows) {
    const int64_t rows = std::min(kRows, n1 - n);
    int64_t begin = 0;
    do {  // once even when k is 0: y is the bias
      const int64_t count = std::min(kChunk, k - begin);
      const bool last = begin + count == k;
      const float* w[kRows];
      for (int64_t r = 0; r < kRows; ++r) {
        const uint8_t* source =
            row_of(weight, n + std::min(r, rows - 1)) + begin / info.block_elements * info.block_bytes;
        if (weight.dtype == DType::f32) {
          w[r] = reinterpret_cast<const float*>(source);
          continue;
        }
        w[r] = unpacked[std::min(r, rows - 1)];
        if (r < rows) dequantize(weight.dtype, source, count, unpacked[r]);
        if (r < rows && scales.first != nullptr) {
          for (int64_t i = 0; i < count; ++i) unpacked[r][i] *= scales.at(n + r, begin + i);
        }
      }
      const auto tile = [&](auto tokens, int64_t t0) {
        constexpr int kTokens = decltype(tokens)::value;
        const float* xs[kTokens];
        float sums[kTokens][4];
        for (int t = 0; t < kTokens; ++t) {
          xs[t] = x.row(t0 + t) + begin;
          const float* sofar = y.base + y.stride * (t0 + t) + (n - n0);
          for (int64_t r = 0; r < kRows; ++r) sums[t][r] = begin > 0 && r < rows ? sofar[r] : 0.0f;
        }
        multiply_f32<kTokens>(w, xs, count, sums);
        for (int t = 0; t < kTokens; ++t) {
          float* out = y.base + y.stride * (t0 + t) + (n - n0);
          for (int64_t r = 0; r < rows; ++r) out[r] = last ? sums[t][r] + bias_of(bias, n + r) : sums[t][r];
        }
      };
      int64_t t = 0;
      for (; t + 3 <= m; t += 3) tile(std::integral_constant<int, 3>(), t);
      for (; t < m; ++t) tile(std::integral_constant<int, 1>(), t);
      begin += count;
    } while (begin < k);
  }
}

void quantize_row(const float* x, const QuantizedRows& out, int64_t row) {
  constexpr int64_t kGroup = QuantizedRows::kGroup;
  // Below this a group counts as zero, so that neither the scale nor its reciprocal overflows.
  constexpr float kTiny = 1e-35f;
  const hn::CappedTag<float, 8> d;
  const hn::RebindToSigned<decltype(d)> d32;
  const hn::Rebind<int16_t, decltype(d)> d16;
  const hn::Rebind<int8_t, decltype(d)> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const bool int8 = out.type == QuantizedType::int8;
  const float largest = int8 ? 127.0f : 16383.0f;
  uint8_t* base = out.row(row);
  auto* q8 = reinterpret_cast<int8_t*>(base);
  auto* q16 = reinterpret_cast<int16_t*>(base);
  auto* scales = reinterpret_cast<float*>(base + (int8 ? out.k : 2 * out.k));
  float* sums = scales + out.k / kGroup;
  for (int64_t g = 0; g < out.k / kGroup; ++g) {
    const float* group = x + g * kGroup;
    auto top = hn::Zero(d), poison = hn::Zero(d);
    for (int64_t i = 0; i < kGroup; i += lanes) {
      const auto v = hn::LoadU(d, group + i);
      top = hn::Max(top, hn::Abs(v));
      poison = hn::MulAdd(v, hn::Zero(d), poison);  // NaN after any NaN or infinity
    }
    const float max = hn::GetLane(hn::MaxOfLanes(d, top));
    const bool finite = hn::GetLane(hn::SumOfLanes(d, poison)) == 0;
    if (!finite || max < kTiny) {
      scales[g] = finite ? 0.0f : NAN;
      if (int8) {
        sums[g] = scales[g];
        std::memset(q8 + g * kGroup, 0, kGroup);
      } else {
        std::memset(q16 + g * kGroup, 0, 2 * kGroup);
      }
      continue;
    }
    scales[g] = max / largest;
    const auto inverse = hn::Set(d, largest / max);
    if (int8) {
      auto sum = hn::Zero(d32);
      for (int64_t i = 0; i < kGroup; i += lanes) {
        const auto q = hn::NearestInt(hn::Mul(hn::LoadU(d, group + i), inverse));
        sum = hn::Add(sum, q);
        hn::StoreU(hn::DemoteTo(d8, q), d8, q8 + g * kGroup + i);
      }
      sums[g] = scales[g] * static_cast<float>(hn::GetLane(hn::SumOfLanes(d32, sum)));
    } else {
      alignas(32) int16_t natural[kGroup];
      for (int64_t i = 0; i < kGroup; i += lanes)
        hn::StoreU(hn::DemoteTo(d16, hn::NearestInt(hn::Mul(hn::LoadU(d, group + i), inverse))), d16,
                   natural + i);
      for (int64_t i = 0; i < kGroup; ++i)
        q16[g * kGroup + i] = natural[(i & ~int64_t{3}) + cpu::kInt16Order[i & 3]];
    }
  }
}

void gemm_quantized_rows(const QuantizedRows& x, int64_t m, const Tensor& weight, int64_t n0, int64_t n1,
                         const Tensor& bias, const YRows& y) {
  constexpr int64_t kRows = Panel::kRows, kGroup = QuantizedRows::kGroup;
  Panel panel;
  const int64_t groups = x.k / kGroup,
                most = x.type == QuantizedType::int8 ? Panel::kInt8Groups : Panel::kInt16Groups;
  for (int64_t n = n0; n < n1; n += kRows) {
    const int64_t rows = std::min(kRows, n1 - n);
    const uint8_t* w[kRows];
    for (int64_t r = 0; r < kRows; ++r) w[r] = row_of(weight, n + std::min(r, rows - 1));
    const uint8_t* next = row_of(weight, n + kRows);
    int64_t begin = 0;
    do {
      const int64_t count = std::min(most, groups - begin);
      const bool last = begin + count == groups;
      unpack_panel(weight.dtype, w, next, begin, count, panel);
      const auto tile = [&](auto tokens, int64_t t0) {
        constexpr int kTokens = decltype(tokens)::value;
        const uint8_t* xs[kTokens];
        alignas(32) float sums[kTokens][kRows];
        for (int t = 0; t < kTokens; ++t) {
          xs[t] = x.row(t0 + t);
          const float* sofar = y.base + y.stride * (t0 + t) + (n - n0);
          for (int64_t r = 0; r < kRows; ++r) sums[t][r] = begin > 0 && r < rows ? sofar[r] : 0.0f;
        }
        if (x.type == QuantizedType::int8) {
          multiply_int8<kTokens>(panel, count, xs, x.k, begin, sums);
        } else {
          multiply_int16<kTokens>(panel, count, xs, x.k, begin, sums);
        }
        for (int t = 0; t < kTokens; ++t) {
          float* out = y.base + y.stride * (t0 + t) + (n - n0);
          if (rows == kRows && !(last && bias.present())) {
            std::memcpy(out, sums[t], sizeof sums[t]);
          } else {
            for (int64_t r = 0; r < rows; ++r) out[r] = last ? sums[t][r] + bias_of(bias, n + r) : sums[t][r];
          }
        }
      };
      int64_t t = 0;
      for (; t + 4 <= m; t += 4) tile(std::integral_constant<int, 4>(), t);
      for (; t + 2 <= m; t += 2) tile(std::integral_constant<int, 2>(), t);
      for (; t < m; ++t) tile(std::integral_constant<int, 1>(), t);
      begin += count;
    } while (begin < groups);
  }
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vivace::cpu {

GemmKernels gemm_kernels(Isa isa) {
  const GemmKernels baseline = {&HWY_STATIC_DISPATCH(gemm_f32_rows), &HWY_STATIC_DISPATCH(quantize_row),
                                &HWY_STATIC_DISPATCH(gemm_quantized_rows)};
#if defined(__x86_64__)
  if (isa == Isa::avx2) return {&N_AVX2::gemm_f32_rows, &N_AVX2::quantize_row, &N_AVX2::gemm_quantized_rows};
#endif
  return baseline;
}

namespace {
const GemmKernels& kernels() {
  static const GemmKernels chosen = gemm_kernels(isa());
  return chosen;
}
}  // namespace

void gemm_f32(const XRows& x, int64_t m, const Tensor& weight, int64_t n0, int64_t n1, const Tensor& bias,
              const YRows& y, const Fp8Scales& scales) {
  kernels().f32(x, m, weight, n0, n1, bias, y, scales);
}

void row_as_f32(DType dtype, const void* values, int64_t k, const Fp8Scales& scales, int64_t row, float* out) {
  for (int64_t i = 0; i < k; ++i) out[i] = load(dtype, values, i) * scales.at(row, i);
}

void quantize_row(const float* x, const QuantizedRows& out, int64_t i) {
  kernels().quantize(x, out, i);
}

void gemm_quantized(const QuantizedRows& x, int64_t m, const Tensor& weight, int64_t n0, int64_t n1,
                    const Tensor& bias, const YRows& y) {
  kernels().quantized(x, m, weight, n0, n1, bias, y);
}

}  // namespace vivace::cpu
#endif
