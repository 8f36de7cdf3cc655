// residual += x;  y = v / sqrt(mean(v * v) + eps) * weight         fp32 arithmetic, rows over threads
//
// Two numbers for a row of width H in fp32
//   bytes  8 H, 16 H with a residual   the row stays in the first-level cache between the sum and the scaling
//   flops  6 H                         0.4 to 0.75 flop per byte: memory is the only roof

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/rms_norm/cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>

#include "src/cpu/simd.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/quantize_fp8/row-inl.h"
#include "src/ops/rms_norm/huge.h"
#include "src/ops/rms_norm/table.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

namespace {

constexpr int64_t kPiece = kFp8ScaleBlock;  // values that wait in fp32 at a time

/// values += other.
void add_floats(const float* other, int64_t count, float* values) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, values + i), hn::LoadU(d, other + i)), d, values + i);
  }
  for (; i < count; ++i) values[i] += other[i];
}

float sum_of_squares(const float* values, int64_t count) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto v = hn::LoadU(d, values + i);
    sum = hn::MulAdd(v, v, sum);
  }
  float tail = 0;
  for (; i < count; ++i) tail += values[i] * values[i];
  return hn::GetLane(hn::SumOfLanes(d, sum)) + tail;
}

/// values *= scale * weight.
void scale_floats(const float* weight, float scale, int64_t count, float* values) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto scaled = hn::Mul(hn::LoadU(d, values + i), hn::Set(d, scale));
    hn::StoreU(hn::Mul(scaled, hn::LoadU(d, weight + i)), d, values + i);
  }
  for (; i < count; ++i) values[i] = values[i] * scale * weight[i];
}

}  // namespace

void rms_norm_row(const RmsNormArgs& args, int64_t t) {
  const int64_t hidden = args.x.shape[1];
  const Tensor x = args.x.at(t), y = args.y.at(t);
  const Tensor residual = args.residual.present() ? args.residual.at(t) : Tensor();
  float other[kPiece];
  // The unrounded sum; asked for again rather than kept, so that a row of any width needs no scratch.
  const auto sum = [&](int64_t i, int64_t count, float* values) {
    load_floats(x.dtype, x.data, i, count, values);
    if (!residual.present()) return;
    load_floats(residual.dtype, residual.data, i, count, other);
    add_floats(other, count, values);
  };
  float values[kPiece];
  const auto mean_square = [&](float factor) {
    float squares = 0;
    for (int64_t i = 0; i < hidden; i += kPiece) {
      const int64_t count = std::min(kPiece, hidden - i);
      sum(i, count, values);
      for (int64_t j = 0; factor != 1 && j < count; ++j) values[j] *= factor;
      squares += sum_of_squares(values, count);
    }
    return squares / static_cast<float>(hidden);
  };
  const float mean = mean_square(1);
  const float scale = std::isinf(mean) ? kTinyFactor / std::sqrt(mean_square(kTinyFactor))
                                       : 1.0f / std::sqrt(mean + static_cast<float>(args.eps));
  const auto make = [&](int64_t i, int64_t count, float* out, bool last) {
    sum(i, count, out);
    if (last && residual.present()) store_floats(residual.dtype, out, i, count, residual.data);
    load_floats(args.weight.dtype, args.weight.data, i, count, other);
    scale_floats(other, scale, count, out);
  };
  if (y.dtype == DType::fp8_e4m3) {
    quantize_columns(make, 0, hidden, args.y_scaling, scales_of(args.y_scale, args.y_scaling, t),
                     y.as<uint8_t>());
    return;
  }
  for (int64_t i = 0; i < hidden; i += kPiece) {
    const int64_t count = std::min(kPiece, hidden - i);
    make(i, count, values, true);
    store_floats(y.dtype, values, i, count, y.data);
  }
  if (args.y_fp8.present()) {
    const auto stored = [&](int64_t i, int64_t count, float* out, bool) {
      load_floats(y.dtype, y.data, i, count, out);
    };
    quantize_columns(stored, 0, hidden, args.y_scaling, scales_of(args.y_scale, args.y_scaling, t),
                     args.y_fp8.at(t).as<uint8_t>());
  }
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
