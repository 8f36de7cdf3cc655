#pragma once

// How work, queries, keys and values reach shared memory in the sm90.* kernel: what is fixed when it is compiled, its shared memory,
// the list of tiles, and the warp that copies. sm90_ready.cuh has what is left to do until they can be multiplied.

#include <type_traits>

#include "src/device/number.h"
#include "src/device/ptx.h"
#include "src/device/reduce.h"
#include "src/ops/attention/params.cuh"

namespace vivace::prefill_sm90 {

using namespace attention_cuda;
using device::Barrier;
using device::bf16;
using device::f16;
using device::fp8;
using device::kAllLanes;

constexpr int kTileRows = 128;  ///< of queries
/// Warp groups: two multiply, the last one feeds them.
constexpr int kGroupThreads = 128, kConsumers = 2 * kGroupThreads, kThreads = kConsumers + kGroupThreads;

/// Keys of a block.
constexpr int prefill_keys(int64_t head_dim) {
  return head_dim <= 128 ? 128 : 64;
}

/// What is fixed when a kernel is compiled: elements of Q, K and V, the width of a head, and what follows from them. Boxes of keys
/// and tiles of queries lie in panels of 64 columns, rows of 128 bytes, as tensor maps write them.
template <class Raw_, int kHead_>
struct Shape {
  using Raw = Raw_;
  static constexpr bool kFp8 = std::is_same_v<Raw, fp8>;
  using Element = std::conditional_t<kFp8, f16, bf16>;  ///< that are multiplied; e4m3 is exact in f16
  static constexpr int kHead = kHead_, kRows = kTileRows, kKeys = prefill_keys(kHead);
  static constexpr int kRowBytes = 2 * kHead, kPanels = kRowBytes / 128;
  static constexpr int kQueryPanelBytes = kRows * 128, kPanelBytes = kKeys * 128,
                       kBoxBytes = kKeys * kRowBytes;
  static constexpr int kStages = kHead == 64 ? 4 : 2;
  // As they are stored.
  static constexpr int kRawRowBytes = kHead * static_cast<int>(sizeof(Raw)),
                       kRawBoxBytes = kKeys * kRawRowBytes;
  static constexpr int kRawLineBytes = kRawRowBytes < 128 ? kRawRowBytes : 128,
                       kRawPanels = kRawRowBytes / kRawLineBytes;
  static constexpr int kRawSlots = kFp8 ? 3 : 1;
  static_assert(!kFp8 || (kRawPanels == 1 && kRows == kKeys),
                "queries, keys and values of fp8 take the same slots");
  static constexpr int kHelpers = 2,
                       kHelperKeys = kKeys / kHelpers;  ///< warps that make boxes ready, keys of each
};

struct Sm90Params {
  CUtensorMap q, k, v;
  Params attention;
  int most_tokens;  ///< query tokens of a request
  int tile_tokens;  ///< query tokens of a tile: as many as have their heads of one group in kRows rows
  int page_log2, copy_log2;  ///< tokens of a page, and of one copy of K or V
};

/// Query tokens of one request with the query heads of one KV head: row r is head r % group of token r / group. Blocks of
/// kKeys keys are counted from the request's start.
struct Tile {
  int request;
  int row, tokens;  ///< of q
  int head_kv;      ///< -1: no more tiles
  int base;         ///< keys before the first token
  int first_block, end_block;

  /// Keys [first, last) that token `i` sees.
  __device__ int last_key(int i) const { return max(0, base + i + 1); }
  __device__ int first_key(int i, int window) const { return window > 0 ? max(0, last_key(i) - window) : 0; }
};

/// Of a block of V: the keys, counted from its first, that some row of its tile sees but not all. None where all rows see all.
struct Checked {
  int from, to;
  static constexpr int kEnd = -1;  ///< as `to`: no more blocks
};

/// Where V was not finite, in the keys of one helper: a bit per key, for each column.
template <class T>
struct Marks {
  static_assert(T::kHelperKeys <= 64, "a bit per key");
  unsigned long long nan[T::kHead], plus[T::kHead], minus[T::kHead];
};

/// What a slot of fp8 holds.
struct Item {
  enum Kind : int { queries, keys, values, end } kind;
  Checked checked;  ///< of values
  Tile tile;        ///< of queries
};

template <class T>
struct Shared {
  char q[T::kRows * T::kRowBytes];
  char k[T::kStages][T::kBoxBytes];
  char v[T::kStages][T::kBoxBytes];
  char raw[T::kRawSlots][T::kFp8 ? T::kRawBoxBytes : 16];
  Marks<T> marks[T::kStages][T::kHelpers];
  bool marked[T::kStages][T::kHelpers];
  Tile tile;
  Checked checked[T::kStages];
  Item items[T::kRawSlots];
  Barrier q_full, q_empty;
  Barrier k_full[T::kStages], k_empty[T::kStages];
  Barrier v_landed[T::kStages], v_full[T::kStages], v_empty[T::kStages];
  Barrier raw_landed[T::kRawSlots], raw_empty[T::kRawSlots];

  __device__ void init_barriers() {
    constexpr int kWarps = kConsumers / 32, kFillers = T::kFp8 ? T::kHelpers : 1;
    device::init_barrier(&q_full, kFillers);
    device::init_barrier(&q_empty, kWarps);
    for (int i = 0; i < T::kStages; ++i) {
      device::init_barrier(k_full + i, kFillers);
      device::init_barrier(k_empty + i, kWarps);
      device::init_barrier(v_landed + i, 1);
      device::init_barrier(v_full + i, T::kHelpers);
      device::init_barrier(v_empty + i, kWarps);
    }
    for (int i = 0; i < T::kRawSlots; ++i) {
      device::init_barrier(raw_landed + i, 1);
      device::init_barrier(raw_empty + i, T::kHelpers);
    }
    device::publish_barriers();
  }
};

/// The tiles of a CTA, by one warp. All tiles of the call, those whose keys end latest first, go round the CTAs and
/// back. Of equally long ones those that share keys are neighbours.
template <class T>
class TileList {
 public:
  __device__ __forceinline__ explicit TileList(const Sm90Params& p)
      : p_(p),
        lane_(static_cast<int>(threadIdx.x) % 32),
        own_(lane_ < p.attention.requests ? load(lane_) : Part{}) {
    int most = 0;
    for (int b = lane_; b < p_.attention.requests; b += 32) {
      const Part part = of(b);
      if (part.rows > 0) most = max(most, (max(0, part.before + part.rows) + T::kKeys - 1) / T::kKeys);
    }
    blocks_ = __reduce_max_sync(kAllLanes, most);
    total_ = longer_than(-1);
  }

  __device__ __forceinline__ bool next(Tile& tile) {
    const int grid = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    const int index = round_ * grid + (round_ % 2 == 0 ? cta : grid - 1 - cta);
    if (index >= total_) return false;
    ++round_;
    if (longer_than(blocks_ - 1) <= index) {
      int low = -1, high = blocks_ - 1;
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (longer_than(middle) > index ? low : high) = middle;
      }
      blocks_ = high;
      longer_ = longer_than(high);
    }
    locate(index - longer_, tile);
    return true;
  }

 private:
  /// Query tokens of a request, and keys before the first of them; may be negative.
  struct Part {
    int rows = 0, before = 0;
  };
  __device__ __forceinline__ Part load(int request) const {
    const Request r(p_.attention, request);
    return {min(r.rows, p_.most_tokens), r.keys - r.rows};
  }
  __device__ __forceinline__ Part of(int request) const { return request == lane_ ? own_ : load(request); }
  __device__ __forceinline__ int tiles(const Part& part) const {
    return (part.rows + p_.tile_tokens - 1) / p_.tile_tokens;
  }
  /// Tiles of a request with more blocks than that, for one head.
  __device__ __forceinline__ int longer_than(const Part& part, int blocks) const {
    if (blocks < 0) return tiles(part);
    const int tokens = blocks * T::kKeys + 1 - part.before;  // that a tile must reach to
    return tokens > part.rows ? 0 : tiles(part) - max(0, tokens - 1) / p_.tile_tokens;
  }
  /// Of all requests, and heads.
  __device__ __forceinline__ int longer_than(int blocks) const {
    int sum = 0;
    for (int b = lane_; b < p_.attention.requests; b += 32) sum += longer_than(of(b), blocks);
    return __reduce_add_sync(kAllLanes, sum) * p_.attention.heads_kv;
  }

  /// The tile at `place` among those of blocks_ blocks: by requests, then heads.
  __device__ __forceinline__ void locate(int place, Tile& tile) {
    const int heads = p_.attention.heads_kv;
    for (int first = 0;; first += 32) {
      Part part;
      if (first + lane_ < p_.attention.requests) part = of(first + lane_);
      const int longer = longer_than(part, blocks_), each = longer_than(part, blocks_ - 1) - longer;
      int end = each * heads;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int before = __shfl_up_sync(kAllLanes, end, d);
        if (lane_ >= d) end += before;
      }
      const uint32_t beyond = __ballot_sync(kAllLanes, end > place);
      if (beyond == 0) {
        place -= __shfl_sync(kAllLanes, end, 31);
        continue;
      }
      const int found = __ffs(static_cast<int>(beyond)) - 1;
      tile.request = first + found;
      part.rows = __shfl_sync(kAllLanes, part.rows, found);
      part.before = __shfl_sync(kAllLanes, part.before, found);
      const int of_head = __shfl_sync(kAllLanes, each, found);
      place -= __shfl_sync(kAllLanes, end, found) - of_head * heads;
      tile.head_kv = place / of_head;
      const int level =
          tiles(part) - 1 - __shfl_sync(kAllLanes, longer, found) - (place - tile.head_kv * of_head);
      const int token = level * p_.tile_tokens;
      tile.row = Request(p_.attention, tile.request).begin + token;
      tile.tokens = min(p_.tile_tokens, part.rows - token);
      tile.base = part.before + token;
      const int first_key = tile.first_key(0, p_.attention.window), last_key = tile.last_key(tile.tokens - 1);
      tile.first_block = first_key / T::kKeys;
      tile.end_block = last_key > 0 ? (last_key - 1) / T::kKeys + 1 : tile.first_block;
      return;
    }
  }

  const Sm90Params& p_;
  const int lane_;
  const Part own_;
  int round_ = 0, total_ = 0;
  int blocks_ = 0, longer_ = 0;  ///< of the tiles at hand, and how many tiles have more
};

/// By one warp: the tiles of this CTA one after the other, K and V of each block in turns, queries behind a tile's first K. Every lane
/// issues one of the copies of a box: a page of it, or as much of a page as it holds, in one panel.
template <class T>
class Feed {
 public:
  __device__ __forceinline__ Feed(const Sm90Params& p, Shared<T>& shared)
      : p_(p),
        s_(shared),
        copies_(T::kKeys >> p.copy_log2),
        panel_(lane() / copies_),
        token_((lane() % copies_) << p.copy_log2) {}

  __device__ __forceinline__ void run() {
    TileList<T> list(p_);
    Tile tile;
    while (list.next(tile)) {
      const int32_t* table = p_.attention.page_table + tile.request * p_.attention.page_table_stride;
      int page = page_of(tile, table, tile.first_block);
      bool owes_queries = true;
      for (int block = tile.first_block; block < tile.end_block; ++block) {
        const int page_after = block + 1 < tile.end_block ? page_of(tile, table, block + 1) : 0;
        bring_keys(tile, block, page);
        if (owes_queries) bring_queries(tile);
        owes_queries = false;
        bring_values(tile, block, page);
        page = page_after;
      }
      if (owes_queries) bring_queries(tile);
    }
    end();
  }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  /// Of this lane's copy. A page that does not exist arrives as zeros: that of keys which no row sees.
  __device__ __forceinline__ int page_of(const Tile& tile, const int32_t* table, int block) const {
    const int key = block * T::kKeys + token_;
    const bool seen = lane() < copies_ * T::kRawPanels && key < tile.last_key(tile.tokens - 1) &&
                      key + (1 << p_.copy_log2) > tile.first_key(0, p_.attention.window);
    return seen ? table[key >> p_.page_log2] : p_.attention.pages;
  }
  __device__ __forceinline__ void load(const CUtensorMap& map, char* box, Barrier* full, const Tile& tile,
                                       int block, int page) const {
    if (lane() == 0) device::arrive_and_expect(full, T::kRawBoxBytes);
    __syncwarp();
    if (lane() >= copies_ * T::kRawPanels) return;
    const int slot = (block * T::kKeys + token_) & ((1 << p_.page_log2) - 1);
    device::tensor_load(box + (panel_ * T::kKeys + token_) * T::kRawLineBytes, &map, full, 0, slot, panel_,
                        tile.head_kv, page);
  }
  __device__ __forceinline__ void load_queries(char* to, Barrier* full, const Tile& tile) const {
    const int group = p_.attention.group;
    if (lane() == 0) device::arrive_and_expect(full, group * p_.tile_tokens * T::kRawRowBytes);
    __syncwarp();
    if (lane() >= T::kRawPanels) return;
    device::tensor_load(to + lane() * T::kRows * T::kRawLineBytes, &p_.q, full, 0, tile.head_kv * group,
                        tile.row, lane(), 0);
  }
  __device__ __forceinline__ Checked to_check(const Tile& tile, int block) const {
    const int window = p_.attention.window, begin = block * T::kKeys, end = begin + T::kKeys;
    if (tile.first_key(tile.tokens - 1, window) <= begin && tile.last_key(0) >= end) return {0, 0};
    return {max(0, tile.first_key(0, window) - begin), min(T::kKeys, tile.last_key(tile.tokens - 1) - begin)};
  }

  __device__ __forceinline__ void bring_keys(const Tile& tile, int block, int page) {
    if constexpr (T::kFp8) {
      bring({.kind = Item::keys}, [&](char* to, Barrier* full) { load(p_.k, to, full, tile, block, page); });
    } else {
      device::wait_for(s_.k_empty + at_.stage, at_.parity);
      load(p_.k, s_.k[at_.stage], s_.k_full + at_.stage, tile, block, page);
    }
  }
  __device__ __forceinline__ void bring_queries(const Tile& tile) {
    if constexpr (T::kFp8) {
      bring({.kind = Item::queries, .tile = tile},
            [&](char* to, Barrier* full) { load_queries(to, full, tile); });
    } else {
      device::wait_for(&s_.q_empty, q_parity_);
      q_parity_ ^= 1;
      if (lane() == 0) s_.tile = tile;
      load_queries(s_.q, &s_.q_full, tile);
    }
  }
  __device__ __forceinline__ void bring_values(const Tile& tile, int block, int page) {
    if constexpr (T::kFp8) {
      bring({.kind = Item::values, .checked = to_check(tile, block)},
            [&](char* to, Barrier* full) { load(p_.v, to, full, tile, block, page); });
    } else {
      device::wait_for(s_.v_empty + at_.stage, at_.parity);
      if (lane() == 0) s_.checked[at_.stage] = to_check(tile, block);
      load(p_.v, s_.v[at_.stage], s_.v_landed + at_.stage, tile, block, page);
      at_.next();
    }
  }
  __device__ __forceinline__ void end() {
    if constexpr (T::kFp8) {
      bring({.kind = Item::end}, [](char*, Barrier* full) {
        if (lane() == 0) device::arrive(full);
      });
    } else {
      device::wait_for(&s_.q_empty, q_parity_);
      device::wait_for(s_.v_empty + at_.stage, at_.parity);
      if (lane() != 0) return;
      s_.tile.head_kv = -1;
      device::arrive(&s_.q_full);
      s_.checked[at_.stage].to = Checked::kEnd;
      device::arrive(s_.v_landed + at_.stage);
    }
  }
  /// Through a slot.
  template <class Copy>
  __device__ __forceinline__ void bring(const Item& item, Copy&& copy) {
    device::wait_for(s_.raw_empty + raw_.stage, raw_.parity);
    if (lane() == 0) s_.items[raw_.stage] = item;
    copy(s_.raw[raw_.stage], s_.raw_landed + raw_.stage);
    raw_.next();
  }

  const Sm90Params& p_;
  Shared<T>& s_;
  const int copies_, panel_, token_;
  device::RingPosition<T::kStages> at_{.stage = 0, .parity = 1};
  device::RingPosition<T::kRawSlots> raw_{.stage = 0, .parity = 1};
  uint32_t q_parity_ = 1;
};

}  // namespace vivace::prefill_sm90
