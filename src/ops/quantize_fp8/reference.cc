#include "src/ops/quantize_fp8/quantize.h"
#include "src/ops/quantize_fp8/table.h"

namespace vivace {

Status quantize_fp8_reference(const QuantizeFp8Args& args, const Stream&) {
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    const Tensor x = args.x.at(t);
    const auto value = [&](int64_t i) { return load(x.dtype, x.data, i); };
    quantize_row(value, args.x.shape[1], args.scaling, scales_of(args.scale, args.scaling, t),
                 args.y.at(t).as<uint8_t>());
  }
  return {};
}

}  // namespace vivace
