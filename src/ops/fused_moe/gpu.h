#pragma once

// What the GPU rows share: their scratch, the matrices of a set of experts, requantisation. For files that are compiled with
// CUDA.

#include <cuda_bf16.h>

#include "src/ops/fused_moe/table.h"

namespace vivace {

/// The scratch of one block of tokens. Slot s = token * top_k + choice. cuda.grouped makes a row of each slot with work,
/// sorted by expert; sm90.split and sm90.stream use the parts `hidden`, `wide` and `scales` with a row per slot.
struct Scratch {
  int64_t block_tokens, slots;
  int32_t *start, *rows;  // [experts]
  int32_t* token_of_row;  // [slots]
  int32_t* row_of_slot;   // [slots] written for pairs with work alone
  struct Part {
    int64_t stride;      // of `hidden`
    void* hidden;        // [rows, stride] silu(gate) * up as the down product reads it
    float* wide;         // [rows, stride] before requantisation
    float* scales;       // [rows, blocks of the intermediate]
    __nv_bfloat16* out;  // [rows, hidden size]
  } routed, shared;
  int64_t bytes = 0;

  Scratch(const FusedMoeArgs& args, uint8_t* memory);
};

/// Matrices of one set of experts with strides between experts: the stacked ones, or the shared one. Strides count elements.
struct Matrices {
  Tensor gate, up, down;
  int64_t gate_step = 0, down_step = 0;
  const float *gate_scale = nullptr, *up_scale = nullptr, *down_scale = nullptr, *act_scale = nullptr;
  int64_t gate_scale_step = 0, gate_scale_stride = 0, down_scale_step = 0, down_scale_stride = 0,
          act_scale_step = 0;
};
Matrices routed_matrices(const FusedMoeArgs& args);
Matrices shared_matrices(const FusedMoeArgs& args);

/// The device knows how many rows there are: those of the last group end them. Null: as many as the call says.
struct LastRow {
  const int32_t *start = nullptr, *rows = nullptr;
};

/// part.wide in blocks of 128 as fp8 in part.hidden with made scales in part.scales. With `next_starts_early` the next kernel may
/// start as soon as this one's CTAs have an SM, otherwise when the kernel ahead has ended.
Status requantise(const Scratch::Part& part, int64_t rows, int64_t intermediate, int64_t block_offset,
                  const LastRow& last, const Stream& stream, bool next_starts_early = true);
int64_t requantise_ctas(int64_t rows, int64_t blocks);

/// Pairs of token and choice in the order of experts, then of slots.
struct IndexParams {
  const int32_t* ids;
  LocalExperts local;
  int64_t ids_stride;
  int32_t slots, top_k;
  int32_t *start, *rows, *token_of_row, *row_of_slot;
};
/// By one cluster of compute capability 9.0, up to kMostSortedSlots and gemm::kMostGroups experts.
inline constexpr int kMostSortedSlots = 32768;
Status sort_sm90(const IndexParams& index, const Stream& stream);

}  // namespace vivace
