// routed experts         tokens sorted by expert on the device, two grouped products, one weighted sum
//
// Two numbers for a token that visits k experts of width I, with hidden size H
//   bytes  3 I H times the weight's size   once per visited expert; and 4 k H for out(t, e) as bf16, written and read
//   flops  6 k I H                         a decode step is bound by the weights, a prompt by the tensor cores
//
// Launches for a block of tokens: an index (a row per pair of token and choice, sorted by expert, stable in tokens); gate
// and up with SwiGLU in the epilogue, reading the token's row of x in place, or from a copy in the order of rows that a launch of its
// own makes where tiles of sm90.wide read it often; for blocks of scales a requantisation; down;
// and the sum of a token's rows in order of choice. The shared expert is one more group of its own. Every pair keeps its
// row until the sum, so neither the order of experts nor the tile changes a bit.

#include <algorithm>

#include "src/core/workspace.h"
#include "src/device/launch.h"
#include "src/device/number.h"
#include "src/device/ptx.h"
#include "src/ops/fused_moe/gpu.h"
#include "src/ops/gemm/sm90_wide.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kThreads = 256, kWarps = kThreads / 32;

// ---- index

/// The sum of `v` over the block, and of the threads before this one in `before`. Two barriers.
template <int kIndexThreads>
__device__ __forceinline__ int block_sum(int v, int& before) {
  constexpr int kIndexWarps = kIndexThreads / 32;
  __shared__ int of_warp[kIndexWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int inclusive = v;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  if (lane == 31) of_warp[warp] = inclusive;
  __syncthreads();
  int all = 0;
  before = inclusive - v;
#pragma unroll
  for (int w = 0; w < kIndexWarps; ++w) {
    if (w < warp) before += of_warp[w];
    all += of_warp[w];
  }
  __syncthreads();
  return all;
}

/// A block per expert: its first row is the number of pairs with a smaller expert, its rows follow the slots' order. A thread looks at
/// kRuns runs of four neighbouring slots together, and remembers which were the expert's.
/// kDense: ids without gaps between tokens, four of which are loaded at once.
template <bool kDense, int kIndexThreads, int kRuns>
__global__ __launch_bounds__(kIndexThreads) void index_kernel(const __grid_constant__ IndexParams p) {
  constexpr int kSlotsOfThread = 4 * kRuns, kSlotsOfWarp = 32 * kSlotsOfThread;
  constexpr int kRound = kIndexThreads * kSlotsOfThread;
  wait_for_previous_kernel();
  const int expert = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto slot_of = [&](int first, int run) {
    return first + warp * kSlotsOfWarp + (run * 32 + lane) * 4;
  };
  // Which of a thread's slots of a round are the expert's, as bits; and how many are of a smaller one.
  const auto look = [&](int first, int& smaller) {
    int ids[kSlotsOfThread];
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int slot = slot_of(first, run);
      if (kDense && slot + 4 <= p.slots) {
        const int4 four = *reinterpret_cast<const int4*>(p.ids + slot);
        ids[4 * run] = four.x, ids[4 * run + 1] = four.y;
        ids[4 * run + 2] = four.z, ids[4 * run + 3] = four.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = slot + i;
          ids[4 * run + i] = at < p.slots ? p.ids[int64_t{at / p.top_k} * p.ids_stride + at % p.top_k] : -1;
        }
      }
    }
    uint32_t matches = 0;
#pragma unroll
    for (int i = 0; i < kSlotsOfThread; ++i) {
      const int id = p.local.of(ids[i]);
      smaller += static_cast<uint32_t>(id) < static_cast<uint32_t>(expert);
      matches |= uint32_t{id == expert} << i;
    }
    return matches;
  };
  int smaller = 0, unused = 0;
  const uint32_t of_first_round = look(0, smaller);
  int equal = __popc(of_first_round);
  for (int first = kRound; first < p.slots; first += kRound) equal += __popc(look(first, smaller));
  const int start = block_sum<kIndexThreads>(smaller, unused), rows = block_sum<kIndexThreads>(equal, unused);
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    p.start[expert] = start;
    p.rows[expert] = rows;
  }
  if (rows == 0) return;
  int row = start;
  for (int first = 0; first < p.slots; first += kRound) {
    const uint32_t matches = first == 0 ? of_first_round : look(first, unused);
    int before;
    const int found = block_sum<kIndexThreads>(__popc(matches), before);
    int place = row + __shfl_sync(0xffffffffu, before, 0);  // of the warp's first
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const uint32_t mine = matches >> (4 * run) & 15;
      if (__ballot_sync(0xffffffffu, mine != 0) == 0) continue;
      int all = 0, at = place;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t some = __ballot_sync(0xffffffffu, mine >> i & 1);
        at += __popc(some & ((1u << lane) - 1));
        all += __popc(some);
      }
      for (uint32_t left = mine; left != 0; left &= left - 1, ++at) {
        const int slot = slot_of(first, run) + __ffs(static_cast<int>(left)) - 1;
        p.token_of_row[at] = slot / p.top_k;
        p.row_of_slot[slot] = at;
      }
      place += all;
    }
    row += found;
  }
}

// ---- rows of x in the order of experts

struct GatherParams {
  const uint8_t* x;
  uint8_t* rows;
  const int32_t *token_of_row, *last_start, *last_rows;
  int64_t x_stride, row_bytes;
};

/// A warp per row, chunks of 16 bytes.
__global__ __launch_bounds__(kThreads) void gather_kernel(const __grid_constant__ GatherParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= *p.last_start + *p.last_rows) return;
  const uint8_t* from = p.x + p.token_of_row[row] * p.x_stride;
  uint8_t* to = p.rows + row * p.row_bytes;
  constexpr int kAhead = 8;
  for (int64_t at = threadIdx.x % 32 * 16; at < p.row_bytes; at += kAhead * 32 * 16) {
    uint4 v[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (at + i * 512 < p.row_bytes) v[i] = *reinterpret_cast<const uint4*>(from + at + i * 512);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (at + i * 512 < p.row_bytes) *reinterpret_cast<uint4*>(to + at + i * 512) = v[i];
  }
}

// ---- weighted sum

struct SumParams {
  const int32_t *ids, *row_of_slot;
  LocalExperts local;
  const float* weights;
  const bf16 *out, *shared;  // null: no expert, no shared expert
  void* y;
  int64_t ids_stride, weights_stride, y_stride, hidden, tokens;
  int32_t top_k, tokens_of_block;
};

constexpr int kSumColumns = 8;  // of a thread: 16 bytes of bf16
constexpr int kSumRows = 4;     // asked for together

/// A block has a few tokens, which look their rows up together. kAligned: y's rows, to 16 bytes.
template <class Y, bool kAligned>
__global__ __launch_bounds__(kThreads) void sum_kernel(const __grid_constant__ SumParams p) {
  extern __shared__ uint8_t memory[];
  // [tokens_of_block, top_k] Where a row of `out` begins, in chunks of a thread's columns; -1: no work.
  int32_t* rows = reinterpret_cast<int32_t*>(memory);
  float* factors = reinterpret_cast<float*>(memory) + p.tokens_of_block * p.top_k;
  wait_for_previous_kernel();
  const int chunks = static_cast<int>(p.hidden / kSumColumns);
  const int64_t first_token = int64_t{blockIdx.x} * p.tokens_of_block;
  const int tokens = static_cast<int>(min(p.tokens - first_token, int64_t{p.tokens_of_block}));
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * p.top_k; i += kThreads) {
    const int64_t token = first_token + i / p.top_k;
    const int j = i % p.top_k;
    const bool work = p.local.of(p.ids[token * p.ids_stride + j]) >= 0;
    rows[i] = work ? p.row_of_slot[token * p.top_k + j] * chunks : -1;
    factors[i] = work ? p.weights[token * p.weights_stride + j] : 0.f;
  }
  __syncthreads();
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kSumColumns;
  if (column >= p.hidden) return;
  using Chunk = Vec<bf16, kSumColumns>;
  const auto* const out = reinterpret_cast<const Chunk*>(p.out + column);
  for (int64_t token = first_token; token < first_token + tokens;
       ++token, rows += p.top_k, factors += p.top_k) {
    float sum[kSumColumns] = {};
    for (int first = 0; first < p.top_k; first += kSumRows) {
      Chunk v[kSumRows];
      float factor[kSumRows];
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) {
        // Without work zeros are added, which changes no sum that began with one.
        const int row = first + i < p.top_k ? rows[first + i] : -1;
        v[i] = Chunk{};
        if (row >= 0) v[i] = out[row];
        factor[i] = row >= 0 ? factors[first + i] : 0.f;
      }
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) {
#pragma unroll
        for (int c = 0; c < kSumColumns; ++c) sum[c] += factor[i] * to_float(v[i].v[c]);
      }
    }
    if (p.shared != nullptr) {
      float v[kSumColumns];
      load_floats(p.shared + token * p.hidden + column, v);
#pragma unroll
      for (int c = 0; c < kSumColumns; ++c) sum[c] += v[c];
    }
    Y* y = static_cast<Y*>(p.y) + token * p.y_stride + column;
    if constexpr (!kAligned) {
#pragma unroll
      for (int c = 0; c < kSumColumns; ++c) y[c] = from_float<Y>(sum[c]);
    } else if constexpr (sizeof(Y) == 4) {
      store_floats(reinterpret_cast<const float(&)[4]>(sum[0]), y);
      store_floats(reinterpret_cast<const float(&)[4]>(sum[4]), y + 4);
    } else {
      // Named: the compiler takes a plain store of these apart.
      __stcg(reinterpret_cast<uint4*>(y), make_uint4(pack<Y>(sum[0], sum[1]), pack<Y>(sum[2], sum[3]),
                                                     pack<Y>(sum[4], sum[5]), pack<Y>(sum[6], sum[7])));
    }
  }
}

// ---- the two products of one set of experts

/// gemm::run or gemm::run_sm90.
using Product = Status (*)(std::string_view name, const gemm::Problem& problem, const Stream& stream);

/// `groups` describes rows, index and groups; the rest is filled in here.
Status run_experts(Product product, const FusedMoeArgs& args, const Tensor& x, const Tensor& x_scale,
                   const Matrices& m, const Scratch::Part& part, const gemm::Problem& groups,
                   const Stream& stream) {
  const int64_t intermediate = m.gate.shape[0], hidden = x.shape[1];
  const bool fp8_values = x.dtype == DType::fp8_e4m3, blocks = fp8_values && has_block_scales(args);
  gemm::Problem up = groups;
  up.type = x.dtype;
  up.block_scales = blocks;
  up.gated = true;
  up.gate = gate_of<float>(args.swiglu);
  up.a = x.data;
  up.a_stride = x.stride[0];
  up.b = m.gate.data;
  up.b_up = m.up.data;
  up.b_stride = m.gate.stride[0];
  up.b_group_stride = m.gate_step;
  up.n = intermediate;
  up.k = hidden;
  up.y = part.hidden;
  up.y_type = fp8_values ? DType::fp8_e4m3 : DType::bf16;
  up.y_stride = part.stride;
  if (fp8_values) {
    up.a_scale = x_scale.as<const float>();
    up.a_scale_stride = blocks ? x_scale.stride[0] : 0;
    up.b_scale = m.gate_scale;
    up.b_up_scale = m.up_scale;
    up.b_scale_stride = m.gate_scale_stride;
    up.b_scale_group_stride = m.gate_scale_step;
    up.y_scale = m.act_scale;
    up.y_scale_group_stride = m.act_scale_step;
  }
  if (blocks) up.n_offset = args.block_offset;
  // Products of many rows that meet many columns are faster where rows lie one after another; `out` is free until the down
  // product.
  constexpr int64_t kManyRows = 64, kManyColumns = 512;
  if (product == gemm::run_sm90 && gemm::sm90_can(up) && up.a_index != nullptr &&
      gemm::alike_rows(up) > kManyRows && up.n >= kManyColumns) {
    const int64_t row_bytes = hidden * info_of(x.dtype).block_bytes;
    GatherParams gather;
    gather.x = x.as<const uint8_t>();
    gather.rows = reinterpret_cast<uint8_t*>(part.out);
    gather.token_of_row = up.a_index;
    gather.last_start = groups.group_start + groups.groups - 1;
    gather.last_rows = groups.group_rows + groups.groups - 1;
    gather.x_stride = x.stride[0] * info_of(x.dtype).block_bytes;
    gather.row_bytes = row_bytes;
    const LaunchShape shape{.grid = dim3(static_cast<unsigned>((up.rows + kWarps - 1) / kWarps)),
                            .block = dim3(kThreads),
                            .overlap_previous = true};
    VIVACE_TRY(launch("fused_moe rows", gather_kernel, shape, stream, gather));
    up.a = part.out;
    up.a_stride = hidden;
    up.a_scale_index = up.a_index;
    up.a_index = nullptr;
  }
  const bool makes_scales = product == gemm::run_sm90 && gemm::sm90_makes_scales(up, stream);
  if (makes_scales) {
    up.y_scales = part.scales;
    up.y_scales_stride = scale_blocks(intermediate);
  } else if (blocks) {
    up.y = part.wide;
    up.y_type = DType::f32;
  }
  VIVACE_TRY(product("fused_moe gate and up", up, stream));

  gemm::Problem down = groups;
  down.type = x.dtype;
  down.block_scales = blocks;
  down.a = part.hidden;
  down.a_stride = part.stride;
  down.a_index = nullptr;
  down.a_scale_index = nullptr;
  down.groups_known = true;  // gate and up needs them
  down.b = m.down.data;
  down.b_stride = m.down.stride[0];
  down.b_group_stride = m.down_step;
  down.n = hidden;
  down.k = intermediate;
  down.y = part.out;
  down.y_type = DType::bf16;
  down.y_stride = hidden;
  if (fp8_values) {
    down.a_scale = m.act_scale;
    down.a_scale_group_stride = m.act_scale_step;
    down.b_scale = m.down_scale;
    down.b_scale_stride = m.down_scale_stride;
    down.b_scale_group_stride = m.down_scale_step;
  }
  if (blocks) {
    const LastRow last = groups.group_start == nullptr ? LastRow{}
                                                       : LastRow{groups.group_start + groups.groups - 1,
                                                                 groups.group_rows + groups.groups - 1};
    if (!makes_scales)
      VIVACE_TRY(requantise(part, groups.rows, intermediate, args.block_offset, last, stream));
    down.a_scale = part.scales;
    down.a_scale_stride = scale_blocks(args.block_offset + intermediate);
    down.a_scale_group_stride = 0;
    down.k_offset = args.block_offset;
  }
  return product("fused_moe down", down, stream);
}

Status run_block(Product product, const FusedMoeArgs& args, int64_t t0, int64_t tokens, const Scratch& s,
                 const Stream& stream) {
  const int64_t experts = expert_count(args), top_k = args.expert_ids.shape[1], hidden = args.x.shape[1];
  const Tensor x = args.x.rows(t0, tokens), ids = args.expert_ids.rows(t0, tokens);
  const bool x_scale_rows = args.x_scale.present() && args.x_scale.rank == 2;
  const Tensor x_scale = x_scale_rows ? args.x_scale.rows(t0, tokens) : args.x_scale;
  // Without an intermediate every expert's output is zero, which no product writes.
  const bool routed = experts > 0 && top_k > 0 && expert_intermediate(args) > 0;
  const bool shared = args.shared.present() && args.shared.gate.shape[0] > 0;
  if (routed) {
    IndexParams index;
    index.ids = ids.as<const int32_t>();
    index.ids_stride = ids.stride[0];
    index.slots = static_cast<int32_t>(tokens * top_k);
    index.top_k = static_cast<int32_t>(top_k);
    index.local = local_experts(args);
    index.start = s.start;
    index.rows = s.rows;
    index.token_of_row = s.token_of_row;
    index.row_of_slot = s.row_of_slot;
    const auto run_index = [&]<int kIndexThreads, int kRuns>() {
      const bool dense = index.ids_stride == top_k && reinterpret_cast<uintptr_t>(index.ids) % 16 == 0;
      const LaunchShape shape{.grid = dim3(static_cast<unsigned>(experts)),
                              .block = dim3(kIndexThreads),
                              .overlap_previous = true};
      return launch(
          "fused_moe index",
          dense ? index_kernel<true, kIndexThreads, kRuns> : index_kernel<false, kIndexThreads, kRuns>, shape,
          stream, index);
    };
    constexpr int kFewSlots = 2048;  // all of them in one round of a small block
    if (index.slots <= kFewSlots) {
      VIVACE_TRY((run_index.template operator()<256, 2>()));
    } else if (product == gemm::run_sm90 && index.slots <= kMostSortedSlots) {
      VIVACE_TRY(sort_sm90(index, stream));
    } else {
      VIVACE_TRY((run_index.template operator()<1024, 8>()));
    }
    gemm::Problem groups;
    groups.a_index = s.token_of_row;
    groups.rows = tokens * top_k;
    groups.group_start = s.start;
    groups.group_rows = s.rows;
    groups.groups = experts;
    groups.rows_of_group = (tokens * top_k + total_experts(args) - 1) / total_experts(args);
    VIVACE_TRY(run_experts(product, args, x, x_scale, routed_matrices(args), s.routed, groups, stream));
  }
  if (shared) {
    gemm::Problem groups;
    groups.rows = tokens;
    VIVACE_TRY(run_experts(product, args, x, x_scale, shared_matrices(args), s.shared, groups, stream));
  }
  const Tensor y = args.y.rows(t0, tokens), weights = args.expert_weights.rows(t0, tokens);
  SumParams sum;
  sum.ids = ids.as<const int32_t>();
  sum.row_of_slot = s.row_of_slot;
  sum.weights = weights.as<const float>();
  sum.out = s.routed.out;
  sum.shared = shared ? s.shared.out : nullptr;
  sum.y = y.data;
  sum.ids_stride = ids.stride[0];
  sum.weights_stride = weights.stride[0];
  sum.y_stride = y.stride[0];
  sum.hidden = hidden;
  sum.local = local_experts(args);
  sum.top_k = routed ? static_cast<int32_t>(top_k) : 0;
  const bool aligned = alignment_of(y) % 16 == 0;
  sum.tokens = tokens;
  constexpr int64_t kManyTokens = 2048, kFewChoices = 64;
  sum.tokens_of_block = tokens >= kManyTokens && sum.top_k <= kFewChoices ? 4 : 1;
  const int64_t columns = kThreads * kSumColumns;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>((tokens + sum.tokens_of_block - 1) / sum.tokens_of_block),
                   static_cast<unsigned>((hidden + columns - 1) / columns)),
      .block = dim3(kThreads),
      .smem_bytes = sum.tokens_of_block * sum.top_k * 8,
      .overlap_previous = true};
  const auto kernel = y.dtype == DType::f32 ? (aligned ? sum_kernel<float, true> : sum_kernel<float, false>)
                                            : (aligned ? sum_kernel<bf16, true> : sum_kernel<bf16, false>);
  return launch("fused_moe sum", kernel, shape, stream, sum);
}

Status run_blocks(Product product, const FusedMoeArgs& args, const Stream& stream) {
  const Scratch scratch(args, first_line(args.workspace));
  const int64_t tokens = args.x.shape[0];
  for (int64_t t = 0; t < tokens; t += scratch.block_tokens) {
    VIVACE_TRY(run_block(product, args, t, std::min(scratch.block_tokens, tokens - t), scratch, stream));
  }
  return {};
}

}  // namespace

Status fused_moe_cuda(const FusedMoeArgs& args, const Stream& stream) {
  return run_blocks(gemm::run, args, stream);
}

Status fused_moe_sm90_wide(const FusedMoeArgs& args, const Stream& stream) {
  return run_blocks(gemm::run_sm90, args, stream);
}

}  // namespace vivace
