// Splits qkv, normalises and rotates Q and K, stores Q and writes K and V into their slots.
//
// Two numbers for a token of H = heads_q + 2 heads_kv heads of width D, bf16
//   bytes  4 D H                        read once, written once; with fp8 out 3 D H
//   flops  7 D (heads_q + heads_kv)     below two flops per byte: memory is the only roof
//
// Heads of whole groups of eight stay in registers. A warp takes several heads of a token, as many at once as its lanes
// hold, so that it reads cosines and sines once and has several loads under way; the other half of a rotated pair comes from
// another lane. Heads of other widths go a warp each through shared memory.
//
// Types of what leaves are known when it runs: a kernel per pair of them would only cost size.

#include <algorithm>

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/row.h"
#include "src/ops/attention_prologue/table.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kWarps = 8;
constexpr int kGroup = 8, kMostWidth = 32 * kGroup;  // values of a lane; of a head that a warp holds
constexpr uint32_t kAllLanes = 0xffffffffu;

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
  int lanes, passes, parts;  // of a head; of a warp, each with 32 / lanes heads; warps of a token
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

/// A token's entry in the cache and the table of angles. `lost`: what the CPU refuses; the token is not stored, and its query
/// is zero.
struct Entry {
  int64_t slot, position;
  bool lost;
};
__device__ __forceinline__ Entry entry_of(const Params& p, int64_t token) {
  const int64_t slot = p.slots[token];
  const int64_t position = p.cos_sin != nullptr ? p.positions[token] : 0;
  const bool lost = slot < -1 || slot >= p.pages * p.page_tokens || position < 0 ||
                    (p.cos_sin != nullptr && position >= p.max_position);
  return {slot, position, lost};
}

/// Where a head goes. fp8 is divided by `*scale`, which is first made of the head with `make`.
struct Place {
  void* data;
  DType dtype;
  int64_t offset;  // in elements
  float* scale;
  bool make;
};
__device__ __forceinline__ Place place_of(const Params& p, int64_t token, int h, int64_t slot) {
  if (h < p.heads_q) {
    return {p.q.data, p.q.dtype, token * p.q.stride[0] + h * p.q.stride[1],
            p.q_scale + token * p.q_scale_stride[0] + h * p.q_scale_stride[1], true};
  }
  const bool is_v = h >= p.heads_q + p.heads_kv;
  const int head = (h - p.heads_q) % p.heads_kv;
  const int64_t page = slot / p.page_tokens, in_page = slot - page * p.page_tokens;
  const auto offset = [&](const int64_t(&stride)[3]) {
    return page * stride[0] + in_page * stride[1] + head * stride[2];
  };
  if (is_v) return {p.v.data, p.v.dtype, offset(p.v.stride), p.v_scale + head * p.v_scale_stride, false};
  return {p.k.data, p.k.dtype, offset(p.k.stride), p.k_scale + offset(p.k_scale_stride), p.made_k_scale};
}

// ---- any width, through shared memory

template <class T>
__device__ void store_as(const float* head, const Params& p, const Place& place, int lane) {
  T* to = static_cast<T*>(place.data) + place.offset;
  for (int d = lane; d < p.head_dim; d += 32) to[d] = from_float<T>(head[d]);
}

__device__ void store_head(float* head, const Params& p, const Place& place, int lane) {
  if (place.dtype == DType::f32) return store_as<float>(head, p, place, lane);
  if (place.dtype == DType::bf16) return store_as<bf16>(head, p, place, lane);
  if (place.dtype == DType::f16) return store_as<f16>(head, p, place, lane);
  float divisor;
  if (place.make) {
    float max = 0.f;
    for (int d = lane; d < p.head_dim; d += 32) max = MaxMagnitude{}(max, head[d]);
    divisor = made_scale(warp_reduce<MaxMagnitude>(max));
    if (lane == 0) *place.scale = divisor;
  } else {
    divisor = *place.scale;
  }
  for (int d = lane; d < p.head_dim; d += 32) head[d] = __fdiv_rn(head[d], divisor);
  __syncwarp();
  store_as<fp8>(head, p, place, lane);
}

template <class In>
__global__ __launch_bounds__(kWarps * 32) void attention_prologue_kernel(const __grid_constant__ Params p) {
  extern __shared__ float smem[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* head = smem + warp * p.head_dim;
  const int heads = p.heads_q + 2 * p.heads_kv;
  const int64_t index = int64_t{blockIdx.x} * kWarps + warp;
  const int64_t token = index / heads;
  const int h = static_cast<int>(index - token * heads);
  wait_for_previous_kernel();
  if (token >= p.tokens) return;
  const bool is_q = h < p.heads_q, is_v = h >= p.heads_q + p.heads_kv;
  const Entry entry = entry_of(p, token);
  if (!is_q && (entry.lost || entry.slot < 0)) return;

  const In* from = static_cast<const In*>(p.qkv) + token * p.qkv_stride + int64_t{h} * p.head_dim;
  for (int d = lane; d < p.head_dim; d += 32) head[d] = entry.lost ? 0.f : to_float(from[d]);
  __syncwarp();
  if (!is_v && !entry.lost) {
    if (p.norm == QkNorm::norm_then_rope) normalise(head, p, is_q ? 0 : 1, lane);
    if (p.cos_sin != nullptr) rotate(head, p.cos_sin + entry.position * p.cos_sin_stride, p, lane);
    if (p.norm == QkNorm::rope_then_norm) normalise(head, p, is_q ? 0 : 1, lane);
  }
  let_next_kernel_start();
  store_head(head, p, place_of(p, token, h, entry.slot), lane);
}

// ---- groups of eight, in registers

__device__ __forceinline__ void load_group(const float* p, float (&v)[kGroup]) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void load_group(const bf16* p, float (&v)[kGroup]) {
  load_floats(p, v);
}

template <class Op>
__device__ __forceinline__ float over_lanes(float v, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) v = Op{}(v, __shfl_xor_sync(kAllLanes, v, step));
  return v;
}

/// v *= weight / sqrt(mean(v * v) + eps), where `weights` are this lane's; lanes past the head hold zeros.
__device__ __forceinline__ void normalise(float (&v)[kGroup], const float* weights, const Params& p) {
  float squares = 0.f;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) squares += v[j] * v[j];
  const float mean = over_lanes<Sum>(squares, p.lanes) / static_cast<float>(p.head_dim);
  const float scale = 1.f / sqrtf(mean + p.eps);
  float w[kGroup];
  load_group(weights, w);
#pragma unroll
  for (int j = 0; j < kGroup; ++j) v[j] *= scale * w[j];
}

/// The cosines and sines that a lane needs; of interleaved pairs the first half.
struct Angles {
  float cos[kGroup], sin[kGroup];
};

__device__ __forceinline__ void rotate(float (&v)[kGroup], const Angles& angles, const Params& p, int group,
                                       int lane) {
  const bool rotates = group * kGroup < 2 * p.half;
  if (p.style == RopeStyle::neox) {
    const int apart = p.half / kGroup;  // lanes between the two of a pair
    const bool is_first = group < apart;
    const int partner = rotates ? (is_first ? lane + apart : lane - apart) : lane;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const float other = __shfl_sync(kAllLanes, v[j], partner);
      const float turned = is_first ? v[j] * angles.cos[j] - other * angles.sin[j]
                                    : v[j] * angles.cos[j] + other * angles.sin[j];
      if (rotates) v[j] = turned;
    }
  } else if (rotates) {
#pragma unroll
    for (int j = 0; j < kGroup; j += 2) {
      const float a = v[j], b = v[j + 1], c = angles.cos[j / 2], s = angles.sin[j / 2];
      v[j] = a * c - b * s;
      v[j + 1] = b * c + a * s;
    }
  }
}

template <class T>
__device__ __forceinline__ void store_group(const float (&v)[kGroup], T* to) {
  if constexpr (sizeof(T) == 4) {
    reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    store_floats(v, to);
  }
}

template <class In, int kPasses>
__global__ __launch_bounds__(kWarps * 32) void attention_prologue_groups_kernel(const __grid_constant__ Params p) {
  __shared__ __align__(16) float weights[2][kMostWidth];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int at_once = 32 / p.lanes, group = lane % p.lanes, begin = group * kGroup;
  const int heads = p.heads_q + 2 * p.heads_kv;
  const int64_t index = int64_t{blockIdx.x} * kWarps + warp;
  const int64_t token = index / p.parts;
  const int first_head = static_cast<int>(index - token * p.parts) * p.passes * at_once + lane / p.lanes;
  wait_for_previous_kernel();
  const bool works = token < p.tokens;
  const Entry entry = works ? entry_of(p, token) : Entry{-1, 0, true};
  const bool in_head = begin < p.head_dim;
  float v[kPasses][kGroup];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int h = first_head + i * at_once;
    if (i < p.passes && h < heads && in_head && !entry.lost) {
      load_group(static_cast<const In*>(p.qkv) + token * p.qkv_stride + int64_t{h} * p.head_dim + begin, v[i]);
    } else {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) v[i][j] = 0.f;
    }
  }
  Angles angles{};
  if (p.cos_sin != nullptr && !entry.lost && begin < 2 * p.half) {
    const float* cos = p.cos_sin + entry.position * p.cos_sin_stride;
    if (p.style == RopeStyle::neox) {
      const int pair = begin < p.half ? begin : begin - p.half;
      load_group(cos + pair, angles.cos);
      load_group(cos + p.half + pair, angles.sin);
    } else {
#pragma unroll
      for (int j = 0; j < kGroup / 2; ++j) {
        angles.cos[j] = cos[begin / 2 + j];
        angles.sin[j] = cos[p.half + begin / 2 + j];
      }
    }
  }
  if (p.norm != QkNorm::none) {
    for (int i = threadIdx.x; i < 2 * kMostWidth; i += kWarps * 32) {
      const int which = i / kMostWidth, d = i % kMostWidth;
      weights[which][d] = d < p.head_dim ? load_any(p.weight_type[which], p.weight[which], d) : 0.f;
    }
    __syncthreads();
  }
  if (!works) return;
  let_next_kernel_start();

#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    if (i >= p.passes) break;
    // Lanes of several heads shuffle together: what does not apply to a head is computed and dropped.
    const int h = first_head + i * at_once;
    const bool is_q = h < p.heads_q, is_v = h >= p.heads_q + p.heads_kv;
    float turned[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) turned[j] = v[i][j];
    const float* own_weights = weights[is_q ? 0 : 1] + begin;
    if (!entry.lost) {
      if (p.norm == QkNorm::norm_then_rope) normalise(turned, own_weights, p);
      if (p.cos_sin != nullptr) rotate(turned, angles, p, group, lane);
      if (p.norm == QkNorm::rope_then_norm) normalise(turned, own_weights, p);
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) v[i][j] = is_v ? v[i][j] : turned[j];

    const bool stores = h < heads && (is_q || (!entry.lost && entry.slot >= 0));
    const Place place = place_of(p, token, stores ? h : 0, entry.slot);
    if (p.q.dtype == DType::fp8_e4m3 || p.k.dtype == DType::fp8_e4m3) {
      float max = 0.f;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) max = MaxMagnitude{}(max, v[i][j]);
      max = over_lanes<MaxMagnitude>(max, p.lanes);
      if (stores && place.dtype == DType::fp8_e4m3) {
        const float divisor = place.make ? made_scale(max) : *place.scale;
        if (place.make && group == 0) *place.scale = divisor;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) v[i][j] = __fdiv_rn(v[i][j], divisor);
      }
    }
    if (!stores || !in_head) continue;
    const int64_t at = place.offset + begin;
    if (place.dtype == DType::f32) {
      store_group(v[i], static_cast<float*>(place.data) + at);
    } else if (place.dtype == DType::bf16) {
      store_group(v[i], static_cast<bf16*>(place.data) + at);
    } else if (place.dtype == DType::f16) {
      store_group(v[i], static_cast<f16*>(place.data) + at);
    } else {
      store_group(v[i], static_cast<fp8*>(place.data) + at);
    }
  }
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

  const auto launch_for = [&](auto kernel, int64_t warps, int64_t smem_bytes) {
    const LaunchShape shape{.grid = dim3(static_cast<unsigned>((warps + kWarps - 1) / kWarps)),
                            .block = dim3(kWarps * 32),
                            .smem_bytes = smem_bytes,
                            .overlap_previous = true};
    return launch("attention_prologue", kernel, shape, stream, p);
  };
  const bool is_f32 = args.qkv.dtype == DType::f32;
  const int heads = p.heads_q + 2 * p.heads_kv;
  const auto fits = [&](const Tensor& t) {
    return alignment_of(t) % std::min<int64_t>(16, kGroup * info_of(t.dtype).block_bytes) == 0;
  };
  const bool groups = p.head_dim % kGroup == 0 && p.head_dim <= kMostWidth && p.half % kGroup == 0 &&
                      fits(args.qkv) && fits(args.q) && fits(args.k) && fits(args.v) &&
                      (p.cos_sin == nullptr || fits(args.cos_sin));
  if (!groups) {
    return launch_for(is_f32 ? attention_prologue_kernel<float> : attention_prologue_kernel<bf16>,
                      p.tokens * heads, int64_t{kWarps} * p.head_dim * 4);
  }
  // A warp takes up to four passes, or one while that is not enough to give every SM some warps.
  constexpr int kMostPasses = 4;
  constexpr int64_t kEnoughWarps = 2048;
  p.lanes = 1;
  while (p.lanes * kGroup < p.head_dim) p.lanes *= 2;
  const int at_once = 32 / p.lanes, passes = (heads + at_once - 1) / at_once;
  const int fewest_parts = (passes + kMostPasses - 1) / kMostPasses;
  const bool many = p.tokens * fewest_parts >= kEnoughWarps;
  p.passes = many ? (passes + fewest_parts - 1) / fewest_parts : 1;
  p.parts = (passes + p.passes - 1) / p.passes;
  const auto kernel = many ? (is_f32 ? attention_prologue_groups_kernel<float, kMostPasses>
                                     : attention_prologue_groups_kernel<bf16, kMostPasses>)
                           : (is_f32 ? attention_prologue_groups_kernel<float, 1>
                                     : attention_prologue_groups_kernel<bf16, 1>);
  return launch_for(kernel, p.tokens * p.parts, 0);
}

}  // namespace vivace
