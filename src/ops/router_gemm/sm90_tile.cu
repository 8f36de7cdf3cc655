// scores = x · weightᵀ (+ bias)         warp-group products, compute capability 9.0a
//
// Two numbers for m tokens, n experts, hidden size k and T terms
//   bytes  2 m k + 2 T n k + 4 m n
//   flops  2 T m n k
// The wall is what enters an SM: a step of 64 brings 128 (rows + T columns) bytes for 32 T rows columns / 64 cycles of the
// tensor cores, so wide tiles, and all terms of a weight beside one copy of x.
//
// Tokens are the rows of a product, experts its columns. Two warps copy steps of k into a ring of stages; each warp group
// multiplies 64 rows, from zero in every step, the smallest term first, and adds what it got to its sums: a tensor core
// truncates, fp32 additions round. CTAs of a cluster share k; then each sends the others its sums of their share of the rows,
// and adds up and stores its own.

#include <algorithm>
#include <type_traits>

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/tensor_map.h"
#include "src/device/wgmma.h"
#include "src/ops/router_gemm/sm90.h"

namespace vivace::router {

namespace {

constexpr int kRowBytes = 2 * kStep;  // of a step: what the swizzle of tensor maps spans
constexpr int kSlices = kStep / 16;   // products of 16 in a step
constexpr int kTotalSteps = 4;        // after which sums are added to totals, where there are any
constexpr int kAll = 1, kTurn = 2;    // named barriers: of all consumers; of each group

struct Maps {
  CUtensorMap x, terms[RouterWeight::kMaxTerms];
};

template <int kTerms, int kGroups, int kColumns_>
struct Tile {
  static constexpr int kColumns = kColumns_;
  static constexpr int kRows = 64 * kGroups, kConsumers = 128 * kGroups;
  // Where three terms are for fp32's accuracy and may meet long sums; tiles of 64 columns have short ones.
  static constexpr bool kHasTotals = kTerms == 3 && (kColumns == 96 || kColumns == 128);
  // One batch of products is added while the next is multiplied: of the next step, or of the other half of the columns
  // where no registers are left for two batches of all of them.
  static constexpr bool kTwoBatches = kTerms == 1 && kGroups == 2 && kColumns >= 96;
  static constexpr int kBatchColumns = kTwoBatches && kColumns > 128 ? kColumns / 2 : kColumns;
  // One warp copies terms, another x, so that x need not wait for them once the kernel ahead has ended.
  static constexpr int kLoaders = 2;
  // Products and sums of a wide tile take more registers than a thread gets: loaders are a whole group, which gives up its own.
  static constexpr bool kMovesRegisters = kColumns > 128 || kHasTotals || kTwoBatches;
  static constexpr int kThreads = kConsumers + (kMovesRegisters ? 128 : 32 * kLoaders);
  static constexpr int kXBytes = kRows * kRowBytes, kTermBytes = kColumns * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kTerms * kTermBytes;
  // Sums of the tile, where the ring was, and behind them what the other CTAs send: as many rows from each of a cluster.
  static constexpr int kSumRowBytes = kColumns * static_cast<int>(sizeof(float));
  static constexpr int kSumBytes = (2 * kRows + kMostCtas - 1) * kSumRowBytes;
  /// Where a sum is: rows are shifted against each other, so that four of them meet all banks.
  static constexpr __device__ int place(int row, int column) {
    return row * kColumns + (column ^ 8 * (row % 4));
  }
  // Small tiles leave room for a second CTA, so that the next call's weights come while this one is added up.
  static constexpr int kCtasPerSm = kRows * kColumns <= 128 * 64 ? 2 : 1;
  static constexpr int kRoom = kCtasPerSm == 2 ? 110 << 10 : 224 << 10;
  static constexpr int kStages = std::min(kRoom / kStageBytes, 8);
  static constexpr int kRingBytes = std::max(kStages * kStageBytes, kSumBytes);
  static constexpr int kSmemBytes =
      kRingBytes + (2 * kStages + 1) * static_cast<int>(sizeof(device::Barrier));
  static_assert(kStages >= 2);
};

/// Copies `bytes` from here to the shared memory of CTA `rank` of the cluster; they complete on a barrier there. `to` and `barrier`
/// are the addresses here that correspond to those there. `bytes` a multiple of 16, like the addresses.
__device__ __forceinline__ void send(void* to, const void* from, uint32_t bytes, device::Barrier* barrier,
                                     uint32_t rank) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          device::address_in_cta(to, rank)),
      "r"(device::shared_address(from)), "r"(bytes), "r"(device::address_in_cta(barrier, rank))
      : "memory");
}

/// Adds up what a cluster's CTAs, at most kMost of them and more than half as many, have of the rows that this one stores, and
/// stores the scores: `rows` of the tile from `first_row`. `tile` are the sums of this CTA, `rank`; `parts` those of the others, each
/// rows_of_cta rows behind the one before. `wait` returns when they are there. The tile begins at token row0 and expert column0.
template <int kTerms, class T, int kMost>
__device__ __forceinline__ void store_rows(const Params& p, const float* tile, const float* parts, int rank,
                                           int ctas, int rows_of_cta, int first_row, int rows, int64_t row0,
                                           int64_t column0, const auto& wait) {
  // A thread has the same four columns of each of its rows, shifted alike.
  constexpr int kThreadsOfRow = T::kColumns / 4, kRowsAtOnce = T::kConsumers / kThreadsOfRow / 4 * 4;
  const int first = threadIdx.x / kThreadsOfRow, column = threadIdx.x % kThreadsOfRow * 4;
  const int64_t token = row0 + first_row + first, expert = column0 + column;
  const int end = first < kRowsAtOnce && expert < p.experts ? rows : 0;
  const float* of_cta[kMost];
#pragma unroll
  for (int other = 0; other < kMost; ++other) {
    of_cta[other] = (kMost == 1 || other == rank ? tile : parts) +
                    (other - rank) * rows_of_cta * T::kColumns + T::place(first_row + first, column);
  }
  const bool in_fours = p.scores_type == DType::f32 && expert + 4 <= p.experts &&
                        (reinterpret_cast<uintptr_t>(p.scores) | 4 * p.scores_stride) % 16 == 0;
  Sums<4> bias = {};
  if (in_fours && p.bias != nullptr) {
#pragma unroll
    for (int c = 0; c < 4; ++c) bias.v[c] = p.bias[expert + c];
  }
  wait();
  const auto add_and = [&](auto store) {
#pragma unroll 1  // code that runs once takes longer to fetch than to run
    for (int row = first; row < end; row += kRowsAtOnce) {
      Sums<4> part[kMost] = {};
#pragma unroll
      for (int other = 0; other < kMost; ++other) {
        if (other <= kMost / 2 || other < ctas)
          part[other] = *reinterpret_cast<const Sums<4>*>(of_cta[other] + (row - first) * T::kColumns);
      }
      add_in_pairs<kTerms>(part);
      store(part[0], row - first);
    }
  };
  if (in_fours) {
    auto* to = static_cast<float*>(p.scores) + token * p.scores_stride + expert;
    add_and([&](Sums<4>& scores, int) {
      if (p.bias != nullptr) scores += bias;
      // Said so, since a plain store is taken apart.
      __stcg(reinterpret_cast<float4*>(to), make_float4(scores.v[0], scores.v[1], scores.v[2], scores.v[3]));
      to += kRowsAtOnce * p.scores_stride;
    });
  } else {
    add_and([&](const Sums<4>& scores, int row) {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (expert + c < p.experts) store_score(p, token + row, expert + c, scores.v[c]);
    });
  }
}

template <int kTerms, int kGroups, int kColumns>
__global__ __launch_bounds__(
    Tile<kTerms, kGroups, kColumns>::kThreads,
    Tile<kTerms, kGroups, kColumns>::kCtasPerSm) void tile_kernel(const __grid_constant__ Maps maps,
                                                                  const __grid_constant__ Params p,
                                                                  int rows_of_cta, bool in_pieces) {
  using T = Tile<kTerms, kGroups, kColumns>;
  extern __shared__ __align__(1024) uint8_t smem[];
  auto* const full = reinterpret_cast<device::Barrier*>(smem + T::kRingBytes);
  auto* const empty = full + T::kStages;
  auto* const parts_here = empty + T::kStages;  // what the other CTAs send
  const int rank = blockIdx.x, ctas = gridDim.x;
  const int64_t column0 = int64_t{blockIdx.y} * kColumns, row0 = int64_t{blockIdx.z} * T::kRows;
  const int steps = static_cast<int>(steps_of(p.hidden)), first = first_step(steps, rank, ctas);
  const int count = first_step(steps, rank + 1, ctas) - first;
  const int rows = static_cast<int>(min(p.tokens - row0, int64_t{T::kRows}));
  const int first_row = rank * rows_of_cta, own_rows = max(min(rows - first_row, rows_of_cta), 0);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < T::kStages; ++i) {
      device::init_barrier(full + i, 1);
      device::init_barrier(empty + i, 4 * kGroups);  // a warp each
    }
    device::init_barrier(parts_here, 1);
    device::publish_barriers();
    device::arrive_and_expect(parts_here, (ctas - 1) * own_rows * T::kSumRowBytes);
  }
  __syncthreads();

  if (threadIdx.x >= T::kConsumers) {
    if constexpr (T::kMovesRegisters) device::give_up_registers<40>();
    const int warp = (threadIdx.x - T::kConsumers) / 32;
    const auto load = [&] {
      if (warp == 1) device::prefetch_tensor_map(&maps.x);
      if (warp == 1 || !p.weight_ready) device::wait_for_previous_kernel();
      device::RingPosition<T::kStages> at{.parity = 1};
      for (int step = 0; step < count; ++step, at.next()) {
        device::wait_for(empty + at.stage, at.parity);
        uint8_t* const to = smem + at.stage * T::kStageBytes;
        const int k0 = (first + step) * kRowBytes;
        if (warp == 1) {
          device::tensor_load(to, &maps.x, full + at.stage, k0, static_cast<int>(row0), 0, 0, 0);
          continue;
        }
        device::arrive_and_expect(full + at.stage, T::kStageBytes);
#pragma unroll
        for (int t = 0; t < kTerms; ++t) {
          device::tensor_load(to + T::kXBytes + t * T::kTermBytes, &maps.terms[t], full + at.stage, k0,
                              static_cast<int>(column0), 0, 0, 0);
        }
      }
    };
    if (warp < T::kLoaders) {
      if (threadIdx.x % 32 == 0) load();
      __syncwarp();
      if (warp == 1) device::let_next_kernel_start();  // it has waited; one thread speaks for its CTA
    }
    if (ctas > 1) device::cluster_arrive_without_fence();
    return;
  }

  if constexpr (T::kMovesRegisters) device::take_registers<232>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = __shfl_sync(~0u, warp / 4, 0);  // shuffled, so that addresses are known to be a warp's
  const uint64_t x0 = device::swizzled_operand(smem + group * (64 * kRowBytes));
  const uint64_t w0 = device::swizzled_operand(smem + T::kXBytes);
  const auto behind = [](uint64_t operand, uint32_t bytes) {  // its address is in the lower half
    return operand >> 32 << 32 | (static_cast<uint32_t>(operand) + bytes / 16);
  };
  float sums[kColumns / 2] = {}, totals[T::kHasTotals ? kColumns / 2 : 1] = {};
  // Asks for the products of a step with columns from `column` on, and counts them as one batch.
  const auto multiply = [&](auto& products, uint32_t stage, int column) {
    constexpr int kWidth = 2 * static_cast<int>(sizeof(products) / sizeof(float));
    device::begin_products();
#pragma unroll
    for (int t = kTerms - 1; t >= 0; --t) {
#pragma unroll
      for (int k = 0; k < kSlices; ++k) {
        const uint32_t x = stage * T::kStageBytes + 32 * k;
        const uint32_t w = x + t * T::kTermBytes + column * kRowBytes;
        device::Wgmma<bf16, kWidth>::multiply(products, behind(x0, x), behind(w0, w),
                                              t < kTerms - 1 || k > 0);
      }
    }
    device::commit_products();
  };
  const auto add = [&](auto& products, int column) {
    device::hold_products(products);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(products) / sizeof(float)); ++i)
      sums[column / 2 + i] += products[i];
  };
  const auto release = [&](uint32_t stage) {
    if (lane == 0) device::arrive(empty + stage);
  };
  device::RingPosition<T::kStages> at;
  if constexpr (T::kTwoBatches) {
    // One batch is multiplied while the one before is added: of the next step, or of the other half of the columns.
    float even[T::kBatchColumns / 2], odd[T::kBatchColumns / 2];
    constexpr int kLast = kColumns - T::kBatchColumns;  // the first column of a step's last batch
    const auto begin = [&](auto& products, int column) {
      if (column == 0) device::wait_for(full + at.stage, at.parity);
      multiply(products, at.stage, column);
    };
    // Adds the batch before the one just begun, whose columns begin with `column`.
    const auto finish = [&](auto& products, int column) {
      device::wait_for_products<1>();
      if (column == kLast) release(at.stage == 0 ? T::kStages - 1 : at.stage - 1);
      add(products, column);
    };
    int left = count * (kColumns / T::kBatchColumns);
    if (left > 0) {
      begin(even, 0);
      if (kLast == 0) at.next();
      for (--left; left >= 2; left -= 2) {
        begin(odd, kLast);
        finish(even, 0);
        at.next();
        begin(even, 0);
        finish(odd, kLast);
        if (kLast == 0) at.next();
      }
      if (left > 0) {
        begin(odd, kLast);
        device::wait_for_products<1>();
        add(even, 0);
        device::wait_for_products<0>();
        add(odd, kLast);
      } else {
        device::wait_for_products<0>();
        add(even, 0);
      }
    }
  } else {
    float products[T::kBatchColumns / 2];
    // Two groups take turns, so that one multiplies while the other adds; left alone they do either at the same time.
    if (kGroups == 2 && group == 1 && count > 0) device::arrive_named_barrier(kTurn, T::kConsumers);
    for (int step = 0; step < count; ++step, at.next()) {
      device::wait_for(full + at.stage, at.parity);
      if constexpr (kGroups == 2) device::named_barrier(kTurn + group, T::kConsumers);
      multiply(products, at.stage, 0);
      if (kGroups == 2 && (group == 0 || step + 1 < count))
        device::arrive_named_barrier(kTurn + 1 - group, T::kConsumers);
      device::wait_for_products<0>();
      release(at.stage);
      add(products, 0);
      if constexpr (T::kHasTotals) {
        if (in_pieces || (step + 1) % kTotalSteps != 0) continue;
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
          const float total = totals[i] + sums[i];
          sums[i] = (totals[i] - total) + sums[i];  // what was lost begins the next sum
          totals[i] = total;
        }
      }
    }
  }
  if constexpr (T::kHasTotals) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sums[i] = in_pieces ? sums[i] : totals[i] + sums[i];
  }
  device::wait_for_previous_kernel();  // it may write the bias, and read the scores
  device::let_next_kernel_start();
  if (ctas > 1) device::cluster_arrive_without_fence();  // the others may write where the ring was
  device::named_barrier(kAll, T::kConsumers);            // and so may this CTA
  auto* const tile = reinterpret_cast<float*>(smem);
  float* const parts = tile + T::kRows * kColumns;
  float* to[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = tile + T::place(16 * warp + lane / 4, 8 * i + lane % 4 * 2);
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    float* const at = to[i % 4] + i / 4 * 32;
    *reinterpret_cast<float2*>(at) = make_float2(sums[4 * i], sums[4 * i + 1]);
    *reinterpret_cast<float2*>(at + 8 * kColumns) = make_float2(sums[4 * i + 2], sums[4 * i + 3]);
  }
  if (ctas > 1) {
    device::publish_to_async_proxy();
    __syncwarp();
    device::cluster_wait();
    // A warp sends its rows to the CTAs that store them, a lane for each.
    const int begin = max(16 * warp, lane * rows_of_cta);
    const int end = min(min(16 * warp + 16, (lane + 1) * rows_of_cta), rows);
    if (lane < ctas && lane != rank && begin < end) {
      send(parts + ((rank - lane) * rows_of_cta + begin) * kColumns, tile + begin * kColumns,
           (end - begin) * T::kSumRowBytes, parts_here, lane);
    }
    __syncwarp();
  }
  const auto wait = [&] {
    __syncwarp();  // both barriers want whole warps
    device::named_barrier(kAll, T::kConsumers);
    if (ctas > 1) {
      device::wait_for_cluster_writes(parts_here, 0);
      __syncwarp();
      device::cluster_arrive_without_fence();
    }
  };
  const auto store = [&](auto most) {
    store_rows<kTerms, T, decltype(most)::value>(p, tile, parts, rank, ctas, rows_of_cta, first_row, own_rows,
                                                 row0, column0, wait);
  };
  if (ctas == 1) {
    store(std::integral_constant<int, 1>());
  } else if (ctas == 2) {
    store(std::integral_constant<int, 2>());
  } else if (ctas <= 4) {
    store(std::integral_constant<int, 4>());
  } else {
    store(std::integral_constant<int, kMostCtas>());
  }
  __syncwarp();
  if (ctas > 1) device::cluster_wait();  // what this CTA sent has arrived
}

/// Rows of k-major elements as the products read them: boxes of a step's 128 bytes.
Status make_map(const void* data, int64_t rows, int64_t hidden, int64_t stride, int box_rows,
                CUtensorMap& map) {
  const auto row_stride =
      static_cast<uint64_t>(2 * (rows > 1 ? stride : hidden));  // a single row's may be anything
  return device::make_tensor_map(
      {.data = data,
       .extent = {static_cast<uint64_t>(2 * hidden), static_cast<uint64_t>(rows), 1, 1, 1},
       .stride = {row_stride, row_stride, row_stride, row_stride},
       .box = {kRowBytes, static_cast<uint32_t>(box_rows), 1, 1, 1}},
      map);
}

template <int kTerms, int kGroups, int kColumns>
Status run(const Params& p, const TilePlan& plan, const Stream& stream) {
  using T = Tile<kTerms, kGroups, kColumns>;
  Maps maps;
  VIVACE_TRY(make_map(p.x, p.tokens, p.hidden, p.x_stride, T::kRows, maps.x));
  for (int t = 0; t < kTerms; ++t)
    VIVACE_TRY(make_map(p.terms[t], p.experts, p.hidden, p.term_stride[t], kColumns, maps.terms[t]));
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(plan.ctas),
                                       static_cast<unsigned>((p.experts + kColumns - 1) / kColumns),
                                       static_cast<unsigned>((p.tokens + T::kRows - 1) / T::kRows)),
                          .block = dim3(T::kThreads),
                          .smem_bytes = T::kSmemBytes,
                          .cluster = plan.ctas,
                          .overlap_previous = true};
  return launch("router_gemm", tile_kernel<kTerms, kGroups, kColumns>, shape, stream, maps, p,
                (T::kRows + plan.ctas - 1) / plan.ctas, plan.in_pieces);
}

template <int kTerms>
Status run(const Params& p, const TilePlan& plan, const Stream& stream) {
  if (plan.groups == 1) {
    return plan.columns == 32 ? run<kTerms, 1, 32>(p, plan, stream) : run<kTerms, 1, 64>(p, plan, stream);
  }
  if (plan.columns == 64) return run<kTerms, 2, 64>(p, plan, stream);
  if (plan.columns == 96) return run<kTerms, 2, 96>(p, plan, stream);
  return plan.columns == 128 ? run<kTerms, 2, 128>(p, plan, stream) : run<kTerms, 2, 192>(p, plan, stream);
}

}  // namespace

Status run_tiles(const Params& p, const TilePlan& plan, const Stream& stream) {
  if (p.term_count == 1) return run<1>(p, plan, stream);
  return p.term_count == 2 ? run<2>(p, plan, stream) : run<3>(p, plan, stream);
}

}  // namespace vivace::router
