#pragma once

// How keys and values reach a worker of the sm90.* kernel: the list of what it does, and the copies that keep its ring full.

#include "src/ops/attention_decode/sm90_shape.cuh"
#include "src/ops/decode_schedule/view.h"

namespace vivace::attention_sm90 {

/// What the schedule says about the workers of cluster `cluster`: lane i has the start of worker i, and that behind the last. Of a
/// schedule for other shapes nothing is done. By a warp; all it asks for is under way together.
struct Starts {
  ScheduleView::Start of_lane;
  int busy_workers;

  __device__ __forceinline__ Starts(const Sm90Params& p, int cluster, int box_keys) {
    using namespace schedule_map;
    static_assert(kRequests == 0 && kHeadsKv == 1 && kTileTokens == 2 && kWorkers == 3);
    const int lane = static_cast<int>(threadIdx.x) % 32, members = workers_per_cluster(p);
    const int worker = cluster * members + min(lane, members);
    const int4 shapes = *reinterpret_cast<const int4*>(p.schedule);
    of_lane = list(p)[min(worker, p.workers)];
    busy_workers = p.schedule[kActive];
    if (shapes.x != p.attention.requests || shapes.y != p.attention.heads_kv ||
        shapes.z != p.boxes_per_tile * box_keys || shapes.w != p.workers)
      of_lane = {p.attention.requests, 0, 0, 0};
  }
  __device__ __forceinline__ static const ScheduleView::Start* list(const Sm90Params& p) {
    return reinterpret_cast<const ScheduleView::Start*>(p.schedule + schedule_map::kHeaderInts);
  }
  /// The unit that the boundary before this start cuts; -1: none.
  __device__ __forceinline__ static int cut_unit(const Sm90Params& p, const ScheduleView::Start& start) {
    return start.tile > 0 ? start.request * p.attention.heads_kv + start.head_kv : -1;
  }
};

/// The run of units of one worker, described kSegments at a time in shared memory.
template <class T>
class WorkList {
 public:
  /// `member`: of the cluster's workers.
  __device__ __forceinline__ WorkList(const Sm90Params& p, const Starts& starts, int member,
                                      Segment* segments)
      : p_(p), segments_(segments), range_(p, starts.of_lane, member) {
    count_ = max(0, range_.end_unit - range_.first_unit + (range_.end_tile > 0 ? 1 : 0));
  }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ const Segment& operator[](int i) const { return segments_[i % kSegments]; }

  /// By one warp: lane l describes segment first + l, up to `limit`.
  __device__ __forceinline__ void describe(int first, int limit) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int i = first + lane;
    if (i >= limit) return;
    const Params& a = p_.attention;
    const int unit = range_.first_unit + i, request = unit / a.heads_kv;
    // Likely the first page, whose id is asked for next.
    const int64_t first_page =
        int64_t{i == 0 ? range_.first_tile : 0} * p_.boxes_per_tile * T::kBoxKeys >> p_.page_log2;
    if (first_page < a.max_pages)
      device::prefetch_line(a.page_table + request * a.page_table_stride + first_page);
    const Request described(a, request);
    const ScheduleView::Record& record = records()[request];
    const int rows = min(described.rows, p_.max_query_tokens);
    // A request whose rows are not in q has none, and no keys that they see.
    const int boxes = rows == 0 || described.keys == 0 ? 0 : (described.keys - 1) / T::kBoxKeys + 1;
    const int first_seen = first_key_seen(p_, described.keys, rows) / T::kBoxKeys;
    const int from = i == 0 ? range_.first_tile : 0;
    const int to = unit == range_.end_unit ? range_.end_tile : record.tiles;
    const auto box_of = [&](int tile) {
      const int64_t box = (int64_t{record.first_tile} + tile) * p_.boxes_per_tile;
      return static_cast<int>(box < first_seen ? min(first_seen, boxes) : box < boxes ? box : boxes);
    };
    segments_[i % kSegments] = {.request = request,
                                .head_kv = unit - request * a.heads_kv,
                                .row_begin = described.begin,
                                .rows = rows,
                                .keys = described.keys,
                                .first_box = box_of(from),
                                .end_box = box_of(to),
                                .begins = from == 0,
                                .ends = to == record.tiles};
  }

 private:
  /// From tile first_tile of unit first_unit up to tile end_tile of end_unit; units count heads, then requests.
  struct Range {
    int first_unit, end_unit, first_tile, end_tile;

    __device__ __forceinline__ Range(const Sm90Params& p, const ScheduleView::Start& of_lane, int member) {
      const int heads = p.attention.heads_kv, units = p.attention.requests * heads;
      const int unit = min(max(of_lane.request, 0) * heads + max(of_lane.head_kv, 0), units);
      first_unit = __shfl_sync(kAllLanes, unit, member);
      end_unit = __shfl_sync(kAllLanes, unit, member + 1);
      first_tile = __shfl_sync(kAllLanes, of_lane.tile, member);
      end_tile = __shfl_sync(kAllLanes, end_unit < units ? of_lane.tile : 0, member + 1);
    }
  };
  __device__ __forceinline__ const ScheduleView::Record* records() const {
    return reinterpret_cast<const ScheduleView::Record*>(p_.schedule + schedule_map::records_at(p_.workers));
  }

  const Sm90Params& p_;
  Segment* segments_;
  const Range range_;
  int count_;
};

/// Keeps a worker's ring full. All lanes of one warp run it together, lane 0 issues the copies; K and V of a box in turns.
template <class T>
class Feed {
 public:
  __device__ __forceinline__ Feed(const Sm90Params& p, const Segment* segments, char* ring, Barrier* full,
                                  int slots)
      : p_(p), segments_(segments), ring_(ring), full_(full), slots_(slots) {}

  /// Segments below `limit` are described.
  __device__ __forceinline__ void see(int limit) { described_ = limit; }

  /// Issues copies until the ring is full, `consumed` boxes of it having been freed, or no more is known. `old_only`: stops
  /// before the first box with keys that this step has written.
  __device__ __forceinline__ void top_up(int consumed, bool old_only) {
    for (; issued_ - consumed < slots_; ++issued_) {
      if (box_ == end_ && !advance()) return;
      if (old_only && box_ >= old_boxes_) return;
      copy(owes_v_ ? p_.v : p_.k);
      box_ += owes_v_;
      owes_v_ ^= 1;
      if (++slot_ == slots_) slot_ = 0;
    }
  }
  /// Before the kernels ahead have ended: all of a ring but its last box, a box at a time. Who asks for memory meanwhile does not wait
  /// behind a ring of every warp.
  __device__ __forceinline__ void fill_in_turns() {
    for (int boxes = 1; boxes < slots_; ++boxes) {
      top_up(boxes - slots_, true);
      if (issued_ < boxes) return;
      device::wait_for(full_ + boxes - 1, 0);
    }
  }

 private:
  /// To the next batch: boxes of one segment whose page ids the lanes hold, one copy each. Those of the batch behind it begin to
  /// load. False if nothing more is known.
  __device__ __forceinline__ bool advance() {
    // The second turn is for where nothing was known when the first looked ahead.
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (next_box_ == next_end_ && next_segment_ >= described_) return false;
      box_ = first_ = next_box_;
      end_ = next_end_;
      ids_ = next_ids_;
      head_kv_ = segments_[next_segment_ % kSegments].head_kv;
      old_boxes_ = (segments_[next_segment_ % kSegments].keys - segments_[next_segment_ % kSegments].rows) /
                   T::kBoxKeys;
      look_ahead();
      if (box_ < end_) return true;
    }
    return false;
  }
  __device__ __forceinline__ void look_ahead() {
    next_box_ = next_end_;
    for (; next_segment_ < described_; ++next_segment_, next_box_ = -1) {
      const Segment& s = segments_[next_segment_ % kSegments];
      if (next_box_ < 0) next_box_ = s.first_box;
      next_end_ = min(next_box_ + (32 >> copies_log2()), s.end_box);
      if (next_box_ >= next_end_) continue;
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const unsigned key = static_cast<unsigned>(next_box_) * T::kBoxKeys + (lane << p_.copy_log2);
      const bool wanted =
          next_box_ + (lane >> copies_log2()) < next_end_ && key < static_cast<unsigned>(s.keys) &&
          key + (1u << p_.copy_log2) > static_cast<unsigned>(first_key_seen(p_, s.keys, s.rows));
      next_ids_ = p_.attention.pages;  // a page that does not exist arrives as zeros
      if (wanted)
        next_ids_ =
            p_.attention.page_table[s.request * p_.attention.page_table_stride + (key >> p_.page_log2)];
      return;
    }
    next_box_ = next_end_ = -1;
  }

  __device__ __forceinline__ int copies_log2() const {
    return __popc(T::kBoxKeys - 1) - p_.copy_log2;
  }

  /// A box is one copy, or one per page and panel of 128 bytes where pages are smaller.
  __device__ __forceinline__ void copy(const CUtensorMap& map) {
    const int copies = 1 << copies_log2(), first_copy = (box_ - first_) << copies_log2();
    const int first_token = box_ * T::kBoxKeys & ((1 << p_.page_log2) - 1);
    const bool issues = threadIdx.x % 32 == 0;
    char* to = ring_ + slot_ * T::kBoxBytes;
    if (issues) device::arrive_and_expect(full_ + slot_, T::kBoxBytes);
    int page = __shfl_sync(kAllLanes, ids_, first_copy);
    if (copies == 1) {
      if (issues) device::tensor_load(to, &map, full_ + slot_, policy_, 0, first_token, 0, head_kv_, page);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < copies; ++i, to += T::kPanelBytes << p_.copy_log2) {
      page = __shfl_sync(kAllLanes, ids_, first_copy + i);
      if (!issues) continue;
      for (int panel = 0; panel < T::kPanels; ++panel) {
        device::tensor_load(to + panel * T::kBoxKeys * T::kPanelBytes, &map, full_ + slot_, policy_, 0, 0,
                            panel, head_kv_, page);
      }
    }
  }

  const Sm90Params& p_;
  const Segment* segments_;
  char* ring_;
  Barrier* full_;
  const uint64_t policy_ = device::read_once_policy();
  int slots_, described_ = 0;
  int first_ = -1, box_ = -1, end_ = -1;  ///< the batch whose ids these are, and the box that is next
  int ids_ = 0, head_kv_ = 0, old_boxes_ = 0;
  int next_segment_ = 0, next_box_ = -1, next_end_ = -1, next_ids_ = 0;
  int issued_ = 0, slot_ = 0, owes_v_ = 0;
};

}  // namespace vivace::attention_sm90
