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

/// For sm90.* on a GPU with `sms` multiprocessors that holds `clusters` clusters of eight at once: `rows` query rows of a unit,
/// keys of `row_bytes` each.
///
/// A worker is a warp or a few, so a CTA averages over its workers, and a start costs about as much as a box of keys: what the
/// worker cannot overlap of looking up its next unit and writing the last one, while its neighbours stream.
constexpr DecodeScheduleParams sm90_decode_schedule(int64_t heads_kv, int64_t rows, int64_t row_bytes,
                                                    int64_t sms, int64_t clusters) {
  using namespace attention_sm90;
  const int cluster_log2 = cluster_log2_of(heads_kv);
  const int64_t ctas =
      cluster_log2 == kMaxClusterLog2 ? clusters << cluster_log2 : sms >> cluster_log2 << cluster_log2;
  return {.heads_kv = heads_kv,
          .tile_tokens = sm90_box_keys(row_bytes),
          .workers = std::max<int64_t>(1, ctas) * workers_per_cta(rows),
          .min_tiles = 1,
          .request_cost = 1};
}

}  // namespace vivace
