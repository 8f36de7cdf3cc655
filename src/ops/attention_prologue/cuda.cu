// Splits qkv, normalises and rotates Q and K, stores Q and writes K and V into their slots.
//
// Two numbers for a token of H = heads_q + 2 heads_kv heads of width D, bf16
//   bytes  4 D H                        read once, written once; with fp8 out 3 D H
//   flops  7 D (heads_q + heads_kv)     below two flops per byte: memory is the only roof
//
// A warp per head and token. The head waits in shared memory as fp32 from its load to its store, because a rotated pair lies
// in two lanes. Types of what leaves are known when it runs: a kernel per pair of them would only cost size.

#include <algorithm>

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/row.h"
#include "src/ops/attention_prologue/table.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kWarps = 8;

/// Base, strides in elements, and type of an output.
struct Target {
  void* data;
  DType dtype;
  int64_t stride[3];
};

struct Params {
  const void* qkv;
  int64_t qkv_stride;
  const void* weight[2];  // of q, of k
  DType weight_type[2];
  const float* cos_sin;
  int64_t cos_sin_stride, max_position;
  const int32_t* positions;
  const int64_t* slots;
  Target q, k, v;
  float *q_scale, *k_scale, *v_scale;
  int64_t q_scale_stride[2], k_scale_stride[3], v_scale_stride;
  bool made_k_scale;
  int64_t tokens, pages, page_tokens;
  int heads_q, heads_kv, head_dim, half;
  QkNorm norm;
  RopeStyle style;
  float eps;
};

/// head *= weight / sqrt(mean(head * head) + eps)
__device__ void normalise(float* head, const Params& p, int which, int lane) {
  float squares = 0.f;
  for (int d = lane; d < p.head_dim; d += 32) squares += head[d] * head[d];
  const float mean = warp_reduce<Sum>(squares) / static_cast<float>(p.head_dim);
  const float scale = 1.f / sqrtf(mean + p.eps);
  for (int d = lane; d < p.head_dim; d += 32)
    head[d] *= scale * load_any(p.weight_type[which], p.weight[which], d);
  __syncwarp();
}

__device__ void rotate(float* head, const float* cos, const Params& p, int lane) {
  const float* sin = cos + p.half;
  for (int i = lane; i < p.half; i += 32) {
    float& a = p.style == RopeStyle::neox ? head[i] : head[2 * i];
    float& b = p.style == RopeStyle::neox ? head[i + p.half] : head[2 * i + 1];
    const float a0 = a, b0 = b, c = cos[i], s = sin[i];
    a = a0 * c - b0 * s;
    b = b0 * c + a0 * s;
  }
  __syncwarp();
}

template <int kVec, class T>
__device__ void store_as(const float* head, const Params& p, T* to, int lane) {
  for (int d = lane * kVec; d < p.head_dim; d += 32 * kVec) {
    float v[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) v[j] = head[d + j];
    store_floats(v, to + d);
  }
}

/// Stores the head at element `offset` of the target. fp8 is divided by `*scale`, which is first made of the head with
/// `make`.
template <int kVec>
__device__ void store_head(float* head, const Params& p, const Target& to, int64_t offset, float* scale,
                           bool make, int lane) {
  if (to.dtype == DType::f32) return store_as<kVec>(head, p, static_cast<float*>(to.data) + offset, lane);
  if (to.dtype == DType::bf16) return store_as<kVec>(head, p, static_cast<bf16*>(to.data) + offset, lane);
  if (to.dtype == DType::f16) return store_as<kVec>(head, p, static_cast<f16*>(to.data) + offset, lane);
  float divisor;
  if (make) {
    float max = 0.f;
    for (int d = lane; d < p.head_dim; d += 32) max = MaxMagnitude{}(max, head[d]);
    divisor = made_scale(warp_reduce<MaxMagnitude>(max));
    if (lane == 0) *scale = divisor;
  } else {
    divisor = *scale;
  }
  for (int d = lane; d < p.head_dim; d += 32) head[d] = __fdiv_rn(head[d], divisor);
  __syncwarp();
  store_as<kVec>(head, p, static_cast<fp8*>(to.data) + offset, lane);
}

template <class In, int kVec>
__global__ __launch_bounds__(kWarps * 32) void attention_prologue_kernel(const __grid_constant__ Params p) {
  extern __shared__ float4 smem[];  // aligned for vectors
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pitch = (p.head_dim + 3) / 4 * 4;
  float* head = reinterpret_cast<float*>(smem) + warp * pitch;
  const int heads = p.heads_q + 2 * p.heads_kv;
  const int64_t index = int64_t{blockIdx.x} * kWarps + warp;
  const int64_t token = index / heads;
  const int h = static_cast<int>(index - token * heads);
  wait_for_previous_kernel();
  if (token >= p.tokens) return;
  const bool is_q = h < p.heads_q, is_v = h >= p.heads_q + p.heads_kv;
  const int head_kv = is_q ? 0 : (h - p.heads_q) % p.heads_kv;
  const int64_t slot = p.slots[token];
  const int64_t position = p.cos_sin != nullptr ? p.positions[token] : 0;
  // What the CPU refuses: the token is not stored, and its query is zero.
  const bool lost = slot < -1 || slot >= p.pages * p.page_tokens || position < 0 ||
                    (p.cos_sin != nullptr && position >= p.max_position);
  if (!is_q && (lost || slot < 0)) return;

  const In* from = static_cast<const In*>(p.qkv) + token * p.qkv_stride + int64_t{h} * p.head_dim;
  for (int d = lane * kVec; d < p.head_dim; d += 32 * kVec) {
    float v[kVec];
    load_floats(from + d, v);
#pragma unroll
    for (int j = 0; j < kVec; ++j) head[d + j] = lost ? 0.f : v[j];
  }
  __syncwarp();
  if (!is_v && !lost) {
    if (p.norm == QkNorm::norm_then_rope) normalise(head, p, is_q ? 0 : 1, lane);
    if (p.cos_sin != nullptr) rotate(head, p.cos_sin + position * p.cos_sin_stride, p, lane);
    if (p.norm == QkNorm::rope_then_norm) normalise(head, p, is_q ? 0 : 1, lane);
  }
  let_next_kernel_start();
  if (is_q) {
    float* scale = p.q_scale + token * p.q_scale_stride[0] + h * p.q_scale_stride[1];
    return store_head<kVec>(head, p, p.q, token * p.q.stride[0] + h * p.q.stride[1], scale, true, lane);
  }
  const int64_t page = slot / p.page_tokens, in_page = slot - page * p.page_tokens;
  const auto offset = [&](const int64_t(&stride)[3]) {
    return page * stride[0] + in_page * stride[1] + head_kv * stride[2];
  };
  if (is_v)
    return store_head<kVec>(head, p, p.v, offset(p.v.stride), p.v_scale + head_kv * p.v_scale_stride, false,
                            lane);
  store_head<kVec>(head, p, p.k, offset(p.k.stride), p.k_scale + offset(p.k_scale_stride), p.made_k_scale,
                   lane);
}

Target target_of(const Tensor& t) {
  return {t.data, t.dtype, {t.stride[0], t.stride[1], t.stride[2]}};
}

}  // namespace

Status attention_prologue_cuda(const AttentionPrologueArgs& args, const Stream& stream) {
  Params p{};
  p.qkv = args.qkv.data;
  p.qkv_stride = args.qkv.stride[0];
  p.weight[0] = args.q_norm_weight.data;
  p.weight[1] = args.k_norm_weight.data;
  p.weight_type[0] = args.q_norm_weight.dtype;
  p.weight_type[1] = args.k_norm_weight.dtype;
  p.cos_sin = args.cos_sin.shape[1] > 0 ? args.cos_sin.as<const float>() : nullptr;
  p.cos_sin_stride = args.cos_sin.stride[0];
  p.max_position = args.cos_sin.shape[0];
  p.positions = args.positions.as<const int32_t>();
  p.slots = args.slots.as<const int64_t>();
  p.q = target_of(args.q);
  p.k = target_of(args.k);
  p.v = target_of(args.v);
  p.q_scale = args.q_scale.as<float>();
  p.k_scale = args.k_scale.as<float>();
  p.v_scale = args.v_scale.as<float>();
  p.made_k_scale = args.k_scale.rank == 3;
  for (int i = 0; i < 2; ++i) p.q_scale_stride[i] = args.q_scale.stride[i];
  for (int i = 0; i < 3; ++i) p.k_scale_stride[i] = p.made_k_scale ? args.k_scale.stride[i] : 0;
  p.v_scale_stride = args.v_scale.shape[0] > 1 ? args.v_scale.stride[0] : 0;
  p.tokens = args.q.shape[0];
  p.pages = args.k.shape[0];
  p.page_tokens = args.k.shape[1];
  p.heads_q = static_cast<int>(args.q.shape[1]);
  p.heads_kv = static_cast<int>(args.k.shape[2]);
  p.head_dim = static_cast<int>(args.q.shape[2]);
  p.half = static_cast<int>(args.cos_sin.shape[1] / 2);
  p.norm = args.qk_norm;
  p.style = args.rope_style;
  p.eps = static_cast<float>(args.eps);

  constexpr int kWide = 4;  // elements of one access, whatever the type
  const auto fits = [&](const Tensor& t) {
    return alignment_of(t) % (kWide * info_of(t.dtype).block_bytes) == 0;
  };
  const bool wide = p.head_dim % kWide == 0 && fits(args.qkv) && fits(args.q) && fits(args.k) && fits(args.v);
  const int64_t warps = p.tokens * (p.heads_q + 2 * p.heads_kv);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((warps + kWarps - 1) / kWarps)),
                          .block = dim3(kWarps * 32),
                          .smem_bytes = int64_t{kWarps} * ((p.head_dim + 3) / 4 * 4) * 4,
                          .overlap_previous = true};
  const auto kernel =
      args.qkv.dtype == DType::f32
          ? (wide ? attention_prologue_kernel<float, kWide> : attention_prologue_kernel<float, 1>)
          : (wide ? attention_prologue_kernel<bf16, kWide> : attention_prologue_kernel<bf16, 1>);
  return launch("attention_prologue", kernel, shape, stream, p);
}

}  // namespace vivace
