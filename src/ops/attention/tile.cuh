#pragma once

// A block of query rows over a range of keys with online softmax, on tensor cores: the whole arithmetic of the cuda.mma
// rows of attention_prefill and attention_decode, which thereby give a row the same bits.
//
// What fixes the bits of a row: its query, its keys, and where `attend` is told to begin and end. Keys come in blocks
// of 64 counted from the request's start. A warp multiplies 16 (or twice 16) query rows with a block, 16 dimensions at
// a time in their order; a block has one maximum; weights are rounded to 16 bits for their product with V, 16 keys at a
// time in their order; a lane adds up the weights of its keys in their order, and the four lanes of a row are added at
// the end. Neither the rows beside it nor the page size appears in this. A block that a row does not see changes no bit
// of it: its maximum stays, the factor on its sums is exactly 1, and what is added is exactly 0.
//
// Sums and products are spelled __fadd_rn and so on: what the compiler fuses on its own, it may fuse in one kernel and not
// in the other.

#include <cuda_runtime.h>

#include <type_traits>

#include "src/device/mma.h"
#include "src/device/number.h"
#include "src/device/ptx.h"
#include "src/device/reduce.h"
#include "src/ops/attention/params.cuh"

namespace vivace::attention_mma {

using namespace attention_cuda;
using device::bf16;
using device::exp2_of;
using device::fp8;
using device::kAllLanes;

constexpr int kBlockKeys = 64;
constexpr int kWarps = 4, kThreads = 32 * kWarps;

/// What is fixed when a kernel is compiled. Raw: elements of K and V as stored, which are multiplied as bf16 (e4m3 is exact
/// in it); kM: tiles of 16 rows per warp.
template <class Raw_, int kHead_, int kM_, int kStages_>
struct Tile {
  using Raw = Raw_;
  static constexpr int kHead = kHead_, kM = kM_, kStages = kStages_;
  static constexpr bool kConverted = std::is_same_v<Raw, fp8>;
  static constexpr int kRows = 16 * kM * kWarps;
  static constexpr int kRowBytes = kHead * 2, kTileBytes = kBlockKeys * kRowBytes;
  static constexpr int kRawRowBytes = kHead * static_cast<int>(sizeof(Raw)),
                       kRawTileBytes = kBlockKeys * kRawRowBytes;
  // Shared memory: stages of K and V as stored; K and V of the current block when they had to be converted; the scales
  // and the places of keys; what each row sees; queries; running totals over groups of keys.
  static constexpr int kConvertedAt = kStages * 2 * kRawTileBytes;
  static constexpr int kKeyScalesAt = kConvertedAt + (kConverted ? 2 * kTileBytes : 0);
  static constexpr int kSlotsAt = kKeyScalesAt + kStages * kBlockKeys * 4;
  static constexpr int kSlotBlocks = kStages + 1;  // a place is looked up one block before its copy
  static constexpr int kRowsAt = kSlotsAt + kSlotBlocks * kBlockKeys * 8;
  static constexpr int kQueriesAt = (kRowsAt + kRows * 16 + 127) / 128 * 128;  // tiles begin on swizzle lines
  static constexpr int total_at(int query_rows) { return kQueriesAt + query_rows * kRowBytes; }
  static constexpr int kTotalBytes = kRows * kHead * 4;
};

/// A tile of rows of one (request, KV head). Row r of a unit is query head r % group of token r / group.
struct Job {
  Request request;
  int head_kv, row0, rows;
  int first, last;          ///< keys that any row sees
  int all_first, all_last;  ///< keys that every row sees

  __device__ Job(const Params& p, const Request& request, int head_kv, int row0, int rows)
      : request(request), head_kv(head_kv), row0(row0), rows(rows) {
    const int token0 = row0 / p.group, token1 = (row0 + rows - 1) / p.group;
    first = request.first_key(token0, p.window);
    last = request.last_key(token1);
    all_first = request.first_key(token1, p.window);
    all_last = request.last_key(token0);
  }
};

/// Of a row: the keys that it sees, and what its products are multiplied by. In shared memory: registers are scarce.
struct RowInfo {
  int first, last;
  float factor;
  int unused;
};

/// The row of a thread's fragments in its tile: warp * 16 kM + 16 mt + 8 h + lane / 4.
template <class T>
__device__ __forceinline__ int row_of(int mt, int h) {
  return static_cast<int>(threadIdx.x) / 32 * 16 * T::kM + 16 * mt + 8 * h +
         static_cast<int>(threadIdx.x) % 32 / 4;
}

/// Writes RowInfo of all rows of the tile; rows beyond the job's see nothing. A barrier must follow.
template <class T>
__device__ __forceinline__ void describe_rows(const Params& p, const Job& job, char* smem) {
  for (int r = static_cast<int>(threadIdx.x); r < T::kRows; r += kThreads) {
    RowInfo info{0, 0, p.factor, 0};
    if (r < job.rows) {
      const int token = (job.row0 + r) / p.group, head = job.head_kv * p.group + (job.row0 + r) % p.group;
      info.first = job.request.first_key(token, p.window);
      info.last = job.request.last_key(token);
      if (p.q_scale != nullptr) {
        info.factor *=
            p.q_scale[(job.request.begin + token) * p.q_scale_stride[0] + head * p.q_scale_stride[1]];
      }
      if (p.k_scale != nullptr && !p.scaled_keys) info.factor *= *p.k_scale;
    }
    reinterpret_cast<RowInfo*>(smem + T::kRowsAt)[r] = info;
  }
}

/// The keys that any and that all rows of this warp see; none for a warp without rows.
struct WarpKeys {
  int first = 0, last = 0, all_first = 0, all_last = 0;

  template <class T>
  static __device__ WarpKeys of(const Params& p, const Job& job) {
    WarpKeys keys;
    const int begin = static_cast<int>(threadIdx.x) / 32 * 16 * T::kM,
              end = min(begin + 16 * T::kM, job.rows);
    if (begin >= end) return keys;
    const int token0 = (job.row0 + begin) / p.group, token1 = (job.row0 + end - 1) / p.group;
    keys.first = job.request.first_key(token0, p.window);
    keys.last = job.request.last_key(token1);
    keys.all_first = job.request.first_key(token1, p.window);
    keys.all_last = job.request.last_key(token0);
    return keys;
  }
};

/// Of each row of a thread: the maximum so far in units of log2, the sum of weights 2^(s - maximum), and its part of
/// the weighted sum of values. A NaN score shows in the sums alone: the maximum passes over it.
template <class T>
struct State {
  float maximum[T::kM][2], weight[T::kM][2];
  float sum[T::kM][T::kHead / 8][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int mt = 0; mt < T::kM; ++mt) {
      maximum[mt][0] = maximum[mt][1] = kNoKeys;
      weight[mt][0] = weight[mt][1] = 0.f;
#pragma unroll
      for (int nt = 0; nt < T::kHead / 8; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[mt][nt][e] = 0.f;
      }
    }
  }
};

/// Copies `bytes` (0 to 16) of a 16-byte piece and fills it up with zeros. Nothing else is read.
__device__ __forceinline__ void copy_part_async(void* destination, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(device::shared_address(destination)),
               "l"(source), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_4_async(void* destination, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(device::shared_address(destination)),
               "l"(source), "r"(valid ? 4 : 0)
               : "memory");
}

/// Where this thread's key of block `block` is: page and offset in it; page -1 for keys outside [from, to).
__device__ __forceinline__ int2 find_slot(const Params& p, const Job& job, int block, int from, int to) {
  const int key = block * kBlockKeys + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= kBlockKeys || key < from || key >= to) return int2{-1, 0};
  const int entry = key / p.page_tokens;
  return int2{job.request.table[entry], key - entry * p.page_tokens};
}

/// Puts it where load_block finds it; page -1 for pages that do not exist. Slots are a ring, `index` counts blocks.
template <class T>
__device__ __forceinline__ void store_slot(const Params& p, int index, int2 slot, char* smem) {
  if (threadIdx.x >= kBlockKeys) return;
  if (slot.x < 0 || slot.x >= p.pages) slot = int2{-1, 0};
  reinterpret_cast<int2*>(smem + T::kSlotsAt)[index % T::kSlotBlocks * kBlockKeys + threadIdx.x] = slot;
}

/// Starts the copies of the block whose slots are at `index`.
template <class T>
__device__ __forceinline__ void load_block(const Params& p, const Job& job, int index, char* smem) {
  constexpr int kChunks = T::kRawRowBytes / 16;
  const int2* slots = reinterpret_cast<const int2*>(smem + T::kSlotsAt) + index % T::kSlotBlocks * kBlockKeys;
  const int stage = index % T::kStages;
  char* tiles = smem + stage * 2 * T::kRawTileBytes;
  // A thread has one chunk of every kKeysAtOnce-th key.
  constexpr int kKeysAtOnce = kThreads / kChunks;
  const int first_key = static_cast<int>(threadIdx.x) / kChunks,
            chunk = static_cast<int>(threadIdx.x) % kChunks;
  const int head_bytes = p.head_dim * static_cast<int>(sizeof(typename T::Raw));
  const int chunk_bytes = min(16, max(0, head_bytes - chunk * 16)), part = chunk_bytes > 0 ? chunk * 16 : 0;
  const char* k = p.k.data + job.head_kv * p.k.head_stride + part;
  const char* v = p.v.data + job.head_kv * p.v.head_stride + part;
#pragma unroll 4  // more would take registers that the sums need
  for (int n = 0; n < kBlockKeys / kKeysAtOnce; ++n) {
    const int key = first_key + n * kKeysAtOnce;
    const int2 slot = slots[key];
    const int bytes = slot.x < 0 ? 0 : chunk_bytes;
    const auto page = static_cast<uint32_t>(max(slot.x, 0)), token = static_cast<uint32_t>(slot.y);
    const auto offset = [&](const Cache& cache) {
      return (uint64_t{page} * cache.page_step + uint64_t{token} * cache.token_step) * 16;
    };
    int at;
    if constexpr (T::kConverted) {
      at = key * T::kRawRowBytes + chunk * 16;
    } else {
      at = device::swizzled<T::kRowBytes>(key, chunk);
    }
    copy_part_async(tiles + at, k + offset(p.k), bytes);
    copy_part_async(tiles + T::kRawTileBytes + at, v + offset(p.v), bytes);
  }
  if (p.scaled_keys && threadIdx.x < kBlockKeys) {
    const int2 slot = slots[threadIdx.x];
    const bool valid = slot.x >= 0;
    const float* scale = p.k_scale + (valid ? slot.x * p.k_scale_stride[0] + slot.y * p.k_scale_stride[1] +
                                                  job.head_kv * p.k_scale_stride[2]
                                            : 0);
    copy_4_async(smem + T::kKeyScalesAt + (stage * kBlockKeys + static_cast<int>(threadIdx.x)) * 4, scale,
                 valid);
  }
}

/// The block's K and V from e4m3 to 16 bits, exactly.
template <class T>
__device__ __forceinline__ void convert_block(const char* raw, char* converted) {
  constexpr int kChunks = T::kRawRowBytes / 16, kTile = kBlockKeys * kChunks;
#pragma unroll 2  // more would take registers that the sums need
  for (int n = 0; n < 2 * kTile / kThreads; ++n) {
    const int i = n * kThreads + static_cast<int>(threadIdx.x), key = i % kTile / kChunks,
              chunk = i % kChunks;
    const uint4 codes = *reinterpret_cast<const uint4*>(raw + i * 16);
    const uint32_t quads[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t words[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const auto pair = static_cast<__nv_fp8x2_storage_t>(quads[j / 2] >> j % 2 * 16);
      const float2 v = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
      words[j] = device::pack<bf16>(v.x, v.y);
    }
    const uint4 low{words[0], words[1], words[2], words[3]}, high{words[4], words[5], words[6], words[7]};
    char* tile = converted + i / kTile * T::kTileBytes;
    *reinterpret_cast<uint4*>(tile + device::swizzled<T::kRowBytes>(key, 2 * chunk)) = low;
    *reinterpret_cast<uint4*>(tile + device::swizzled<T::kRowBytes>(key, 2 * chunk + 1)) = high;
  }
}

/// The tile's queries as 16-bit numbers; zeros past head_dim and past the last row. `query_rows`: room, a multiple of
/// 16. They may come with the first block of keys.
template <class T>
__device__ __forceinline__ void load_queries(const Params& p, const Job& job, int query_rows, char* smem) {
  constexpr int kChunks = T::kHead / 8;
  const bool as_they_are = p.q_type == DType::bf16 && p.q_vectors;
  for (int i = static_cast<int>(threadIdx.x); i < query_rows * kChunks; i += kThreads) {
    const int row = i / kChunks, d = i % kChunks * 8;
    const bool there = row < job.rows && d < p.head_dim;
    const int token = (job.row0 + row) / p.group, head = job.head_kv * p.group + (job.row0 + row) % p.group;
    const int64_t at = (job.request.begin + token) * p.q_stride[0] + head * p.q_stride[1] + d;
    char* to = smem + T::kQueriesAt + device::swizzled<T::kRowBytes>(row, d / 8);
    if (as_they_are) {
      copy_part_async(to, static_cast<const bf16*>(p.q) + (there ? at : 0), there ? 16 : 0);
      continue;
    }
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = 0.f;
    if (there) {
      const auto load = [&](const auto* q) {
        if (p.q_vectors) {
          device::load_floats(q + at, v);
        } else {
          for (int j = 0; j < 8 && d + j < p.head_dim; ++j) v[j] = device::to_float(q[at + j]);
        }
      };
      p.q_type == DType::bf16 ? load(static_cast<const bf16*>(p.q)) : load(static_cast<const fp8*>(p.q));
    }
    uint4 packed;
    uint32_t* words = reinterpret_cast<uint32_t*>(&packed);
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = device::pack<bf16>(v[2 * j], v[2 * j + 1]);
    *reinterpret_cast<uint4*>(to) = packed;
  }
}

// ---- Values that are not finite, in a block that some rows see in part
//
// A weight of zero does not keep a NaN away: 0 x NaN is NaN. Such a V is therefore zeroed in shared memory before the
// product, and what it means is added to the rows that see its key. `Marks` says where they were: a bit per key, for
// each column. It takes the place of the block's K, which nobody reads any more.

struct Marks {
  unsigned long long *nan, *plus, *minus;
  __device__ Marks(char* memory, int head)
      : nan(reinterpret_cast<unsigned long long*>(memory)), plus(nan + head), minus(plus + head) {}
};

/// Of bf16.
struct NotFinite {
  static constexpr uint32_t kExponent = 0x7f80u, kMantissa = 0x7fu;
  __device__ static bool in_pair(uint32_t pair) {
    return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
  }
};

template <class T>
__device__ __noinline__ bool has_not_finite(const char* v_tile) {
  bool found = false;
  for (int i = static_cast<int>(threadIdx.x); i < T::kTileBytes / 16; i += kThreads) {
    const uint4 four = *reinterpret_cast<const uint4*>(v_tile + i * 16);  // in any order
    found = found || NotFinite::in_pair(four.x) || NotFinite::in_pair(four.y) || NotFinite::in_pair(four.z) ||
            NotFinite::in_pair(four.w);
  }
  return found;
}

/// Block-wide. Zeroes what is not finite in V and marks it.
template <class T>
__device__ __noinline__ void mark_not_finite(char* v_tile, char* marks_memory) {
  const Marks marks(marks_memory, T::kHead);
  for (int i = static_cast<int>(threadIdx.x); i < 3 * T::kHead; i += kThreads) marks.nan[i] = 0;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kBlockKeys * T::kHead; i += kThreads) {
    const int key = i / T::kHead, column = i % T::kHead;
    auto* at =
        reinterpret_cast<uint16_t*>(v_tile + device::swizzled<T::kRowBytes>(key, column / 8)) + column % 8;
    const uint32_t bits = *at;
    if ((bits & NotFinite::kExponent) != NotFinite::kExponent) continue;
    auto* to = bits & NotFinite::kMantissa ? marks.nan : bits & 0x8000u ? marks.minus : marks.plus;
    atomicOr(to + column, 1ull << key);
    *at = 0;
  }
  __syncthreads();
}

/// Bits [lo, hi) of 64.
__device__ __forceinline__ unsigned long long bits_between(int lo, int hi) {
  if (lo >= hi) return 0;
  return (~0ull >> (64 - (hi - lo))) << lo;
}

/// Keys of a block that are there, and where it begins.
struct BlockKeys {
  int block, from, to;
  /// Of `row`: the keys that it sees, counted from the block's begin.
  __device__ int lo(const RowInfo& row) const { return max(row.first, from) - block; }
  __device__ int hi(const RowInfo& row) const { return min(row.last, to) - block; }
};

/// Adds what was marked to the rows that see it.
template <class T>
__device__ __forceinline__ void add_not_finite(const char* marks_memory, const RowInfo* rows,
                                               const BlockKeys& keys, State<T>& state) {
  const Marks marks(const_cast<char*>(marks_memory), T::kHead);
#pragma unroll
  for (int nt = 0; nt < T::kHead / 8; ++nt) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = nt * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + e;
      const unsigned long long nan = marks.nan[column], plus = marks.plus[column],
                               minus = marks.minus[column];
      if ((nan | plus | minus) == 0) continue;
#pragma unroll
      for (int mt = 0; mt < T::kM; ++mt) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const RowInfo& row = rows[row_of<T>(mt, h)];
          const unsigned long long seen = bits_between(keys.lo(row), keys.hi(row));
          float& sum = state.sum[mt][nt][2 * h + e];
          if (seen & plus) sum += INFINITY;
          if (seen & minus) sum -= INFINITY;
          if (seen & nan) sum = NAN;
        }
      }
    }
  }
}

// ---- One block of keys

/// scores = q . k of the warp's rows, unscaled.
template <class T>
__device__ __forceinline__ void multiply_keys(const char* queries, const char* k_tile,
                                              float (&scores)[T::kM][8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int mt = 0; mt < T::kM; ++mt) {
#pragma unroll
    for (int nt = 0; nt < 8; ++nt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[mt][nt][e] = 0.f;
    }
  }
#pragma unroll
  for (int k = 0; k < T::kHead / 16; ++k) {
    uint32_t a[T::kM][4];
#pragma unroll
    for (int mt = 0; mt < T::kM; ++mt) {
      const int row = warp * 16 * T::kM + mt * 16 + lane % 16;
      device::load_matrices(a[mt], queries + device::swizzled<T::kRowBytes>(row, 2 * k + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < kBlockKeys / 16; ++n) {
      uint32_t b[4];
      const int key = n * 16 + lane / 16 * 8 + lane % 8;
      device::load_matrices(b, k_tile + device::swizzled<T::kRowBytes>(key, 2 * k + lane / 8 % 2));
      const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
      for (int mt = 0; mt < T::kM; ++mt) {
        device::mma_16x8x16<bf16>(scores[mt][2 * n], a[mt], low);
        device::mma_16x8x16<bf16>(scores[mt][2 * n + 1], a[mt], high);
      }
    }
  }
}

/// Turns scores into weights and brings the sums to their new maximum. `masked`: some row does not see the whole block.
template <class T>
__device__ __forceinline__ void weigh(const Params& p, const RowInfo* rows, const BlockKeys& keys,
                                      bool masked, const float* key_scales, float (&scores)[T::kM][8][4],
                                      State<T>& state) {
  const int pair = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int mt = 0; mt < T::kM; ++mt) {
    float highest[2] = {kNoKeys, kNoKeys};
    const float factor[2] = {rows[row_of<T>(mt, 0)].factor, rows[row_of<T>(mt, 1)].factor};
#pragma unroll
    for (int nt = 0; nt < 8; ++nt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[mt][nt][e] = __fmul_rn(scores[mt][nt][e], factor[e / 2]);
    }
    if (p.scaled_keys) {
#pragma unroll
      for (int nt = 0; nt < 8; ++nt) {
        const float2 scale = *reinterpret_cast<const float2*>(key_scales + nt * 8 + pair);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          scores[mt][nt][e] = __fmul_rn(scores[mt][nt][e], e % 2 == 0 ? scale.x : scale.y);
      }
    }
    if (p.cap_log2 > 0.f) {
#pragma unroll
      for (int nt = 0; nt < 8; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[mt][nt][e] = capped(scores[mt][nt][e], p.cap_log2);
      }
    }
    if (masked) {
      const RowInfo &row0 = rows[row_of<T>(mt, 0)], &row1 = rows[row_of<T>(mt, 1)];
      const int lo[2] = {keys.lo(row0), keys.lo(row1)}, hi[2] = {keys.hi(row0), keys.hi(row1)};
#pragma unroll
      for (int nt = 0; nt < 8; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = nt * 8 + pair + e % 2;
          if (key < lo[e / 2] || key >= hi[e / 2]) scores[mt][nt][e] = kNoKeys;
        }
      }
    }
#pragma unroll
    for (int nt = 0; nt < 8; ++nt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) highest[e / 2] = fmaxf(highest[e / 2], scores[mt][nt][e]);
    }
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      highest[h] = fmaxf(highest[h], __shfl_xor_sync(kAllLanes, highest[h], 1));
      highest[h] = fmaxf(highest[h], __shfl_xor_sync(kAllLanes, highest[h], 2));
      highest[h] = fmaxf(highest[h], state.maximum[mt][h]);
      // Without a score above -infinity the weights are 0, or NaN for a NaN; -infinity - -infinity would be NaN for
      // both.
      const float maximum = highest[h] == kNoKeys ? 0.f : highest[h];
      scale[h] = exp2_of(__fsub_rn(state.maximum[mt][h], maximum));
      state.maximum[mt][h] = highest[h];
      highest[h] = maximum;
    }
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int nt = 0; nt < 8; ++nt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[mt][nt][e] = exp2_of(__fsub_rn(scores[mt][nt][e], highest[e / 2]));
        total[e / 2] = __fadd_rn(total[e / 2], scores[mt][nt][e]);
      }
    }
    state.weight[mt][0] = __fmaf_rn(state.weight[mt][0], scale[0], total[0]);
    state.weight[mt][1] = __fmaf_rn(state.weight[mt][1], scale[1], total[1]);
    if (__any_sync(kAllLanes,
                   scale[0] != 1.f || scale[1] != 1.f)) {  // a factor of 1 changes nothing
#pragma unroll
      for (int nt = 0; nt < T::kHead / 8; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.sum[mt][nt][e] = __fmul_rn(state.sum[mt][nt][e], scale[e / 2]);
      }
    }
  }
}

/// sum += weights . v
template <class T>
__device__ __forceinline__ void add_values(const char* v_tile, const float (&weights)[T::kM][8][4],
                                           State<T>& state) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int k = 0; k < kBlockKeys / 16; ++k) {
    uint32_t a[T::kM][4];
#pragma unroll
    for (int mt = 0; mt < T::kM; ++mt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* w = weights[mt][2 * k + i / 2] + i % 2 * 2;
        a[mt][i] = device::pack<bf16>(w[0], w[1]);
      }
    }
#pragma unroll
    for (int c = 0; c < T::kHead / 16; ++c) {
      uint32_t b[4];
      device::load_matrices_transposed(
          b, v_tile + device::swizzled<T::kRowBytes>(k * 16 + lane % 16, 2 * c + lane / 16));
      const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
      for (int mt = 0; mt < T::kM; ++mt) {
        device::mma_16x8x16<bf16>(state.sum[mt][2 * c], a[mt], low);
        device::mma_16x8x16<bf16>(state.sum[mt][2 * c + 1], a[mt], high);
      }
    }
  }
}

/// The keys [begin, end) of the request, from nothing. Block-wide; queries and rows need not have been waited for.
template <class T>
__device__ __forceinline__ void attend(const Params& p, const Job& job, const WarpKeys& warp, int begin,
                                       int end, char* smem, State<T>& state) {
  state.clear();
  const int from = max(begin, job.first), to = min(end, job.last);
  if (from >= to) {
    device::commit_copies();
    device::wait_for_copies<0>();  // of queries that are for nothing
    return;
  }
  const int first_block = from / kBlockKeys, blocks = (to - 1) / kBlockKeys + 1 - first_block;
  __syncthreads();  // nobody reads what an earlier call left in shared memory
  for (int i = 0; i < T::kStages && i < blocks; ++i)
    store_slot<T>(p, i, find_slot(p, job, first_block + i, from, to), smem);
  __syncthreads();
  for (int i = 0; i < T::kStages - 1; ++i) {
    if (i < blocks) load_block<T>(p, job, i, smem);
    device::commit_copies();  // an empty group keeps the count
  }
  for (int i = 0; i < blocks; ++i) {
    device::wait_for_copies<T::kStages - 2>();
    __syncthreads();  // the block is there for all, and the stage of the block before is free
    if (i + T::kStages - 1 < blocks) load_block<T>(p, job, i + T::kStages - 1, smem);
    device::commit_copies();
    // Looked up here, stored after the products, which hide the wait.
    const bool looks_ahead = i + T::kStages < blocks;
    int2 ahead{-1, 0};
    if (looks_ahead) ahead = find_slot(p, job, first_block + i + T::kStages, from, to);
    const int stage = i % T::kStages;
    char* k_tile = smem + stage * 2 * T::kRawTileBytes;
    if constexpr (T::kConverted) {
      convert_block<T>(k_tile, smem + T::kConvertedAt);
      __syncthreads();
      k_tile = smem + T::kConvertedAt;
    }
    char* v_tile = k_tile + T::kTileBytes;
    const int block = (first_block + i) * kBlockKeys;
    const BlockKeys keys{block, max(block, from), min(block + kBlockKeys, to)};
    const bool active = warp.first < keys.to && warp.last > keys.from;
    float scores[T::kM][8][4];
    if (active) multiply_keys<T>(smem + T::kQueriesAt, k_tile, scores);
    if (looks_ahead) store_slot<T>(p, i + T::kStages, ahead, smem);
    bool marked = false;
    if (job.all_first > keys.from || job.all_last < keys.to) {  // some rows do not see some of these keys
      marked = __syncthreads_or(has_not_finite<T>(v_tile));
      if (marked) mark_not_finite<T>(v_tile, k_tile);
    }
    if (!active) continue;
    const bool masked = keys.to - keys.from < kBlockKeys || warp.all_first > block || warp.all_last < keys.to;
    const auto* rows = reinterpret_cast<const RowInfo*>(smem + T::kRowsAt);
    const auto* key_scales = reinterpret_cast<const float*>(smem + T::kKeyScalesAt) + stage * kBlockKeys;
    weigh<T>(p, rows, keys, masked, key_scales, scores, state);
    add_values<T>(v_tile, scores, state);
    if (marked) add_not_finite<T>(k_tile, rows, keys, state);
  }
#pragma unroll
  for (int mt = 0; mt < T::kM; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float& weight = state.weight[mt][h];
      weight = __fadd_rn(weight, __shfl_xor_sync(kAllLanes, weight, 1));
      weight = __fadd_rn(weight, __shfl_xor_sync(kAllLanes, weight, 2));
    }
  }
}

// ---- The end of a row

/// Writes a thread's rows of output and lse.
template <class T>
__device__ __forceinline__ void finish(const Params& p, const Job& job, const State<T>& state) {
#pragma unroll
  for (int mt = 0; mt < T::kM; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row_of<T>(mt, h);
      if (r >= job.rows) continue;
      const int token = (job.row0 + r) / p.group, head = job.head_kv * p.group + (job.row0 + r) % p.group;
      const int64_t row = job.request.begin + token;
      const bool sees_keys = job.request.last_key(token) > 0;
      const RowEnd end(p, sees_keys, state.maximum[mt][h], state.weight[mt][h], head);
      if (p.lse != nullptr && threadIdx.x % 4 == 0)
        p.lse[row * p.lse_stride[0] + head * p.lse_stride[1]] = end.lse;
      const int64_t at = row * p.output_stride[0] + head * p.output_stride[1];
#pragma unroll
      for (int nt = 0; nt < T::kHead / 8; ++nt) {
        const int d = nt * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
        if (d >= p.head_dim) continue;
        const float v[2] = {sees_keys ? state.sum[mt][nt][2 * h] * end.scale : 0.f,
                            sees_keys ? state.sum[mt][nt][2 * h + 1] * end.scale : 0.f};
        const auto store = [&](auto* output) {
          using Out = std::remove_pointer_t<decltype(output)>;
          if (p.output_pairs) {
            device::store_floats(v, output + at + d);
          } else {
            output[at + d] = device::from_float<Out>(v[0]);
            if (d + 1 < p.head_dim) output[at + d + 1] = device::from_float<Out>(v[1]);
          }
        };
        p.output_type == DType::bf16 ? store(static_cast<bf16*>(p.output))
                                     : store(static_cast<float*>(p.output));
      }
    }
  }
}

}  // namespace vivace::attention_mma
