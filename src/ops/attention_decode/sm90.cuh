#pragma once

// The kernels of the sm90.* rows: decode attention that keeps the memory of a Hopper GPU busy.
//
// A worker of the schedule is a warp, or a team of 2 or 4 that look at the same keys for other query rows. It streams its run
// of keys through a ring of its own: boxes of K and of V, 8 KB each (4 KB of fp8 heads of 64), that the copy engine brings
// page by page. Nobody else touches the ring, so nothing waits for anything but its own boxes until a worker is done. Then the
// pieces of requests that were cut are put together in two rounds, each in the order of their keys: workers of a cluster of two
// CTAs, clusters of the grid; with sm90.few by another kernel. What one worker finishes goes to the output at once.

#include "src/device/launch.h"
#include "src/ops/attention_decode/sm90_add_up.cuh"
#include "src/ops/attention_decode/sm90_feed.cuh"
#include "src/ops/attention_decode/sm90_merge.cuh"
#include "src/ops/attention_decode/sm90_products.cuh"

namespace vivace::attention_sm90 {

/// One warp of a worker: walks the list, and leaves complete rows in the output, others as pieces.
template <class T>
class Worker {
 public:
  __device__ __forceinline__ Worker(const Sm90Params& p, Shared<T>& shared, const Starts& starts)
      : p_(p),
        shared_(shared),
        team_(1 << p.team_log2),
        member_((static_cast<int>(threadIdx.x) / 32) & (team_ - 1)),
        local_((static_cast<int>(threadIdx.x) / 32) >> p.team_log2),
        row0_(member_ * T::kRowsPerWarp),
        list_(p, starts, static_cast<int>(blockIdx.x) % kClusterCtas * (T::kWarps >> p.team_log2) + local_,
              shared.segments[local_]),
        feed_(p, shared.segments[local_], ring(), shared.full[local_ * team_], T::kSlots * team_),
        all_busy_(2 * starts.busy_workers > p.workers) {}

  /// Pieces but the last go to `merge`; `open` becomes that, if the last segment is one. kFew: all are left in the workspace.
  template <bool kFew>
  __device__ __forceinline__ void run(Merge<T>& merge, OpenPiece<T>& open) {
    const int slots = T::kSlots * team_;
    Barrier* full = shared_.full[local_ * team_];
    open.clear();
    see_until(0, min(list_.count(), kSegments));
    int slot = 0, consumed = 0;
    uint32_t parity = 0;
    bool early = p_.old_keys_ready;
    for (int i = 0; i < list_.count() || early; ++i) {
      constexpr int kHalf = kSegments / 2;
      if (i % kHalf == 0) {
        if (i > 0) see_until(i + kHalf, min(list_.count(), i + kSegments));
#pragma unroll 1
        do {
          if (kFew && early && all_busy_) feed_.fill_in_turns();
          if (member_ == 0) feed_.top_up(consumed, early);
          if (!early) break;
          if (list_.count() > 0) prefetch_queries(list_[0]);
          device::wait_for_previous_kernel();
          device::let_next_kernel_start();
          early = false;
        } while (true);
        if (i >= list_.count()) return;
      }
      const Segment& segment = list_[i];
      if (segment.rows == 0 && segment.begins && segment.ends)
        continue;  // a part is parked: others count on it
      Queries<T> queries;
      queries.load(p_, segment, row0_);
      if (i + 1 < list_.count()) prefetch_queries(list_[i + 1]);
      Sums<T>& sums = open.sums;
      sums.clear();
      Scores<T> scores;
      const int all_first = first_key(segment, segment.rows - 1), all_last = last_key(segment, 0);
      // K and V of a box in turns.
#pragma unroll 1
      for (int half = 2 * segment.first_box; half < 2 * segment.end_box; ++half) {
        const int key0 = half / 2 * T::kBoxKeys;
        const bool masked = key0 < all_first || all_last - key0 < T::kBoxKeys;
        device::wait_for(full + slot, parity);
        const char* box = ring() + slot * T::kBoxBytes;
        if (half % 2 == 0) {
          scores.multiply(box, queries);
          scale(segment, key0, queries, scores);
          if (masked) [[unlikely]]
            hide(segment, key0, scores);
          sums.weigh(scores);
        } else if (!masked) [[likely]] {
          sums.template add<false>(
              box, scores, [](int) { return true; }, [](int, int) { return true; });
        } else {
          // Once per token: a row must not meet what it does not see, be that a NaN.
          const int last_token = min(token_of_row(p_, row0_ + T::kRowsPerWarp - 1), segment.rows - 1);
#pragma unroll 1
          for (int token = token_of_row(p_, row0_); token <= last_token; ++token) {
            const int first = first_key(segment, token) - key0, last = last_key(segment, token) - key0;
            sums.template add<true>(
                box, scores, [&](int key) { return key >= first && key < last; },
                [&](int b, int c) { return token_of(b, c) == token; });
          }
        }
        sync_team();
        ++consumed;
        if (++slot == slots) {
          slot = 0;
          parity ^= 1;
        }
        if (member_ == 0) feed_.top_up(consumed, false);
      }
      sums.total_weights();
      if (segment.begins && segment.ends) {
        finish(segment, sums);
      } else if constexpr (kFew) {
        leave(segment, sums);
      } else {
        open.which = segment.begins ? 1 : 0;
        Sums<T>::for_each_row([&](int b, int c) { open.places[b][c] = place_of(segment, b, c); });
        if (i < list_.count() - 1) {
          merge.park(open);
          open.which = -1;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ char* ring() const {
    return shared_.ring[local_ * team_][0];
  }
  __device__ __forceinline__ void sync_team() const {
    if (team_ == 1) {
      __syncwarp();
    } else {
      device::named_barrier(1 + local_, 32 * team_);
    }
  }
  /// Describes segments from `first` on; those before have been left by all warps of the team.
  __device__ __forceinline__ void see_until(int first, int limit) {
    sync_team();
    if (member_ == 0) list_.describe(first, limit);
    sync_team();
    feed_.see(limit);
  }
  /// Of a segment to come: four lanes ask for a row's lines, up to 512 bytes of it.
  __device__ __forceinline__ void prefetch_queries(const Segment& segment) const {
    const Params& a = p_.attention;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int element = a.q_type == DType::bf16 ? 2 : 1, from = lane % 4 * 128;
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
      const int r = row0_ + 8 * b + lane / 4, token = token_of_row(p_, r);
      if (token >= segment.rows || from >= T::kHead * element) continue;
      const int64_t at = (segment.row_begin + token) * a.q_stride[0] +
                         (segment.head_kv * a.group + r - token * a.group) * a.q_stride[1];
      device::prefetch_line(static_cast<const char*>(a.q) + at * element + from);
    }
  }
  __device__ __forceinline__ int row_of(int b, int c) const {
    return row0_ + 8 * b + static_cast<int>(threadIdx.x) % 4 * 2 + c;
  }
  __device__ __forceinline__ int token_of(int b, int c) const {
    return token_of_row(p_, row_of(b, c));
  }
  /// Keys [first, last) are what token `token` of the segment's request sees.
  __device__ __forceinline__ static int last_key(const Segment& s, int token) {
    return max(0, s.keys - s.rows + token + 1);
  }
  __device__ __forceinline__ int first_key(const Segment& s, int token) const {
    const int window = p_.attention.window;
    return window > 0 ? max(0, last_key(s, token) - window) : 0;
  }

  /// Products become scores in units of log2. What few models want lies out of the way: a loop should jump little.
  __device__ __forceinline__ void scale(const Segment& segment, int key0, const Queries<T>& queries,
                                        Scores<T>& scores) const {
    const Params& a = p_.attention;
    scores.for_each([&](int, int b, int e, float& s) { s = __fmul_rn(s, queries.factor[b][e % 2]); });
    if (T::kFp8 && a.scaled_keys) [[unlikely]] {
      const int q = static_cast<int>(threadIdx.x) % 32 / 4;
      float key_scale[T::kKeySteps][2];
#pragma unroll
      for (int i = 0; i < T::kKeySteps; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) key_scale[i][h] = scale_of_key(segment, key0 + 16 * i + 8 * h + q);
      }
      scores.for_each([&](int i, int, int e, float& s) { s = __fmul_rn(s, key_scale[i][e / 2]); });
    }
    if (a.cap_log2 > 0.f) [[unlikely]]
      scores.for_each([&](int, int, int, float& s) { s = capped(s, a.cap_log2); });
  }
  __device__ __forceinline__ float scale_of_key(const Segment& segment, int key) const {
    const Params& a = p_.attention;
    if (key >= segment.keys || key < first_key_seen(p_, segment.keys, segment.rows)) return 1.f;
    const int page = a.page_table[segment.request * a.page_table_stride + (key >> p_.page_log2)];
    if (page < 0 || page >= a.pages) return 1.f;
    return a.k_scale[page * a.k_scale_stride[0] + (key & ((1 << p_.page_log2) - 1)) * a.k_scale_stride[1] +
                     segment.head_kv * a.k_scale_stride[2]];
  }

  __device__ __forceinline__ void hide(const Segment& segment, int key0, Scores<T>& scores) const {
    const int q = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int token = token_of(b, c);
        const bool exists = token < segment.rows;
        const int first = first_key(segment, token) - key0,
                  last = exists ? last_key(segment, token) - key0 : 0;
#pragma unroll
        for (int i = 0; i < T::kKeySteps; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int key = 16 * i + 8 * h + q;
            if (key < first || key >= last) scores.s[i][b][c + 2 * h] = kNoKeys;
          }
        }
      }
    }
  }

  /// Rows that nobody else has a part of.
  __device__ __forceinline__ void finish(const Segment& segment, const Sums<T>& sums) const {
    const Params& a = p_.attention;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int token = token_of(b, c);
        if (token >= segment.rows) continue;
        const int head = segment.head_kv * a.group + row_of(b, c) - token * a.group;
        const int64_t row = segment.row_begin + token;
        const RowOutput output(a, row, head, last_key(segment, token) > 0, sums.maximum[b][c],
                               sums.weight[b][c], lane < 4);
        sums.for_each_pair(
            b, c, [&](int d, float v0, float v1) { store_two<T>(a, output.at + d, output(v0), output(v1)); });
      }
    }
  }
  /// Rows that others have a part of, for a kernel that adds up.
  __device__ __forceinline__ void leave(const Segment& segment, const Sums<T>& sums) const {
    const int q = static_cast<int>(threadIdx.x) % 32 / 4,
              first = static_cast<int>(blockIdx.x) * (T::kWarps >> p_.team_log2);
    const int64_t piece = int64_t{2 * (first + local_) + (segment.begins ? 1 : 0)} * T::kRowsPerWarp;
    Sums<T>::for_each_row([&](int b, int c) {
      const int r = row_of(b, c);
      if (token_of(b, c) >= segment.rows) return;
      float4* values = reinterpret_cast<float4*>(p_.pieces + (piece + r) * T::kHead);
#pragma unroll
      for (int k = 0; k < Sums<T>::kChunks; ++k) values[8 * k + q] = sums.chunk(b, c, k);
      if (q == 0) p_.piece_ends[piece + r] = {sums.maximum[b][c], sums.weight[b][c]};
    });
  }
  /// Where row (b, c) of a segment goes.
  __device__ __forceinline__ RowPlace place_of(const Segment& segment, int b, int c) const {
    const int r = row_of(b, c), token = token_of_row(p_, r), row = segment.row_begin + token;
    if (token >= segment.rows) return {0, -1};
    return {last_key(segment, token) > 0 ? row : ~row,
            segment.head_kv * p_.attention.group + r - token * p_.attention.group};
  }

  const Sm90Params& p_;
  Shared<T>& shared_;
  const int team_, member_, local_, row0_;
  WorkList<T> list_;
  Feed<T> feed_;
  const bool all_busy_;  ///< or most of the workers
};

/// Barriers, and what is copied for the merge.
template <class T, bool kFew>
__device__ __forceinline__ void prepare(const Sm90Params& p, Shared<T>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    for (Barrier& full : shared.full[warp]) device::init_barrier(&full, 1);
    device::init_barrier(&shared.arrived[warp], T::kWarps);
    device::publish_barriers();
  }
  if (kFew || warp != 1) return;
  for (int i = lane; i <= p.clusters; i += 32)
    device::copy_16_async(&shared.cluster_starts[i],
                          Starts::list(p) + min(i * workers_per_cluster(p), p.workers));
  device::commit_copies();
}

template <class T, bool kFew>
__device__ __forceinline__ void attend(const Sm90Params& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  if (threadIdx.x == 0) {
    device::prefetch_tensor_map(&p.k);
    device::prefetch_tensor_map(&p.v);
    if (p.attention.v_scale != nullptr) device::prefetch_line(p.attention.v_scale);  // asked for at the end
  }
  if (!p.old_keys_ready) {
    device::wait_for_previous_kernel();
    device::let_next_kernel_start();
  }
  const Starts starts(p, static_cast<int>(blockIdx.x) / kClusterCtas, T::kBoxKeys);
  prepare<T, kFew>(p, shared);
  Merge<T> merge(p, shared, starts);
  OpenPiece<T> open;
  Worker<T>(p, shared, starts).template run<kFew>(merge, open);
  if constexpr (!kFew) merge.run(open);
}

template <class T>
__global__ __launch_bounds__(T::kThreads, kCtasPerSm) void attention_decode_sm90_kernel(
    const __grid_constant__ Sm90Params p) {
  attend<T, false>(p);
}
template <class T>
__global__ __maxnreg__(T::kFewRegisters) void attention_decode_sm90_few_kernel(
    const __grid_constant__ Sm90Params p) {
  attend<T, true>(p);
}

template <class T>
Status launch_shape(const Sm90Params& p, const Stream& stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(p.clusters * kClusterCtas)),
                          .block = dim3(T::kThreads),
                          .smem_bytes = sizeof(Shared<T>),
                          .cluster = kClusterCtas,
                          .overlap_previous = true};
  static_assert(kCtasPerSm * (sizeof(Shared<T>) + 1024) <= 228 << 10, "that many fit an SM");
  return launch("attention_decode", attention_decode_sm90_kernel<T>, shape, stream, p);
}

/// The same walk without clusters, and a second kernel that lies beside it.
template <class T>
Status launch_few(const Sm90Params& p, const Stream& stream) {
  static_assert(kCtasPerSm * T::kThreads * T::kFewRegisters + AddUp<T>::kThreads * T::kAddUpRegisters <=
                64 << 10);
  static_assert(kCtasPerSm * (sizeof(Shared<T>) + 1024) + sizeof(typename AddUp<T>::Shared) + 1024 <=
                228 << 10);
  const LaunchShape walk{.grid = dim3(static_cast<unsigned>(p.clusters * kClusterCtas)),
                         .block = dim3(T::kThreads),
                         .smem_bytes = sizeof(Shared<T>),
                         .overlap_previous = true};
  VIVACE_TRY(launch("attention_decode", attention_decode_sm90_few_kernel<T>, walk, stream, p));
  const LaunchShape add_up{.grid = dim3(static_cast<unsigned>(p.clusters)),
                           .block = dim3(AddUp<T>::kThreads),
                           .overlap_previous = true};
  return launch("attention_decode add up", attention_decode_sm90_add_up_kernel<T>, add_up, stream, p);
}

/// K and V of type Raw. `few`: a warp has all rows of a unit, of heads up to 128.
template <class Raw>
Status launch_decode(const Sm90Params& p, bool few, const Stream& stream) {
  if (few)
    return p.attention.head_dim == 64 ? launch_few<Shape<Raw, 64, 1>>(p, stream)
                                      : launch_few<Shape<Raw, 128, 1>>(p, stream);
  const bool wide = rows_plan(p.rows, p.attention.head_dim).blocks == 2;
  switch (p.attention.head_dim) {
    case 64:
      return wide ? launch_shape<Shape<Raw, 64, 2>>(p, stream) : launch_shape<Shape<Raw, 64, 1>>(p, stream);
    case 128:
      return wide ? launch_shape<Shape<Raw, 128, 2>>(p, stream) : launch_shape<Shape<Raw, 128, 1>>(p, stream);
    default:
      return launch_shape<Shape<Raw, 256, 1>>(p, stream);
  }
}

extern template Status launch_decode<bf16>(const Sm90Params&, bool, const Stream&);
extern template Status launch_decode<fp8>(const Sm90Params&, bool, const Stream&);

}  // namespace vivace::attention_sm90
