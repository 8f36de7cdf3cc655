// scores = x · weightᵀ (+ bias)         warp-group products, compute capability 9.0a
//
// Two numbers for m tokens, n experts, hidden size k and T terms
//   bytes  2 m k + 2 T n k + 4 m n
//   flops  2 T m n k
// The wall is what enters an SM: a step of 64 brings 128 (rows + T columns) bytes for 32 T rows columns / 64 cycles of the
// tensor cores, so wide tiles, and all terms of a weight beside one copy of x.
//
// Tokens are the rows of a product, experts its columns. One warp copies steps of k into a ring of stages; each warp group
// multiplies 64 rows, from zero in every turn of one step or two, the smallest term first, and adds what it got to its sums:
// a tensor core truncates, fp32 additions round. CTAs of a cluster share k; then each adds up and stores its share of the rows.

#include <algorithm>

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

template <int kTerms, int kGroups, int kColumns>
struct Tile {
  static constexpr int kRows = 64 * kGroups, kConsumers = 128 * kGroups;
  // Where three terms are for fp32's accuracy and may meet long sums; tiles of 64 columns have short ones.
  static constexpr bool kHasTotals = kTerms == 3 && (kColumns == 96 || kColumns == 128);
  // Products and sums of a wide tile take more registers than a thread gets: a whole group copies, and gives up its own.
  static constexpr bool kMovesRegisters = kColumns > 128 || kHasTotals;
  static constexpr int kThreads = kConsumers + (kMovesRegisters ? 128 : 32);
  static constexpr int kXBytes = kRows * kRowBytes, kTermBytes = kColumns * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kTerms * kTermBytes;
  // Sums of the tile, where the ring was: rows shifted against each other, so that eight of them meet all banks.
  static constexpr int kPitch = kColumns + 8, kSumBytes = kRows * kPitch * static_cast<int>(sizeof(float));
  // Small tiles leave room for a second CTA, so that the next call's weights come while this one is added up.
  static constexpr int kCtasPerSm = kRows * kColumns <= 128 * 64 ? 2 : 1;
  static constexpr int kRoom = kCtasPerSm == 2 ? 110 << 10 : 224 << 10;
  static constexpr int kStages = std::min(kRoom / kStageBytes, 8);
  static constexpr int kRingBytes = std::max(kStages * kStageBytes, kSumBytes);
  static constexpr int kSmemBytes = kRingBytes + 2 * kStages * static_cast<int>(sizeof(device::Barrier));
  static_assert(kStages >= 2);
};

template <int kTerms, int kGroups, int kColumns, int kTurnSteps>
__global__ __launch_bounds__(
    Tile<kTerms, kGroups, kColumns>::kThreads,
    Tile<kTerms, kGroups, kColumns>::kCtasPerSm) void tile_kernel(const __grid_constant__ Maps maps,
                                                                  const __grid_constant__ Params p,
                                                                  bool in_pieces) {
  using T = Tile<kTerms, kGroups, kColumns>;
  extern __shared__ __align__(1024) uint8_t smem[];
  auto* const full = reinterpret_cast<device::Barrier*>(smem + T::kRingBytes);
  auto* const empty = full + T::kStages;
  const int rank = blockIdx.x, ctas = gridDim.x;
  const int64_t column0 = int64_t{blockIdx.y} * kColumns, row0 = int64_t{blockIdx.z} * T::kRows;
  // Of whole turns: copies of what is beyond the hidden size bring zeros.
  const int turns = static_cast<int>((steps_of(p.hidden) + kTurnSteps - 1) / kTurnSteps);
  const int first = kTurnSteps * first_step(turns, rank, ctas);
  const int count = kTurnSteps * first_step(turns, rank + 1, ctas) - first;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < T::kStages; ++i) {
      device::init_barrier(full + i, 1);
      device::init_barrier(empty + i, 4 * kGroups);  // a warp each
    }
    device::publish_barriers();
  }
  __syncthreads();

  if (threadIdx.x >= T::kConsumers) {
    if constexpr (T::kMovesRegisters) device::give_up_registers<40>();
    const int lane = threadIdx.x - T::kConsumers;
    if (lane >= 32) {
      if (ctas > 1) device::cluster_arrive();
      return;
    }
    const auto load_terms = [&](int step, int stage) {
      device::arrive_and_expect(full + stage, T::kStageBytes);
      uint8_t* to = smem + stage * T::kStageBytes + T::kXBytes;
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        device::tensor_load(to + t * T::kTermBytes, &maps.terms[t], full + stage, (first + step) * kRowBytes,
                            static_cast<int>(column0), 0, 0, 0);
      }
    };
    const auto load_x = [&](int step, int stage) {
      device::tensor_load(smem + stage * T::kStageBytes, &maps.x, full + stage, (first + step) * kRowBytes,
                          static_cast<int>(row0), 0, 0, 0);
    };
    const int ahead = min(count, T::kStages);
    if (!p.weight_ready) device::wait_for_previous_kernel();
    if (lane == 0) {
      device::prefetch_tensor_map(&maps.x);
      for (int step = 0; step < ahead; ++step) load_terms(step, step);
    }
    __syncwarp();
    device::wait_for_previous_kernel();
    if (lane == 0) {
      for (int step = 0; step < ahead; ++step) load_x(step, step);
      device::RingPosition<T::kStages> at;
      for (int step = ahead; step < count; ++step, at.next()) {
        device::wait_for(empty + at.stage, at.parity);
        load_terms(step, at.stage);
        load_x(step, at.stage);
      }
    }
    __syncwarp();
    device::let_next_kernel_start();
    if (ctas > 1) device::cluster_arrive();
    return;
  }

  if constexpr (T::kMovesRegisters) device::take_registers<232>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = __shfl_sync(~0u, warp / 4, 0);  // shuffled, so that addresses are known to be a warp's
  float sums[kColumns / 2] = {}, totals[T::kHasTotals ? kColumns / 2 : 1] = {}, products[kColumns / 2];
  // Two groups take turns, so that one multiplies while the other adds; left alone they do either at the same time.
  if (kGroups == 2 && group == 1 && count > 0) device::arrive_named_barrier(kTurn, T::kConsumers);
  device::RingPosition<T::kStages> at;
  for (int step = 0; step < count; step += kTurnSteps) {
    const uint8_t* stages[kTurnSteps];
    device::Barrier* done[kTurnSteps];
#pragma unroll
    for (int s = 0; s < kTurnSteps; ++s, at.next()) {
      stages[s] = smem + at.stage * T::kStageBytes;
      done[s] = empty + at.stage;
      device::wait_for(full + at.stage, at.parity);
    }
    if constexpr (kGroups == 2) device::named_barrier(kTurn + group, T::kConsumers);
    device::begin_products();
#pragma unroll
    for (int s = 0; s < kTurnSteps; ++s) {
      const uint8_t* x = stages[s] + group * (64 * kRowBytes);
#pragma unroll
      for (int t = kTerms - 1; t >= 0; --t) {
        const uint8_t* w = stages[s] + T::kXBytes + t * T::kTermBytes;
#pragma unroll
        for (int k = 0; k < kSlices; ++k) {
          device::Wgmma<bf16, kColumns>::multiply(products, device::swizzled_operand(x + 32 * k),
                                                  device::swizzled_operand(w + 32 * k),
                                                  s > 0 || t < kTerms - 1 || k > 0);
        }
      }
    }
    device::commit_products();
    if (kGroups == 2 && (group == 0 || step + kTurnSteps < count))
      device::arrive_named_barrier(kTurn + 1 - group, T::kConsumers);
    device::wait_for_products<0>();
    device::hold_products(products);
    if (lane == 0) {
#pragma unroll
      for (int s = 0; s < kTurnSteps; ++s) device::arrive(done[s]);
    }
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sums[i] += products[i];
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
  if constexpr (T::kHasTotals) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sums[i] = in_pieces ? sums[i] : totals[i] + sums[i];
  }
  device::wait_for_previous_kernel();  // it may write the bias, and read the scores
  device::let_next_kernel_start();
  device::named_barrier(kAll, T::kConsumers);  // nobody reads the ring any more
  float* const tile = reinterpret_cast<float*>(smem);
  float* to = tile + (16 * warp + lane / 4) * T::kPitch + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    *reinterpret_cast<float2*>(to + 8 * i) = make_float2(sums[4 * i], sums[4 * i + 1]);
    *reinterpret_cast<float2*>(to + 8 * i + 8 * T::kPitch) = make_float2(sums[4 * i + 2], sums[4 * i + 3]);
  }
  if (ctas > 1) {
    device::cluster_barrier();
  } else {
    device::named_barrier(kAll, T::kConsumers);
  }

  // This CTA's share of the rows, from all CTAs of the cluster.
  constexpr int kVectors = kColumns / 4;
  const int first_row = T::kRows * rank / ctas, last_row = T::kRows * (rank + 1) / ctas;
  const int rows = static_cast<int>(min(int64_t{last_row}, p.tokens - row0)) - first_row;
  for (int i = threadIdx.x; i < rows * kVectors; i += T::kConsumers) {
    const int row = first_row + i / kVectors, column = i % kVectors * 4;
    if (column0 + column >= p.experts) continue;
    const float* from = tile + row * T::kPitch + column;
    Sums<4> part[kMostCtas];
#pragma unroll
    for (int other = 0; other < kMostCtas; ++other)
      if (other < ctas) part[other] = *reinterpret_cast<const Sums<4>*>(device::in_cta(from, other));
    add_in_pairs<kTerms>(part, ctas);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (column0 + column + c < p.experts) store_score(p, row0 + row, column0 + column + c, part[0].v[c]);
  }
  __syncwarp();                             // a cluster's barrier wants whole warps
  if (ctas > 1) device::cluster_barrier();  // nobody reads this CTA's sums any more
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

template <int kTerms, int kGroups, int kColumns, int kTurnSteps = 1>
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
  return launch("router_gemm", tile_kernel<kTerms, kGroups, kColumns, kTurnSteps>, shape, stream, maps, p,
                plan.in_pieces);
}

template <int kTerms>
Status run(const Params& p, const TilePlan& plan, const Stream& stream) {
  if (plan.groups == 1) {
    return plan.columns == 32 ? run<kTerms, 1, 32>(p, plan, stream) : run<kTerms, 1, 64>(p, plan, stream);
  }
  constexpr int kTurnSteps = kTerms == 1 ? 2 : 1;  // steps of one term are short, and the stages many
  if (plan.columns == 64) return run<kTerms, 2, 64>(p, plan, stream);
  if (plan.columns == 96) return run<kTerms, 2, 96, kTurnSteps>(p, plan, stream);
  if (plan.columns == 192) return run<kTerms, 2, 192>(p, plan, stream);
  return plan.in_pieces ? run<kTerms, 2, 128>(p, plan, stream)
                        : run<kTerms, 2, 128, kTurnSteps>(p, plan, stream);
}

}  // namespace

Status run_tiles(const Params& p, const TilePlan& plan, const Stream& stream) {
  if (p.term_count == 1) return run<1>(p, plan, stream);
  return p.term_count == 2 ? run<2>(p, plan, stream) : run<3>(p, plan, stream);
}

}  // namespace vivace::router
