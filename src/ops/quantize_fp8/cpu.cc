// y = e4m3(x / scale)         fp32 arithmetic, rows over threads
//
// Two numbers for a row of width W in fp32
//   bytes  5 W   read x, write y; the second look of a scale per token at x is in the first-level cache
//   flops  2 W   a division; the conversion is a dozen integer instructions per vector

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/quantize_fp8/cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "src/cpu/simd.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/quantize_fp8/row-inl.h"
#include "src/ops/quantize_fp8/table.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

void quantize_fp8_row(const QuantizeFp8Args& args, int64_t t) {
  const Tensor x = args.x.at(t);
  const auto make = [&](int64_t i, int64_t count, float* values, bool) {
    load_floats(x.dtype, x.data, i, count, values);
  };
  quantize_columns(make, 0, x.shape[0], args.scaling, scales_of(args.scale, args.scaling, t),
                   args.y.at(t).as<uint8_t>());
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vivace {

Status quantize_fp8_cpu(const QuantizeFp8Args& args, const Stream& stream) {
  const auto row = VIVACE_SIMD(quantize_fp8_row);
  cpu::parallel_for(stream.threads, args.x.shape[0], [&](int64_t t, int) { row(args, t); });
  return {};
}

}  // namespace vivace
#endif
