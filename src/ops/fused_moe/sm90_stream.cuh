#pragma once

// A warp's stream of weights: a ring of stages of its own, filled ahead across its items, and the products of a stage.
//
// An item is a few blocks of 16 rows of an expert's weights times a block of rows of activations, over all of k. Weights lie
// along M of m16n8k16, so a few activations waste nothing, and no warp waits for another. A stage is 128 bytes of k. fp8 is
// widened to f16, which is exact. Sums run over k in ascending steps of 16 (with block scales: from zero in every 128), as in
// src/ops/gemm: the bits are those of cuda.grouped.

#include <type_traits>

#include "src/ops/fused_moe/sm90_index.cuh"
#include "src/ops/gemm/tile.h"

namespace vivace::moe_sm90 {

using device::bf16;
using device::fp8;
using gemm::kRowBytes, gemm::kChunkBytes, gemm::kChunks, gemm::kSlices;

template <class E_, bool kBlockScales_, int kMBlocks_, int kNBlocks_, int kStages_>
struct Shape {
  using E = E_;
  static constexpr bool kBlockScales = kBlockScales_;
  static constexpr int kMBlocks = kMBlocks_, kNBlocks = kNBlocks_, kStages = kStages_;
  static constexpr int kWeightRows = 16 * kMBlocks, kRows = 8 * kNBlocks;
  static constexpr int kStageBytes = (kWeightRows + kRows) * kRowBytes;
  // Behind the stages their scales: of the rows of activations if k has blocks, of the weights, and act_scale.
  static constexpr int kRowScales = kBlockScales ? kRows : 0, kScales = sizeof(E) == 1 ? kRowScales + 4 : 0;
  static constexpr int kRingBytes = (kStages * (kStageBytes + kScales * 4) + 127) / 128 * 128;
  static constexpr int kCtasPerSm = kMBlocks == 1 ? 2 : 1;  // that registers leave room for
  static_assert(kRows <= 32, "a lane brings the scale of a row");
};

template <class S>
using Accumulators = float[S::kMBlocks][S::kNBlocks][4];

/// What a warp multiplies next: rows of an expert's weights that become columns of the result from `column` on, by `block`.
struct Item {
  Block block;
  int column;
};

/// An item's weights. In a block of 16 rows the upper 8 and the lower 8 may come from two matrices. Scales are those of the upper
/// and of the lower, for block 0 of k or for all of it, and act_scale where k has no blocks.
struct Weights {
  const uint8_t *upper, *lower;    // first rows of the first block
  int64_t row_bytes, block_bytes;  // from a row, from a block of 16, to the next
  const float* scales[3];
  int blocks;             // of 16 rows that are there
  int k_bytes, k_offset;  // k and where it starts in a stage

  /// At least one, of zeros where there is no k.
  __device__ __forceinline__ int stages() const {
    return max(1, (k_bytes + k_offset + kRowBytes - 1) / kRowBytes);
  }
};

template <class S>
__device__ __forceinline__ float* scales_of(uint8_t* ring, int slot) {
  return reinterpret_cast<float*>(ring + S::kStages * S::kStageBytes) + slot * S::kScales;
}

/// Fills a warp's stages, in the order in which they are used.
template <class S, class Phase>
class Filler {
 public:
  __device__ __forceinline__ Filler(const Phase& phase, uint8_t* ring, int items)
      : phase_(phase), ring_(ring), items_(items) {
    begin_item();
  }
  __device__ __forceinline__ void next() {
    if (++slot_ == S::kStages) slot_ = 0;
    if (item_ >= items_ || ++stage_ < stages_) return;
    stage_ = 0;
    ++item_;
    begin_item();
  }
  __device__ __forceinline__ void fill_weights() {
    uint8_t* const to = ring_ + slot_ * S::kStageBytes;
    const int k = stage_ * kRowBytes + k_;
    const bool live = item_ < items_, inside = live && k >= 0 && k < k_bytes_;
#pragma unroll
    for (int i = 0; i < 4 * S::kMBlocks; ++i) {
      const uint8_t* from = (i % 4 < 2 ? upper_ : lower_) + i / 4 * block_bytes_ + i % 2 * 4 * row_bytes_;
      device::copy_16_async(to + place(i), from + (inside ? k : 0),
                            inside && (S::kMBlocks == 1 || i / 4 < blocks_));
    }
    if constexpr (S::kScales > 0) {
      const int lane = threadIdx.x % 32;
      if (lane < (S::kBlockScales ? 2 : 3))
        device::copy_4_async(scales() + S::kRowScales + lane, scale_ + (S::kBlockScales ? stage_ : 0), live);
    }
  }
  __device__ __forceinline__ void fill_rows() {
    uint8_t* const to = ring_ + slot_ * S::kStageBytes;
    const int k = stage_ * kRowBytes + k_, lane = threadIdx.x % 32;
    const bool live = item_ < items_, inside = live && k >= 0 && k < k_bytes_;
#pragma unroll
    for (int i = 0; i < 2 * S::kNBlocks; ++i) {
      if (live && lane / kChunks + 4 * i < rows_)
        device::copy_16_async(to + S::kWeightRows * kRowBytes + place(i), row_[i] + (inside ? k : 0), inside);
    }
    if constexpr (S::kBlockScales) {
      if (live && lane < rows_) device::copy_4_async(scales() + lane, row_scale_ + stage_);
    }
  }

 private:
  __device__ __forceinline__ float* scales() const {
    return scales_of<S>(ring_, slot_);
  }
  /// Where this lane's chunk of row lane / 8 + 4 i lies in a stage.
  __device__ __forceinline__ static int place(int i) {
    const int lane = threadIdx.x % 32, row = lane / kChunks + i % 2 * 4;
    return device::swizzled<kRowBytes>(row, lane % kChunks) + i / 2 * 8 * kRowBytes;
  }
  __device__ __forceinline__ void begin_item() {
    if (item_ >= items_) return;
    const int lane = threadIdx.x % 32, chunk = lane % kChunks * kChunkBytes;
    const Item item = phase_.item(item_);
    const Weights w = phase_.weights(item);
    upper_ = w.upper + lane / kChunks * w.row_bytes;
    lower_ = w.lower + lane / kChunks * w.row_bytes;
    row_bytes_ = w.row_bytes, block_bytes_ = w.block_bytes, blocks_ = w.blocks;
    k_ = chunk - w.k_offset, k_bytes_ = w.k_bytes, stages_ = w.stages(), rows_ = item.block.rows;
    const auto slot_of = [&](int row) { return phase_.index.slots[item.block.first + min(row, rows_ - 1)]; };
#pragma unroll
    for (int i = 0; i < 2 * S::kNBlocks; ++i) row_[i] = phase_.row(item, slot_of(lane / kChunks + 4 * i));
    if constexpr (S::kScales > 0) scale_ = lane == 0 ? w.scales[0] : lane == 1 ? w.scales[1] : w.scales[2];
    if constexpr (S::kBlockScales) row_scale_ = phase_.row_scales(item, slot_of(lane));
  }

  const Phase& phase_;
  uint8_t* ring_;
  int items_, item_ = 0, stage_ = 0, stages_ = 0, slot_ = 0;
  const uint8_t *upper_ = nullptr, *lower_ = nullptr, *row_[2 * S::kNBlocks];
  const float *scale_ = nullptr, *row_scale_ = nullptr;
  int64_t row_bytes_ = 0, block_bytes_ = 0;
  int blocks_ = 0, rows_ = 0, k_ = 0, k_bytes_ = 0;
};

/// What a stage's products are multiplied with.
template <class S>
struct Scales {
  float of_weights[3];  // as Weights::scales
  float of_rows[S::kNBlocks][2];

  /// Adds a block of k to the totals and begins the next.
  __device__ __forceinline__ void add_block(Accumulators<S>& acc, Accumulators<S>& total) const {
#pragma unroll
    for (int i = 0; i < S::kMBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < S::kNBlocks; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          total[i][j][v] = fmaf(acc[i][j][v], of_rows[j][v % 2] * of_weights[v / 2], total[i][j][v]);
          acc[i][j][v] = 0.f;
        }
      }
    }
  }
};

/// A stage as operands of products, 16 of k a step.
template <class S>
struct Operands {
  static constexpr int kSteps = kRowBytes / 16 / static_cast<int>(sizeof(typename S::E));
  uint32_t weights[kSteps][S::kMBlocks][4], rows[kSteps][S::kNBlocks][2];

  __device__ __forceinline__ void multiply(int row_blocks, Accumulators<S>& acc) const {
    using Narrow = std::conditional_t<sizeof(typename S::E) == 2, bf16, device::f16>;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < S::kNBlocks; ++j) {
        if (j > 0 && j >= row_blocks) break;
#pragma unroll
        for (int i = 0; i < S::kMBlocks; ++i)
          device::mma_16x8x16<Narrow>(acc[i][j], weights[step][i], rows[step][j]);
      }
    }
  }
};

/// A stage's bytes in registers: as soon as they are there, the stage is filled anew.
template <class S>
struct StageBytes {
  uint32_t weights[S::kMBlocks][kSlices][4], rows[S::kNBlocks][2][4];
  Scales<S> scales;

  __device__ __forceinline__ void load(uint8_t* ring, int slot) {
    const uint8_t* const stage = ring + slot * S::kStageBytes;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < S::kMBlocks; ++i) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        device::load_matrices(weights[i][slice],
                              stage + device::swizzled<kRowBytes>(16 * i + lane % 16, 2 * slice + lane / 16));
      }
    }
#pragma unroll
    for (int j = 0; j < S::kNBlocks; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        device::load_matrices(rows[j][half],
                              stage + S::kWeightRows * kRowBytes +
                                  device::swizzled<kRowBytes>(8 * j + lane % 8, 4 * half + lane / 8));
      }
    }
    if constexpr (S::kScales > 0) {
      const float* const from = scales_of<S>(ring, slot);
#pragma unroll
      for (int i = 0; i < (S::kBlockScales ? 2 : 3); ++i) scales.of_weights[i] = from[S::kRowScales + i];
#pragma unroll
      for (int j = 0; j < S::kNBlocks; ++j) {
        if constexpr (S::kBlockScales)
          scales.of_rows[j][0] = from[8 * j + lane % 4 * 2],
          scales.of_rows[j][1] = from[8 * j + lane % 4 * 2 + 1];
      }
    }
  }

  /// fp8 widened to f16. The same order of k within 16 in both operands, whichever it is.
  __device__ __forceinline__ void widen(Operands<S>& to) const {
#pragma unroll
    for (int step = 0; step < Operands<S>::kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < S::kMBlocks; ++i) {
        uint32_t(&w)[4] = to.weights[step][i];
        if constexpr (sizeof(typename S::E) == 2) {
          w[0] = weights[i][step][0], w[1] = weights[i][step][1], w[2] = weights[i][step][2],
          w[3] = weights[i][step][3];
        } else {
          const uint32_t(&raw)[4] = weights[i][step / 2];
          gemm::fp8_to_f16(raw[step % 2 * 2], w[0], w[2]);      // the upper 8 rows
          gemm::fp8_to_f16(raw[step % 2 * 2 + 1], w[1], w[3]);  // the lower
        }
      }
#pragma unroll
      for (int j = 0; j < S::kNBlocks; ++j) {
        uint32_t(&r)[2] = to.rows[step][j];
        if constexpr (sizeof(typename S::E) == 2) {
          r[0] = rows[j][step / 2][step % 2 * 2], r[1] = rows[j][step / 2][step % 2 * 2 + 1];
        } else {
          gemm::fp8_to_f16(rows[j][step / 4][step % 4], r[0], r[1]);
        }
      }
    }
  }
};

/// Works through a warp's items: phase.finish(item, scales, sums) for each. With kWeightsFirst the rows of activations, and they
/// alone, are what the kernel before this one writes: the wait for it is in here, behind the first copies of weights.
template <class S, class Phase>
__device__ __forceinline__ void run_items(const Phase& phase, uint8_t* ring, int items) {
  Filler<S, Phase> filler(phase, ring, items);
  if constexpr (Phase::kWeightsFirst) {
    Filler<S, Phase> second = filler;
#pragma unroll 1
    for (int s = 0; s < S::kStages; ++s, filler.next()) filler.fill_weights();
    device::wait_for_previous_kernel();
#pragma unroll 1
    for (int s = 0; s < S::kStages; ++s, second.next()) second.fill_rows();
    device::commit_copies();
    device::wait_for_copies<0>();
  } else {
#pragma unroll 1
    for (int s = 0; s < S::kStages; ++s, filler.next()) {
      filler.fill_weights();
      filler.fill_rows();
      device::commit_copies();
    }
  }
  int slot = 0;
  StageBytes<S> bytes;
  const auto load_stage = [&] {
    device::wait_for_copies<S::kStages - 1>();
    __syncwarp();
    bytes.load(ring, slot);
    if (++slot == S::kStages) slot = 0;
    __syncwarp();
    filler.fill_weights();
    filler.fill_rows();
    device::commit_copies();
  };
  // With one chain of products nothing else hides the next stage's loads. What is loaded past the end is not used.
  constexpr bool kAhead = S::kMBlocks * S::kNBlocks == 1;
  if constexpr (kAhead) {
    load_stage();
    filler.next();
  }
#pragma unroll 1
  for (int i = 0; i < items; ++i) {
    const Item item = phase.item(i);
    const int stages = phase.weights(item).stages(), row_blocks = (item.block.rows + 7) / 8;
    Accumulators<S> acc = {}, total = {};  // total: of blocks of k times their scales
    Scales<S> scales;
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      if constexpr (!kAhead) load_stage();
      Operands<S> operands;
      bytes.widen(operands);
      scales = bytes.scales;
      if constexpr (kAhead) load_stage();
      operands.multiply(row_blocks, acc);
      if constexpr (S::kBlockScales) scales.add_block(acc, total);
      filler.next();
    }
    phase.finish(item, scales.of_weights, S::kBlockScales ? total : acc);
  }
}

}  // namespace vivace::moe_sm90
