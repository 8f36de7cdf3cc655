#pragma once

#include <cstdint>

#include "vivace/decode_schedule.h"

namespace vivace {

/// How a decode step is cut for attention_decode on a GPU with `sms` multiprocessors; window and piece_tiles are the
/// caller's.
///
/// On an H200 a tile of 64 keys takes a CTA 2.5 us in a long unit, and a (request, KV head) unit of one or two tiles 9 us: what
/// starting costs is 9 / 2.5 - 1.5 tiles, about 2. A piece of a long unit starts as dearly, and each piece more adds a
/// dependent load to its merge: a worker gets at least twice that cost in tiles, so that no more than half of its time
/// is starting.
constexpr DecodeScheduleParams gpu_decode_schedule(int64_t heads_kv, int64_t sms) {
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

}  // namespace vivace
