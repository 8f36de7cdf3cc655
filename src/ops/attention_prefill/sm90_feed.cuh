#pragma once

// How work, queries, keys and values reach the products of sm90.tiles: what is fixed when the kernel is compiled, its shared
// memory, the list of tiles, and the warps that fill that memory.

#include "src/device/ptx.h"
#include "src/device/reduce.h"
#include "src/ops/attention/params.cuh"

namespace vivace::prefill_sm90 {

using namespace attention_cuda;
using device::Barrier;
using device::kAllLanes;

/// Warp groups: two multiply, the last one feeds them.
constexpr int kGroupThreads = 128, kConsumers = 2 * kGroupThreads, kThreads = kConsumers + kGroupThreads;

/// What is fixed when a kernel is compiled: the width of a head and what follows from it. Boxes of keys and tiles of queries
/// lie in panels of 64 columns, rows of 128 bytes, as tensor maps write them.
template <int kHead_>
struct Shape {
  static constexpr int kHead = kHead_, kRows = 128, kKeys = kHead <= 128 ? 128 : 64;
  static constexpr int kRowBytes = 2 * kHead, kPanels = kRowBytes / 128;
  static constexpr int kQueryPanelBytes = kRows * 128, kPanelBytes = kKeys * 128,
                       kBoxBytes = kKeys * kRowBytes;
  static constexpr int kStages = kHead == 64 ? 4 : 2;
  static constexpr int kCheckers = 2,
                       kCheckedKeys = kKeys / kCheckers;  ///< warps that look at V, keys of each
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

/// Where V was not finite, in the keys of one checker: a bit per key, for each column.
template <class T>
struct Marks {
  static_assert(T::kCheckedKeys <= 64, "a bit per key");
  unsigned long long nan[T::kHead], plus[T::kHead], minus[T::kHead];
};

template <class T>
struct Shared {
  char q[T::kRows * T::kRowBytes];
  char k[T::kStages][T::kBoxBytes];
  char v[T::kStages][T::kBoxBytes];
  Marks<T> marks[T::kStages][T::kCheckers];
  bool marked[T::kStages][T::kCheckers];
  Tile tile;
  Checked checked[T::kStages];
  Barrier q_full, q_empty;
  Barrier k_full[T::kStages], k_empty[T::kStages];
  Barrier v_landed[T::kStages], v_full[T::kStages], v_empty[T::kStages];

  __device__ void init_barriers() {
    constexpr int kWarps = kConsumers / 32;
    device::init_barrier(&q_full, 1);
    device::init_barrier(&q_empty, kWarps);
    for (int i = 0; i < T::kStages; ++i) {
      device::init_barrier(k_full + i, 1);
      device::init_barrier(k_empty + i, kWarps);
      device::init_barrier(v_landed + i, 1);
      device::init_barrier(v_full + i, T::kCheckers);
      device::init_barrier(v_empty + i, kWarps);
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

/// By one warp: the tiles of this CTA one after the other, K and V of each block in turns. Every lane issues one of the copies of a
/// box: a page of it, or as much of a page as it holds, in one panel.
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
      for (int block = tile.first_block; block < tile.end_block; ++block, at_.next()) {
        const int page_after = block + 1 < tile.end_block ? page_of(tile, table, block + 1) : 0;
        device::wait_for(s_.k_empty + at_.stage, at_.parity);
        load(p_.k, s_.k[at_.stage], s_.k_full + at_.stage, tile, block, page);
        if (owes_queries) load_queries(tile);
        owes_queries = false;
        device::wait_for(s_.v_empty + at_.stage, at_.parity);
        if (lane() == 0) s_.checked[at_.stage] = to_check(tile, block);
        load(p_.v, s_.v[at_.stage], s_.v_landed + at_.stage, tile, block, page);
        page = page_after;
      }
      if (owes_queries) load_queries(tile);
    }
    device::wait_for(&s_.q_empty, q_parity_);
    device::wait_for(s_.v_empty + at_.stage, at_.parity);
    if (lane() != 0) return;
    s_.tile.head_kv = -1;
    device::arrive(&s_.q_full);
    s_.checked[at_.stage].to = Checked::kEnd;
    device::arrive(s_.v_landed + at_.stage);
  }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  /// Of this lane's copy. A page that does not exist arrives as zeros: that of keys which no row sees.
  __device__ __forceinline__ int page_of(const Tile& tile, const int32_t* table, int block) const {
    const int key = block * T::kKeys + token_;
    const bool seen = lane() < copies_ * T::kPanels && key < tile.last_key(tile.tokens - 1) &&
                      key + (1 << p_.copy_log2) > tile.first_key(0, p_.attention.window);
    return seen ? table[key >> p_.page_log2] : p_.attention.pages;
  }
  __device__ __forceinline__ void load(const CUtensorMap& map, char* box, Barrier* full, const Tile& tile,
                                       int block, int page) const {
    if (lane() == 0) device::arrive_and_expect(full, T::kBoxBytes);
    __syncwarp();
    if (lane() >= copies_ * T::kPanels) return;
    const int slot = (block * T::kKeys + token_) & ((1 << p_.page_log2) - 1);
    device::tensor_load(box + panel_ * T::kPanelBytes + token_ * 128, &map, full, 0, slot, panel_,
                        tile.head_kv, page);
  }
  __device__ __forceinline__ void load_queries(const Tile& tile) {
    device::wait_for(&s_.q_empty, q_parity_);
    q_parity_ ^= 1;
    const int group = p_.attention.group;
    if (lane() == 0) {
      s_.tile = tile;
      device::arrive_and_expect(&s_.q_full, group * p_.tile_tokens * T::kRowBytes);
    }
    __syncwarp();
    if (lane() >= T::kPanels) return;
    device::tensor_load(s_.q + lane() * T::kQueryPanelBytes, &p_.q, &s_.q_full, 0, tile.head_kv * group,
                        tile.row, lane(), 0);
  }
  __device__ __forceinline__ Checked to_check(const Tile& tile, int block) const {
    const int window = p_.attention.window, begin = block * T::kKeys, end = begin + T::kKeys;
    if (tile.first_key(tile.tokens - 1, window) <= begin && tile.last_key(0) >= end) return {0, 0};
    return {max(0, tile.first_key(0, window) - begin), min(T::kKeys, tile.last_key(tile.tokens - 1) - begin)};
  }

  const Sm90Params& p_;
  Shared<T>& s_;
  const int copies_, panel_, token_;
  device::RingPosition<T::kStages> at_{.stage = 0, .parity = 1};
  uint32_t q_parity_ = 1;
};

/// By a warp for its share of the keys: blocks of V that some rows of their tile see in part. A weight of zero does not keep a NaN
/// away, 0 x NaN is NaN: what is not finite there becomes zero, and marks say which keys had it for the rows that see them.
template <class T>
class Check {
 public:
  __device__ __forceinline__ Check(Shared<T>& shared, int checker) : s_(shared), checker_(checker) {}

  __device__ __forceinline__ void run() {
    for (device::RingPosition<T::kStages> at;; at.next()) {
      device::wait_for(s_.v_landed + at.stage, at.parity);
      const Checked checked = s_.checked[at.stage];
      if (checked.to == Checked::kEnd) return;
      if (checked.from < checked.to) check(at.stage, checked);
      __syncwarp();
      if (lane() == 0) device::arrive(s_.v_full + at.stage);
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ __forceinline__ void check(int stage, const Checked& checked) {
    Marks<T>& marks = s_.marks[stage][checker_];
    bool& marked = s_.marked[stage][checker_];
    if (marked) clear(marks);
    bool found = false;
    constexpr int kBytes = T::kCheckedKeys * 128, kAtOnce = 8;
    static_assert(kBytes % (kAtOnce * 512) == 0);
#pragma unroll 1
    for (int i = 0; i < T::kPanels * kBytes; i += kAtOnce * 512) {
      const int panel = i / kBytes;
      char* at = s_.v[stage] + panel * T::kPanelBytes + checker_ * kBytes + i % kBytes + lane() * 16;
      uint4 chunk[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) chunk[j] = *reinterpret_cast<const uint4*>(at + j * 512);
      uint32_t sum = 0;  // of 0 x v: zero, or NaN
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        for (const uint32_t pair : {chunk[j].x, chunk[j].y, chunk[j].z, chunk[j].w})
          asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0u));
      }
      if (sum == 0) continue;
      for (int j = 0; j < kAtOnce; ++j) found = mark(stage, at + j * 512, checked, marks) || found;
    }
    device::publish_to_async_proxy();
    const bool any = __any_sync(kAllLanes, found) != 0;
    if (lane() == 0) marked = any;
  }
  __device__ __forceinline__ void clear(Marks<T>& marks) {
    for (int i = lane(); i < T::kHead; i += 32) marks.nan[i] = marks.plus[i] = marks.minus[i] = 0;
    __syncwarp();
  }
  /// Eight elements of a key.
  __device__ __noinline__ bool mark(int stage, char* at, const Checked& checked, Marks<T>& marks) {
    const int offset = static_cast<int>(at - s_.v[stage]) % T::kPanelBytes;
    const int key = offset / 128, column = static_cast<int>(at - s_.v[stage]) / T::kPanelBytes * 64 +
                                           ((offset / 16 ^ key) & 7) * 8;
    const bool seen = key >= checked.from && key < checked.to;
    bool found = false;
    for (int i = 0; i < 8; ++i) {
      uint16_t& element = reinterpret_cast<uint16_t*>(at)[i];
      const uint32_t bits = element;
      if ((bits & 0x7f80u) != 0x7f80u) continue;
      element = 0;
      if (!seen) continue;
      auto* to = (bits & 0x7fu) != 0 ? marks.nan : (bits & 0x8000u) != 0 ? marks.minus : marks.plus;
      atomicOr(to + column + i, 1ull << key % T::kCheckedKeys);
      found = true;
    }
    return found;
  }

  Shared<T>& s_;
  const int checker_;
};

}  // namespace vivace::prefill_sm90
