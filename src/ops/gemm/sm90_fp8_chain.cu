// y[r] = a[r] · bᵀ of up to 64 rows with scales of blocks        compute capability 9.0
//
// Two numbers for m rows
//   bytes  n k + m k + m n elements
//   flops  2 m n k
// They allow about a microsecond, so what counts is how long one thing waits for another.
//
// A sum is a chain over blocks of k, sum = product · scales + sum, but a product of a block needs none of the others. A
// cluster of CTAs shares k: each asks for all of its blocks at once, teams of two warps multiply them in turns and leave a
// product where the block's operands were, and then all threads add up. The first CTA begins the chain, each hands its
// sums to the next, and the last one stores y: the order of every other tile, so the same bits.

#include <algorithm>
#include <bit>
#include <type_traits>

#include "src/device/launch.h"
#include "src/ops/gemm/store.h"

namespace vivace::gemm {

namespace {

/// Of tiles of kRows rows, 16 or 64.
template <int kRows>
struct Chain {
  using Team = std::conditional_t<kRows == 16, Tile<16, 32, 1, 2, 1, 1>, Tile<64, 32, 2, 1, 1, 1>>;
  static constexpr int kTeams = 4, kThreads = kTeams * Team::kThreads;
  static constexpr int kRounds = 4, kMaxBlocks = kTeams * kRounds;  // of k, in one CTA; a stage is one
  // Pairs of neighbours in a thread's accumulators, and a team's share of them, which is added up in parts.
  static constexpr int kPairs = Team::kMBlocks * Team::kNBlocks * 2, kShare = kPairs / kTeams;
  static constexpr int kParts = kShare > 1 ? 2 : 1, kOfPart = kShare / kParts;
  static_assert(Team::kM * Team::kN * sizeof(float) <= Team::kStageBytes,
                "a product takes its operands' place");
};
inline constexpr int kMaxCtas = 8;  // of a cluster

/// Until at most `pending` < 4 of this thread's committed groups are still under way.
__device__ __forceinline__ void wait_for_copies(int pending) {
  if (pending == 0) {
    device::wait_for_copies<0>();
  } else if (pending == 1) {
    device::wait_for_copies<1>();
  } else if (pending == 2) {
    device::wait_for_copies<2>();
  } else {
    device::wait_for_copies<3>();
  }
}

/// Stores columns (column, column + 1) of a row, the second if it is there.
template <class Y>
__device__ __forceinline__ void store_pair(const Problem& p, Access access, int64_t row, int64_t column,
                                           const float (&v)[2]) {
  Y* const y = static_cast<Y*>(p.y) + row * p.y_stride + column;
  if (access != Access::single && column + 1 < p.n) {
    device::store_floats(v, y);
  } else {
    y[0] = device::from_float<Y>(v[0]);
    if (column + 1 < p.n) y[1] = device::from_float<Y>(v[1]);
  }
}

template <int kRows>
__global__ __launch_bounds__(Chain<kRows>::kThreads) void chain_kernel(const __grid_constant__ Problem p,
                                                                       Access access) {
  using C = Chain<kRows>;
  using T = typename C::Team;
  constexpr int kHalves = T::kN / 16;  // 16 columns lie in one block of scales
  extern __shared__ __align__(128) uint8_t stages[];
  // The sums of the CTA before: one part is handed on while the next is added up.
  __shared__ float2 handed[C::kParts][C::kOfPart][C::kThreads];
  __shared__ device::Barrier handed_over[C::kParts];
  __shared__ float scales[kHalves][T::kM][C::kMaxBlocks + 1];  // what a product is multiplied with
  const int team = threadIdx.x / T::kThreads, thread = threadIdx.x % T::kThreads;
  const int warp = thread / 32, lane = thread % 32;
  const int warp_row = warp / T::kWarpsN * T::kWarpRows, warp_column = warp % T::kWarpsN * T::kWarpColumns;
  const int rank = blockIdx.x, ctas = gridDim.x;
  if (threadIdx.x == 0) {
#pragma unroll
    for (device::Barrier& barrier : handed_over) device::init_barrier(&barrier, 1);
    device::publish_barriers();
#pragma unroll
    for (device::Barrier& barrier : handed_over)
      if (rank > 0) device::arrive_and_expect_of_cluster(&barrier, sizeof(handed[0]));
  }
  device::cluster_barrier();  // the next CTA can take what it is handed
  device::wait_for_previous_kernel();
  const int64_t first_row = int64_t{blockIdx.z} * T::kM, first_column = int64_t{blockIdx.y} * T::kN;
  const int rows = static_cast<int>(min(int64_t{T::kM}, p.rows - first_row));
  const int k_blocks = static_cast<int>((p.k + p.k_offset + kScaleBlock - 1) / kScaleBlock);
  const int halvings = __ffs(ctas) - 1;  // of k among the CTAs
  const int first_block = k_blocks * rank >> halvings,
            blocks = (k_blocks * (rank + 1) >> halvings) - first_block;

  // Scales are asked for before the copies, behind which they would wait.
  const int scale_block = threadIdx.x % C::kMaxBlocks, scale_row = threadIdx.x / C::kMaxBlocks;
  constexpr int kScaleRows = C::kThreads / C::kMaxBlocks;
  float a_scales[T::kM / kScaleRows] = {}, b_scales[kHalves] = {};
  if (scale_block < blocks) {
#pragma unroll
    for (int i = 0; i < T::kM / kScaleRows; ++i) {
      const int row = scale_row + i * kScaleRows;
      if (row < rows)
        a_scales[i] = p.a_scale[(first_row + row) * p.a_scale_stride + first_block + scale_block];
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int64_t column = first_column + 16 * half;
      if (column < p.n) {
        b_scales[half] =
            p.b_scale[(column + p.n_offset) / kScaleBlock * p.b_scale_stride + first_block + scale_block];
      }
    }
  }

  // This thread's share of a block: one chunk of every eighth row; zeros past the last row, the last column, and k.
  const int copy_row = thread / kChunks, chunk = thread % kChunks;
  const int columns = static_cast<int>(min(int64_t{T::kN}, p.n - first_column));
  const fp8 *a_rows[T::kACopies], *b_rows[T::kBCopies];
#pragma unroll
  for (int i = 0; i < T::kACopies; ++i) {
    const int row = min(copy_row + i * T::kRowsAtOnce, rows - 1);
    a_rows[i] = static_cast<const fp8*>(p.a) + (first_row + row) * p.a_stride;
  }
#pragma unroll
  for (int i = 0; i < T::kBCopies; ++i) {
    const int column = min(copy_row + i * T::kRowsAtOnce, columns - 1);
    b_rows[i] = static_cast<const fp8*>(p.b) + (first_column + column) * p.b_stride;
  }
#pragma unroll 1
  for (int block = team; block < C::kMaxBlocks; block += C::kTeams) {
    if (block < blocks) {
      uint8_t* a = stages + block * T::kStageBytes + device::swizzled<kRowBytes>(copy_row, chunk);
      uint8_t* b = a + T::kM * kRowBytes;
      int64_t k = int64_t{first_block + block} * kScaleBlock - p.k_offset + chunk * kChunkBytes;
      const bool inside = k >= 0 && k < p.k;
      if (!inside) k = 0;
      const int rows_left = inside ? rows - copy_row : 0, columns_left = inside ? columns - copy_row : 0;
#pragma unroll
      for (int i = 0; i < T::kBCopies; ++i) {
        const int row = i * T::kRowsAtOnce;
        device::copy_16_async(b + row * kRowBytes, b_rows[i] + k, row < columns_left);
      }
#pragma unroll
      for (int i = 0; i < T::kACopies; ++i) {
        const int row = i * T::kRowsAtOnce;
        device::copy_16_async(a + row * kRowBytes, a_rows[i] + k, row < rows_left);
      }
    }
    device::commit_copies();  // an empty group at the end keeps the count
  }
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < T::kM / kScaleRows; ++i) {
      scales[half][scale_row + i * kScaleRows][scale_block] = a_scales[i] * b_scales[half];
    }
  }

#pragma unroll 1
  for (int block = team; block < blocks; block += C::kTeams) {
    uint8_t* const stage = stages + block * T::kStageBytes;
    static_assert(C::kRounds == 4);
    wait_for_copies(C::kRounds - 1 - block / C::kTeams);
    device::named_barrier(1 + team, T::kThreads);
    Accumulators<T> acc = {};
    const uint8_t *a = stage + warp_row * kRowBytes, *b = stage + (T::kM + warp_column) * kRowBytes;
    multiply_stage<T, fp8>(a, b, lane, acc);
    device::named_barrier(1 + team, T::kThreads);  // the team is done with the operands
    float2* product = reinterpret_cast<float2*>(stage) + thread;
#pragma unroll
    for (int pair = 0; pair < C::kPairs; ++pair) {
      const float* v = acc[pair / 2 / T::kNBlocks][pair / 2 % T::kNBlocks] + pair % 2 * 2;
      product[pair * T::kThreads] = make_float2(v[0], v[1]);
    }
  }
  __syncthreads();  // all products and scales are there
  device::let_next_kernel_start();

  // Thread t of a team adds up the team's share of the pairs that thread t of every team multiplied.
#pragma unroll 1
  for (int part = 0; part < C::kParts; ++part) {
    const int first_pair = team * C::kShare + part * C::kOfPart;
    const int block_column = warp_column + first_pair / 2 % T::kNBlocks * 8;
    const int row = warp_row + first_pair / 2 / T::kNBlocks * 16 + first_pair % 2 * 8 + lane / 4;
    const float(*scale)[C::kMaxBlocks + 1] = scales[block_column / 16] + row;
    const float2* product = reinterpret_cast<const float2*>(stages) + first_pair * T::kThreads + thread;
    float sums[C::kOfPart][2] = {};  // of rows 8 apart
    if (rank > 0) {
      device::wait_for_cluster_writes(&handed_over[part], 0);
#pragma unroll
      for (int i = 0; i < C::kOfPart; ++i) {
        const float2 before = handed[part][i][threadIdx.x];
        sums[i][0] = before.x, sums[i][1] = before.y;
      }
    }
#pragma unroll 8
    for (int block = 0; block < blocks; ++block) {
#pragma unroll
      for (int i = 0; i < C::kOfPart; ++i) {
        const float2 v = product[block * (T::kStageBytes / sizeof(float2)) + i * T::kThreads];
        sums[i][0] = fmaf(v.x, scale[8 * i][block], sums[i][0]);
        sums[i][1] = fmaf(v.y, scale[8 * i][block], sums[i][1]);
      }
    }
    if (rank + 1 < ctas) {
#pragma unroll
      for (int i = 0; i < C::kOfPart; ++i)
        device::store_async(&handed[part][i][threadIdx.x], sums[i], &handed_over[part], rank + 1);
      continue;
    }
    const int64_t column = first_column + block_column + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < C::kOfPart; ++i) {
      if (row + 8 * i >= rows || column >= p.n) break;
      if (p.bias != nullptr) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (column + c < p.n) sums[i][c] += device::load_any(p.bias_type, p.bias, column + c);
      }
      if (p.y_type == DType::bf16) {
        store_pair<bf16>(p, access, first_row + row + 8 * i, column, sums[i]);
      } else {
        store_pair<float>(p, access, first_row + row + 8 * i, column, sums[i]);
      }
    }
  }
}

int64_t blocks_of_k(const Problem& p) {
  return (p.k + p.k_offset + kScaleBlock - 1) / kScaleBlock;
}

int64_t column_tiles(const Problem& p) {
  return (p.n + Chain<64>::Team::kN - 1) / Chain<64>::Team::kN;
}

template <int kRows>
Status run_chain(std::string_view name, const Problem& p, const Stream& stream) {
  using C = Chain<kRows>;
  constexpr uint64_t kEnoughCtas = 128;  // close to one per SM of the GPUs this is for
  const int64_t tiles = column_tiles(p);
  const auto shared_by = [&](uint64_t count) {
    return (static_cast<uint64_t>(blocks_of_k(p)) + count - 1) / count;
  };
  // A power of two: clusters of 3 fill fewer SMs. No team without a block, if it can be.
  const uint64_t most = std::min<uint64_t>(std::bit_ceil(shared_by(C::kTeams)), kMaxCtas);
  const uint64_t ctas = std::clamp(std::bit_floor(kEnoughCtas / static_cast<uint64_t>(tiles)),
                                   std::bit_ceil(shared_by(C::kMaxBlocks)), most);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(tiles),
                                       static_cast<unsigned>((p.rows + kRows - 1) / kRows)),
                          .block = dim3(C::kThreads),
                          .smem_bytes = static_cast<int64_t>(shared_by(ctas)) * C::Team::kStageBytes,
                          .cluster = static_cast<int>(ctas),
                          .overlap_previous = true};
  return launch(name, chain_kernel<kRows>, shape, stream, p, access_of(p));
}

}  // namespace

bool chain_suits(const Problem& p, const Stream& stream) {
  constexpr int64_t kTooManyTiles = 200;  // more than one and a half per SM
  return stream.compute_capability == 90 && p.block_scales && !p.gated && p.y_scale == nullptr &&
         p.y_type != DType::fp8_e4m3 && p.group_start == nullptr && p.a_index == nullptr && p.rows <= 64 &&
         column_tiles(p) <= kTooManyTiles && blocks_of_k(p) <= kMaxCtas * Chain<64>::kMaxBlocks;
}

Status run_fp8_chain(std::string_view name, const Problem& p, const Stream& stream) {
  // Two tiles of 16 rows take less time than half a tile of 64.
  return p.rows <= 32 ? run_chain<16>(name, p, stream) : run_chain<64>(name, p, stream);
}

}  // namespace vivace::gemm
