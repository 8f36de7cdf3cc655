// y = silu(gate) * up         fp32 arithmetic, rows over threads
//
// Two numbers for a row of width I in fp32
//   bytes  12 I   read gate and up, write y
//   flops  18 I   mostly the exponential: at 3 bytes per vector cycle arithmetic and first-level cache are
//   near

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/silu_mul/cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "src/cpu/math-inl.h"
#include "src/cpu/simd.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/quantize_fp8/row-inl.h"
#include "src/ops/silu_mul/table.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

namespace {

/// Columns [begin, end) of row `t`, quantised.
void silu_mul_fp8(const SiluMulArgs& args, int64_t t, int64_t begin, int64_t end) {
  const hn::ScalableTag<float> d;
  const Tensor gate = args.gate.at(t), up = args.up.at(t);
  float u[kFp8ScaleBlock] = {};
  const auto make = [&](int64_t i, int64_t count, float* values, bool) {
    load_floats(gate.dtype, gate.data, i, count, values);
    load_floats(up.dtype, up.data, i, count, u);
    // The last vector may go past `count`, within the block of both arrays.
    for (int64_t j = count; j < kFp8ScaleBlock && j % static_cast<int64_t>(hn::Lanes(d)) != 0; ++j)
      values[j] = 0;
    for (int64_t j = 0; j < count; j += static_cast<int64_t>(hn::Lanes(d))) {
      hn::StoreU(hn::Mul(silu(d, hn::LoadU(d, values + j)), hn::LoadU(d, u + j)), d, values + j);
    }
  };
  quantize_columns(make, begin, end, args.y_scaling, scales_of(args.y_scale, args.y_scaling, t),
                   args.y.at(t).as<uint8_t>());
}

}  // namespace

void silu_mul_part(const SiluMulArgs& args, int64_t t, int64_t begin, int64_t end) {
  if (args.y.dtype == DType::fp8_e4m3) return silu_mul_fp8(args, t, begin, end);
  with_storage(args.gate.dtype, [&](auto type) {
    using T = decltype(type);
    using Element = typename T::Element;
    const hn::ScalableTag<float> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    const auto* gate = args.gate.at(t).template as<const Element>();
    const auto* up = args.up.at(t).template as<const Element>();
    auto* y = args.y.at(t).template as<Element>();
    const auto step = [&](const Element* g, const Element* u, Element* out) {
      store_from_f32(d, T{}, hn::Mul(silu(d, load_as_f32(d, T{}, g)), load_as_f32(d, T{}, u)), out);
    };
    int64_t i = begin;
    for (; i + lanes <= end; i += lanes) step(gate + i, up + i, y + i);
    if (i == end) return;
    // The rest goes through the same instructions, so an element's bits do not depend on its column.
    Element g[hn::MaxLanes(d)] = {}, u[hn::MaxLanes(d)] = {}, out[hn::MaxLanes(d)];
    std::copy(gate + i, gate + end, g);
    std::copy(up + i, up + end, u);
    step(g, u, out);
    std::copy(out, out + (end - i), y + i);
  });
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vivace {

Status silu_mul_cpu(const SiluMulArgs& args, const Stream& stream) {
  constexpr int64_t kChunk =
      1024;  // columns of a task: a microsecond, so that one token uses all threads too
  const auto part = VIVACE_SIMD(silu_mul_part);
  static_assert(kChunk % kFp8ScaleBlock == 0, "a block has one scale and is made by one task");
  const int64_t intermediate = args.gate.shape[1];
  // A scale per row looks at the whole row.
  const bool by_row = args.y.dtype == DType::fp8_e4m3 && args.y_scaling == Fp8Scaling::token;
  const int64_t chunk = by_row ? intermediate : kChunk, chunks = (intermediate + chunk - 1) / chunk;
  cpu::parallel_for(stream.threads, args.gate.shape[0] * chunks, [&](int64_t task, int) {
    const int64_t begin = task % chunks * chunk;
    part(args, task / chunks, begin, std::min(begin + chunk, intermediate));
  });
  return {};
}

}  // namespace vivace
#endif
