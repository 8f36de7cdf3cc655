#pragma once

// The kernel of sm90.tiles: causal attention of prompts on warp-group products.
//
// A CTA an SM walks its list of tiles. One warp group feeds: a warp copies queries, keys and values, two look at values that not all
// rows see. Each of the other two has 64 of the tile's rows, and in registers their sums, the scores of a block of keys and the
// weights of the one before:
//
//   S = Q K[n]^T, O += P V[n - 1]    under way together; the turn to start them goes from one warp group to the other,
//   softmax of S                     so that the one's exponentials run beside the other's products
//   O *= scale, P = weights of S
//
// The bits of a row follow from its query and its keys: blocks begin at the request's first key and come in their order, a block has one
// maximum, a lane adds the weights of its keys in their order. Neither the tile nor the rows beside it appear in this: a block that a
// row does not see leaves its maximum, multiplies by exactly 1 and adds exactly 0.

#include <cfloat>

#include "src/device/launch.h"
#include "src/device/wgmma_rows.h"
#include "src/ops/attention_prefill/sm90_ready.cuh"

namespace vivace::prefill_sm90 {

/// Of a thread's two rows: what they see, counted from a block's begin when it is used, and their softmax so far.
struct Rows {
  int first[2];
  unsigned count[2];            ///< of keys
  int all_first, all_last;      ///< keys that all rows of the warp see
  float factor[2];              ///< of scores: units of log2, or of the cap
  float maximum[2], weight[2];  ///< units of log2; this lane's part
};

template <class T>
struct Products {
  float sums[T::kHead / 2], scores[T::kKeys / 2];
  uint32_t weights[T::kKeys / 16][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& sum : sums) sum = 0.f;
  }
  /// scores = q . k, begins.
  __device__ __forceinline__ void multiply_keys(const char* q, const char* k) {
    const uint64_t a = device::swizzled_operand(q), b = device::swizzled_operand(k);
    device::begin_products();
#pragma unroll
    for (int i = 0; i < T::kHead / 16; ++i) {
      const int panel = i / 4, in_row = i % 4 * 32;
      device::Wgmma<typename T::Element, T::kKeys>::multiply(
          scores, a + (panel * T::kQueryPanelBytes + in_row) / 16, b + (panel * T::kPanelBytes + in_row) / 16,
          i > 0);
    }
    device::commit_products();
  }
  /// sums += weights . v, begins.
  __device__ __forceinline__ void add_values(const char* v) {
    const uint64_t b = device::swizzled_rows_operand(v, T::kPanelBytes);
    device::begin_products();
#pragma unroll
    for (int i = 0; i < T::kKeys / 16; ++i)
      device::WgmmaRows<typename T::Element, T::kHead>::multiply(sums, weights[i], b + i * (16 * 128 / 16));
    device::commit_products();
  }
  __device__ __forceinline__ void wait_for_all() {
    device::wait_for_products<0>();
    device::hold_products(sums);
#pragma unroll
    for (auto& four : weights) {
#pragma unroll
      for (uint32_t& pair : four) asm volatile("" : "+r"(pair)::"memory");
    }
  }
  __device__ __forceinline__ void scale_sums(const float (&scale)[2]) {
    if (!__any_sync(kAllLanes, scale[0] != 1.f || scale[1] != 1.f)) return;  // changes nothing
#pragma unroll
    for (int i = 0; i < T::kHead / 2; ++i) sums[i] = __fmul_rn(sums[i], scale[i / 2 % 2]);
  }
  /// The weights as the operand of the next product.
  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < T::kKeys / 4; ++i)
      weights[i / 4][i % 4] = device::pack<typename T::Element>(scores[2 * i], scores[2 * i + 1]);
  }

  /// Turns scores of the block of keys from `begin` on into weights; `scale` brings earlier sums to their maximum.
  __device__ __forceinline__ void weigh(const Params& p, int begin, Rows& rows, float (&scale)[2]) {
    float factor[2] = {rows.factor[0], rows.factor[1]};
    if (p.cap_log2 > 0.f ||
        !(factor[0] >= FLT_MIN && factor[1] >= FLT_MIN)) {  // else their order is that of the products
#pragma unroll
      for (int i = 0; i < T::kKeys / 2; ++i) {
        scores[i] = __fmul_rn(scores[i], factor[i / 2 % 2]);
        if (p.cap_log2 > 0.f) scores[i] = capped(scores[i], p.cap_log2);
      }
      factor[0] = factor[1] = 1.f;
    }
    if (rows.all_first > begin || rows.all_last < begin + T::kKeys) {
      const int pair = begin + static_cast<int>(threadIdx.x) % 4 * 2;
      const int from[2] = {pair - rows.first[0], pair - rows.first[1]};
#pragma unroll
      for (int i = 0; i < T::kKeys / 2; ++i) {
        const auto key = static_cast<unsigned>(from[i / 2 % 2] + i / 4 * 8 + i % 2);
        if (key >= rows.count[i / 2 % 2]) scores[i] = kNoKeys;
      }
    }
    float highest[2][2] = {{kNoKeys, kNoKeys}, {kNoKeys, kNoKeys}};
#pragma unroll
    for (int i = 0; i < T::kKeys / 2; ++i)
      highest[i / 2 % 2][i % 2] = fmaxf(highest[i / 2 % 2][i % 2], scores[i]);
    float minus_maximum[2], total[2] = {0.f, 0.f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = fmaxf(highest[h][0], highest[h][1]);
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      most = fmaxf(rows.maximum[h], __fmul_rn(most, factor[h]));
      // Without a score above -infinity the weights are 0, or NaN for a NaN; -infinity - -infinity would be NaN for both.
      minus_maximum[h] = most == kNoKeys ? 0.f : -most;
      scale[h] = exp2_of(__fadd_rn(rows.maximum[h], minus_maximum[h]));
      rows.maximum[h] = most;
    }
#pragma unroll
    for (int i = 0; i < T::kKeys / 2; ++i) {
      scores[i] = exp2_of(__fmaf_rn(scores[i], factor[i / 2 % 2], minus_maximum[i / 2 % 2]));
      total[i / 2 % 2] = __fadd_rn(total[i / 2 % 2], scores[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) rows.weight[h] = __fmaf_rn(rows.weight[h], scale[h], total[h]);
  }
};

/// Bits [from, to) of 64.
__device__ __forceinline__ unsigned long long bits_between(int from, int to) {
  from = max(from, 0);
  to = min(to, 64);
  return from >= to ? 0 : ~0ull >> (64 - (to - from)) << from;
}

/// A warp group: tile after tile.
template <class T>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Sm90Params& p, Shared<T>& shared) : p_(p.attention), s_(shared) {}

  __device__ __forceinline__ void run() {
    if (group() == 1) give_turn();
    for (Tile tile; take(tile);) {
      Rows rows;
      describe(tile, rows);
      Products<T> products;
      products.clear();
      if (tile.first_block < tile.end_block) {
        attend(tile, rows, products);
      } else {
        release(&s_.q_empty);
      }
      store(tile, rows, products);
    }
  }

 private:
  __device__ __forceinline__ static int group() { return static_cast<int>(threadIdx.x) / kGroupThreads; }
  __device__ __forceinline__ const char* queries() const { return s_.q + group() * 64 * 128; }
  __device__ __forceinline__ static int row(int h) {
    return static_cast<int>(threadIdx.x) / 32 * 16 + 8 * h + lane() / 4;
  }
  /// The turn to start products.
  __device__ __forceinline__ static void take_turn() { device::named_barrier(1 + group(), kConsumers); }
  __device__ __forceinline__ static void give_turn() {
    device::arrive_named_barrier(1 + (group() ^ 1), kConsumers);
  }
  /// For the whole warp, whatever its lanes have read.
  __device__ __forceinline__ static void release(Barrier* barrier) {
    __syncwarp();
    if (lane() == 0) device::arrive(barrier);
  }

  /// The next tile, its queries in shared memory; false when there are no more.
  __device__ __forceinline__ bool take(Tile& tile) {
    device::wait_for(&s_.q_full, q_parity_);
    q_parity_ ^= 1;
    tile = s_.tile;
    return tile.head_kv >= 0;
  }
  /// Rows that do not exist are like the last that does: nobody stores them.
  __device__ __forceinline__ void describe(const Tile& tile, Rows& rows) const {
    int last[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = min(row(h) / p_.group, tile.tokens - 1);
      rows.first[h] = tile.first_key(token, p_.window);
      last[h] = tile.last_key(token);
      rows.count[h] = last[h] - rows.first[h];
      rows.factor[h] = p_.factor;
      if constexpr (T::kFp8) {
        const int head = tile.head_kv * p_.group + row(h) % p_.group;
        rows.factor[h] *=
            *p_.k_scale * p_.q_scale[(tile.row + token) * p_.q_scale_stride[0] + head * p_.q_scale_stride[1]];
      }
      rows.maximum[h] = kNoKeys;
      rows.weight[h] = 0.f;
    }
    rows.all_first = __reduce_max_sync(kAllLanes, max(rows.first[0], rows.first[1]));
    rows.all_last = __reduce_min_sync(kAllLanes, min(last[0], last[1]));
  }

  __device__ __forceinline__ void attend(const Tile& tile, Rows& rows, Products<T>& products) {
    float scale[2];
    int block = tile.first_block;
    device::wait_for(s_.k_full + k_.stage, k_.parity);
    products.multiply_keys(queries(), s_.k[k_.stage]);
    device::wait_for_products<0>();
    end_keys(tile, block, products);
    products.weigh(p_, block * T::kKeys, rows, scale);
    products.pack_weights();
#pragma unroll 1
    for (++block; block < tile.end_block; ++block) {
      device::wait_for(s_.k_full + k_.stage, k_.parity);
      take_turn();
      products.multiply_keys(queries(), s_.k[k_.stage]);
      device::wait_for(s_.v_full + v_.stage, v_.parity);
      products.add_values(s_.v[v_.stage]);
      give_turn();
      device::wait_for_products<1>();
      end_keys(tile, block, products);
      products.weigh(p_, block * T::kKeys, rows, scale);
      products.wait_for_all();
      end_values(tile, block - 1, rows, products);
      products.scale_sums(scale);
      products.pack_weights();
    }
    device::wait_for(s_.v_full + v_.stage, v_.parity);
    products.add_values(s_.v[v_.stage]);
    products.wait_for_all();
    end_values(tile, block - 1, rows, products);
  }
  /// Behind the product with a block of K.
  __device__ __forceinline__ void end_keys(const Tile& tile, int block, Products<T>& products) {
    device::hold_products(products.scores);
    release(s_.k_empty + k_.stage);
    if (block == tile.end_block - 1) release(&s_.q_empty);
    k_.next();
  }
  /// Behind the product with a block of V.
  __device__ __forceinline__ void end_values(const Tile& tile, int block, const Rows& rows,
                                             Products<T>& products) {
    const int begin = block * T::kKeys;
    if (tile.first_key(tile.tokens - 1, p_.window) > begin || tile.last_key(0) < begin + T::kKeys) {
#pragma unroll 1
      for (int helper = 0; helper < T::kHelpers; ++helper) {
        if (s_.marked[v_.stage][helper])
          add_marked(s_.marks[v_.stage][helper], begin + helper * T::kHelperKeys, rows, products);
      }
    }
    release(s_.v_empty + v_.stage);
    v_.next();
  }
  /// Adds what was not finite, of keys from `begin` on, to the rows that see it.
  __device__ __forceinline__ void add_marked(const Marks<T>& marks, int begin, const Rows& rows,
                                             Products<T>& products) {
    unsigned long long seen[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int from = rows.first[h] - begin;
      seen[h] = bits_between(from, from + static_cast<int>(rows.count[h]));
    }
#pragma unroll
    for (int i = 0; i < T::kHead / 4; ++i) {
      const int column = i / 2 * 8 + lane() % 4 * 2 + i % 2;
      const unsigned long long nan = marks.nan[column], plus = marks.plus[column],
                               minus = marks.minus[column];
      if ((nan | plus | minus) == 0) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& sum = products.sums[i / 2 * 4 + 2 * h + i % 2];
        if (seen[h] & plus) sum += INFINITY;
        if (seen[h] & minus) sum -= INFINITY;
        if (seen[h] & nan) sum = NAN;
      }
    }
  }

  /// Writes output and lse. Lanes of a row turn four pairs each into sixteen bytes of one.
  __device__ __forceinline__ void store(const Tile& tile, Rows& rows, const Products<T>& products) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float weight = rows.weight[h];
      weight = __fadd_rn(weight, __shfl_xor_sync(kAllLanes, weight, 1));
      weight = __fadd_rn(weight, __shfl_xor_sync(kAllLanes, weight, 2));
      const int token = row(h) / p_.group, head = tile.head_kv * p_.group + row(h) - token * p_.group;
      const bool exists = token < tile.tokens;
      const bool sees_keys = rows.count[h] > 0;
      const int64_t at = tile.row + token;
      const RowEnd end(p_, sees_keys, rows.maximum[h], weight, head);
      if (exists && p_.lse != nullptr && lane() % 4 == 0)
        p_.lse[at * p_.lse_stride[0] + head * p_.lse_stride[1]] = end.lse;
      bf16* output = static_cast<bf16*>(p_.output) + at * p_.output_stride[0] + head * p_.output_stride[1];
#pragma unroll
      for (int i = 0; i < T::kHead / 32; ++i) {
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* sum = products.sums + 16 * i + 4 * j + 2 * h;
          pairs[j] = sees_keys ? device::pack<bf16>(sum[0] * end.scale, sum[1] * end.scale) : 0;
        }
        transpose(pairs);
        if (exists)
          *reinterpret_cast<uint4*>(output + 32 * i + 8 * (lane() % 4)) = {pairs[0], pairs[1], pairs[2],
                                                                           pairs[3]};
      }
    }
  }
  /// Word j of lane t of four lanes becomes word t of lane j.
  __device__ __forceinline__ static void transpose(uint32_t (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      const bool high = (lane() & bit) != 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t &low_word = words[bit == 1 ? 2 * i : i], &high_word = words[(bit == 1 ? 2 * i : i) + bit];
        const uint32_t other = __shfl_xor_sync(kAllLanes, high ? low_word : high_word, bit);
        (high ? low_word : high_word) = other;
      }
    }
  }

  const Params& p_;
  Shared<T>& s_;
  device::RingPosition<T::kStages> k_, v_;
  uint32_t q_parity_ = 0;
};

template <class T>
__global__ __launch_bounds__(kThreads,
                             1) void attention_prefill_sm90_kernel(const __grid_constant__ Sm90Params p) {
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  if (threadIdx.x == 0) {
    device::prefetch_tensor_map(&p.q);
    device::prefetch_tensor_map(&p.k);
    device::prefetch_tensor_map(&p.v);
    shared.init_barriers();
  }
  if (threadIdx.x < T::kStages * T::kHelpers)
    (&shared.marked[0][0])[threadIdx.x] = true;  // what is there is not clear
  __syncthreads();
  device::wait_for_previous_kernel();
  if (threadIdx.x < kConsumers) {
    device::take_registers<224>();
    Consumer<T>(p, shared).run();
    return;
  }
  device::give_up_registers<56>();
  const int warp = static_cast<int>(threadIdx.x - kConsumers) / 32;
  if (warp == 0) {
    Feed<T>(p, shared).run();
    device::let_next_kernel_start();
  } else if (warp <= T::kHelpers) {
    std::conditional_t<T::kFp8, Widen<T>, Pass<T>>(shared, warp - 1).run();
  }
}

template <class T>
Status launch_shape(const Sm90Params& p, int64_t ctas, const Stream& stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ctas)),
                          .block = dim3(kThreads),
                          .smem_bytes = sizeof(Shared<T>),
                          .overlap_previous = true};
  static_assert(sizeof(Shared<T>) <= 227 << 10, "it fits an SM");
  return launch("attention_prefill", attention_prefill_sm90_kernel<T>, shape, stream, p);
}

/// Q, K and V of type Raw.
template <class Raw>
Status launch_prefill(const Sm90Params& p, int64_t ctas, const Stream& stream) {
  if (p.attention.head_dim == 64) return launch_shape<Shape<Raw, 64>>(p, ctas, stream);
  if constexpr (std::is_same_v<Raw, bf16>) {
    if (p.attention.head_dim == 256) return launch_shape<Shape<Raw, 256>>(p, ctas, stream);
  }
  return launch_shape<Shape<Raw, 128>>(p, ctas, stream);
}

extern template Status launch_prefill<bf16>(const Sm90Params&, int64_t, const Stream&);
extern template Status launch_prefill<fp8>(const Sm90Params&, int64_t, const Stream&);

}  // namespace vivace::prefill_sm90
