// Causal attention of prompts: tiles of 128 query rows against blocks of 128 keys, by warp-group products.
//
// Two numbers for one query row of a head of width D over L keys, bf16 cache
//   bytes  4 D L / 128   a tile of rows shares one pass over K and V, which the L2 holds
//   flops  4 D L         128 flops per byte of the L2: the tensor cores are the roof, half of it above the diagonal is skipped
//
// An SM's tensor cores take 2,048 cycles for a tile's block at D = 128, its exponentials 1,024: they overlap. See sm90.cuh for the
// kernel; this file is what a call makes of its arguments.

#include "src/ops/attention_prefill/sm90.cuh"

#include <bit>

#include "src/device/runtime.h"
#include "src/ops/attention/cache_map.h"
#include "src/ops/attention_prefill/table.h"

namespace vivace {

namespace {

using namespace prefill_sm90;

/// Panels of at most 128 bytes of a head; heads of a token are neighbours, then come tokens.
Status make_query_map(const Tensor& q, int64_t group, int64_t tokens, CUtensorMap& map) {
  const int64_t element = info_of(q.dtype).block_bytes, row_bytes = q.shape[2] * element;
  const int64_t panel = std::min<int64_t>(128, row_bytes);
  const auto stride = [&](int dimension) {  // that of a single element may be anything
    return static_cast<uint64_t>(q.shape[dimension] == 1 ? 16 : q.stride[dimension] * element);
  };
  const auto extent = [](int64_t n) { return static_cast<uint64_t>(n); };
  const auto box = [](int64_t n) { return static_cast<uint32_t>(n); };
  return device::make_tensor_map(
      {.data = q.data,
       .extent = {extent(panel), extent(q.shape[1]), extent(q.shape[0]), extent(row_bytes / panel), 1},
       .stride = {stride(1), stride(0), extent(panel), 16},
       .box = {box(panel), box(group), box(tokens), 1, 1},
       .swizzle = static_cast<int>(panel)},
      map);
}

}  // namespace

Status attention_prefill_sm90(const AttentionPrefillArgs& args, const Stream& stream) {
  const AttentionArgs& a = args.attention;
  const int64_t tokens = a.q.shape[0], requests = a.page_table.shape[0];
  if (tokens == 0 || requests == 0) return {};
  VIVACE_TRY_ASSIGN(const device::DeviceInfo* info, device::device_info(stream.ordinal));
  Sm90Params p{};
  p.attention = params_of(a);
  const int64_t group = p.attention.group, page = a.k.shape[1];
  const int64_t copy_tokens = std::min<int64_t>(page, prefill_keys(a.q.shape[2]));
  const int64_t most = args.max_query_tokens > 0 ? std::min(args.max_query_tokens, tokens) : tokens;
  p.most_tokens = static_cast<int>(most);
  p.tile_tokens = static_cast<int>(kTileRows / group);
  p.page_log2 = std::countr_zero(static_cast<uint64_t>(page));
  p.copy_log2 = std::countr_zero(static_cast<uint64_t>(copy_tokens));
  VIVACE_TRY(make_query_map(a.q, group, p.tile_tokens, p.q));
  VIVACE_TRY(make_cache_map(a.k, copy_tokens, 1, p.k));
  VIVACE_TRY(make_cache_map(a.v, copy_tokens, 1, p.v));
  // Every request may end in a tile of its own.
  const int64_t tiles =
      std::min(tokens / p.tile_tokens + requests, (most + p.tile_tokens - 1) / p.tile_tokens * requests);
  const int64_t ctas = std::min<int64_t>(tiles * p.attention.heads_kv, info->sms);
  Status status;
  device::with_type<bf16, fp8>(a.k.dtype,
                               [&](auto raw) { status = launch_prefill<decltype(raw)>(p, ctas, stream); });
  return status;
}

}  // namespace vivace
