// Two numbers per key and KV head of width D, for g query heads per KV head and s query tokens, bf16 cache
//   bytes  4 D      read once for all g s rows (2 D in fp8), up to 64 rows
//   flops  4 D g s  memory is the roof: 64 rows need 290 of the 560 TFLOP/s that mma.sync has
//
// See sm90.cuh for the kernel; this file is what a call makes of its arguments.

#include "src/ops/attention_decode/sm90.cuh"

#include <bit>

#include "src/core/workspace.h"
#include "src/ops/attention/cache_map.h"
#include "src/ops/attention_decode/table.h"

namespace vivace {

namespace {

using namespace attention_sm90;

/// What follows from shapes alone.
struct Sizes {
  RowsPlan plan;
  int64_t clusters;
  int64_t parked_bytes, partial_bytes, end_bytes;
  int64_t piece_bytes, piece_end_bytes;  ///< of sm90.few

  explicit Sizes(const AttentionDecodeArgs& args)
      : plan(rows_plan(unit_rows(args), args.attention.k.shape[3])) {
    clusters = (ctas_of(args.params.workers, plan) + kClusterCtas - 1) / kClusterCtas;
    const int64_t workers = clusters * kClusterCtas * workers_per_cta(plan);
    set_bytes(workers, clusters, plan.rows(), args.attention.q.shape[2]);
  }
  int64_t bytes() const {
    return std::max(parked_bytes + partial_bytes + end_bytes, piece_bytes + piece_end_bytes);
  }

  /// No call with as many workers and at most these rows and this width has more.
  static int64_t most_bytes(const AttentionDecodeArgs& args) {
    Sizes most = Sizes();
    const int64_t rows = std::min<int64_t>(unit_rows(args), kMostRows), head_dim = args.attention.q.shape[2];
    const int64_t workers = args.params.workers + kClusterCtas * kCtaWarps;  // a grid is whole clusters
    const int64_t each = kClusterCtas * workers_per_cta(rows_plan(rows, head_dim));
    most.set_bytes(workers, workers / each, rows_plan(rows, 1).rows(), std::min<int64_t>(head_dim, 256));
    return most.bytes();
  }

 private:
  Sizes() = default;
  void set_bytes(int64_t workers, int64_t most_clusters, int64_t rows, int64_t head_dim) {
    constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
    parked_bytes = whole_lines(workers * rows * head_dim * kFloat);
    partial_bytes = whole_lines(2 * most_clusters * rows * head_dim * kFloat);
    end_bytes = whole_lines(2 * most_clusters * rows * static_cast<int64_t>(sizeof(float2)));
    const int64_t few_rows = 2 * workers * std::min<int64_t>(rows, kFewRows);
    piece_bytes = whole_lines(few_rows * head_dim * kFloat);
    piece_end_bytes = whole_lines(few_rows * static_cast<int64_t>(sizeof(float2)));
  }
};

}  // namespace

int64_t attention_decode_sm90_workspace(const AttentionDecodeArgs& args) {
  return Sizes::most_bytes(args) + kWorkspaceSlack;
}

int64_t attention_decode_gpu_workspace(const AttentionDecodeArgs& args, const Stream& stream) {
  const int64_t mma = attention_decode_cuda_workspace(args);
  if (stream.compute_capability != 90 || args.params.piece_tiles > 0) return mma;
  return std::max(mma, attention_decode_sm90_workspace(args));
}

namespace {

Status run(const AttentionDecodeArgs& args, bool few, const Stream& stream) {
  const Sizes sizes(args);
  const AttentionArgs& a = args.attention;
  const int64_t row_bytes = a.k.shape[3] * info_of(a.k.dtype).block_bytes, page = a.k.shape[1];
  const int64_t box_keys = sm90_box_keys(row_bytes), copy_tokens = std::min(page, box_keys);
  Sm90Params p{};
  const int64_t panels = copy_tokens < box_keys ? 1 : (row_bytes + 127) / 128;
  VIVACE_TRY(make_cache_map(a.k, copy_tokens, panels, p.k));
  VIVACE_TRY(make_cache_map(a.v, copy_tokens, panels, p.v));
  p.attention = params_of(a);
  p.schedule = args.schedule.as<int32_t>();
  uint8_t* scratch = first_line(args.workspace);
  p.parked = reinterpret_cast<float*>(scratch);
  p.partials = reinterpret_cast<float*>(scratch + sizes.parked_bytes);
  p.partial_ends = reinterpret_cast<float2*>(scratch + sizes.parked_bytes + sizes.partial_bytes);
  p.pieces = reinterpret_cast<float*>(scratch);
  p.piece_ends = reinterpret_cast<float2*>(scratch + sizes.piece_bytes);
  p.workers = static_cast<int>(args.params.workers);
  p.clusters = static_cast<int>(sizes.clusters);
  p.rows = static_cast<int>(unit_rows(args));
  p.max_query_tokens = static_cast<int>(args.max_query_tokens);
  p.group_inverse = (65535 + p.attention.group) / p.attention.group;
  p.team_log2 = sizes.plan.team_log2;
  p.boxes_per_tile = static_cast<int>(args.params.tile_tokens / box_keys);
  p.page_log2 = std::countr_zero(static_cast<uint64_t>(page));
  p.copy_log2 = std::countr_zero(static_cast<uint64_t>(copy_tokens));
  p.old_keys_ready = args.old_keys_ready;
  Status status;
  device::with_type<bf16, fp8>(a.k.dtype,
                               [&](auto raw) { status = launch_decode<decltype(raw)>(p, few, stream); });
  return status;
}

}  // namespace

Status attention_decode_sm90(const AttentionDecodeArgs& args, const Stream& stream) {
  return run(args, false, stream);
}

Status attention_decode_sm90_few(const AttentionDecodeArgs& args, const Stream& stream) {
  return run(args, true, stream);
}

}  // namespace vivace
