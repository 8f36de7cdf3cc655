// Attention of a decode step: each worker walks its run of tiles, then the requests that were cut are merged.
//
// Two numbers per key and KV head of width D, g query heads and s query tokens, fp32 cache
//   bytes  8 D          read once for all g s rows of a group
//   flops  4 D g s      g s / 2 flop per byte: memory is the roof up to about 8 rows

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/attention_decode/cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "src/core/workspace.h"
#include "src/cpu/simd.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/attention/tile-inl.h"
#include "src/ops/attention_decode/table.h"
#include "src/ops/decode_schedule/view.h"

#ifndef VIVACE_OPS_ATTENTION_DECODE_PARTIALS_
#define VIVACE_OPS_ATTENTION_DECODE_PARTIALS_
namespace vivace {

/// The workspace: per slot and row of a group the maximum, the sum of weights, and head_dim sums of values.
struct Partials {
  int64_t rows, head_dim;

  explicit Partials(const AttentionDecodeArgs& args)
      : rows(args.max_query_tokens * (args.attention.q.shape[1] / args.attention.k.shape[2])),
        head_dim(args.attention.q.shape[2]) {}
  int64_t floats_per_row() const { return 2 + head_dim; }
  float* at(const AttentionDecodeArgs& args, int64_t slot, int64_t row) const {
    return reinterpret_cast<float*>(first_line(args.workspace)) + (slot * rows + row) * floats_per_row();
  }
};

}  // namespace vivace
#endif

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

namespace {

/// Calls body(first head, heads) for runs of a group's query heads that fit a block with `tokens` tokens.
template <class Body>
HWY_INLINE void for_each_run(int64_t group, int64_t tokens, Body&& body) {
  const int64_t run = std::max<int64_t>(1, kMaxRows / tokens);
  for (int64_t head = 0; head < group; head += run) body(head, std::min(run, group - head));
}

}  // namespace

void attention_decode_piece(const AttentionDecodeArgs& args, const SchedulePiece& piece) {
  const AttentionArgs& a = args.attention;
  const RequestRange range = request_range(a, piece.request);
  const int64_t group = a.q.shape[1] / a.k.shape[2], tile = args.params.tile_tokens;
  const KeySource source(a, piece.request, piece.head_kv);
  const Partials partials(args);
  QueryBlock rows;
  KeyBlock keys;
  for_each_run(group, range.rows, [&](int64_t head, int64_t heads) {
    load_queries(a, range, 0, range.rows, piece.head_kv * group + head, heads, rows);
    attend(source, piece.first_tile * tile, (piece.first_tile + piece.tiles) * tile, rows, keys);
    for (int64_t r = 0; r < rows.rows; ++r) {
      const int64_t token = r / heads, h = head + r % heads;
      const float* sum = rows.sum + r * rows.pitch;
      if (piece.slot < 0) {
        finish(a, range, token, piece.head_kv * group + h, rows.state[r], sum);
        continue;
      }
      float* partial = partials.at(args, piece.slot, token * group + h);
      partial[0] = rows.state[r].maximum;
      partial[1] = rows.state[r].sum;
      std::copy(sum, sum + rows.head_dim, partial + 2);
    }
  });
}

/// Puts the rows of a unit that was cut together, piece by piece.
void attention_decode_merge(const AttentionDecodeArgs& args, const ScheduleSplit& split) {
  const AttentionArgs& a = args.attention;
  const RequestRange range = request_range(a, split.request);
  const int64_t group = a.q.shape[1] / a.k.shape[2], head_dim = a.q.shape[2], pitch = pitch_of(head_dim);
  const Partials partials(args);
  alignas(64) float part[kMaxHeadDim], sum[kMaxHeadDim];
  for (int64_t r = 0; r < range.rows * group; ++r) {
    RowState total;
    std::fill(sum, sum + pitch, 0.0f);
    std::fill(part, part + pitch, 0.0f);
    for (int64_t i = 0; i < split.pieces; ++i) {
      const float* partial = partials.at(args, split.slot(i), r);
      std::copy(partial + 2, partial + 2 + head_dim, part);
      merge(total, sum, {partial[0], partial[1]}, part, pitch);
    }
    finish(a, range, r / group, split.head_kv * group + r % group, total, sum);
  }
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vivace {

int64_t attention_decode_cpu_workspace(const AttentionDecodeArgs& args, const Stream&) {
  const AttentionArgs& a = args.attention;
  const Partials partials(args);
  const int64_t slots =
      max_partial_slots(args.params, a.page_table.shape[0], a.page_table.shape[1] * a.k.shape[1]);
  if (slots == 0) return 0;
  return slots * partials.rows * partials.floats_per_row() * static_cast<int64_t>(sizeof(float)) +
         kWorkspaceSlack;
}

Status attention_decode_cpu(const AttentionDecodeArgs& args, const Stream& stream) {
  const auto run_piece = VIVACE_SIMD(attention_decode_piece);
  const auto merge_split = VIVACE_SIMD(attention_decode_merge);
  const ScheduleView view(args.schedule.as<const int32_t>());
  cpu::parallel_for(stream.threads, view.active_workers(), [&](int64_t worker, int) {
    view.for_each_piece(worker, [&](const SchedulePiece& piece) { run_piece(args, piece); });
  });
  cpu::parallel_for(stream.threads, view.merge_tasks(), [&](int64_t task, int) {
    ScheduleSplit split;
    if (view.split_at(task, split)) merge_split(args, split);
  });
  return {};
}

}  // namespace vivace
#endif
