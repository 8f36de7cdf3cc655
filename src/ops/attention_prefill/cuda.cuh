#pragma once

// The kernel of cuda.mma and its launch, apart from cuda.cu so that each type of K and V is a compilation of its own.

#include "src/device/launch.h"
#include "src/ops/attention/tile.cuh"
#include "vivace/attention_prefill.h"

namespace vivace::attention_mma {

struct PrefillParams {
  Params attention;
  int64_t split_tokens;  ///< 0: none
  int64_t most_rows;     ///< rows of a unit at most
};

/// Totals over groups of keys, in shared memory: element i of a thread lies at i * kThreads + thread, so that lanes are
/// neighbours.
template <class T>
struct Totals {
  float maximum[T::kM][2], weight[T::kM][2];
  float* sums;

  __device__ explicit Totals(char* memory) : sums(reinterpret_cast<float*>(memory) + threadIdx.x) {
#pragma unroll
    for (int mt = 0; mt < T::kM; ++mt) {
      maximum[mt][0] = maximum[mt][1] = kNoKeys;
      weight[mt][0] = weight[mt][1] = 0.f;
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < T::kM * T::kHead / 2; ++i) sums[i * kThreads] = 0.f;
  }
  /// total += part, in the arithmetic of attention_decode's merge.
  __device__ __forceinline__ void add(const State<T>& part) {
#pragma unroll
    for (int mt = 0; mt < T::kM; ++mt) {
      const Blend blend[2] = {Blend(maximum[mt][0], weight[mt][0], part.maximum[mt][0], part.weight[mt][0]),
                              Blend(maximum[mt][1], weight[mt][1], part.maximum[mt][1], part.weight[mt][1])};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        weight[mt][h] = blend[h](weight[mt][h], part.weight[mt][h]);
        maximum[mt][h] = blend[h].maximum;
      }
#pragma unroll
      for (int nt = 0; nt < T::kHead / 8; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& total = sums[((mt * (T::kHead / 8) + nt) * 4 + e) * kThreads];
          total = blend[e / 2](total, part.sum[mt][nt][e]);
        }
      }
    }
  }
  __device__ __forceinline__ void copy_to(State<T>& state) const {
#pragma unroll
    for (int mt = 0; mt < T::kM; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        state.maximum[mt][h] = maximum[mt][h];
        state.weight[mt][h] = weight[mt][h];
      }
#pragma unroll
      for (int nt = 0; nt < T::kHead / 8; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          state.sum[mt][nt][e] = sums[((mt * (T::kHead / 8) + nt) * 4 + e) * kThreads];
      }
    }
  }
};

/// A request's tile of rows.
struct FoundTile {
  int request, level;
};

/// The tile of block `index`: the highest tiles of all requests first, since a request's last rows see the most keys and no
/// long block should be left for the end; false when there are fewer. Every warp searches by itself.
template <class TilesOf>
__device__ __forceinline__ bool tile_of_block(int requests, int index, TilesOf&& tiles_of, FoundTile& out) {
  const int lane = threadIdx.x % 32, own = lane < requests ? tiles_of(lane) : 0;
  const auto tiles = [&](int request) {
    return request == lane ? own : request < requests ? tiles_of(request) : 0;
  };
  const auto from_level = [&](int level) {  // tiles at this level and above
    int sum = 0;
    for (int b = lane; b < requests; b += 32) sum += max(0, tiles(b) - level);
    return __reduce_add_sync(kAllLanes, sum);
  };
  int most = 0;
  for (int b = lane; b < requests; b += 32) most = max(most, tiles(b));
  int low = 0, high = __reduce_max_sync(kAllLanes, most);
  if (index >= from_level(0)) return false;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (from_level(middle) > index ? low : high) = middle;
  }
  int place = index - from_level(high);
  for (int first = 0;; first += 32) {
    const uint32_t there = __ballot_sync(kAllLanes, tiles(first + lane) > low);
    if (place < __popc(there)) {
      out = {first + static_cast<int>(__fns(there, 0, place + 1)), low};
      return true;
    }
    place -= __popc(there);
  }
}

template <class T>
__global__ __launch_bounds__(kThreads, T::kHead <= 128 ? 2 : 1) void attention_prefill_kernel(
    const __grid_constant__ PrefillParams d) {
  extern __shared__ __align__(1024) char smem[];
  const Params& p = d.attention;
  device::wait_for_previous_kernel();
  const auto rows_of = [&](const Request& request) {
    return min(int64_t{request.rows} * p.group, d.most_rows);
  };
  const auto tiles_of = [&](int request) {
    return static_cast<int>((rows_of(Request(p, request)) + T::kRows - 1) / T::kRows);
  };
  FoundTile tile;
  if (!tile_of_block(p.requests, static_cast<int>(blockIdx.x / p.heads_kv), tiles_of, tile)) return;
  const Request request(p, tile.request);
  const int64_t row0 = int64_t{tile.level} * T::kRows;
  const Job job(p, request, static_cast<int>(blockIdx.x % p.heads_kv), static_cast<int>(row0),
                static_cast<int>(min(int64_t{T::kRows}, rows_of(request) - row0)));
  const WarpKeys warp = WarpKeys::of<T>(p, job);
  describe_rows<T>(p, job, smem);
  load_queries<T>(p, job, T::kRows, smem);
  State<T> state;
  state.clear();
  Totals<T> totals(smem + T::total_at(T::kRows));
  if (d.split_tokens > 0) totals.clear();
  const int64_t group = d.split_tokens > 0 ? d.split_tokens : int64_t{1} << 31;
  for (int64_t begin = job.first / group * group; begin < job.last; begin += group) {
    attend<T>(p, job, warp, static_cast<int>(begin), static_cast<int>(min(begin + group, int64_t{job.last})),
              smem, state);
    if (d.split_tokens > 0) totals.add(state);
  }
  if (job.first >= job.last) {  // rows that see no key
    device::commit_copies();
    device::wait_for_copies<0>();
  }
  if (d.split_tokens > 0) totals.copy_to(state);
  device::let_next_kernel_start();
  finish<T>(p, job, state);
}

template <class T>
Status launch_prefill_tile(const PrefillParams& d, const Stream& stream) {
  // Every request may end in a tile of its own. A request has at most most_rows rows, and all have those of q.
  const Params& p = d.attention;
  const int64_t tiles = std::min(p.tokens * p.group / T::kRows + p.requests,
                                 (d.most_rows + T::kRows - 1) / T::kRows * p.requests);
  const int64_t blocks = tiles * p.heads_kv;
  if (blocks > 0x7fffffff)
    return Status(Code::unsupported, "attention_prefill: the grid exceeds 2^31 - 1 blocks");
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(blocks)),
                          .block = dim3(kThreads),
                          .smem_bytes = T::total_at(T::kRows) + (d.split_tokens > 0 ? T::kTotalBytes : 0),
                          .overlap_previous = true};
  return launch("attention_prefill", attention_prefill_kernel<T>, shape, stream, d);
}

/// K and V of type Raw. Two tiles of 16 rows per warp share each fragment of K and V; at head 256 the registers do not
/// hold them.
template <class Raw>
Status launch_prefill(const PrefillParams& d, int64_t head_dim, const Stream& stream) {
  if (head_dim <= 64) return launch_prefill_tile<Tile<Raw, 64, 2, 2>>(d, stream);
  if (head_dim <= 128) return launch_prefill_tile<Tile<Raw, 128, 2, 2>>(d, stream);
  return launch_prefill_tile<Tile<Raw, 256, 1, 2>>(d, stream);
}

extern template Status launch_prefill<bf16>(const PrefillParams&, int64_t, const Stream&);
extern template Status launch_prefill<fp8>(const PrefillParams&, int64_t, const Stream&);

}  // namespace vivace::attention_mma
