#pragma once

// Which outputs of tokens an expert works on, found by every CTA for itself: a few hundred ids cost less than a launch. Every
// instruction here is run once and in sight of the clock, so loops stay loops.
//
// Slot t * top_k + j is choice j of token t; slots from tokens * top_k on are the shared expert's, one a token. Slots of an
// expert stand in ascending order, so that all CTAs of all kernels cut them into the same blocks.

#include "src/device/reduce.h"
#include "src/ops/fused_moe/sm90_params.h"

namespace vivace::moe_sm90 {

/// Rows of activations that meet an expert's weights together: places [first, first + rows) of the list of slots.
struct Block {
  uint16_t expert, first, rows;  // expert == Params::experts: the shared one
};

struct Index {
  Block* blocks;    // routed ones by expert, then the shared expert's
  uint16_t* slots;  // sorted by expert
  int routed_blocks, all_blocks;

  /// Shared memory of an index whose blocks have up to `rows` rows.
  static __host__ __device__ int blocks_at_most(const Params& p, int rows) {
    const int whole = p.pairs / rows + p.experts;
    return (p.pairs < whole ? p.pairs : whole) + (p.shared_slots + rows - 1) / rows;
  }
  static __host__ __device__ int bytes(const Params& p, int rows) {
    const int blocks = blocks_at_most(p, rows) * static_cast<int>(sizeof(Block));
    return (blocks + (p.pairs + p.shared_slots) * 2 + 15) / 16 * 16;
  }
};

inline constexpr int kRounds = (kMaxSlots + kThreads - 1) / kThreads;  // of all threads over the slots

/// Scratch of build_index: how many slots of an expert each warp has, then where they go; and of each slot the expert and its
/// place among those of the warp.
struct IndexScratch {
  uint4 counts[kMaxExperts];         // eight numbers of 16 bits
  uint32_t ids[kRounds * kThreads];  // id | place << 16
  uint32_t of_warp[kWarps];
};
static_assert(kWarps == 8);

/// An index in `memory`, which takes bytes(). All threads call it.
template <int kRows>
__device__ __forceinline__ Index build_index(const Params& p, uint8_t* memory, IndexScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  Block* const blocks = reinterpret_cast<Block*>(memory);
  uint16_t* const slots = reinterpret_cast<uint16_t*>(blocks + Index::blocks_at_most(p, kRows));
  auto* const own = reinterpret_cast<uint16_t*>(scratch.counts) + warp;  // of expert e: own[e * kWarps]

  // A warp has neighbouring slots. All ids are asked for before the first is looked at.
  const int rounds = (p.pairs + kThreads - 1) / kThreads, first_slot = warp * rounds * 32 + lane;
  int ids[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int slot = first_slot + i * 32;
    ids[i] = i < rounds && slot < p.pairs ? id_of(p, slot) : -1;
  }
#pragma unroll 1
  for (int e = thread; e < p.experts; e += kThreads) scratch.counts[e] = uint4{};
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (i < rounds) scratch.ids[first_slot + i * 32] = static_cast<uint32_t>(ids[i]);
  }
  __syncthreads();
#pragma unroll 1
  for (int slot = first_slot; slot - lane < min(p.pairs, first_slot - lane + rounds * 32); slot += 32) {
    const int id = static_cast<int>(scratch.ids[slot]);
    const uint32_t peers = __match_any_sync(device::kAllLanes, id);
    const int leader = __ffs(static_cast<int>(peers)) - 1;
    int before = 0;
    if (lane == leader && id >= 0) {
      before = own[id * kWarps];
      own[id * kWarps] = static_cast<uint16_t>(before + __popc(peers));
    }
    before = __shfl_sync(device::kAllLanes, before, leader) + __popc(peers & ((1u << lane) - 1));
    if (id >= 0) scratch.ids[slot] = static_cast<uint32_t>(id | before << 16);
    __syncwarp();
  }
  __syncthreads();

  // A thread has an expert: how many rows and blocks (16 bits each) it and those before it have.
  uint32_t done = 0;
#pragma unroll 1
  for (int first = 0; first < p.experts; first += kThreads) {
    const int expert = first + thread;
    uint32_t starts[4] = {};  // of the eight warps
    int rows = 0;
    if (expert < p.experts) {
      const uint4 counts = scratch.counts[expert];
      const uint32_t pairs[4] = {counts.x, counts.y, counts.z, counts.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int low = static_cast<int>(pairs[w] & 0xffff), high = static_cast<int>(pairs[w] >> 16);
        starts[w] = static_cast<uint32_t>(rows | (rows + low) << 16);
        rows += low + high;
      }
    }
    const uint32_t mine = static_cast<uint32_t>(rows | (rows + kRows - 1) / kRows << 16);
    uint32_t inclusive = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t below = __shfl_up_sync(device::kAllLanes, inclusive, step);
      if (lane >= step) inclusive += below;
    }
    if (lane == 31) scratch.of_warp[warp] = inclusive;
    __syncthreads();
    uint32_t before = done + inclusive - mine;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const uint32_t of_warp = scratch.of_warp[w];
      if (w < warp) before += of_warp;
      done += of_warp;
    }
    const int row = static_cast<int>(before & 0xffff);
    if (rows > 0) {
      const uint32_t both = static_cast<uint32_t>(row | row << 16);
      scratch.counts[expert] =
          make_uint4(starts[0] + both, starts[1] + both, starts[2] + both, starts[3] + both);
      Block* block = blocks + (before >> 16);
#pragma unroll 1
      for (int at = 0; at < rows; at += kRows) {
        *block++ = {static_cast<uint16_t>(expert), static_cast<uint16_t>(row + at),
                    static_cast<uint16_t>(min(kRows, rows - at))};
      }
    }
    __syncthreads();
  }
  const int routed_rows = static_cast<int>(done & 0xffff), routed_blocks = static_cast<int>(done >> 16);
  const int all_blocks = routed_blocks + (p.shared_slots + kRows - 1) / kRows;
#pragma unroll 1
  for (int i = thread; i < p.shared_slots; i += kThreads) {
    slots[routed_rows + i] = static_cast<uint16_t>(p.pairs + i);
    if (i % kRows == 0) {
      blocks[routed_blocks + i / kRows] = {static_cast<uint16_t>(p.experts),
                                           static_cast<uint16_t>(routed_rows + i),
                                           static_cast<uint16_t>(min(kRows, p.shared_slots - i))};
    }
  }
#pragma unroll 1
  for (int slot = first_slot; slot < min(p.pairs, first_slot - lane + rounds * 32); slot += 32) {
    const uint32_t id = scratch.ids[slot];
    if (static_cast<int>(id) >= 0)
      slots[own[(id & 0xffff) * kWarps] + (id >> 16)] = static_cast<uint16_t>(slot);
  }
  __syncthreads();
  return {blocks, slots, routed_blocks, all_blocks};
}

}  // namespace vivace::moe_sm90
