// The rows cpu.q8, cpu.f32 and cpu.fp8: one loop over tiles of all parts. The arithmetic is in cpu_gemm.cc.

#include <algorithm>

#include "src/core/error.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/linear/cpu_gemm.h"
#include "src/ops/linear/table.h"

namespace vivace {

namespace {

using cpu::QuantizedRows;
using cpu::QuantizedType;

// Tokens of one tile: their activations (k = 1536: 200 KB in int8) stay in a core's second-level cache.
constexpr int64_t kTileTokens = 128;
// Tiles for each thread: enough for threads of unequal speed to finish together.
constexpr int64_t kTilesPerThread = 4;
// A tile of fewer weight bytes than this costs less than handing it out.
constexpr int64_t kTileBytes = 8192;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// How the loop is split: tiles of `rows` weight rows by kTileTokens tokens, part after part.
struct Tiling {
  int64_t rows = cpu::kPanelRows;
  int64_t token_tiles = 0;
  int64_t row_tiles[LinearArgs::kMaxParts] = {};
  int64_t tiles = 0;

  Tiling(const LinearArgs& args, int threads) {
    token_tiles = ceil_div(args.x.shape[0], kTileTokens);
    int64_t panels = 0, bytes = 0;
    for (int p = 0; p < args.part_count; ++p) {
      panels += ceil_div(args.parts[p].weight.shape[0], cpu::kPanelRows);
      bytes += args.parts[p].weight.bytes();
    }
    if (panels == 0) return;
    const int64_t for_threads = ceil_div(panels * token_tiles, kTilesPerThread * threads);
    const int64_t for_bytes =
        args.x.shape[0] > 8 ? 1 : ceil_div(kTileBytes * panels, std::max<int64_t>(1, bytes));
    rows *= std::max(for_threads, for_bytes);
    // A tall tile of many tokens only makes the tail longer.
    if (args.x.shape[0] > 8) rows = std::min<int64_t>(rows, 64);
    for (int p = 0; p < args.part_count; ++p) {
      row_tiles[p] = ceil_div(args.parts[p].weight.shape[0], rows);
      tiles += row_tiles[p] * token_tiles;
    }
  }
};

/// Calls multiply(part, n0, n1, t0, t1) for all tiles.
template <class Multiply>
void for_each_tile(const LinearArgs& args, cpu::ThreadPool* threads, Multiply&& multiply) {
  const Tiling tiling(args, cpu::threads_of(threads));
  cpu::parallel_for(threads, tiling.tiles, [&](int64_t tile, int) {
    int p = 0;
    for (; tile >= tiling.row_tiles[p] * tiling.token_tiles; ++p)
      tile -= tiling.row_tiles[p] * tiling.token_tiles;
    const LinearPart& part = args.parts[p];
    const int64_t n0 = tile % tiling.row_tiles[p] * tiling.rows,
                  t0 = tile / tiling.row_tiles[p] * kTileTokens;
    multiply(part, n0, std::min(n0 + tiling.rows, part.weight.shape[0]), t0,
             std::min(t0 + kTileTokens, args.x.shape[0]));
  });
}

void multiply_f32(const cpu::XRows& x, const LinearPart& part, int64_t n0, int64_t n1, int64_t t0, int64_t t1) {
  const int64_t y_stride = part.y.stride[0];
  cpu::gemm_f32({x.base + t0 * x.stride, x.stride}, t1 - t0, part.weight, n0, n1, part.bias,
                {part.y.as<float>() + t0 * y_stride + n0, y_stride}, fp8_scales(part.weight_scale));
}

cpu::XRows rows_of_x(const LinearArgs& args) {
  return {args.x.as<const float>(), args.x.stride[0]};
}

/// invalid_argument unless the workspace has `needed` bytes and slack for alignment.
Status check_scratch(const LinearArgs& args, int64_t needed) {
  const int64_t given = args.workspace.present() ? args.workspace.shape[0] : 0;
  if (given >= needed) return {};
  return invalid_argument("linear: workspace.shape[0] is {}, needs {} bytes (linear_workspace_bytes)", given, needed);
}

/// Which integer types the parts need.
struct Activations {
  bool int8 = false, int16 = false;
  int64_t int8_bytes = 0, bytes = 0;

  explicit Activations(const LinearArgs& args) {
    const int64_t tokens = args.x.shape[0], k = args.x.shape[1];
    for (int p = 0; p < args.part_count; ++p) {
      const DType weight = args.parts[p].weight.dtype;
      if (!is_block_format(weight)) continue;
      (cpu::quantized_type_for(weight) == QuantizedType::int8 ? int8 : int16) = true;
    }
    if (int8) int8_bytes = tokens * QuantizedRows::row_bytes_for(QuantizedType::int8, k);
    bytes = int8_bytes + (int16 ? tokens * QuantizedRows::row_bytes_for(QuantizedType::int16, k) : 0);
  }
};

// The workspace starts at any address; rows of floats inside it start at a multiple of this.
constexpr int64_t kAlign = 64;

uint8_t* aligned(const Tensor& workspace) {
  const auto address = reinterpret_cast<uintptr_t>(workspace.data);
  return reinterpret_cast<uint8_t*>((address + kAlign - 1) / kAlign * kAlign);
}

}  // namespace

int64_t linear_cpu_q8_workspace(const LinearArgs& args, const Stream&) {
  return Activations(args).bytes + kAlign;
}

Status linear_cpu_q8(const LinearArgs& args, const Stream& stream) {
  const int64_t tokens = args.x.shape[0], k = args.x.shape[1];
  const Activations needed(args);
  VIVACE_TRY(check_scratch(args, needed.bytes + kAlign));
  uint8_t* memory = aligned(args.workspace);
  const QuantizedRows int8{.type = QuantizedType::int8, .k = k, .base = memory};
  const QuantizedRows int16{.type = QuantizedType::int16, .k = k, .base = memory + needed.int8_bytes};

  // Few tokens are quantised faster than a second loop is started.
  constexpr int64_t kTokensPerTask = 16;
  cpu::parallel_for(stream.threads, ceil_div(tokens, kTokensPerTask), [&](int64_t task, int) {
    for (int64_t t = task * kTokensPerTask; t < std::min(tokens, (task + 1) * kTokensPerTask); ++t) {
      const float* x = args.x.as<const float>() + t * args.x.stride[0];
      if (needed.int8) cpu::quantize_row(x, int8, t);
      if (needed.int16) cpu::quantize_row(x, int16, t);
    }
  });
  for_each_tile(
      args, stream.threads, [&](const LinearPart& part, int64_t n0, int64_t n1, int64_t t0, int64_t t1) {
        if (!is_block_format(part.weight.dtype)) return multiply_f32(rows_of_x(args), part, n0, n1, t0, t1);
        QuantizedRows x = cpu::quantized_type_for(part.weight.dtype) == QuantizedType::int8 ? int8 : int16;
        x.base += x.row_bytes() * t0;
        const int64_t stride = part.y.stride[0];
        cpu::gemm_quantized(x, t1 - t0, part.weight, n0, n1, part.bias,
                            {part.y.as<float>() + t0 * stride + n0, stride});
      });
  return {};
}

Status linear_cpu_f32(const LinearArgs& args, const Stream& stream) {
  for_each_tile(args, stream.threads,
                [&](const LinearPart& part, int64_t n0, int64_t n1, int64_t t0, int64_t t1) {
                  multiply_f32(rows_of_x(args), part, n0, n1, t0, t1);
                });
  return {};
}

int64_t linear_cpu_fp8_workspace(const LinearArgs& args, const Stream&) {
  return args.x.elements() * int64_t{sizeof(float)} + kAlign;
}

Status linear_cpu_fp8(const LinearArgs& args, const Stream& stream) {
  const int64_t tokens = args.x.shape[0], k = args.x.shape[1];
  VIVACE_TRY(check_scratch(args, linear_cpu_fp8_workspace(args, stream)));
  auto* x = reinterpret_cast<float*>(aligned(args.workspace));
  const Fp8Scales scales = activation_scales(args.x_scale);
  cpu::parallel_for(stream.threads, tokens, [&](int64_t t, int) {
    cpu::row_as_f32(args.x.dtype, args.x.at(t).data, k, scales, t, x + t * k);
  });
  for_each_tile(args, stream.threads,
                [&](const LinearPart& part, int64_t n0, int64_t n1, int64_t t0, int64_t t1) {
                  multiply_f32({x, k}, part, n0, n1, t0, t1);
                });
  return {};
}

}  // namespace vivace
