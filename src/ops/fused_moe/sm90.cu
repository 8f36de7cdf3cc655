// routed experts of a decode step        weights stream once, a ring a warp; two launches
//
// Two numbers for T tokens that visit A experts of width I, with hidden size H
//   bytes  3 A I H times the weight's size   the roof: 4.4 TB/s
//   flops  6 T k I H                         by mma.sync, which a handful of rows an expert does not fill
//
// gate and up: warps take units of columns of the intermediate, 8 rows of gate above 8 of up, so that SiLU and requantisation
// happen in the lane that has both. down: a CTA has 32 columns of y for all experts, keeps each output of a token in shared
// memory, and sums a token's outputs in order of choice. It starts before gate and up have ended and fills its rings with
// weights meanwhile. Every CTA builds the index of experts by itself. Sums, roundings and their order are those of
// cuda.grouped, so a token has the same bits in both. In sm90.split they are not: four warps share
// k of gate and up, because a few tokens have too few columns for all warps.

#include <algorithm>
#include <type_traits>

#include "src/core/workspace.h"
#include "src/device/launch.h"
#include "src/device/runtime.h"
#include "src/ops/fused_moe/gpu.h"
#include "src/ops/fused_moe/sm90_stream.cuh"

namespace vivace {

namespace {

using namespace moe_sm90;

__device__ __forceinline__ const Experts& experts_of(const Params& p, const Item& item) {
  return item.block.expert < p.experts ? p.routed : p.shared;
}
__device__ __forceinline__ int64_t expert_of(const Params& p, const Item& item) {
  return item.block.expert < p.experts ? item.block.expert : 0;
}
/// Row of a slot in its set's part of the scratch.
__device__ __forceinline__ int64_t row_of(const Params& p, int slot) {
  return slot < p.pairs ? slot : slot - p.pairs;
}

// ---- gate and up

/// kWarpsOfTeam neighbouring warps that share the k of an item, each a run of stages, and add up in the order of k. How k is cut
/// depends on k alone.
template <class S, int kWarpsOfTeam>
struct Team {
  static constexpr int kOfLane = sizeof(Accumulators<S>) / sizeof(float4);
  static constexpr int kSumsBytes = kWarpsOfTeam > 1 ? kThreads* static_cast<int>(sizeof(Accumulators<S>))
                                                     : 0;
  int rank, first_byte, bytes;  // of k, this warp's; without any it multiplies a stage of zeros
  float4* sums;                 // of all warps of the CTA, in shared memory

  __device__ __forceinline__ Team(int k_bytes, uint8_t* memory)
      : rank(static_cast<int>(threadIdx.x) / 32 % kWarpsOfTeam),
        sums(reinterpret_cast<float4*>(memory) + threadIdx.x % 32) {
    const int stages = (k_bytes + kRowBytes - 1) / kRowBytes;
    const int first = stages * rank / kWarpsOfTeam, end = stages * (rank + 1) / kWarpsOfTeam;
    first_byte = first < end ? first * kRowBytes : 0;
    bytes = first < end ? min(k_bytes, end * kRowBytes) - first_byte : 0;
  }
  /// All warps call it. The first then has the team's sums, and true.
  __device__ __forceinline__ bool add_up(Accumulators<S>& sums_of_warp) const {
    if constexpr (kWarpsOfTeam == 1) return true;
    const int warp = threadIdx.x / 32, barrier = 1 + warp / kWarpsOfTeam;
    auto& mine = reinterpret_cast<float4(&)[kOfLane]>(sums_of_warp);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) sums[(warp * kOfLane + i) * 32] = mine[i];
    device::named_barrier(barrier, 32 * kWarpsOfTeam);
    if (rank == 0) {
#pragma unroll
      for (int w = 1; w < kWarpsOfTeam; ++w) {
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          const float4 other = sums[((warp + w) * kOfLane + i) * 32];
          mine[i].x += other.x, mine[i].y += other.y, mine[i].z += other.z, mine[i].w += other.w;
        }
      }
    }
    device::named_barrier(barrier, 32 * kWarpsOfTeam);  // before the next item's sums
    return rank == 0;
  }
};

template <class S, int kWarpsOfTeam>
struct GateUp {
  static constexpr bool kWeightsFirst = false;
  static constexpr int kColumns = 8 * S::kMBlocks;  // of an item
  const Params& p;
  const Index& index;
  int first_item;
  Team<S, kWarpsOfTeam> team;
  float x_scale;  // without blocks

  static __device__ __forceinline__ int items_of(const Params& p, const Index& index) {
    return index.routed_blocks * (p.routed.intermediate / kColumns) +
           (index.all_blocks - index.routed_blocks) * (p.shared.intermediate / kColumns);
  }
  __device__ __forceinline__ Item item(int i) const {
    i += first_item;
    int first_block = 0, units = p.routed.intermediate / kColumns;
    if (const int routed = index.routed_blocks * units; i >= routed) {
      i -= routed;
      first_block = index.routed_blocks;
      units = p.shared.intermediate / kColumns;
    }
    const int block = i / units;
    return {index.blocks[first_block + block], (i - block * units) * kColumns};
  }
  __device__ __forceinline__ Weights weights(const Item& item) const {
    const Experts& e = experts_of(p, item);
    const int64_t expert = expert_of(p, item);
    const int64_t at = expert * e.gate_step + item.column * e.gate_stride + team.first_byte;
    const int64_t scale =
        S::kBlockScales ? expert * e.gate_scale_step +
                              (item.column + p.block_offset) / device::kScaleBlock * e.gate_scale_stride +
                              team.first_byte / kRowBytes
                        : expert * e.gate_scale_step;
    return {.upper = e.gate + at,
            .lower = e.up + at,
            .row_bytes = e.gate_stride,
            .block_bytes = 8 * e.gate_stride,
            .scales = {e.gate_scale + scale, e.up_scale + scale, e.act_scale + expert * e.act_scale_step},
            .blocks = S::kMBlocks,
            .k_bytes = team.bytes,
            .k_offset = 0};
  }
  __device__ __forceinline__ int token_of(int slot) const {
    return slot < p.pairs ? token_of_pair(p, slot) : slot - p.pairs;
  }
  __device__ __forceinline__ const uint8_t* row(const Item&, int slot) const {
    return p.x + token_of(slot) * p.x_stride + team.first_byte;
  }
  __device__ __forceinline__ const float* row_scales(const Item&, int slot) const {
    return p.x_scale + token_of(slot) * p.x_scale_stride + team.first_byte / kRowBytes;
  }

  __device__ __forceinline__ void finish(const Item& item, const float (&scales)[3],
                                         Accumulators<S>& sums) const {
    using E = typename S::E;
    if (!team.add_up(sums)) return;
    const Experts& e = experts_of(p, item);
    const int lane = threadIdx.x % 32, column = item.column + lane / 4;
    constexpr bool kOneScale = sizeof(E) == 1 && !S::kBlockScales;
    const float gate_scale = kOneScale ? x_scale * scales[0] : 1.f,
                up_scale = kOneScale ? x_scale * scales[1] : 1.f;
#pragma unroll
    for (int j = 0; j < S::kNBlocks; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * j + lane % 4 * 2 + c;
        if (row >= item.block.rows) continue;
        const int64_t at = row_of(p, index.slots[item.block.first + row]) * e.hidden_stride + column;
#pragma unroll
        for (int i = 0; i < S::kMBlocks; ++i) {
          float gate = sums[i][j][c], up = sums[i][j][2 + c];
          if constexpr (kOneScale) gate *= gate_scale, up *= up_scale;
          const float value = p.gate(gate, up);
          if constexpr (S::kBlockScales) {
            e.wide[at + 8 * i] = value;
          } else if constexpr (sizeof(E) == 1) {
            static_cast<fp8*>(e.hidden)[at + 8 * i] = device::from_float<fp8>(__fdiv_rn(value, scales[2]));
          } else {
            static_cast<bf16*>(e.hidden)[at + 8 * i] = device::from_float<bf16>(value);
          }
        }
      }
    }
  }
};

/// Where the sums of a CTA's teams lie in the memory of gate and up.
template <class S>
__host__ __device__ int sums_at(const Params& p) {
  return kWarps * S::kRingBytes + Index::bytes(p, S::kRows);
}

/// A CTA an SM. With few rows an expert it leaves half of the SM to the kernel after it, whose rings then fill beside it.
template <class S, int kWarpsOfTeam>
__global__ __launch_bounds__(kThreads, S::kCtasPerSm) void gate_up_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t memory[];
  device::wait_for_previous_kernel();
  // Not before the wait: that ids are there is what the next kernel relies on.
  device::let_next_kernel_start();
  using Phase = GateUp<S, kWarpsOfTeam>;
  const Index index =
      build_index<S::kRows>(p, memory + kWarps * S::kRingBytes, *reinterpret_cast<IndexScratch*>(memory));
  const int warp = threadIdx.x / 32;
  const int64_t items = Phase::items_of(p, index), teams = int64_t{gridDim.x} * (kWarps / kWarpsOfTeam);
  const int64_t of_grid = (int64_t{blockIdx.x} * kWarps + warp) / kWarpsOfTeam;
  const int first = static_cast<int>(items * of_grid / teams),
            end = static_cast<int>(items * (of_grid + 1) / teams);
  const float x_scale = sizeof(typename S::E) == 1 && !S::kBlockScales ? *p.x_scale : 1.f;
  const Team<S, kWarpsOfTeam> team(p.hidden * static_cast<int>(sizeof(typename S::E)),
                                   memory + sums_at<S>(p));
  run_items<S>(Phase{p, index, first, team, x_scale}, memory + warp * S::kRingBytes, end - first);
}

// ---- down and the weighted sum

constexpr int kColumns = 32;  // of y, that a CTA has

template <class S>
struct Down {
  static constexpr bool kWeightsFirst = true;
  static_assert(S::kWeightRows == kColumns);
  const Params& p;
  const Index& index;
  bf16* out;                // [slots][kColumns]
  int column, first_block;  // of y; of this warp

  __device__ __forceinline__ Item item(int i) const {
    return {index.blocks[first_block + i * kWarps], column};
  }
  __device__ __forceinline__ Weights weights(const Item& item) const {
    const Experts& e = experts_of(p, item);
    const int64_t expert = expert_of(p, item);
    const uint8_t* first = e.down + expert * e.down_step + column * e.down_stride;
    const float* scale = e.down_scale + expert * e.down_scale_step +
                         (S::kBlockScales ? column / device::kScaleBlock * e.down_scale_stride : 0);
    return {.upper = first,
            .lower = first + 8 * e.down_stride,
            .row_bytes = e.down_stride,
            .block_bytes = 16 * e.down_stride,
            .scales = {scale, scale, e.act_scale + expert * e.act_scale_step},
            .blocks = min(S::kMBlocks, (p.hidden - column) / 16),
            .k_bytes = e.intermediate * static_cast<int>(sizeof(typename S::E)),
            .k_offset = S::kBlockScales ? p.block_offset : 0};
  }
  __device__ __forceinline__ const uint8_t* row(const Item& item, int slot) const {
    const Experts& e = experts_of(p, item);
    return static_cast<const uint8_t*>(e.hidden) + row_of(p, slot) * e.hidden_stride * sizeof(typename S::E);
  }
  __device__ __forceinline__ const float* row_scales(const Item& item, int slot) const {
    const Experts& e = experts_of(p, item);
    return e.scales + row_of(p, slot) * e.scale_blocks;
  }

  __device__ __forceinline__ void finish(const Item& item, const float (&scales)[3],
                                         Accumulators<S>& sums) const {
    const int lane = threadIdx.x % 32;
    constexpr bool kOneScale = sizeof(typename S::E) == 1 && !S::kBlockScales;
    const float scale = kOneScale ? scales[2] * scales[0] : 1.f;
#pragma unroll
    for (int j = 0; j < S::kNBlocks; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * j + lane % 4 * 2 + c;
        if (row >= item.block.rows) continue;
        bf16* to = out + index.slots[item.block.first + row] * kColumns + lane / 4;
#pragma unroll
        for (int i = 0; i < 2 * S::kMBlocks; ++i) {
          float v = sums[i / 2][j][i % 2 * 2 + c];
          if constexpr (kOneScale) v *= scale;
          to[8 * i] = device::from_float<bf16>(v);
        }
      }
    }
  }
};

/// y of a token's eight columns: its outputs in order of choice, those without work times 0, then the shared expert's.
__device__ __forceinline__ void sum_outputs(const Params& p, const bf16* out, const float* factors, int token,
                                            int column) {
  constexpr int kEight = 8;
  float sum[kEight] = {}, v[kEight];
  for (int slot = token * p.top_k; slot < (token + 1) * p.top_k; ++slot) {
    device::load_floats(out + slot * kColumns + column % kColumns, v);
#pragma unroll
    for (int c = 0; c < kEight; ++c) sum[c] += factors[slot] * v[c];
  }
  if (p.shared_slots > 0) {
    device::load_floats(out + (p.pairs + token) * kColumns + column % kColumns, v);
#pragma unroll
    for (int c = 0; c < kEight; ++c) sum[c] += v[c];
  }
  const auto store = [&](auto* y) {
    using Y = std::remove_pointer_t<decltype(y)>;
    y += token * p.y_stride + column;
    if (!p.y_is_aligned) {
#pragma unroll
      for (int c = 0; c < kEight; ++c) y[c] = device::from_float<Y>(sum[c]);
      return;
    }
    constexpr int kAccess = device::kVec<Y>;
#pragma unroll
    for (int c = 0; c < kEight; c += kAccess)
      device::store_floats(reinterpret_cast<const float(&)[kAccess]>(sum[c]), y + c);
  };
  if (p.y_is_f32) {
    store(static_cast<float*>(p.y));
  } else {
    store(static_cast<bf16*>(p.y));
  }
}

template <class S>
__global__ __launch_bounds__(kThreads, 1) void down_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t memory[];
  bf16* const out = reinterpret_cast<bf16*>(memory + kWarps * S::kRingBytes);
  float* const factors = reinterpret_cast<float*>(out + (p.pairs + p.shared_slots) * kColumns);
#pragma unroll 1
  for (int slot = threadIdx.x; slot < p.pairs; slot += kThreads) {
    const int token = token_of_pair(p, slot);
    const bool work = id_of(p, slot) >= 0;
    factors[slot] = work ? __ldcg(p.weights + token * p.weights_stride + (slot - token * p.top_k)) : 0.f;
    if (work) continue;
#pragma unroll
    for (int c = 0; c < kColumns; c += 8) *reinterpret_cast<uint4*>(out + slot * kColumns + c) = uint4{};
  }
  const Index index = build_index<S::kRows>(p, reinterpret_cast<uint8_t*>(factors + (p.pairs + 3) / 4 * 4),
                                            *reinterpret_cast<IndexScratch*>(memory));

  const int warp = threadIdx.x / 32, first_column = blockIdx.x * kColumns;
  const int items = (max(0, index.all_blocks - warp) + kWarps - 1) / kWarps;
  run_items<S>(Down<S>{p, index, out, first_column, warp}, memory + warp * S::kRingBytes, items);
  // The next kernel is not let in early: where it begins as these CTAs end one by one, two of its own would share an SM
  // and leave others idle.
  __syncthreads();
  for (int i = threadIdx.x; i < p.tokens * (kColumns / 8); i += kThreads) {
    const int y_column = first_column + i % (kColumns / 8) * 8;
    if (y_column < p.hidden) sum_outputs(p, out, factors, i / (kColumns / 8), y_column);
  }
}

// ---- host

Experts experts_from(const Matrices& m, const Scratch::Part& part, int64_t block_offset) {
  const int64_t element = info_of(m.gate.dtype).block_bytes;
  Experts e{};
  e.gate = m.gate.as<const uint8_t>(), e.up = m.up.as<const uint8_t>(), e.down = m.down.as<const uint8_t>();
  e.gate_step = m.gate_step * element, e.gate_stride = m.gate.stride[0] * element;
  e.down_step = m.down_step * element, e.down_stride = m.down.stride[0] * element;
  e.gate_scale = m.gate_scale, e.up_scale = m.up_scale, e.down_scale = m.down_scale,
  e.act_scale = m.act_scale;
  e.gate_scale_step = m.gate_scale_step, e.gate_scale_stride = m.gate_scale_stride;
  e.down_scale_step = m.down_scale_step, e.down_scale_stride = m.down_scale_stride;
  e.act_scale_step = m.act_scale_step;
  e.hidden = part.hidden, e.wide = part.wide, e.scales = part.scales;
  e.hidden_stride = part.stride;
  e.intermediate = static_cast<int>(m.gate.shape[0]);
  e.scale_blocks = static_cast<int>(scale_blocks(block_offset + m.gate.shape[0]));
  return e;
}

/// Without an intermediate every output is zero: then there are no experts.
Params params_of(const FusedMoeArgs& args, const Scratch& scratch) {
  Params p{};
  p.ids = args.expert_ids.as<const int32_t>();
  p.local = local_experts(args);
  p.gate = gate_of<float>(args.swiglu);
  p.weights = args.expert_weights.as<const float>();
  p.ids_stride = args.expert_ids.stride[0], p.weights_stride = args.expert_weights.stride[0];
  p.x = args.x.as<const uint8_t>();
  p.x_stride = args.x.stride[0] * info_of(args.x.dtype).block_bytes;
  p.x_scale = args.x_scale.as<const float>();
  p.x_scale_stride = args.x_scale.rank == 2 ? args.x_scale.stride[0] : 0;
  p.y = args.y.data;
  p.y_stride = args.y.stride[0];
  p.y_is_f32 = args.y.dtype == DType::f32;
  p.y_is_aligned = alignment_of(args.y) % 16 == 0;
  p.tokens = static_cast<int>(args.x.shape[0]);
  p.top_k = static_cast<int>(args.expert_ids.shape[1]);
  p.pairs = p.tokens * p.top_k;
  p.inverse_of_top_k = p.top_k > 0 ? static_cast<uint32_t>(((1 << 21) + p.top_k - 1) / p.top_k) : 0;
  p.hidden = static_cast<int>(args.x.shape[1]);
  p.block_offset = static_cast<int>(args.block_offset);
  if (expert_count(args) > 0 && expert_intermediate(args) > 0) {
    p.experts = p.local.experts;
    p.routed = experts_from(routed_matrices(args), scratch.routed, args.block_offset);
  }
  p.local.experts = p.experts;
  if (args.shared.present() && args.shared.gate.shape[0] > 0) {
    p.shared_slots = p.tokens;
    p.shared = experts_from(shared_matrices(args), scratch.shared, args.block_offset);
  }
  return p;
}

template <class S, int kWarpsOfTeam>
Status run_gate_up(const Params& p, const Stream& stream) {
  VIVACE_TRY_ASSIGN(const device::DeviceInfo* device, device::device_info(stream.ordinal));
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(device->sms)),
                          .block = dim3(kThreads),
                          .smem_bytes = sums_at<S>(p) + Team<S, kWarpsOfTeam>::kSumsBytes,
                          .overlap_previous = true};
  return launch("fused_moe gate and up", gate_up_kernel<S, kWarpsOfTeam>, shape, stream, p);
}

template <class S>
Status run_down(const Params& p, const Stream& stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((p.hidden + kColumns - 1) / kColumns)),
                          .block = dim3(kThreads),
                          .smem_bytes = kWarps * S::kRingBytes +
                                        (p.pairs + p.shared_slots) * kColumns * int64_t{sizeof(bf16)} +
                                        (p.pairs + 3) / 4 * 16 + Index::bytes(p, S::kRows),
                          .overlap_previous = true};
  return launch("fused_moe down", down_kernel<S>, shape, stream, p);
}

template <class E, bool kBlockScales>
Status run(const FusedMoeArgs& args, const Scratch& scratch, bool split, const Stream& stream) {
  const Params p = params_of(args, scratch);
  const bool few = rows_of_expert(args) <= kFewRows;
  const bool routed = p.experts > 0 && p.pairs > 0;
  if (routed || p.shared_slots > 0) {
    using Few = Shape<E, kBlockScales, 1, 1, 4>;
    VIVACE_TRY((!few    ? run_gate_up<Shape<E, kBlockScales, 2, 2, 4>, 1>(p, stream)
                : split ? run_gate_up<Few, 4>(p, stream)
                        : run_gate_up<Few, 1>(p, stream)));
  }
  if constexpr (kBlockScales) {
    VIVACE_TRY_ASSIGN(const device::DeviceInfo* device, device::device_info(stream.ordinal));
    // Beside gate and up for few rows an SM has registers for a CTA of down or for one that quantises. Where the latter are on a part
    // of the SMs, down would crowd on the others: with 2 such CTAs on 132 SMs it does not, nor with 128; with 16 to 96 it does.
    const int64_t ctas = (routed ? requantise_ctas(p.pairs, p.routed.scale_blocks) : 0) +
                         (p.shared_slots > 0 ? requantise_ctas(p.tokens, p.shared.scale_blocks) : 0);
    const bool early = !few || ctas <= device->sms / 16 || ctas >= device->sms * 7 / 8;
    if (routed)
      VIVACE_TRY(
          requantise(scratch.routed, p.pairs, p.routed.intermediate, p.block_offset, {}, stream, early));
    if (p.shared_slots > 0)
      VIVACE_TRY(
          requantise(scratch.shared, p.tokens, p.shared.intermediate, p.block_offset, {}, stream, early));
  }
  return few ? run_down<Shape<E, kBlockScales, 2, 1, 2>>(p, stream)
             : run_down<Shape<E, kBlockScales, 2, 2, 3>>(p, stream);
}

Status run(const FusedMoeArgs& args, bool split, const Stream& stream) {
  const Scratch scratch(args, first_line(args.workspace));
  if (!is_fp8(args)) return run<bf16, false>(args, scratch, split, stream);
  return has_block_scales(args) ? run<fp8, true>(args, scratch, split, stream)
                                : run<fp8, false>(args, scratch, split, stream);
}

}  // namespace

Status fused_moe_sm90_split(const FusedMoeArgs& args, const Stream& stream) {
  return run(args, true, stream);
}

Status fused_moe_sm90_stream(const FusedMoeArgs& args, const Stream& stream) {
  return run(args, false, stream);
}

}  // namespace vivace
