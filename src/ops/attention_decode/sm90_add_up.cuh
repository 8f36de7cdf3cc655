#pragma once

// The second kernel of sm90.few: adds up the pieces of units that were cut, in an order that the schedule fixes.
//
// It is small enough to lie beside the CTAs of the walk, finds out meanwhile what it will have to do, and lets the kernel behind it
// start before it waits: that one's copies are under way while pieces are added up.

#include "src/ops/attention_decode/sm90_feed.cuh"
#include "src/ops/attention_decode/sm90_products.cuh"
#include "src/ops/decode_schedule/view.h"

namespace vivace::attention_sm90 {

/// Four values of a row, weighed by 2^(score - maximum), and the sum of the weights.
struct Part {
  float maximum = kNoKeys, weight = 0.f;
  float4 value = {0.f, 0.f, 0.f, 0.f};

  /// Measures from `most`, no smaller than the maximum.
  __device__ __forceinline__ void raise(float most) {
    const float by = factor_of(maximum, most);
    maximum = most;
    weight = __fmul_rn(weight, by);
    value = {__fmul_rn(value.x, by), __fmul_rn(value.y, by), __fmul_rn(value.z, by), __fmul_rn(value.w, by)};
  }
  /// Adds what was measured from its_maximum, which is no larger.
  __device__ __forceinline__ void add(float its_maximum, float its_weight, const float4& v) {
    const float by = factor_of(its_maximum, maximum);
    weight = __fmaf_rn(its_weight, by, weight);
    value = {__fmaf_rn(v.x, by, value.x), __fmaf_rn(v.y, by, value.y), __fmaf_rn(v.z, by, value.z),
             __fmaf_rn(v.w, by, value.w)};
  }
};

/// What a CTA adds up of a unit: of its rows the quads of values [first_quad, first_quad + 2^quads_log2), over the pieces that workers
/// first_worker and on have left.
struct AddUpTask {
  int first_worker, pieces, first_quad, quads_log2;
  int head_kv, row_begin, rows, keys;  ///< of its request
};

/// A CTA for the workers of two CTAs of the walk. Units that are cut among them it adds up whole; those that a longer unit was cut
/// for take equal parts of that. A thread has four values of a row at a time, and takes pieces in turns with others.
template <class T>
class AddUp {
 public:
  static constexpr int kThreads = 32 * kClusterCtas * T::kWarps;

  struct Shared {
    Part parts[kThreads];
    AddUpTask tasks[kClusterCtas * T::kWarps + 1];
    int before[2],
        through[2];  ///< of both ends: workers that start before the unit that is cut there, or in it
  };

  __device__ __forceinline__ AddUp(const Sm90Params& p, Shared& shared)
      : p_(p), shared_(shared), members_(workers_per_cluster(p)) {}

  __device__ __forceinline__ void run() {
    const int tasks = describe();
    device::wait_for_previous_kernel();
#pragma unroll 1
    for (int i = 0; i < tasks; ++i) add_up(shared_.tasks[i]);
  }

 private:
  static constexpr int kQuads = T::kHead / 4;  ///< of a row
  static constexpr int kUnitQuadsLog2 = 3 + (kQuads == 32 ? 5 : 4);
  static_assert(T::kRowsPerWarp == kFewRows && kFewRows == 8 && (kQuads == 32 || kQuads == 16));
  static constexpr int kAhead = 8;                                 ///< pieces under way together
  static constexpr int kStarts = kMaxCtas * T::kWarps / kThreads;  ///< of the schedule, a thread
  static_assert(kMaxCtas * T::kWarps % kThreads == 0);

  /// Leaves the CTA's tasks in shared memory, and returns how many.
  __device__ __forceinline__ int describe() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // All under way together: the schedule's starts, of which each thread looks at a few.
    ScheduleView::Start mine[kStarts];
#pragma unroll
    for (int i = 0; i < kStarts; ++i)
      mine[i] = Starts::list(p_)[min(static_cast<int>(threadIdx.x) + i * kThreads, p_.workers)];
    const Starts starts(p_, static_cast<int>(blockIdx.x), T::kBoxKeys);
    if (threadIdx.x < 2) shared_.before[threadIdx.x] = shared_.through[threadIdx.x] = 0;
    __syncthreads();
    // Lane m: the units that the boundaries before and behind worker m cut.
    const int before = Starts::cut_unit(p_, starts.of_lane), behind = __shfl_down_sync(kAllLanes, before, 1);
    const int from_before = __shfl_sync(kAllLanes, before, 0),
              goes_on = __shfl_sync(kAllLanes, before, members_);
    count_starts(mine, from_before, 0);
    count_starts(mine, goes_on, 1);
    // A unit that begins in a worker is a task, and one that was begun before.
    const bool begins = lane < members_ && behind >= 0 && behind != before;
    const bool leads = lane == members_ && from_before >= 0;
    const int unit = leads ? from_before : behind;
    int inside = 2;  // pieces, if it is cut among these workers alone
#pragma unroll
    for (int m = 0; m < kClusterCtas * T::kWarps; ++m) {
      const int cut = __shfl_sync(kAllLanes, before, m);
      if (m > lane + 1 && m < members_ && cut == unit) ++inside;
    }
    AddUpTask task{};
    __syncthreads();
    bool has_task = (begins || leads) && unit < p_.attention.requests * p_.attention.heads_kv;
    if (has_task) {
      const int end = leads ? 0 : 1;
      const bool beyond = leads || unit == goes_on;
      task.first_worker = beyond ? shared_.before[end] - 1 : static_cast<int>(blockIdx.x) * members_ + lane;
      task.pieces = beyond ? shared_.through[end] - task.first_worker : inside;
      // The CTAs it was cut for take equal parts, a power of two of them; a part is at least two quads.
      const int first = task.first_worker / members_, last = (task.first_worker + task.pieces - 1) / members_;
      const int parts_log2 = min(31 - __clz(last - first + 1), kUnitQuadsLog2 - 1);
      const int part = static_cast<int>(blockIdx.x) - first;
      task.quads_log2 = kUnitQuadsLog2 - parts_log2;
      task.first_quad = part << task.quads_log2;
      has_task = task.first_worker >= 0 && part >= 0 && part < 1 << parts_log2;
    }
    const unsigned all = __ballot_sync(kAllLanes, has_task);
    if (threadIdx.x < 32 && has_task) {
      const Params& a = p_.attention;
      const int request_id = unit / a.heads_kv;
      const Request request(a, request_id);
      task.head_kv = unit - request_id * a.heads_kv;
      task.row_begin = request.begin;
      task.rows = min(request.rows, p_.max_query_tokens);
      task.keys = request.keys;
      shared_.tasks[__popc(all & ((1u << lane) - 1))] = task;
    }
    __syncthreads();
    return __popc(all);
  }

  /// How many workers start before unit `unit` or with it, and how many up to its end.
  __device__ __forceinline__ void count_starts(const ScheduleView::Start (&starts)[kStarts], int unit,
                                               int end) const {
    if (unit < 0) return;
    int before = 0, through = 0;
#pragma unroll
    for (int i = 0; i < kStarts; ++i) {
      const int at = starts[i].request * p_.attention.heads_kv + starts[i].head_kv;
      const bool exists = static_cast<int>(threadIdx.x) + i * kThreads < p_.workers;
      before += exists && (at < unit || (at == unit && starts[i].tile == 0));
      through += exists && at <= unit;
    }
    before = __reduce_add_sync(kAllLanes, before);
    through = __reduce_add_sync(kAllLanes, through);
    if (threadIdx.x % 32 == 0) {
      atomicAdd(&shared_.before[end], before);
      atomicAdd(&shared_.through[end], through);
    }
  }

  __device__ __forceinline__ void add_up(const AddUpTask& task) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int count = 1 << task.quads_log2, turns = kThreads >> task.quads_log2;
    const int quad = task.first_quad + (thread & (count - 1)), r = quad / kQuads;
    const bool exists = r < p_.rows && token_of_row(p_, r) < task.rows;  // others were not left
    const int pieces = exists ? task.pieces : 0;
    Part sum;
#pragma unroll 1
    for (int first = thread >> task.quads_log2; first < pieces; first += kAhead * turns) {
      float2 end[kAhead];  // all under way together
      float4 value[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        end[j] = {kNoKeys, 0.f};
        value[j] = {0.f, 0.f, 0.f, 0.f};
        const int piece = first + j * turns;
        if (piece >= pieces) continue;
        const int slot = 2 * (task.first_worker + piece) + (piece == 0 ? 1 : 0);
        end[j] = p_.piece_ends[slot * T::kRowsPerWarp + r];
        value[j] = reinterpret_cast<const float4*>(p_.pieces)[slot * T::kRowsPerWarp * kQuads + quad];
      }
      float most = sum.maximum;
#pragma unroll
      for (const float2& e : end) most = fmaxf(most, e.x);
      sum.raise(most);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) sum.add(end[j].x, end[j].y, value[j]);
    }
    if (turns > 1) {
      // Threads of a warp that have one quad, then the warps.
      float most = sum.maximum;
#pragma unroll 1
      for (int lanes = count; lanes < 32; lanes *= 2)
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, lanes));
      sum.raise(most);
#pragma unroll 1
      for (int lanes = count; lanes < 32; lanes *= 2) {
        const auto add = [&](float& v) { v = __fadd_rn(v, __shfl_xor_sync(kAllLanes, v, lanes)); };
        add(sum.weight);
        add(sum.value.x);
        add(sum.value.y);
        add(sum.value.z);
        add(sum.value.w);
      }
      constexpr int kWarps = kThreads / 32;
      const int each = min(count, 32), parts = min(turns, kWarps);
      __syncthreads();  // who read the parts of the task before is done
      if (lane < each) shared_.parts[warp * each + lane] = sum;
      __syncthreads();
      if (thread >= count) return;
      const Part* part = shared_.parts + thread;
#pragma unroll
      for (int j = 1; j < kWarps; ++j) {
        if (j < parts) most = fmaxf(most, part[j * count].maximum);
      }
      sum.raise(most);
#pragma unroll
      for (int j = 1; j < kWarps; ++j) {
        if (j < parts) sum.add(part[j * count].maximum, part[j * count].weight, part[j * count].value);
      }
    }
    if (exists) finish(task, r, quad % kQuads, sum);
  }

  /// Four values of row r, as Sums::chunk has them.
  __device__ __forceinline__ void finish(const AddUpTask& task, int r, int quad, const Part& sum) const {
    const Params& a = p_.attention;
    const int token = token_of_row(p_, r);
    const int head = task.head_kv * a.group + r - token * a.group;
    const int64_t row = task.row_begin + token;
    const RowOutput output(a, row, head, task.keys - task.rows + token + 1 > 0, sum.maximum, sum.weight,
                           quad == 0);
    const int k = quad / 8, q = quad % 8;
    store_two<T>(a, output.at + Sums<T>::dimension(2 * k, q), output(sum.value.x), output(sum.value.y));
    store_two<T>(a, output.at + Sums<T>::dimension(2 * k + 1, q), output(sum.value.z), output(sum.value.w));
  }

  const Sm90Params& p_;
  Shared& shared_;
  const int members_;
};

template <class T>
__global__ __maxnreg__(T::kAddUpRegisters) void attention_decode_sm90_add_up_kernel(
    const __grid_constant__ Sm90Params p) {
  __shared__ typename AddUp<T>::Shared shared;
  device::let_next_kernel_start();
  AddUp<T>(p, shared).run();
}

}  // namespace vivace::attention_sm90
