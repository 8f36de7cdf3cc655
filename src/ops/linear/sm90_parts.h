#pragma once

// What the Hopper rows of linear tell their kernels: the parts of a call as one row of tiles. For files that are compiled with CUDA.

#include "src/device/number.h"
#include "vivace/linear.h"

namespace vivace {

/// A matrix whose tiles are `first_tile` and those after it.
struct PartOnGpu {
  const uint8_t* weight;
  const float* scale;
  const void* bias;
  void* y;
  int64_t weight_stride, scale_stride, y_stride;  ///< bytes, then elements
  int n, first_tile;
  DType bias_type, y_type;
};

struct PartsOnGpu {
  PartOnGpu parts[LinearArgs::kMaxParts];
  const uint8_t* x;
  const float* x_scale;
  int64_t x_stride, x_scale_stride;  ///< bytes, then elements; 0: one scale
  int part_count, tokens, k_bytes, tiles;
  bool block_scales;  ///< fp8: a scale per 128 of k
  bool weight_ready;
};

/// The call with tiles of so many outputs of one part.
inline PartsOnGpu parts_on_gpu(const LinearArgs& args, int64_t outputs_of_tile) {
  const int64_t element = info_of(args.x.dtype).block_bytes;
  PartsOnGpu p{.x = args.x.as<const uint8_t>(),
               .x_scale = args.x_scale.as<const float>(),
               .x_stride = args.x.stride[0] * element,
               .x_scale_stride = args.x_scaling == Fp8Scaling::tensor ? 0 : args.x_scale.stride[0],
               .part_count = args.part_count,
               .tokens = static_cast<int>(args.x.shape[0]),
               .k_bytes = static_cast<int>(args.x.shape[1] * element),
               .block_scales = args.x.dtype == DType::fp8_e4m3 && args.x_scaling == Fp8Scaling::block,
               .weight_ready = args.weight_ready};
  for (int i = 0; i < args.part_count; ++i) {
    const LinearPart& part = args.parts[i];
    p.parts[i] = {.weight = part.weight.as<const uint8_t>(),
                  .scale = part.weight_scale.as<const float>(),
                  .bias = part.bias.present() ? part.bias.data : nullptr,
                  .y = part.y.data,
                  .weight_stride = part.weight.stride[0] * element,
                  .scale_stride = p.block_scales ? part.weight_scale.stride[0] : 0,
                  .y_stride = part.y.stride[0],
                  .n = static_cast<int>(part.weight.shape[0]),
                  .first_tile = p.tiles,
                  .bias_type = part.bias.dtype,
                  .y_type = part.y.dtype};
    p.tiles += static_cast<int>((part.weight.shape[0] + outputs_of_tile - 1) / outputs_of_tile);
  }
  return p;
}

/// The part that a tile belongs to.
__device__ __forceinline__ const PartOnGpu& part_of(const PartsOnGpu& p, int tile) {
  int part = 0;
  while (part + 1 < p.part_count && tile >= p.parts[part + 1].first_tile) ++part;
  return p.parts[part];
}

/// y(token, output) of a sum that has its scales.
__device__ __forceinline__ void store_output(const PartOnGpu& part, int token, int output, float sum) {
  if (part.bias != nullptr) sum += device::load_any(part.bias_type, part.bias, output);
  const int64_t to = token * part.y_stride + output;
  if (part.y_type == DType::bf16) {
    static_cast<device::bf16*>(part.y)[to] = device::from_float<device::bf16>(sum);
  } else {
    static_cast<float*>(part.y)[to] = sum;
  }
}

}  // namespace vivace
