// y[t] = table[ids[t]]         a copy of rows
//
// Two numbers for a row of width H in bf16
//   bytes  4 H   read a table row, write y
//   flops  0     memory is the only roof
//
// A block per token and piece of the row. Ids are known only when the kernel runs: one outside the table gives zeros.

#include <algorithm>

#include "src/device/launch.h"
#include "src/device/number.h"
#include "src/device/ptx.h"
#include "src/ops/embedding/table.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kThreads = 256;

struct Params {
  const int32_t* ids;
  const void* table;
  void* y;
  int64_t vocab, hidden, table_stride, y_stride;
  DType table_type, y_type;
};

template <class T, class Y, int kCount>
__global__ __launch_bounds__(kThreads) void gather_kernel(const __grid_constant__ Params p) {
  const int64_t token = blockIdx.x;
  const int64_t i = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kCount;
  if (i >= p.hidden) return;
  wait_for_previous_kernel();
  const int64_t id = p.ids[token];
  float v[kCount] = {};
  if (id >= 0 && id < p.vocab) load_floats(static_cast<const T*>(p.table) + id * p.table_stride + i, v);
  let_next_kernel_start();
  store_floats(v, static_cast<Y*>(p.y) + token * p.y_stride + i);
}

/// Any types, width and alignment.
__global__ __launch_bounds__(kThreads) void gather_one_by_one_kernel(const __grid_constant__ Params p) {
  const int64_t token = blockIdx.x;
  const int64_t i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (i >= p.hidden) return;
  wait_for_previous_kernel();
  const int64_t id = p.ids[token];
  const float v = id >= 0 && id < p.vocab ? load_any(p.table_type, p.table, id * p.table_stride + i) : 0.f;
  let_next_kernel_start();
  const int64_t at = token * p.y_stride + i;
  if (p.y_type == DType::f32) {
    static_cast<float*>(p.y)[at] = v;
  } else {
    static_cast<bf16*>(p.y)[at] = from_float<bf16>(v);
  }
}

}  // namespace

Status embedding_cuda(const EmbeddingArgs& args, const Stream& stream) {
  const int64_t hidden = args.table.shape[1];
  const Params params{.ids = args.ids.as<const int32_t>(),
                      .table = args.table.data,
                      .y = args.y.data,
                      .vocab = args.table.shape[0],
                      .hidden = hidden,
                      .table_stride = args.table.stride[0],
                      .y_stride = args.y.stride[0],
                      .table_type = args.table.dtype,
                      .y_type = args.y.dtype};
  const bool aligned = alignment_of(args.table) % 16 == 0 && alignment_of(args.y) % 16 == 0;
  Status status;
  const auto run = [&](auto kernel, int64_t count) {
    const int64_t pieces = hidden / count, threads = std::min<int64_t>(kThreads, (pieces + 31) / 32 * 32);
    const LaunchShape shape{.grid = dim3(static_cast<unsigned>(args.ids.shape[0]),
                                         static_cast<unsigned>((pieces + threads - 1) / threads)),
                            .block = dim3(static_cast<unsigned>(threads)),
                            .overlap_previous = true};
    status = launch("embedding", kernel, shape, stream, params);
  };
  with_type<float, bf16, f16>(args.table.dtype, [&](auto table) {
    with_type<float, bf16>(args.y.dtype, [&](auto y) {
      using T = decltype(table);
      using Y = decltype(y);
      constexpr int kCount = std::min(kVec<T>, kVec<Y>);
      if (aligned && hidden % kCount == 0) {
        run(gather_kernel<T, Y, kCount>, kCount);
      } else {
        run(gather_one_by_one_kernel, 1);
      }
    });
  });
  return status;
}

}  // namespace vivace
