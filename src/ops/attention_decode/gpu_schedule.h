#pragma once

#include <algorithm>
#include <cstdint>

#include "src/ops/attention_decode/sm90_plan.h"
#include "vivace/decode_schedule.h"

// How a decode step is cut for the GPU rows of attention_decode; window and piece_tiles are the caller's.

namespace vivace {

/// For cuda.mma on a GPU with `sms` multiprocessors.
///
/// On an H200 a tile of 64 keys takes a CTA 2.5 us in a long unit, and a (request, KV head) unit of one or two tiles 9 us: what
/// starting costs is 9 / 2.5 - 1.5 tiles, about 2. A piece of a long unit starts as dearly, and each piece more adds a
/// dependent load to its merge: a worker gets at least twice that cost in tiles, so that no more than half of its time
/// is starting.
constexpr DecodeScheduleParams mma_decode_schedule(int64_t heads_kv, int64_t sms) {
  constexpr int64_t kCtasPerSm = 2;
  constexpr double kTileMicroseconds = 2.5, kShortUnitMicroseconds = 9, kShortUnitTiles = 1.5;
  constexpr auto kStartTiles =
      static_cast<int64_t>(kShortUnitMicroseconds / kTileMicroseconds - kShortUnitTiles + 0.5);
  return {.heads_kv = heads_kv,
          .tile_tokens = 64,
          .workers = sms * kCtasPerSm,
          .min_tiles = 2 * kStartTiles,
          .request_cost = kStartTiles};
}

/// For sm90.* on a GPU with `sms` multiprocessors: `rows` query rows of a unit, keys of `head_dim`
/// elements and `row_bytes` each.
///
/// A worker is a warp or a few, of which an SM has eight. While all of them stream, a tile takes a worker 4 us on an H200, and a
/// start in fp8 nearly as long, in bf16 a third of that: it counts as a tile. What a worker leaves open costs a microsecond to merge, in
/// which it could read 64 keys alone.
constexpr DecodeScheduleParams sm90_decode_schedule(int64_t heads_kv, int64_t rows, int64_t head_dim,
                                                    int64_t row_bytes, int64_t sms) {
  using namespace attention_sm90;
  const int64_t ctas = std::max<int64_t>(1, sms / kClusterCtas) * kClusterCtas * kCtasPerSm;
  return {.heads_kv = heads_kv,
          .tile_tokens = sm90_box_keys(row_bytes),
          .workers = ctas * workers_per_cta(rows_plan(rows, head_dim)),
          .min_tiles = std::max<int64_t>(1, 64 / sm90_box_keys(row_bytes)),
          .request_cost = 1};
}

}  // namespace vivace
