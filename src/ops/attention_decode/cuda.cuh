#pragma once

// The kernel of cuda.mma and its launch, apart from cuda.cu so that each type of K and V is a compilation of its own.

#include "src/device/launch.h"
#include "src/ops/attention/tile.cuh"
#include "src/ops/decode_schedule/view.h"
#include "vivace/attention_decode.h"

namespace vivace::attention_mma {

struct DecodeParams {
  Params attention;
  const int32_t* schedule;
  int tile_tokens, workers, piece_tiles, max_query_tokens;
  int query_rows;  ///< rows of a tile that have room in shared memory
  /// Per slot and row of a unit: maximum, weight, head_dim sums.
  float* partials;
  int64_t slots, slot_rows;

  __device__ float* partial(int64_t slot, int row) const {
    return partials + (slot * slot_rows + row) * (2 + attention.head_dim);
  }
};

/// Whether the schedule was made for this call's shapes: of another nothing is done.
__device__ __forceinline__ bool is_for(const int32_t* schedule, const DecodeParams& d) {
  using namespace schedule_map;
  return schedule[kRequests] == d.attention.requests && schedule[kHeadsKv] == d.attention.heads_kv &&
         schedule[kTileTokens] == d.tile_tokens && schedule[kWorkers] == d.workers &&
         schedule[kPieceTiles] == d.piece_tiles && schedule[kActive] <= d.workers;
}

/// Leaves a thread's rows in the workspace.
template <class T>
__device__ __forceinline__ void store_partial(const DecodeParams& d, int64_t slot, const Job& job,
                                              const State<T>& state) {
#pragma unroll
  for (int mt = 0; mt < T::kM; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row_of<T>(mt, h);
      if (r >= job.rows) continue;
      float* partial = d.partial(slot, job.row0 + r);
      if (threadIdx.x % 4 == 0) {
        partial[0] = state.maximum[mt][h];
        partial[1] = state.weight[mt][h];
      }
#pragma unroll
      for (int nt = 0; nt < T::kHead / 8; ++nt) {
        const int column = nt * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
        if (column < d.attention.head_dim) partial[2 + column] = state.sum[mt][nt][2 * h];
        if (column + 1 < d.attention.head_dim) partial[2 + column + 1] = state.sum[mt][nt][2 * h + 1];
      }
    }
  }
}

template <class T>
__global__ __launch_bounds__(kThreads) void attention_decode_kernel(const __grid_constant__ DecodeParams d) {
  extern __shared__ __align__(1024) char smem[];
  const Params& p = d.attention;
  device::wait_for_previous_kernel();
  if (!is_for(d.schedule, d)) return;
  const ScheduleView view(d.schedule);
  view.for_each_piece(blockIdx.x, [&](const SchedulePiece& piece) {
    const Request request(p, static_cast<int>(piece.request));
    const int rows = min(request.rows, d.max_query_tokens) * p.group;
    // Keys fit 32 bits; the end of the last tile may not.
    const int64_t begin = piece.first_tile * d.tile_tokens;
    const int64_t end = min(begin + piece.tiles * d.tile_tokens, int64_t{request.keys});
    if (piece.slot >= d.slots) return;  // a map for other shapes
    for (int row0 = 0; row0 < rows; row0 += T::kRows) {
      const Job job(p, request, static_cast<int>(piece.head_kv), row0, min(T::kRows, rows - row0));
      const WarpKeys warp = WarpKeys::of<T>(p, job);
      __syncthreads();  // nobody reads the rows and queries before
      describe_rows<T>(p, job, smem);
      load_queries<T>(p, job, d.query_rows, smem);
      State<T> state;
      attend<T>(p, job, warp, static_cast<int>(min(begin, end)), static_cast<int>(end), smem, state);
      if (piece.slot < 0) {
        finish<T>(p, job, state);
      } else {
        store_partial<T>(d, piece.slot, job, state);
      }
    }
  });
  device::let_next_kernel_start();
}

template <class T>
Status launch_decode_tile(DecodeParams d, int64_t workers, const Stream& stream) {
  const int rows = d.max_query_tokens * d.attention.group;
  d.query_rows = std::min(T::kRows, (rows + 15) / 16 * 16);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(workers)),
                          .block = dim3(kThreads),
                          .smem_bytes = T::total_at(d.query_rows),
                          .overlap_previous = true};
  return launch("attention_decode", attention_decode_kernel<T>, shape, stream, d);
}

/// K and V of type Raw. Stages are what lets two blocks of one SM have 64 KB under way.
template <class Raw>
Status launch_decode(const DecodeParams& d, int64_t workers, const Stream& stream) {
  constexpr int kStages = 3;
  if (d.attention.head_dim <= 64) return launch_decode_tile<Tile<Raw, 64, 1, kStages>>(d, workers, stream);
  if (d.attention.head_dim <= 128) return launch_decode_tile<Tile<Raw, 128, 1, kStages>>(d, workers, stream);
  return launch_decode_tile<Tile<Raw, 256, 1, 2>>(d, workers, stream);
}

extern template Status launch_decode<bf16>(const DecodeParams&, int64_t, const Stream&);
extern template Status launch_decode<fp8>(const DecodeParams&, int64_t, const Stream&);

}  // namespace vivace::attention_mma
