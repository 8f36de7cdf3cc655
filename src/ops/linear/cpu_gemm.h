#pragma once

#include <cstdint>

#include "src/cpu/simd.h"
#include "src/ops/linear/fp8_scales.h"
#include "vivace/tensor.h"

// x times rows of a weight on one thread: what `linear` and the expert layers share. No allocation, no
// threads, no checks. A result depends on its row of x and its weight row alone: not on the other tokens,
// their number, or where [n0, n1) starts.

namespace vivace::cpu {

/// Rows of activations: row i starts at base + stride * (index ? index[i] : i).
struct XRows {
  const float* base = nullptr;
  int64_t stride = 0;
  const int32_t* index = nullptr;

  const float* row(int64_t i) const { return base + stride * (index ? index[i] : i); }
};

/// Where results go: y(t, n) at base + stride * t + (n - n0), so `base` belongs to the first weight row of
/// the call.
struct YRows {
  float* base = nullptr;
  int64_t stride = 0;
};

/// fp32 products of the weight's exact values. `weight` [n, k] is of a plain type or a block format; `bias`
/// [n] of a plain type, or absent. y = x · weight[n0..n1)ᵀ + bias[n0..n1) for `m` rows. fp8 weights are multiplied by
/// their scales before the product.
void gemm_f32(const XRows& x, int64_t m, const Tensor& weight, int64_t n0, int64_t n1, const Tensor& bias,
              const YRows& y, const Fp8Scales& scales = {});

/// out[0..k) = the values of a row of activations of any plain type, or fp8 with the scales of row `row`.
void row_as_f32(DType dtype, const void* values, int64_t k, const Fp8Scales& scales, int64_t row, float* out);

/// Activations as block formats multiply them: integers in groups of 32 along k.
/// For q4_0, q4_1 and q4_k: int8, d = max|x| / 127, s = d * sum of the integers.
/// For q8_0 and q6_k: int16, d = max|x| / 16383.
enum class QuantizedType : uint8_t { int8, int16 };
inline QuantizedType quantized_type_for(DType weight) {
  return weight == DType::q8_0 || weight == DType::q6_k ? QuantizedType::int16 : QuantizedType::int8;
}

/// Rows of quantised activations in caller's memory, a row of `row_bytes` each: the integers, then d, then
/// (int8) s.
struct QuantizedRows {
  static constexpr int64_t kGroup = 32;

  QuantizedType type = QuantizedType::int8;
  int64_t k = 0;                   ///< a multiple of 32
  uint8_t* base = nullptr;         ///< aligned to 4 bytes
  const int32_t* index = nullptr;  ///< as in XRows

  static int64_t row_bytes_for(QuantizedType type, int64_t k) {
    return type == QuantizedType::int8 ? k + k / kGroup * 8 : 2 * k + k / kGroup * 4;
  }
  int64_t row_bytes() const { return row_bytes_for(type, k); }
  uint8_t* row(int64_t i) const { return base + row_bytes() * (index ? index[i] : i); }
};

/// Fills row i of `out` from k floats.
void quantize_row(const float* x, const QuantizedRows& out, int64_t i);

/// The same product from quantised activations, for a block-format weight whose quantized_type_for is x.type.
/// The products of a group are summed exactly; groups are added in order in fp32.
void gemm_quantized(const QuantizedRows& x, int64_t m, const Tensor& weight, int64_t n0, int64_t n1,
                    const Tensor& bias, const YRows& y);

/// The three functions for one instruction set, so that tests can compare all.
struct GemmKernels {
  void (*f32)(const XRows&, int64_t, const Tensor&, int64_t, int64_t, const Tensor&, const YRows&, const Fp8Scales&);
  void (*quantize)(const float*, const QuantizedRows&, int64_t);
  void (*quantized)(const QuantizedRows&, int64_t, const Tensor&, int64_t, int64_t, const Tensor&,
                    const YRows&);
};
GemmKernels gemm_kernels(Isa isa);

/// Weight rows are unpacked eight at a time: split [0, n) at multiples of this.
inline constexpr int64_t kPanelRows = 8;

}  // namespace vivace::cpu
