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
#include <cfloat>

#include "src/device/runtime.h"
#include "src/ops/attention/cache_map.h"
#include "src/ops/attention_prefill/table.h"

namespace vivace {

namespace {

using namespace prefill_sm90;

/// Queries of one KV head, panel by panel: heads of a token are neighbours, then come tokens.
Status make_query_map(const Tensor& q, int64_t group, int64_t tokens, CUtensorMap& map) {
  const auto stride = [&](int dimension) {  // that of a single element may be anything
    return static_cast<uint64_t>(q.shape[dimension] == 1 ? 16 : q.stride[dimension] * 2);
  };
  return device::make_tensor_map(
      {.data = q.data,
       .extent = {128, static_cast<uint64_t>(q.shape[1]), static_cast<uint64_t>(q.shape[0]),
                  static_cast<uint64_t>(q.shape[2] / 64), 1},
       .stride = {stride(1), stride(0), 128, 16},
       .box = {128, static_cast<uint32_t>(group), static_cast<uint32_t>(tokens), 1, 1}},
      map);
}

}  // namespace

Status attention_prefill_sm90(const AttentionPrefillArgs& args, const Stream& stream) {
  const AttentionArgs& a = args.attention;
  if (a.q.shape[0] == 0 || a.page_table.shape[0] == 0) return {};
  VIVACE_TRY_ASSIGN(const device::DeviceInfo* info, device::device_info(stream.ordinal));
  Sm90Params p{};
  p.attention = params_of(a);
  p.attention.factor = std::max(p.attention.factor, FLT_MIN);  // times -infinity, it stays that
  const int64_t group = p.attention.group, tokens = a.q.shape[0], page = a.k.shape[1];
  p.most_tokens =
      static_cast<int>(args.max_query_tokens > 0 ? std::min(args.max_query_tokens, tokens) : tokens);
  const auto call = [&]<int kHead>() -> Status {
    using T = Shape<kHead>;
    p.tile_tokens = static_cast<int>(T::kRows / group);
    const int64_t copy_tokens = std::min<int64_t>(page, T::kKeys);
    p.page_log2 = std::countr_zero(static_cast<uint64_t>(page));
    p.copy_log2 = std::countr_zero(static_cast<uint64_t>(copy_tokens));
    VIVACE_TRY(make_query_map(a.q, group, p.tile_tokens, p.q));
    VIVACE_TRY(make_cache_map(a.k, copy_tokens, 1, p.k));
    VIVACE_TRY(make_cache_map(a.v, copy_tokens, 1, p.v));
    // Every request may end in a tile of its own.
    const int64_t requests = p.attention.requests,
                  of_request = (p.most_tokens + p.tile_tokens - 1) / p.tile_tokens;
    const int64_t tiles =
        std::min(tokens / p.tile_tokens + requests, of_request * requests) * p.attention.heads_kv;
    return launch_prefill<T>(p, tiles, info->sms, stream);
  };
  switch (a.q.shape[2]) {
    case 64:
      return call.operator()<64>();
    case 128:
      return call.operator()<128>();
    default:
      return call.operator()<256>();
  }
}

}  // namespace vivace
