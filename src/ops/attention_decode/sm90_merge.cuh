#pragma once

// How the sm90.* kernel puts together what it cut.

#include "src/ops/attention_decode/sm90_feed.cuh"
#include "src/ops/attention_decode/sm90_products.cuh"
#include "src/ops/decode_schedule/view.h"

namespace vivace::attention_sm90 {

/// What a warp did last, in registers: a piece of a unit that others have parts of, if it was one.
template <class T>
struct OpenPiece {
  Sums<T> sums;
  RowPlace places[T::kBlocks][2];
  int which;  ///< 0: goes on with a unit, 1: begins one; -1: none

  /// To one that has no keys and no rows.
  __device__ __forceinline__ void clear() {
    which = -1;
    sums.clear();
    Sums<T>::for_each_row([&](int b, int c) { places[b][c] = {0, -1}; });
  }
  __device__ __forceinline__ PieceEnd end(int b, int c) const {
    return {sums.maximum[b][c], sums.weight[b][c], places[b][c]};
  }
  __device__ __forceinline__ void set_end(int b, int c, const PieceEnd& end) {
    sums.maximum[b][c] = end.maximum;
    sums.weight[b][c] = end.weight;
    places[b][c] = end.place;
  }
};

/// Four floats in the shared memory of another CTA of the cluster; their 16 bytes complete on that CTA's barrier.
__device__ __forceinline__ void store_async(uint32_t to, const float4& v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
          to),
      "r"(barrier), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

/// Puts cut units together, when all workers of the cluster are done, in two rounds, each in the order of their keys. Every warp adds
/// up its own rows of all units of the cluster: workers send it those of their pieces, into its drained ring. What other clusters
/// have of a unit goes through the L2, where the warp that is the last to leave its rows adds up again. Warps wait for what they are
/// sent, for nothing else.
template <class T>
class Merge {
  static constexpr int kMembers = kClusterCtas * T::kWarps;  ///< at most, of a chain of workers
  static constexpr int kColumns = T::kHead / 32;             ///< of a lane
  static constexpr int kLoad = kColumns < 4 ? kColumns : 4, kLoads = kColumns / kLoad;
  static constexpr int kAtATime = 16;  ///< pieces of clusters whose values are under way together
  using Vector = device::Vec<float, kLoad>;

 public:
  __device__ __forceinline__ Merge(const Sm90Params& p, Shared<T>& shared, const Starts& starts)
      : p_(p),
        shared_(shared),
        members_(workers_per_cluster(p)),
        rows_log2_((T::kBlocks == 2 ? 4 : 3) + p.team_log2),
        each_log2_(rows_log2_ - kClusterLog2 - kCtaWarpsLog2),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        cluster_(static_cast<int>(blockIdx.x) / kClusterCtas),
        rank_(static_cast<int>(blockIdx.x) % kClusterCtas),
        cuts_(p, starts, members_) {}

  /// A piece of the warp's worker that will not be the last.
  __device__ __forceinline__ void park(const OpenPiece<T>& piece) {
    const int q = lane_ / 4, t = lane_ % 4;
    Sums<T>::for_each_chunk([&](int b, int c, int k) { *parked(b, c, k) = piece.sums.chunk(b, c, k); });
    if (q == 0)
      Sums<T>::for_each_row(
          [&](int b, int c) { shared_.parked_ends[warp_][8 * b + 2 * t + c] = piece.end(b, c); });
    has_parked_ = true;
  }

  /// After the walk; `open` is the piece that it ended with.
  __device__ __forceinline__ void run(OpenPiece<T>& open) {
    device::wait_for_copies<0>();  // nobody leaves with copies under way
    if (!cuts_.any()) return;
    __syncthreads();
    // Both CTAs are here: their rings are drained, and their barriers can be used.
    device::cluster_arrive_without_fence();
    device::cluster_wait();
    send_pieces(open);
    const ClusterChain before = clusters_at(0), behind = clusters_at(1);
    device::wait_for_cluster_writes(&shared_.arrived[warp_], 0);
    for (int i = 0; i < 1 << each_log2_; ++i) add_up(i);
    add_up_clusters(before, behind);
  }

 private:
  /// Which workers of a cluster have pieces of cut units, a bit a worker.
  struct Cuts {
    unsigned goes_on;       ///< with a unit that a worker before it began
    unsigned begins, ends;  ///< a cut unit begins in it, ends in it
    int members;

    __device__ __forceinline__ Cuts(const Sm90Params& p, const Starts& starts, int n) : members(n) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const int before = Starts::cut_unit(p, starts.of_lane), behind = __shfl_down_sync(kAllLanes, before, 1);
      // Where the cut behind a worker is another than that before it, a unit begins in it, and one ends.
      goes_on = __ballot_sync(kAllLanes, lane < n && before >= 0);
      begins = __ballot_sync(kAllLanes, lane < n && behind >= 0 && behind != before);
      ends = __ballot_sync(kAllLanes, lane < n && before >= 0 && behind != before);
    }
    __device__ __forceinline__ bool from_before() const { return goes_on & 1; }
    __device__ __forceinline__ bool any() const { return begins != 0 || from_before(); }
    /// Whether worker `member` has a piece that begins its unit (`which` = 1), or goes on with it.
    __device__ __forceinline__ bool has(int member, int which) const {
      return ((which == 1 ? begins : goes_on) >> member & 1) != 0;
    }
    /// Of the unit of such a piece; first = -1 without one.
    __device__ __forceinline__ Chain chain_of(int member, int which) const {
      const unsigned here = 1u << member, before = begins & (here - 1);
      const unsigned ends_behind = ends & ~(here - 1) & ~(which == 1 ? here : 0u);
      const bool continues = which == 0 && before == 0;
      if (which == 1 ? (begins & here) == 0 : continues && !from_before()) return {-1, -1, false, false};
      const int first = which == 1 ? member : continues ? 0 : 31 - __clz(static_cast<int>(before));
      const int last = ends_behind == 0 ? members - 1 : __ffs(static_cast<int>(ends_behind)) - 1;
      return {first, last, continues, ends_behind == 0};
    }
  };

  __device__ __forceinline__ float4* parked(int b, int c, int k) const {
    const int64_t warp = int64_t{blockIdx.x} * T::kWarps + warp_;
    return reinterpret_cast<float4*>(p_.parked + warp * T::kRowsPerWarp * T::kHead) +
           ((2 * b + c) * Sums<T>::kChunks + k) * 32 + lane_;
  }

  /// To each warp of the cluster its rows of the pieces that this warp's worker has. Whatever the walk left, what the cuts promise
  /// is sent.
  __device__ __forceinline__ void send_pieces(OpenPiece<T>& piece) {
    const int member = (rank_ * T::kWarps + warp_) >> p_.team_log2;
    const int row0 = (warp_ & ((1 << p_.team_log2) - 1)) * T::kRowsPerWarp;
    OpenPiece<T> before;
    if (has_parked_) {
      Sums<T>::for_each_chunk([&](int b, int c, int k) { before.sums.set_chunk(b, c, k, *parked(b, c, k)); });
      Sums<T>::for_each_row(
          [&](int b, int c) { before.set_end(b, c, shared_.parked_ends[warp_][8 * b + lane_ % 4 * 2 + c]); });
    }
#pragma unroll 1
    for (int which = 1; which >= 0; --which) {
      if (!cuts_.has(member, which)) continue;
      if (which != piece.which) {
        if (has_parked_) {
          piece = before;
        } else {
          piece.clear();
        }
      }
      send(piece, which * members_ + member, row0);
    }
    // What the CTA stores itself is counted in warps, what the other one sends in bytes.
    __syncwarp();
    if (lane_ == warp_) {
      const int each = members_ / kClusterCtas;
      const unsigned others = ((1u << each) - 1) << (rank_ == 0 ? each : 0);
      const int pieces = __popc(cuts_.goes_on & others) + __popc(cuts_.begins & others);
      device::arrive_and_expect(&shared_.arrived[warp_],
                                (pieces << each_log2_) * T::kPitch * int{sizeof(float)});
    } else if (lane_ < T::kWarps) {
      device::arrive(&shared_.arrived[lane_]);
    }
  }
  __device__ __forceinline__ void send(const OpenPiece<T>& piece, int place, int row0) {
    const int q = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
      // A lane's two rows, which are neighbours, are those of one warp or of two beside each other.
      const int r = row0 + 8 * b + 2 * t, owner = r >> each_log2_;
      const int cta = owner / T::kWarps, warp = owner % T::kWarps;
      float* to = shared_.inbox(warp, place, r & ((1 << each_log2_) - 1), each_log2_);
      const bool same = each_log2_ > 0;
      const int second =
          same ? T::kPitch : T::kSlots * T::kBoxBytes / int{sizeof(float)};  // floats behind the first
      if (cta == rank_) {
#pragma unroll
        for (int c = 0; c < 2; ++c, to += second) {
#pragma unroll
          for (int k = 0; k < Sums<T>::kChunks; ++k)
            *reinterpret_cast<float4*>(to + 4 * (8 * k + q)) = piece.sums.chunk(b, c, k);
          if (q == 0) *reinterpret_cast<PieceEnd*>(to + T::kHead) = piece.end(b, c);
        }
      } else {
        uint32_t there = device::address_in_cta(to, cta);
        uint32_t barrier = device::address_in_cta(&shared_.arrived[warp], cta);
        const uint32_t next = same ? 0 : sizeof(Barrier);
#pragma unroll
        for (int c = 0; c < 2; ++c, there += 4 * second, barrier += next) {
#pragma unroll
          for (int k = 0; k < Sums<T>::kChunks; ++k)
            store_async(there + 16 * (8 * k + q), piece.sums.chunk(b, c, k), barrier);
          if (q == 0) {
            const PieceEnd end = piece.end(b, c);
            store_async(there + 4 * T::kHead, *reinterpret_cast<const float4*>(&end), barrier);
          }
        }
      }
    }
  }

  /// By a warp, when all is there: the i-th of its rows, of all units.
  __device__ __forceinline__ void add_up(int i) {
    const int r = row(i), step = T::kPitch << each_log2_;
    if (r >= p_.rows) return;
    unsigned begins = cuts_.begins;
#pragma unroll 1
    for (bool from_before = cuts_.from_before(); from_before || begins != 0; from_before = false) {
      const int first = from_before ? 0 : __ffs(static_cast<int>(begins)) - 1;
      if (!from_before) begins &= begins - 1;
      const Chain chain = cuts_.chain_of(first, from_before ? 0 : 1);
      const int pieces = chain.last - chain.first + 1;
      const float *going_on = inbox(0, first, i), *lead = from_before ? going_on : inbox(1, first, i);
      float2 ends[kMembers];
      Vector values[kMembers][kLoads];  // all under way together
#pragma unroll
      for (int j = 0; j < kMembers; ++j) {
        const float* piece = j == 0 ? lead : going_on + j * step;
        ends[j] = {kNoKeys, 0.f};
        if (j < pieces) ends[j] = *reinterpret_cast<const float2*>(piece + T::kHead);
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
          values[j][load] = {};
          if (j < pieces) values[j][load] = *reinterpret_cast<const Vector*>(piece + column(load));
        }
      }
      float maximum = kNoKeys, weight = 0.f;
#pragma unroll
      for (const float2& end : ends) maximum = fmaxf(maximum, end.x);
      Vector sum[kLoads] = {};
#pragma unroll
      for (int j = 0; j < kMembers; ++j) {
        const float factor = factor_of(ends[j].x, maximum);
        weight = __fmaf_rn(ends[j].y, factor, weight);
        add(sum, values[j], factor);
      }
      if (from_before || chain.goes_on) {
        leave_open((int64_t{2 * cluster_ + (from_before ? 0 : 1)} << rows_log2_) + r, maximum, weight, sum);
      } else {
        finish(reinterpret_cast<const PieceEnd*>(lead + T::kHead)->place, maximum, weight, sum);
      }
    }
  }

  /// The clusters that have a part of the unit that is open at end `end` of this one; first = -1: none, or the unit is that of end
  /// 0, which both cuts belong to. By a warp.
  __device__ __forceinline__ ClusterChain clusters_at(int end) const {
    const auto cut = [&](int i) { return Starts::cut_unit(p_, shared_.cluster_starts[i]); };
    const int unit = cut(cluster_ + end);
    if (unit < 0 || (end == 1 && unit == cut(cluster_))) return {-1, -1};
    int first = cluster_ + end, last = first;
#pragma unroll 1
    for (int base = 0; base <= p_.clusters; base += 32) {
      const int i = base + lane_;
      const unsigned same = __ballot_sync(kAllLanes, i <= p_.clusters && cut(min(i, p_.clusters)) == unit);
      if (same == 0) continue;
      first = min(first, base + __ffs(static_cast<int>(same)) - 1);
      last = max(last, base + 31 - __clz(static_cast<int>(same)));
    }
    return {first - 1, last};
  }
  /// What is added up together in a round: pieces of `count` clusters, `step` apart.
  struct Pieces {
    int first, count, step;
    bool is_all;  ///< of the unit
  };
  __device__ __forceinline__ Pieces pieces_of(const ClusterChain& chain, int round) const {
    const int log2 = chain.group_log2(), groups = chain.groups();
    if (round > 0) return {chain.first, groups, 1 << log2, true};
    const int first = chain.first + ((cluster_ - chain.first) >> log2 << log2);
    return {first, min(1 << log2, chain.last - first + 1), 1, groups == 1};
  }
  /// The warp has left its rows of what is open at an end of the cluster, or of a group: is it the last to do so? By a thread. The
  /// clusters behind the first of a chain, which are open at their beginning for it alone, have its counters: 8 bits a warp.
  __device__ __forceinline__ bool arrives_last(const ClusterChain& chain, int round) const {
    const Pieces pieces = pieces_of(chain, round);
    if (round > 0 && pieces.count == 1) return false;  // all was added up in the first one
    const int counter = pieces.is_all ? 1 : 2 + ((cluster_ - chain.first) >> chain.group_log2());
    int* count =
        p_.schedule + schedule_map::arrivals_at(p_.workers) + (chain.first + counter) * kClusterCtas + rank_;
    static_assert(ClusterChain::kMost < 256 && T::kWarps * 8 <= 32);
    const int before = device::add_acquire_release(count, 1 << 8 * warp_);
    const bool last = (before >> 8 * warp_ & 255) == pieces.count - 1;
    if (last) atomicSub(count, pieces.count << 8 * warp_);
    return last;
  }

  /// What is open at the beginning of the cluster, and at its end.
  __device__ __forceinline__ void add_up_clusters(const ClusterChain& before, const ClusterChain& behind) {
    const auto at = [&](bool end) {
      return ClusterChain{end ? behind.first : before.first, end ? behind.last : before.last};
    };
    unsigned open = (before.first >= 0 ? 1 : 0) | (behind.first >= 0 ? 2 : 0);
#pragma unroll 1
    for (int round = 0; round < 2 && open != 0; ++round) {
      __syncwarp();  // the warp's rows are written
      const bool last = (open >> lane_ & 1) != 0 && arrives_last(at(lane_ != 0), round);
      open = __ballot_sync(kAllLanes, last);
#pragma unroll 1
      for (unsigned ends = open; ends != 0; ends &= ends - 1) {
        const bool end = (ends & 1) == 0;
#pragma unroll 1
        for (int i = 0; i < 1 << each_log2_; ++i) add_up_clusters(at(end), round, i, end);
      }
    }
  }
  /// By a warp: the i-th of its rows of a round's pieces of a unit; lanes look at them side by side. What a group leaves takes the
  /// place of its first piece.
  __device__ __forceinline__ void add_up_clusters(const ClusterChain& chain, int round, int i, bool at_end) {
    const int r = row(i);
    if (r >= p_.rows) return;
    const Pieces pieces = pieces_of(chain, round);
    const auto place = [&](int j) {
      const int cluster = pieces.first + j * pieces.step;
      return (int64_t{2 * cluster + (cluster == chain.first ? 1 : 0)} << rows_log2_) + r;
    };
    float2 end = {kNoKeys, 0.f};
    if (lane_ < pieces.count) end = p_.partial_ends[place(lane_)];
    const float *lead = p_.partials + place(0) * T::kHead,
                *others = p_.partials + ((int64_t{2 * pieces.first} << rows_log2_) + r) * T::kHead;
    const int64_t step = int64_t{2 * T::kHead * pieces.step} << rows_log2_;
    float maximum = 0.f, weight = 0.f, mine = 0.f;
    Vector sum[kLoads] = {};
#pragma unroll 1
    for (int from = 0; from < pieces.count; from += kAtATime) {
      Vector values[kAtATime][kLoads];  // all under way together
#pragma unroll
      for (int j = 0; j < kAtATime; ++j, others += step) {
        const float* piece = j == 0 && from == 0 ? lead : others;
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
          values[j][load] = {};
          if (from + j < pieces.count)
            values[j][load] = *reinterpret_cast<const Vector*>(piece + column(load));
        }
      }
      if (from == 0) {
        maximum = device::warp_reduce<device::Max>(end.x);
        mine = factor_of(end.x, maximum);  // 0 beyond the last
        weight = device::warp_reduce<device::Sum>(__fmul_rn(end.y, mine));
      }
#pragma unroll
      for (int j = 0; j < kAtATime; ++j) add(sum, values[j], __shfl_sync(kAllLanes, mine, from + j));
    }
    if (!pieces.is_all) return leave_open(place(0), maximum, weight, sum);
    // The piece of this cluster says where the row goes.
    const int which = at_end ? 1 : 0, member = at_end ? 31 - __clz(static_cast<int>(cuts_.begins)) : 0;
    finish(reinterpret_cast<const PieceEnd*>(inbox(which, member, i) + T::kHead)->place, maximum, weight,
           sum);
  }

  /// The i-th row that the warp adds up.
  __device__ __forceinline__ int row(int i) const {
    return ((rank_ * T::kWarps + warp_) << each_log2_) + i;
  }
  __device__ __forceinline__ float* inbox(int which, int member, int i) const {
    return shared_.inbox(warp_, which * members_ + member, i, each_log2_);
  }
  /// Of values a warp loads: as Sums::chunk has them, 4 (8 k + q) and on are chunk k of lanes q.
  __device__ __forceinline__ int column(int load) const {
    return kLoad * (lane_ + 32 * load);
  }
  __device__ __forceinline__ static void add(Vector (&sum)[kLoads], const Vector (&values)[kLoads],
                                             float factor) {
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
#pragma unroll
      for (int e = 0; e < kLoad; ++e) sum[load].v[e] = __fmaf_rn(values[load].v[e], factor, sum[load].v[e]);
    }
  }

  /// A row that other clusters have a part of, as partial `at`.
  __device__ __forceinline__ void leave_open(int64_t at, float maximum, float weight,
                                             const Vector (&sum)[kLoads]) const {
    if (lane_ == 0) p_.partial_ends[at] = {maximum, weight};
#pragma unroll
    for (int load = 0; load < kLoads; ++load)
      *reinterpret_cast<Vector*>(p_.partials + at * T::kHead + column(load)) = sum[load];
  }
  /// A row whose pieces are added up.
  __device__ __forceinline__ void finish(const RowPlace& place, float maximum, float weight,
                                         const Vector (&sum)[kLoads]) const {
    if (place.head < 0) return;
    const Params& a = p_.attention;
    const bool sees_keys = place.row >= 0;
    const RowOutput output(a, sees_keys ? place.row : ~place.row, place.head, sees_keys, maximum, weight,
                           lane_ == 0);
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
#pragma unroll
      for (int e = 0; e < kLoad; e += 2) {
        const int value = column(load) + e, k = value / 32, q = value % 32 / 4, step = 2 * k + value % 4 / 2;
        store_two<T>(a, output.at + Sums<T>::dimension(step, q), output(sum[load].v[e]),
                     output(sum[load].v[e + 1]));
      }
    }
  }

  const Sm90Params& p_;
  Shared<T>& shared_;
  const int members_, rows_log2_, each_log2_, warp_, lane_, cluster_, rank_;
  const Cuts cuts_;
  bool has_parked_ = false;
};

}  // namespace vivace::attention_sm90
