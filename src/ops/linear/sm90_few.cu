// y_p = x · weight_pᵀ (+ bias_p) of few tokens        compute capability 9.0
//
// Two numbers for m tokens, n outputs of all parts, inner size k
//   bytes  n k + m k   elements; the weights' need not wait for the kernel before
//   flops  2 m n k     nothing; what counts is how long one thing waits for another
//
// A warp has 8 outputs and a share of k, and multiplies straight from memory: the order of k inside a product of 16 is free,
// so a lane takes 16 bytes of a row of the weight and the same 16 of a row of x, and four lanes two whole sectors. All that a
// warp has of a weight, up to two rounds, is under way at once. Warps that share outputs add up through shared memory, in the
// order of k; how many share depends on k alone.

#include <algorithm>
#include <bit>

#include "src/core/error.h"
#include "src/device/launch.h"
#include "src/device/mma.h"
#include "src/device/ptx.h"
#include "src/ops/linear/table.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kOutputs = 8, kRows = 16;                     // of a product: outputs and tokens
constexpr int kQuadBytes = 64, kSteps = 4;                  // of a row that four lanes load at once; such loads of a round
constexpr int kRoundBytes = kQuadBytes * kSteps;            // of k
constexpr int kStepsOfBlock = kScaleBlock / kQuadBytes;     // of fp8 under one scale
constexpr int kRegisters = 4;                               // of 16 bytes

struct Part {
  const uint8_t* weight;
  const float* scale;
  const void* bias;
  void* y;
  int64_t weight_stride, scale_stride, y_stride;  // bytes, then elements
  int n, first_tile;
  DType bias_type, y_type;
};
struct Params {
  Part parts[LinearArgs::kMaxParts];
  const uint8_t* x;
  const float* x_scale;
  int64_t x_stride, x_scale_stride;  // bytes, then elements; 0: one scale
  int part_count, tokens, k_bytes;
  int log_sharing;  // of the warps that share outputs
  bool weight_ready;
};

/// What a lane has of a round: of a row of a weight, or of x.
using Round = uint4[kSteps];

__device__ __forceinline__ uint32_t of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/// Four fp8 as two pairs of f16, exactly.
__device__ __forceinline__ void widen(uint32_t four, uint32_t& lower, uint32_t& upper) {
  const auto pair = [](uint32_t two) {
    const __half2_raw v = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two & 0xffffu), __NV_E4M3);
    return static_cast<uint32_t>(v.x) | static_cast<uint32_t>(v.y) << 16;
  };
  lower = pair(four), upper = pair(four >> 16);
}

/// acc += x · wᵀ of 64 bytes of k: x of rows `lower` and eight further.
template <class E>
__device__ __forceinline__ void multiply_step(float (&acc)[4], const uint4& lower, const uint4& upper, const uint4& w) {
  if constexpr (sizeof(E) == 2) {
#pragma unroll
    for (int i = 0; i < kRegisters; i += 2) {
      const uint32_t a[4] = {of(lower, i), of(upper, i), of(lower, i + 1), of(upper, i + 1)};
      const uint32_t b[2] = {of(w, i), of(w, i + 1)};
      mma_16x8x16<E>(acc, a, b);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      uint32_t a[4], b[2];
      widen(of(lower, i), a[0], a[2]);
      widen(of(upper, i), a[1], a[3]);
      widen(of(w, i), b[0], b[1]);
      mma_16x8x16<f16>(acc, a, b);
    }
  }
}

/// Of kBlocks · 16 tokens. kBlockScales: fp8 with a scale per 128 of k.
template <class E, bool kBlockScales, int kBlocks>
__global__ __launch_bounds__(kThreads, kBlocks == 1 ? 2 : 1) void few_tokens_kernel(const __grid_constant__ Params p) {
  __shared__ float sums[kWarps][kBlocks * kRows * kOutputs];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int share = warp & ((1 << p.log_sharing) - 1), sharing = 1 << p.log_sharing;
  const int tile = static_cast<int>(blockIdx.x), token0 = static_cast<int>(blockIdx.y) * kBlocks * kRows;
  int of_part = 0;
  while (of_part + 1 < p.part_count && tile >= p.parts[of_part + 1].first_tile) ++of_part;
  const Part& part = p.parts[of_part];
  const int first_output = (tile - part.first_tile) * (kWarps >> p.log_sharing) * kOutputs;
  const int output0 = first_output + (warp >> p.log_sharing) * kOutputs;

  // A lane's row of the weight, and its bytes of k.
  const bool has_output = output0 + row < part.n;
  const uint8_t* const weight = part.weight + (has_output ? output0 + row : 0) * part.weight_stride + quad * 16;
  const auto load_weight = [&](Round& w, int k) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int at = k + i * kQuadBytes;
      w[i] = has_output && at + quad * 16 < p.k_bytes ? __ldcs(reinterpret_cast<const uint4*>(weight + at)) : uint4{};
    }
  };
  const int step = sharing * kRoundBytes;
  int k = share * kRoundBytes;
  Round even, odd;
  if (!p.weight_ready) wait_for_previous_kernel();
  load_weight(even, k);
  load_weight(odd, k + step);
  wait_for_previous_kernel();
  let_next_kernel_start();

  float acc[kBlocks][4] = {};
  const auto multiply = [&](const Round& w, int from) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      Round x[2];
      float x_scales[2][kSteps / kStepsOfBlock], w_scales[kSteps / kStepsOfBlock];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = token0 + block * kRows + half * 8 + row;
        const bool valid = token < p.tokens;
        const uint8_t* const x_row = p.x + (valid ? token : 0) * p.x_stride + quad * 16;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const int at = from + i * kQuadBytes;
          x[half][i] =
              valid && at + quad * 16 < p.k_bytes ? *reinterpret_cast<const uint4*>(x_row + at) : uint4{};
        }
        if constexpr (kBlockScales) {
#pragma unroll
          for (int i = 0; i < kSteps / kStepsOfBlock; ++i) {
            const int at = from + i * kScaleBlock;
            x_scales[half][i] =
                valid && at < p.k_bytes ? p.x_scale[token * p.x_scale_stride + at / kScaleBlock] : 0.f;
          }
        }
      }
      if constexpr (kBlockScales) {
#pragma unroll
        for (int i = 0; i < kSteps / kStepsOfBlock; ++i) {
          const int at = from + i * kScaleBlock;
          w_scales[i] = at < p.k_bytes && output0 < part.n
                            ? part.scale[output0 / kScaleBlock * part.scale_stride + at / kScaleBlock]
                            : 0.f;
        }
#pragma unroll
        for (int i = 0; i < kSteps / kStepsOfBlock; ++i) {
          float of_block[4] = {};
#pragma unroll
          for (int s = i * kStepsOfBlock; s < (i + 1) * kStepsOfBlock; ++s)
            multiply_step<E>(of_block, x[0][s], x[1][s], w[s]);
#pragma unroll
          for (int c = 0; c < 4; ++c)
            acc[block][c] = fmaf(of_block[c], x_scales[c / 2][i] * w_scales[i], acc[block][c]);
        }
      } else {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) multiply_step<E>(acc[block], x[0][s], x[1][s], w[s]);
      }
    }
  };
#pragma unroll 1
  while (k < p.k_bytes) {
    multiply(even, k);
    if (k + step < p.k_bytes) multiply(odd, k + step);
    k += 2 * step;
    if (k >= p.k_bytes) break;
    load_weight(even, k);
    load_weight(odd, k + step);
  }

  // Element (token, output) of a block lies at token * 8 + output.
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const at = sums[warp] + (block * kRows + half * 8 + row) * kOutputs + quad * 2;
      *reinterpret_cast<float2*>(at) = make_float2(acc[block][2 * half], acc[block][2 * half + 1]);
    }
  }
  __syncthreads();
  constexpr int kOfTile = kBlocks * kRows * kOutputs;
  const float w_scale = sizeof(E) == 1 && !kBlockScales ? *part.scale : 1.f;
  for (int i = threadIdx.x; i < kOfTile << (3 - p.log_sharing); i += kThreads) {
    static_assert(kWarps == 1 << 3);
    const int group = i / kOfTile, at = i % kOfTile;
    const int token = token0 + at / kOutputs, output = first_output + group * kOutputs + at % kOutputs;
    if (token >= p.tokens || output >= part.n) continue;
    float sum = 0.f;
    for (int w = group * sharing; w < (group + 1) * sharing; ++w) sum += sums[w][at];
    if constexpr (sizeof(E) == 1 && !kBlockScales) sum *= p.x_scale[token * p.x_scale_stride] * w_scale;
    if (part.bias != nullptr) sum += load_any(part.bias_type, part.bias, output);
    const int64_t to = token * part.y_stride + output;
    if (part.y_type == DType::bf16) {
      static_cast<bf16*>(part.y)[to] = from_float<bf16>(sum);
    } else {
      static_cast<float*>(part.y)[to] = sum;
    }
  }
}

/// Warps that share outputs: so many that each has one or two rounds, if it can be.
int log_sharing(int64_t k_bytes) {
  const auto rounds = static_cast<uint64_t>((k_bytes + kRoundBytes - 1) / kRoundBytes);
  return std::countr_zero(std::min<uint64_t>(std::bit_ceil((rounds + 1) / 2), kWarps));
}

template <class E, bool kBlockScales>
Status run(const Params& p, int tiles, const Stream& stream) {
  const int rows = p.tokens <= kRows ? kRows : 2 * kRows;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(tiles), static_cast<unsigned>((p.tokens + rows - 1) / rows)),
      .block = dim3(kThreads),
      .overlap_previous = true};
  const auto kernel =
      rows == kRows ? few_tokens_kernel<E, kBlockScales, 1> : few_tokens_kernel<E, kBlockScales, 2>;
  return launch("linear", kernel, shape, stream, p);
}

}  // namespace

Status linear_sm90_few(const LinearArgs& args, const Stream& stream) {
  const bool fp8_values = args.x.dtype == DType::fp8_e4m3;
  const bool blocks = fp8_values && args.x_scaling == Fp8Scaling::block;
  const int64_t element = info_of(args.x.dtype).block_bytes;
  Params p{.x = args.x.as<const uint8_t>(),
           .x_scale = args.x_scale.as<const float>(),
           .x_stride = args.x.stride[0] * element,
           .x_scale_stride = args.x_scaling == Fp8Scaling::tensor ? 0 : args.x_scale.stride[0],
           .part_count = args.part_count,
           .tokens = static_cast<int>(args.x.shape[0]),
           .k_bytes = static_cast<int>(args.x.shape[1] * element),
           .log_sharing = log_sharing(args.x.shape[1] * element),
           .weight_ready = args.weight_ready};
  const int64_t outputs_of_tile = (kWarps >> p.log_sharing) * kOutputs;
  int64_t tiles = 0;
  for (int i = 0; i < args.part_count; ++i) {
    const LinearPart& part = args.parts[i];
    p.parts[i] = {.weight = part.weight.as<const uint8_t>(),
                  .scale = part.weight_scale.as<const float>(),
                  .bias = part.bias.present() ? part.bias.data : nullptr,
                  .y = part.y.data,
                  .weight_stride = part.weight.stride[0] * element,
                  .scale_stride = blocks ? part.weight_scale.stride[0] : 0,
                  .y_stride = part.y.stride[0],
                  .n = static_cast<int>(part.weight.shape[0]),
                  .first_tile = static_cast<int>(tiles),
                  .bias_type = part.bias.dtype,
                  .y_type = part.y.dtype};
    tiles += (part.weight.shape[0] + outputs_of_tile - 1) / outputs_of_tile;
  }
  if (!fp8_values) return run<bf16, false>(p, static_cast<int>(tiles), stream);
  return blocks ? run<fp8, true>(p, static_cast<int>(tiles), stream) : run<fp8, false>(p, static_cast<int>(tiles), stream);
}

}  // namespace vivace
