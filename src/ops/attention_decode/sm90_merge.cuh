#pragma once

// How the sm90.* kernel puts together what it cut.

#include "src/ops/attention_decode/sm90_shape.cuh"
#include "src/ops/decode_schedule/view.h"

namespace vivace::attention_sm90 {

/// Puts cut units together, when all workers of the CTA are done, in three rounds: workers of the CTA, CTAs of the cluster,
/// clusters of the grid. Half a warp takes a row of a unit. All of it is latency, and code that runs once costs a nanosecond
/// an instruction: the rounds share theirs.
template <class T>
class Merge {
  static constexpr int kLanes = 16, kHalves = T::kThreads / kLanes, kVectors = T::kHead / (4 * kLanes);
  using Vector = device::Vec<float, 4>;
  enum Round { workers_of_cta, ctas_of_cluster, clusters_of_grid };

 public:
  __device__ __forceinline__ Merge(const Sm90Params& p, Shared<T>& shared)
      : p_(p),
        shared_(shared),
        workers_(T::kWarps >> p.team_log2),
        rows_log2_((T::kBlocks == 2 ? 4 : 3) + p.team_log2),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        cluster_(static_cast<int>(blockIdx.x) >> p.cluster_log2),
        rank_(static_cast<int>(blockIdx.x) & ((1 << p.cluster_log2) - 1)) {}

  /// Before the walk: which boundaries cut a unit. A barrier of the CTA publishes it.
  __device__ __forceinline__ void read_cuts() {
    const int cluster_workers = workers_ << p_.cluster_log2;
    if (warp_ == 0) read(static_cast<int>(blockIdx.x) * workers_, 1, workers_, shared_.worker_cuts);
    if (warp_ == 1) read(cluster_ * cluster_workers, workers_, 1 << p_.cluster_log2, shared_.cta_cuts);
    if (warp_ == 2) read(0, cluster_workers, p_.clusters, shared_.cluster_cuts);
  }

  __device__ __forceinline__ void run() {
    const int ctas = 1 << p_.cluster_log2;
    const bool cta_cut = any_cut(shared_.cta_cuts, ctas);
#pragma unroll 1
    for (int round = workers_of_cta; round <= clusters_of_grid; ++round) {
      if (round == ctas_of_cluster) {
        if (!cta_cut) return;
        device::cluster_barrier();
      }
      if (round == clusters_of_grid) {
        device::cluster_arrive_without_fence();  // has read what it needed of others
        if (!any_cut(shared_.cluster_cuts + cluster_, 1)) break;
        __syncthreads();  // partials of the CTA are written
        if (warp_ < 2) arrive(warp_);
        __syncthreads();
      }
      // A CTA has all rows of its own chains, and its rank's share of others.
      const int rows_log2 = rows_log2_ - (round == workers_of_cta ? 0 : p_.cluster_log2);
      const int first_row = round == workers_of_cta ? 0 : rank_ << rows_log2;
      // Chain c is cut by the boundaries from the c-th bit of `firsts` to that of `lasts`.
      const int members = round == workers_of_cta ? workers_ : ctas;
      unsigned firsts, lasts = 0;
      if (round == clusters_of_grid) {
        firsts = __ballot_sync(kAllLanes, lane_ < 2 && shared_.last_arrivals[lane_ % 2].first >= 0);
      } else {
        const int* cuts = round == workers_of_cta ? shared_.worker_cuts : shared_.cta_cuts;
        const int cut = lane_ <= members ? cuts[lane_] : -1;
        const int before = __shfl_up_sync(kAllLanes, cut, 1), after = __shfl_down_sync(kAllLanes, cut, 1);
        firsts = __ballot_sync(kAllLanes, cut >= 0 && (lane_ == 0 || cut != before));
        lasts = __ballot_sync(kAllLanes, cut >= 0 && cut != after);
      }
      const int tasks = __popc(firsts) << rows_log2;
#pragma unroll 1
      for (int task = static_cast<int>(threadIdx.x) / kLanes; task < tasks; task += kHalves) {
        const int r = first_row + (task & ((1 << rows_log2) - 1));
        if (r >= p_.rows) continue;
        unsigned first_bits = firsts, last_bits = lasts;
        for (int c = task >> rows_log2; c > 0; --c) {
          first_bits &= first_bits - 1;
          last_bits &= last_bits - 1;
        }
        const int i = __ffs(static_cast<int>(first_bits)) - 1, j = __ffs(static_cast<int>(last_bits)) - 1;
        const Chain chain = round == clusters_of_grid
                                ? shared_.last_arrivals[i]
                                : Chain{max(i - 1, 0), min(j, members - 1), i == 0, j == members};
        row(static_cast<Round>(round), chain, r, round == clusters_of_grid ? i : 0);
      }
      __syncwarp();  // the halves have had rows of their own; barriers want whole warps
    }
    device::cluster_wait();
  }

 private:
  /// By a warp: cuts[i] of the boundaries before workers first + i step, i up to members.
  __device__ __forceinline__ void read(int first, int step, int members, int* cuts) const {
    const auto* starts =
        reinterpret_cast<const ScheduleView::Start*>(p_.schedule + schedule_map::kHeaderInts);
    for (int i = lane_; i <= members; i += 32) {
      const ScheduleView::Start start = starts[min(first + i * step, p_.workers)];
      cuts[i] = start.tile > 0 ? start.request * p_.attention.heads_kv + start.head_kv : -1;
    }
  }
  __device__ __forceinline__ bool any_cut(const int* cuts, int members) const {
    return __any_sync(kAllLanes, lane_ <= members && cuts[min(lane_, members)] >= 0);
  }

  /// The cluster has left its part of the unit at one of its ends: is it the last of those that have one? By a warp.
  __device__ __forceinline__ void arrive(int end) {
    const int boundary = cluster_ + end, unit = shared_.cluster_cuts[boundary];
    Chain chain{-1, -1, false, false};
    if (unit >= 0 && !(end == 1 && unit == shared_.cluster_cuts[cluster_])) {
      int first = boundary, last = boundary;
      for (int base = 0; base <= p_.clusters; base += 32) {
        const int i = base + lane_;
        const unsigned same =
            __ballot_sync(kAllLanes, i <= p_.clusters && shared_.cluster_cuts[min(i, p_.clusters)] == unit);
        if (same == 0) continue;
        first = min(first, base + __ffs(static_cast<int>(same)) - 1);
        last = max(last, base + 31 - __clz(static_cast<int>(same)));
      }
      int arrived = 0;
      if (lane_ == 0) {
        int* count =
            p_.schedule + schedule_map::arrivals_at(p_.workers) + ((first - 1) << p_.cluster_log2) + rank_;
        arrived = device::add_acquire_release(count, 1);
        if (arrived == last - first + 1) *count = 0;
      }
      if (__shfl_sync(kAllLanes, arrived, 0) == last - first + 1) chain = {first - 1, last, false, false};
    }
    if (lane_ == 0) shared_.last_arrivals[end] = chain;
  }

  __device__ __forceinline__ int column(int i) const {
    return 4 * (kLanes * i + lane_ % kLanes);
  }

  /// Where member `member` of a round has row `r` of its piece.
  __device__ __forceinline__ void find(Round round, const Chain& chain, int member, int r, bool last_parked,
                                       const float*& values, const float2*& ends) const {
    const int which = chain.which(member), rows = 1 << rows_log2_;
    if (round == workers_of_cta) {
      values = shared_.values(member << p_.team_log2) + r * T::kPitch;
      if (last_parked && member == chain.last) {
        values = p_.parked + ((int64_t{blockIdx.x} * workers_ + member) * rows + r) * T::kPitch;
      }
      ends = &shared_.piece_ends[which][member * rows + r];
    } else if (round == ctas_of_cluster) {
      const auto cta = static_cast<uint32_t>(member);
      values = device::in_cta(shared_.open_values(which, 1 << p_.team_log2, rows) + r * T::kPitch, cta);
      ends = device::in_cta(&shared_.open_ends[which][r], cta);
    } else {
      const int64_t at = int64_t{2 * member + which} * rows + r;
      values = p_.partials + at * T::kHead;
      ends = p_.partial_ends + at;
    }
  }

  /// Row `r` of a chain, to where it goes next, by half a warp. `end`: of the cluster, in the last round.
  __device__ __forceinline__ void row(Round round, const Chain& chain, int r, int end) {
    const int which = chain.which(chain.first), which_last = chain.which(chain.last);
    const Piece unit = round == workers_of_cta ? shared_.pieces[which][chain.first]
                       : round == ctas_of_cluster
                           ? *device::in_cta(&shared_.open[which], static_cast<uint32_t>(chain.first))
                           : shared_.cluster_open[end];
    const bool last_parked =
        round == workers_of_cta && which_last == 0 && !shared_.pieces[0][chain.last].in_ring;
    const int token = token_of_row(p_, r),
              head = unit.head_kv * p_.attention.group + r - token * p_.attention.group;
    const HeadEnd head_end(p_.attention, head);
    float maximum = kNoKeys, weight = 0.f;
    Vector sum[kVectors] = {};
    constexpr int kAhead = 4;  // pieces whose loads are under way together
#pragma unroll 1
    for (int first = chain.first; first <= chain.last; first += kAhead) {
      float2 ends[kAhead];
      Vector values[kAhead][kVectors];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        ends[a] = {kNoKeys, 0.f};
#pragma unroll
        for (int i = 0; i < kVectors; ++i) values[a][i] = {};
        if (first + a > chain.last) continue;
        const float* from;
        const float2* from_ends;
        find(round, chain, first + a, r, last_parked, from, from_ends);
        ends[a] = *from_ends;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) values[a][i] = *reinterpret_cast<const Vector*>(from + column(i));
      }
      float most = maximum;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) most = fmaxf(most, ends[a].x);
      const float own = factor(maximum, weight, most);
      maximum = most;
      weight = __fmul_rn(weight, own);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i].v[e] = __fmul_rn(sum[i].v[e], own);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const float f = factor(ends[a].x, ends[a].y, most);
        weight = __fmaf_rn(ends[a].y, f, weight);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i].v[e] = __fmaf_rn(values[a][i].v[e], f, sum[i].v[e]);
        }
      }
    }
    if (!chain.from_before && !chain.goes_on) {
      if (token < unit.rows) write_row(unit, token, head, head_end, maximum, weight, sum);
      return;
    }
    const int open = chain.from_before ? 0 : 1, rows = 1 << rows_log2_;
    float* to;
    if (round == workers_of_cta) {
      to = shared_.open_values(open, 1 << p_.team_log2, rows) + r * T::kPitch;
      if (lane_ % kLanes == 0) {
        shared_.open_ends[open][r] = {maximum, weight};
        if (r == 0) shared_.open[open] = unit;
      }
    } else {
      const int64_t at = int64_t{2 * cluster_ + open} * rows + r;
      to = p_.partials + at * T::kHead;
      if (lane_ % kLanes == 0) {
        p_.partial_ends[at] = {maximum, weight};
        if (r % (rows >> p_.cluster_log2) == 0) shared_.cluster_open[open] = unit;
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) *reinterpret_cast<Vector*>(to + column(i)) = sum[i];
  }

  /// On a part's sums when they join others of this maximum; 0 for a part that saw nothing.
  __device__ __forceinline__ static float factor(float part_maximum, float part_weight, float maximum) {
    if (part_maximum == kNoKeys && part_weight == 0.f) return 0.f;
    return exp2_of(__fsub_rn(part_maximum, maximum == kNoKeys ? 0.f : maximum));
  }

  __device__ __forceinline__ void write_row(const Piece& unit, int token, int head, const HeadEnd& head_end,
                                            float maximum, float weight,
                                            const Vector (&sum)[kVectors]) const {
    const Params& a = p_.attention;
    const int64_t row = unit.row_begin + token;
    const bool sees_keys = unit.keys - unit.rows + token + 1 > 0;
    const RowEnd end(a, sees_keys, maximum, weight, head_end);
    if (a.lse != nullptr && lane_ % kLanes == 0)
      a.lse[row * a.lse_stride[0] + head * a.lse_stride[1]] = end.lse;
    const int64_t at = row * a.output_stride[0] + head * a.output_stride[1];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const float v0 = sees_keys ? sum[i].v[e] * end.scale : 0.f,
                    v1 = sees_keys ? sum[i].v[e + 1] * end.scale : 0.f;
        store_pair(a, at + column(i) + e, v0, v1);
      }
    }
  }

  const Sm90Params& p_;
  Shared<T>& shared_;
  const int workers_, rows_log2_, warp_, lane_, cluster_, rank_;
};

}  // namespace vivace::attention_sm90
