// Two numbers for B requests and N workers
//   bytes  8 B read, 16 B + 20 N written
//   steps  B / threads + log2(threads) for the sums, log2 B for a cut: all of it is latency, about two microseconds
//
// One block. It adds up the weights of the requests, chunk by chunk; then a thread per worker finds its start in the sums by
// bisection, in shared memory while they fit: steps of it in the L2 cost a third of a microsecond each. Nobody waits for
// anybody but at the block's barriers.

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/reduce.h"
#include "src/ops/decode_schedule/table.h"
#include "src/ops/decode_schedule/view.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int64_t kCopied = 2048;  // requests whose records have a copy in shared memory

struct Params {
  const int32_t *lengths, *rows;
  int64_t length_stride, row_stride, requests;
  int32_t* map;
  DecodeScheduleParams schedule;
};

/// Weight and slots, of one request or of all before it.
struct Sums {
  int64_t weight, slots;
  __device__ Sums operator+(const Sums& other) const { return {weight + other.weight, slots + other.slots}; }
};

__device__ int32_t saturated(int64_t v) {
  constexpr int64_t kMax = 0x7fffffff;
  return static_cast<int32_t>(v < kMax ? v : kMax);
}

/// The sum over the threads before this one; `all` becomes the sum over all.
__device__ Sums sum_before(const Sums& mine, Sums& all) {
  __shared__ Sums warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Sums sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Sums below{__shfl_up_sync(kAllLanes, sum.weight, step),
                     __shfl_up_sync(kAllLanes, sum.slots, step)};
    if (lane >= step) sum = sum + below;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  all = Sums{0, 0};
  Sums before{sum.weight - mine.weight, sum.slots - mine.slots};
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before = before + warp_sums[w];
    all = all + warp_sums[w];
  }
  __syncthreads();
  return before;
}

__global__ __launch_bounds__(kThreads) void decode_schedule_kernel(const __grid_constant__ Params p) {
  using namespace schedule_map;
  extern __shared__ __align__(16) ScheduleView::Record copies[];  // of all records, or none
  __shared__ int32_t header[kHeaderInts];
  const DecodeScheduleParams& s = p.schedule;
  const bool copied = p.requests <= kCopied;
  auto* starts = reinterpret_cast<ScheduleView::Start*>(p.map + kHeaderInts);
  auto* records = reinterpret_cast<ScheduleView::Record*>(p.map + records_at(s.workers));
  wait_for_previous_kernel();  // it may also be a reader of the map that is about to be replaced
  for (int64_t i = threadIdx.x; i < decode_schedule_arrivals(s.workers); i += kThreads)
    p.map[arrivals_at(s.workers) + i] = 0;
  Sums total{0, 0};
  for (int64_t chunk = 0; chunk < p.requests; chunk += kThreads) {
    const int64_t b = chunk + threadIdx.x;
    TileRange range{0, 0};
    Sums mine{0, 0}, all;
    if (b < p.requests) {
      const int64_t keys = p.lengths[b * p.length_stride];
      const int64_t n = int64_t{p.rows[(b + 1) * p.row_stride]} - p.rows[b * p.row_stride];
      if (n > 0) {
        range = tiles_of(keys > 0 ? keys : 0, n, s.tile_tokens, s.window);
        mine.weight = s.request_cost + (range.tiles > 1 ? range.tiles : 1);
        const int64_t groups = groups_of(range, s.piece_tiles);
        if (groups > 1) mine.slots = groups * s.heads_kv;
      }
    }
    const Sums before = total + sum_before(mine, all);
    if (b < p.requests) {
      const ScheduleView::Record record = {static_cast<int32_t>(range.first_tile),
                                           static_cast<int32_t>(range.tiles), saturated(before.weight),
                                           saturated(before.slots)};
      records[b] = record;
      if (copied) copies[b] = record;
    }
    total = total + all;
  }
  if (threadIdx.x == 0) {
    const int64_t fields[kHeaderInts] = {p.requests,
                                         s.heads_kv,
                                         s.tile_tokens,
                                         s.workers,
                                         active_workers_of(s, saturated(total.weight)),
                                         s.piece_tiles,
                                         s.request_cost,
                                         s.window,
                                         s.min_tiles};
    for (int i = 0; i < kHeaderInts; ++i) p.map[i] = header[i] = static_cast<int32_t>(fields[i]);
    const ScheduleView::Record last = {0, 0, saturated(total.weight), saturated(total.slots)};
    records[p.requests] = last;
    if (copied) copies[p.requests] = last;
  }
  __syncthreads();
  let_next_kernel_start();
  for (int64_t i = threadIdx.x; i <= s.workers; i += kThreads) {
    starts[i] = ScheduleView::cut(i, header, copied ? copies : records);
  }
}

}  // namespace

Status decode_schedule_cuda(const DecodeScheduleArgs& args, const Stream& stream) {
  const Params params{.lengths = args.kv_lengths.as<const int32_t>(),
                      .rows = args.query_start.as<const int32_t>(),
                      .length_stride = args.kv_lengths.stride[0],
                      .row_stride = args.query_start.stride[0],
                      .requests = args.kv_lengths.shape[0],
                      .map = args.schedule.as<int32_t>(),
                      .schedule = args.params};
  const int64_t copies = params.requests <= kCopied ? params.requests + 1 : 0;
  const LaunchShape shape{.grid = dim3(1),
                          .block = dim3(kThreads),
                          .smem_bytes = copies * int64_t{sizeof(ScheduleView::Record)},
                          .overlap_previous = true};
  return launch("decode_schedule", decode_schedule_kernel, shape, stream, params);
}

}  // namespace vivace
