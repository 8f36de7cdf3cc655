#pragma once

// How the sm90.* kernel puts together what it cut.

#include "src/ops/attention_decode/sm90_shape.cuh"
#include "src/ops/decode_schedule/view.h"

namespace vivace::attention_sm90 {

/// Puts cut units together, when all workers of the cluster are done, in two rounds: workers of the cluster, through each
/// other's shared memory, then clusters of the grid. All of it is latency, about four cycles an instruction: first a thread
/// looks at a row of a piece, all of them side by side, then warps add up the values, row by row and in the order of their keys.
template <class T>
class Merge {
  static constexpr int kMembers = kClusterCtas * T::kWarps;  ///< at most, of a chain of workers
  static constexpr int kColumns = T::kHead / 32;             ///< of a lane, which are neighbours
  static constexpr int kLoad = kColumns < 4 ? kColumns : 4, kLoads = kColumns / kLoad;
  using Vector = device::Vec<float, kLoad>;

 public:
  __device__ __forceinline__ Merge(const Sm90Params& p, Shared<T>& shared)
      : p_(p),
        shared_(shared),
        workers_log2_(kCtaWarpsLog2 - p.team_log2),
        members_(kClusterCtas << workers_log2_),
        rows_log2_((T::kBlocks == 2 ? 4 : 3) + p.team_log2),
        share_log2_(rows_log2_ - kClusterLog2),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        cluster_(static_cast<int>(blockIdx.x) / kClusterCtas),
        rank_(static_cast<int>(blockIdx.x) % kClusterCtas) {}

  /// Before the walk: which boundaries cut a unit. A barrier of the CTA publishes it.
  __device__ __forceinline__ void read_cuts() {
    const int n = warp_ == 0 ? members_ : p_.clusters;
    int* cuts = warp_ == 0 ? shared_.worker_cuts : shared_.cluster_cuts;
    const auto* starts =
        reinterpret_cast<const ScheduleView::Start*>(p_.schedule + schedule_map::kHeaderInts);
    const bool cuts_any = is_for(p_.schedule, p_, T::kBoxKeys);
    for (int i = lane_; warp_ < 2 && i <= n; i += 32) {
      const int worker = warp_ == 0 ? cluster_ * members_ + i : i * members_;
      const ScheduleView::Start start = starts[min(worker, p_.workers)];
      cuts[i] = cuts_any && start.tile > 0 ? start.request * p_.attention.heads_kv + start.head_kv : -1;
    }
    if (warp_ != 1) return;
    __syncwarp();
#pragma unroll 1
    for (int end = 0; end < 2; ++end) {
      const ClusterChain chain = clusters_at(end);
      if (lane_ == 0) {
        shared_.open_at[end] = chain;
        shared_.adds_up[end] = chain.first >= 0;
      }
    }
  }

  __device__ __forceinline__ void run() {
    const Cuts cuts(shared_.worker_cuts, members_);
    if (cuts.begins == 0 && !cuts.from_before) return;
    device::cluster_barrier();
    look(cuts);
    __syncthreads();
    const int rows =
        min(1 << share_log2_, p_.rows - (rank_ << share_log2_));  // of the CTA's share that exist
    for (int row = warp_; row < rows; row += T::kWarps) {
      unsigned begins = cuts.begins;
      for (bool from_before = cuts.from_before; from_before || begins != 0; from_before = false) {
        const int first = from_before ? 0 : __ffs(static_cast<int>(begins)) - 1;
        if (!from_before) begins &= begins - 1;
        add_up(cuts.chain_of(first, from_before ? 0 : 1), row);
      }
    }
    device::cluster_arrive_without_fence();  // has read what it needed of the other
#pragma unroll 1
    for (int round = 0; round < 2; ++round) {
      __syncthreads();  // partials of the CTA are written
      if (lane_ == 0 && warp_ < 2 && shared_.adds_up[warp_])
        shared_.adds_up[warp_] = arrives_last(shared_.open_at[warp_], round);
      __syncthreads();
      if (!shared_.adds_up[0] && !shared_.adds_up[1]) break;
#pragma unroll 1
      for (int end = 0; end < 2; ++end) {
        if (!shared_.adds_up[end]) continue;
        for (int row = warp_; row < rows; row += T::kWarps)
          add_up_clusters(shared_.open_at[end], round, (rank_ << share_log2_) + row,
                          shared_.cluster_open[end]);
      }
    }
    device::cluster_wait();
  }

 private:
  /// The cuts of a row of workers, a bit a worker.
  struct Cuts {
    unsigned begins, ends;  ///< a cut unit begins in it, ends in it
    bool from_before;       ///< the first of them goes on with one
    int members;

    __device__ __forceinline__ Cuts(const int* boundaries, int n) : members(n) {
      // Where the cut behind a worker is another than that before it, a unit begins in it, and one ends.
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const int before = lane < n ? boundaries[lane] : -1, behind = lane < n ? boundaries[lane + 1] : -1;
      begins = __ballot_sync(kAllLanes, behind >= 0 && behind != before);
      ends = __ballot_sync(kAllLanes, before >= 0 && behind != before);
      from_before = __shfl_sync(kAllLanes, before, 0) >= 0;
    }
    /// Of the unit that worker `member` begins (`which` = 1) or goes on with (0); first = -1 without one.
    __device__ __forceinline__ Chain chain_of(int member, int which) const {
      const unsigned here = 1u << member, before = begins & (here - 1);
      const unsigned ends_behind = ends & ~(here - 1) & ~(which == 1 ? here : 0u);
      const bool continues = which == 0 && before == 0;
      if (which == 1 ? (begins & here) == 0 : continues && !from_before) return {-1, -1, false, false};
      const int first = which == 1 ? member : continues ? 0 : 31 - __clz(static_cast<int>(before));
      const int last = ends_behind == 0 ? members - 1 : __ffs(static_cast<int>(ends_behind)) - 1;
      return {first, last, continues, ends_behind == 0};
    }
  };

  /// The clusters that have a part of the unit that is open at end `end` of this one; first = -1: none, or the unit is that of end
  /// 0, which both cuts belong to. By a warp.
  __device__ __forceinline__ ClusterChain clusters_at(int end) const {
    const int* cuts = shared_.cluster_cuts;
    const int unit = cuts[cluster_ + end];
    if (unit < 0 || (end == 1 && unit == cuts[cluster_])) return {-1, -1};
    int first = cluster_ + end, last = first;
#pragma unroll 1
    for (int base = 0; base <= p_.clusters; base += 32) {
      const int i = base + lane_;
      const unsigned same = __ballot_sync(kAllLanes, i <= p_.clusters && cuts[min(i, p_.clusters)] == unit);
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
  /// The CTA has left its share of what is open at an end of the cluster, or of a group: is it the last to do so? By a thread. The
  /// clusters behind the first of a chain, which are open at their beginning for it alone, have its counters.
  __device__ __forceinline__ bool arrives_last(const ClusterChain& chain, int round) const {
    const Pieces pieces = pieces_of(chain, round);
    if (round > 0 && pieces.count == 1) return false;  // all was added up in the first one
    const int counter = pieces.is_all ? 1 : 2 + ((cluster_ - chain.first) >> chain.group_log2());
    int* count =
        p_.schedule + schedule_map::arrivals_at(p_.workers) + (chain.first + counter) * kClusterCtas + rank_;
    const bool last = device::add_acquire_release(count, 1) == pieces.count - 1;
    if (last) *count = 0;
    return last;
  }

  /// Of a CTA's share of the rows: what `look` finds out about row `row` of a piece.
  __device__ __forceinline__ int index(const Chain& chain, int member, int row) const {
    return ((2 * member + chain.which(member)) << share_log2_) + row;
  }

  /// A thread a row of a piece: where its values are, and what they are multiplied by; that of the first piece of a chain also
  /// where the row goes.
  __device__ __forceinline__ void look(const Cuts& cuts) {
    const int t = static_cast<int>(threadIdx.x), piece = t >> share_log2_, member = piece / 2;
    const int row = t & ((1 << share_log2_) - 1), r = (rank_ << share_log2_) + row;
    Chain chain{-1, -1, false, false};
    if (member < members_) chain = cuts.chain_of(member, piece % 2);
    // A worker may go on with no unit, or be in the middle of one that a later worker of the cluster began to cut.
    const bool exists = chain.first >= 0 && (piece % 2 == 1 || shared_.worker_cuts[member] >= 0);
    const bool leads = exists && index(chain, chain.first, row) == t;
    const auto cta = static_cast<uint32_t>(member >> workers_log2_);
    const int local = member & ((1 << workers_log2_) - 1), rows = 1 << rows_log2_;
    float2 end = {kNoKeys, 0.f};
    Piece unit{};
    if (exists) {
      end = *device::in_cta(&shared_.piece_ends[piece % 2][local * rows + r], cta);
      unit = *device::in_cta(&shared_.pieces[piece % 2][local], cta);
      shared_.ends[t] = end;
    }
    __syncthreads();
    if (!exists) return;
    float2 ends[kMembers];
    float maximum = kNoKeys, weight = 0.f;
#pragma unroll
    for (int i = 0; i < kMembers; ++i) {
      ends[i] = {kNoKeys, 0.f};
      if (chain.first + i <= chain.last) ends[i] = shared_.ends[index(chain, chain.first + i, row)];
      maximum = fmaxf(maximum, ends[i].x);
    }
    if (leads) {
#pragma unroll
      for (const float2& part : ends) weight = __fmaf_rn(part.y, factor(part.x, part.y, maximum), weight);
      if (chain.from_before || chain.goes_on) {
        const int open = chain.from_before ? 0 : 1;
        if (row == 0) shared_.cluster_open[open] = unit;
        shared_.destinations[t] =
            leave_open((int64_t{2 * cluster_ + open} << rows_log2_) + r, maximum, weight);
      } else {
        shared_.destinations[t] = end_row(unit, r, maximum, weight, true);
      }
    }
    const float* values = unit.in_ring
                              ? device::in_cta(shared_.values(local << p_.team_log2) + r * T::kPitch, cta)
                              : p_.parked + ((int64_t{cluster_} * members_ + member) * rows + r) * T::kPitch;
    shared_.parts[t] = {values, factor(end.x, end.y, maximum)};
  }

  /// By a warp: row `row` of the CTA's share of a chain.
  __device__ __forceinline__ void add_up(const Chain& chain, int row) {
    Vector values[kMembers][kLoads];  // all under way together
    float factors[kMembers];
#pragma unroll
    for (int i = 0; i < kMembers; ++i) {
      const bool exists = chain.first + i <= chain.last;
      const Part part = shared_.parts[index(chain, exists ? chain.first + i : chain.last, row)];
      factors[i] = exists ? part.factor : 0.f;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        values[i][j] = {};
        if (exists) values[i][j] = *reinterpret_cast<const Vector*>(part.values + column(j));
      }
    }
    Vector sum[kLoads] = {};
    add<kMembers>(sum, values, factors);
    store(shared_.destinations[index(chain, chain.first, row)], sum);
  }

  /// By a warp: row `r` of a round's pieces of a unit; lanes look at them side by side. What a group leaves takes the place of its
  /// first piece.
  __device__ __forceinline__ void add_up_clusters(const ClusterChain& chain, int round, int r,
                                                  const Piece& unit) {
    constexpr int kPieces = ClusterChain::kAtATime;
    const Pieces pieces = pieces_of(chain, round);
    const auto place = [&](int i) {
      const int cluster = pieces.first + i * pieces.step;
      return (int64_t{2 * cluster + (cluster == chain.first ? 1 : 0)} << rows_log2_) + r;
    };
    float2 end = {kNoKeys, 0.f};
    if (lane_ < pieces.count) end = p_.partial_ends[place(lane_)];
    Vector values[kPieces][kLoads];  // all under way together
#pragma unroll
    for (int a = 0; a < kPieces; ++a) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        values[a][i] = {};
        if (a < pieces.count)
          values[a][i] = *reinterpret_cast<const Vector*>(p_.partials + place(a) * T::kHead + column(i));
      }
    }
    const float maximum = device::warp_reduce<device::Max>(end.x), mine = factor(end.x, end.y, maximum);
    const float weight = device::warp_reduce<device::Sum>(__fmul_rn(end.y, mine));
    float factors[kPieces];
#pragma unroll
    for (int a = 0; a < kPieces; ++a) factors[a] = __shfl_sync(kAllLanes, mine, a);  // 0 beyond the last
    Vector sum[kLoads] = {};
    add<kPieces>(sum, values, factors);
    store(
        pieces.is_all ? end_row(unit, r, maximum, weight, lane_ == 0) : leave_open(place(0), maximum, weight),
        sum);
  }

  __device__ __forceinline__ int column(int i) const {
    return kColumns * lane_ + kLoad * i;
  }
  template <int kPieces>
  __device__ __forceinline__ static void add(Vector (&sum)[kLoads], const Vector (&values)[kPieces][kLoads],
                                             const float (&factors)[kPieces]) {
#pragma unroll
    for (int a = 0; a < kPieces; ++a) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
#pragma unroll
        for (int e = 0; e < kLoad; ++e) sum[i].v[e] = __fmaf_rn(values[a][i].v[e], factors[a], sum[i].v[e]);
      }
    }
  }

  /// A row that others have a part of, as partial `at`. Returns where its values go.
  __device__ __forceinline__ Destination leave_open(int64_t at, float maximum, float weight) const {
    p_.partial_ends[at] = {maximum, weight};
    return {at * T::kHead, 1.f, Destination::partials};
  }
  /// Ends row `r`, whose pieces are known: writes its lse. Returns where its values go.
  __device__ __forceinline__ Destination end_row(const Piece& unit, int r, float maximum, float weight,
                                                 bool writes_lse) const {
    const Params& a = p_.attention;
    const int token = token_of_row(p_, r), head = unit.head_kv * a.group + r - token * a.group;
    if (token >= unit.rows) return {0, 0.f, Destination::nowhere};
    const int64_t row = unit.row_begin + token;
    const bool sees_keys = unit.keys - unit.rows + token + 1 > 0;
    const RowEnd end(a, sees_keys, maximum, weight, head);
    if (a.lse != nullptr && writes_lse) a.lse[row * a.lse_stride[0] + head * a.lse_stride[1]] = end.lse;
    return {row * a.output_stride[0] + head * a.output_stride[1], end.scale,
            sees_keys ? Destination::output : Destination::zeros};
  }
  __device__ __forceinline__ void store(const Destination& to, const Vector (&sum)[kLoads]) const {
    if (to.kind == Destination::nowhere) return;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (to.kind == Destination::partials) {
        *reinterpret_cast<Vector*>(p_.partials + to.at + column(i)) = sum[i];
        continue;
      }
#pragma unroll
      for (int e = 0; e < kLoad; e += 2) {
        const bool zeros = to.kind == Destination::zeros;
        store_pair(p_.attention, to.at + column(i) + e, zeros ? 0.f : sum[i].v[e] * to.scale,
                   zeros ? 0.f : sum[i].v[e + 1] * to.scale);
      }
    }
  }

  /// On a part's sums when they join others of this maximum; 0 for a part that saw nothing.
  __device__ __forceinline__ static float factor(float part_maximum, float part_weight, float maximum) {
    if (part_maximum == kNoKeys && part_weight == 0.f) return 0.f;
    return exp2_of(__fsub_rn(part_maximum, maximum == kNoKeys ? 0.f : maximum));
  }

  const Sm90Params& p_;
  Shared<T>& shared_;
  const int workers_log2_, members_, rows_log2_, share_log2_, warp_, lane_, cluster_, rank_;
};

}  // namespace vivace::attention_sm90
