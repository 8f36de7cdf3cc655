// Attention of a decode step: each block walks its run of key tiles, then the units that were cut are merged.
//
// Two numbers per key and KV head of width D, for g query heads per KV head and s query tokens, bf16 cache
//   bytes  4 D      read once for all g s rows (2 D in fp8); 64 rows share one read, more rows read again, from the L2
//   flops  4 D g s  g s flops per byte: memory is the roof up to about 100 rows
//
// Persistent blocks, one per worker of the schedule. A block of 64 keys is in flight behind the one that is multiplied.
// Up to 16 rows one warp of four has work in the products, which it does about as fast as memory brings the keys; the
// arithmetic of a row is that of attention_prefill, and splitting keys over the warps would change its order. Partials
// go to the workspace, and a second kernel merges them in the order of their keys.

#include <algorithm>

#include "src/core/workspace.h"
#include "src/ops/attention_decode/cuda.cuh"
#include "src/ops/attention_decode/table.h"

namespace vivace {

namespace {

using namespace attention_mma;

/// Blocks per unit that may have been cut (blockIdx.x) and kWarps of its rows (blockIdx.y), a warp per row.
template <int kParts>
__global__ __launch_bounds__(kThreads) void attention_decode_merge_kernel(
    const __grid_constant__ DecodeParams d) {
  constexpr int kAhead = 16 / kParts * 2;
  const Params& p = d.attention;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  device::wait_for_previous_kernel();
  if (!is_for(d.schedule, d)) return;
  const ScheduleView view(d.schedule);
  const int64_t task = blockIdx.x;
  ScheduleSplit split{};
  if (view.piece_tiles() == 0 && task >= view.active_workers()) return;
  if (!view.split_at(task, split)) return;
  if (split.slot(split.pieces - 1) >= d.slots) return;  // a map for other shapes
  const Request request(p, static_cast<int>(split.request));
  const int rows = min(request.rows, d.max_query_tokens) * p.group;
  device::let_next_kernel_start();
  for (int r = static_cast<int>(blockIdx.y) * kWarps + warp; r < rows;
       r += static_cast<int>(gridDim.y) * kWarps) {
    float maximum = kNoKeys, weight = 0.f, sum[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum[i] = 0.f;
    // Pieces are added in the order of their keys; a few are read ahead, since a request may be cut into hundreds.
    for (int64_t first = 0; first < split.pieces; first += kAhead) {
      const int64_t count = min(int64_t{kAhead}, split.pieces - first);
      float part[kAhead][kParts], part_maximum[kAhead], part_weight[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (a >= count) continue;
        const float* partial = d.partial(split.slot(first + a), r);
        part_maximum[a] = partial[0];
        part_weight[a] = partial[1];
#pragma unroll
        for (int i = 0; i < kParts; ++i)
          part[a][i] = lane + 32 * i < p.head_dim ? partial[2 + lane + 32 * i] : 0.f;
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (a >= count) continue;
        const Blend blend(maximum, weight, part_maximum[a], part_weight[a]);
#pragma unroll
        for (int i = 0; i < kParts; ++i) sum[i] = blend(sum[i], part[a][i]);
        weight = blend(weight, part_weight[a]);
        maximum = blend.maximum;
      }
    }
    const int token = r / p.group, head = static_cast<int>(split.head_kv) * p.group + r % p.group;
    const int64_t row = request.begin + token;
    const bool sees_keys = request.last_key(token) > 0;
    const RowEnd end(p, sees_keys, maximum, weight, head);
    if (p.lse != nullptr && lane == 0) p.lse[row * p.lse_stride[0] + head * p.lse_stride[1]] = end.lse;
    const int64_t at = row * p.output_stride[0] + head * p.output_stride[1];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int column = lane + 32 * i;
      if (column >= p.head_dim) continue;
      const float v = sees_keys ? sum[i] * end.scale : 0.f;
      if (p.output_type == DType::bf16) {
        static_cast<bf16*>(p.output)[at + column] = device::from_float<bf16>(v);
      } else {
        static_cast<float*>(p.output)[at + column] = v;
      }
    }
  }
}

int64_t slot_rows_of(const AttentionDecodeArgs& args) {
  return args.max_query_tokens * (args.attention.q.shape[1] / args.attention.k.shape[2]);
}

int64_t slots_of(const AttentionDecodeArgs& args) {
  const AttentionArgs& a = args.attention;
  return max_partial_slots(args.params, a.page_table.shape[0], a.page_table.shape[1] * a.k.shape[1]);
}

}  // namespace

int64_t attention_decode_cuda_workspace(const AttentionDecodeArgs& args) {
  const int64_t slots = slots_of(args);
  if (slots == 0) return 0;
  return slots * slot_rows_of(args) * (2 + args.attention.q.shape[2]) * static_cast<int64_t>(sizeof(float)) +
         kWorkspaceSlack;
}

Status attention_decode_cuda(const AttentionDecodeArgs& args, const Stream& stream) {
  DecodeParams d{};
  d.attention = params_of(args.attention);
  d.schedule = args.schedule.as<const int32_t>();
  d.tile_tokens = static_cast<int>(args.params.tile_tokens);
  d.workers = static_cast<int>(args.params.workers);
  d.piece_tiles = static_cast<int>(args.params.piece_tiles);
  d.max_query_tokens = static_cast<int>(args.max_query_tokens);
  d.slots = slots_of(args);
  d.slot_rows = slot_rows_of(args);
  if (d.slots > 0) d.partials = reinterpret_cast<float*>(first_line(args.workspace));
  Status status;
  device::with_type<bf16, fp8>(args.attention.k.dtype, [&](auto raw) {
    status = launch_decode<decltype(raw)>(d, args.params.workers, stream);
  });
  if (!status.ok() || d.slots == 0) return status;
  const int64_t units = int64_t{d.attention.requests} * d.attention.heads_kv;
  const int64_t tasks = args.params.piece_tiles > 0 ? units : args.params.workers;
  constexpr int64_t kMostRowBlocks = 16;
  const int64_t row_blocks = std::clamp<int64_t>((d.slot_rows + kWarps - 1) / kWarps, 1, kMostRowBlocks);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(tasks), static_cast<unsigned>(row_blocks)),
                          .block = dim3(kThreads),
                          .overlap_previous = true};
  const int64_t head_dim = d.attention.head_dim;
  const auto kernel = head_dim <= 64    ? attention_decode_merge_kernel<2>
                      : head_dim <= 128 ? attention_decode_merge_kernel<4>
                                        : attention_decode_merge_kernel<8>;
  return launch("attention_decode merge", kernel, shape, stream, d);
}

}  // namespace vivace
