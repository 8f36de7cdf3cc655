#pragma once

// What the kernels of sm90.split and sm90.stream are given. For files that are compiled with CUDA.

#include <cuda_runtime.h>

#include <cstdint>

#include "src/ops/fused_moe/table.h"

namespace vivace::moe_sm90 {

inline constexpr int kWarps = 8, kThreads = 32 * kWarps;

/// The routed experts, or the shared one, and the values between their two products: a row per slot. Strides of matrices and
/// activations are bytes, those of scales and of `hidden` elements.
struct Experts {
  const uint8_t *gate, *up, *down;
  int64_t gate_step, gate_stride, down_step, down_stride;
  const float *gate_scale, *up_scale, *down_scale, *act_scale;
  int64_t gate_scale_step, gate_scale_stride, down_scale_step, down_scale_stride, act_scale_step;
  void* hidden;
  float *wide, *scales;  // of blocks of 128
  int64_t hidden_stride;
  int intermediate, scale_blocks;
};

struct Params {
  const int32_t* ids;
  LocalExperts local;
  gemm::Gate<float> gate;
  const float* weights;
  int64_t ids_stride, weights_stride;
  const uint8_t* x;
  const float* x_scale;
  int64_t x_stride, x_scale_stride;
  void* y;
  int64_t y_stride;
  bool y_is_f32, y_is_aligned;  // rows to 16 bytes
  int tokens, top_k, pairs, experts, hidden, block_offset;
  int shared_slots;           // 0 or one a token
  uint32_t inverse_of_top_k;  // times 2^21, rounded up
  Experts routed, shared;
};

/// The token of a slot below `pairs`. Rounding up adds less than slot / 2^21, which is too little to reach the next token.
__device__ __forceinline__ int token_of_pair(const Params& p, int slot) {
  static_assert(kMaxSlots * kMaxSlots <= 1 << 21);
  return static_cast<int>(static_cast<uint32_t>(slot) * p.inverse_of_top_k >> 21);
}

/// The expert of a slot, -1 without work. Ids are older than the kernel before this one, which may not have ended: they are read
/// past the L1.
__device__ __forceinline__ int id_of(const Params& p, int slot) {
  const int token = token_of_pair(p, slot);
  return p.local.of(__ldcg(p.ids + token * p.ids_stride + (slot - token * p.top_k)));
}

}  // namespace vivace::moe_sm90
