// Two numbers for B requests and N workers
//   bytes  8 B read by each of N / 256 + 1 blocks, 16 B + 20 N written
//   steps  B / threads + log2(threads) for the sums, log2 B for a cut: all of it is latency, about two microseconds
//
// Each block adds up the weights of all requests for itself, chunk by chunk; then a thread per worker finds its start in the
// sums by bisection, in shared memory while they fit: steps of it in the L2 cost a third of a microsecond each. Nobody waits
// for anybody but at a block's barriers.

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/reduce.h"
#include "src/ops/decode_schedule/table.h"
#include "src/ops/decode_schedule/view.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kOfThread = 2,
              kChunk = kThreads * kOfThread;  // requests that a thread, and a block, looks at at once
constexpr int64_t kCopied = 2048;             // requests whose records have a copy in shared memory

struct Params {
  const int32_t *lengths, *rows;
  int64_t length_stride, row_stride, requests;
  int32_t* map;
  DecodeScheduleParams schedule;
};

/// Weight and, with pieces of so many tiles, slots, of one request or of all before it.
template <bool kSlots>
struct Sums {
  int64_t weight = 0, slots = 0;
  __device__ Sums operator+(const Sums& other) const {
    return {weight + other.weight, kSlots ? slots + other.slots : 0};
  }
};

/// The sum over the block.
__device__ int block_count(int mine) {
  __shared__ int of_warp[kWarps];
  const int of_mine = __reduce_add_sync(kAllLanes, mine);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = of_mine;
  __syncthreads();
  int all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all += of_warp[w];
  return all;
}

__device__ int32_t saturated(int64_t v) {
  constexpr int64_t kMax = 0x7fffffff;
  return static_cast<int32_t>(v < kMax ? v : kMax);
}

/// The sum over the threads before this one; `all` becomes the sum over all.
template <bool kSlots>
__device__ Sums<kSlots> sum_before(const Sums<kSlots>& mine, Sums<kSlots>& all) {
  __shared__ Sums<kSlots> warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Sums<kSlots> sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t weight = __shfl_up_sync(kAllLanes, sum.weight, step);
    const int64_t slots = kSlots ? __shfl_up_sync(kAllLanes, sum.slots, step) : 0;
    if (lane >= step) sum = sum + Sums<kSlots>{weight, slots};
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  all = {};
  Sums<kSlots> before{sum.weight - mine.weight, kSlots ? sum.slots - mine.slots : 0};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before = before + warp_sums[w];
    all = all + warp_sums[w];
  }
  __syncthreads();
  return before;
}

template <bool kSlots>
__global__ __launch_bounds__(kThreads) void decode_schedule_kernel(const __grid_constant__ Params p) {
  using namespace schedule_map;
  extern __shared__ __align__(16) ScheduleView::Record copies[];  // of all records, or none
  const DecodeScheduleParams& s = p.schedule;
  const bool copied = p.requests <= kCopied, first_block = blockIdx.x == 0, writes = first_block || !copied;
  auto* starts = reinterpret_cast<ScheduleView::Start*>(p.map + kHeaderInts);
  auto* records = reinterpret_cast<ScheduleView::Record*>(p.map + records_at(s.workers));
  wait_for_previous_kernel();  // it may also be a reader of the map that is about to be replaced
  if (first_block) {
    for (int64_t i = threadIdx.x; i < decode_schedule_arrivals(s.workers); i += kThreads)
      p.map[arrivals_at(s.workers) + i] = 0;
  }
  Sums<kSlots> total;
  RequestWeights weights;
  int64_t heaviest = 0;  // of this thread's
  int weighing = 0;      // how many of them weigh anything
  for (int64_t chunk = 0; chunk < p.requests; chunk += kChunk) {
    const int64_t first = chunk + threadIdx.x * kOfThread;
    int32_t lengths[kOfThread] = {}, rows[kOfThread + 1] = {};  // all asked for together
#pragma unroll
    for (int j = 0; j < kOfThread; ++j) {
      if (first + j < p.requests) lengths[j] = p.lengths[(first + j) * p.length_stride];
    }
#pragma unroll
    for (int j = 0; j <= kOfThread; ++j) {
      if (first + j <= p.requests) rows[j] = p.rows[(first + j) * p.row_stride];
    }
    TileRange ranges[kOfThread] = {};
    Sums<kSlots> each[kOfThread] = {}, mine, all;
#pragma unroll
    for (int j = 0; j < kOfThread; ++j) {
      const int64_t n = int64_t{rows[j + 1]} - rows[j];
      if (first + j < p.requests && n > 0) {
        ranges[j] = tiles_of(std::max(lengths[j], 0), n, s.tile_tokens, s.window);
        each[j].weight = weight_of(s, ranges[j]);
        if constexpr (kSlots) {
          const int64_t groups = groups_of(ranges[j], s.piece_tiles);
          if (groups > 1) each[j].slots = groups * s.heads_kv;
        }
      }
      mine = mine + each[j];
      weighing += each[j].weight > 0;
      heaviest = std::max(heaviest, each[j].weight);
    }
    Sums<kSlots> before = total + sum_before(mine, all);
#pragma unroll
    for (int j = 0; j < kOfThread; ++j) {
      if (first + j < p.requests) {
        const ScheduleView::Record record = {static_cast<int32_t>(ranges[j].first_tile),
                                             static_cast<int32_t>(ranges[j].tiles), saturated(before.weight),
                                             saturated(before.slots)};
        if (writes) records[first + j] = record;
        if (copied) copies[first + j] = record;
      }
      before = before + each[j];
    }
    total = total + all;
  }
  weights.sum = saturated(total.weight);
  if (threadIdx.x == 0) {
    const ScheduleView::Record last = {0, 0, saturated(total.weight), saturated(total.slots)};
    if (writes) records[p.requests] = last;
    if (copied) copies[p.requests] = last;
  }
  weights.requests = block_count(weighing);
  // Whoever has one above the mean knows that they differ.
  weights.all_alike = __syncthreads_and(heaviest * weights.requests <= weights.sum);
  const BusyWorkers busy = busy_workers_of(s, weights);
  const CutRule rule = cut_rule(s, busy, p.requests, weights.sum);
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i <= s.workers)
    starts[i] = copied ? ScheduleView::cut(i, rule, copies) : ScheduleView::cut(i, rule, records);
  if (i < kHeaderInts) {
    const int64_t fields[kHeaderInts] = {p.requests,  s.heads_kv,       s.tile_tokens,     s.workers,
                                         busy.count,  s.piece_tiles,    s.request_cost,    s.window,
                                         s.min_tiles, busy.unit_weight, busy.per_unit_log2};
#pragma unroll
    for (int field = 0; field < kHeaderInts; ++field)
      if (i == field) p.map[field] = static_cast<int32_t>(fields[field]);
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
  const int64_t blocks = args.params.workers / kThreads + 1;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(blocks)),
                          .block = dim3(kThreads),
                          .smem_bytes = copies * int64_t{sizeof(ScheduleView::Record)},
                          .overlap_previous = true};
  const auto kernel =
      args.params.piece_tiles > 0 ? decode_schedule_kernel<true> : decode_schedule_kernel<false>;
  return launch("decode_schedule", kernel, shape, stream, params);
}

}  // namespace vivace
