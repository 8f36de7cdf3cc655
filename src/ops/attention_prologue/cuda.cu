// Splits qkv, normalises and rotates Q and K, stores Q and writes K and V into their slots.
//
// Two numbers for a token of H = heads_q + 2 heads_kv heads of width D, bf16
//   bytes  4 D H                        read once, written once; with fp8 out 3 D H
//   flops  7 D (heads_q + heads_kv)     below two flops per byte: memory is the only roof
//
// Heads of whole groups of eight stay in registers. A warp takes several heads of a token, as many at once as its lanes
// hold, so that it reads cosines and sines once and has several loads under way; a lane holds both of a rotated pair.
// Heads of other widths go a warp each through shared memory.
//
// Types of what leaves are known when it runs: a kernel per pair of them would only cost size.

#include <algorithm>
#include <bit>

#include "src/device/launch.h"
#include "src/device/ptx.h"
#include "src/device/row.h"
#include "src/ops/attention_prologue/table.h"

namespace vivace {

namespace {

using namespace device;

constexpr int kWarps = 8;
constexpr int kMostWidth = 256;  // of a head that a warp holds in registers

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
  int page_shift;  // log2 of page_tokens; -1 when it is no power of two
  int heads_q, heads_kv, head_dim, half;
  int lanes, passes, parts;  // of a head; of a warp, each with 32 / lanes heads; warps of a token
  QkNorm norm;
  RopeStyle style;
  float eps, inverse_dim;
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
  const int head = h - p.heads_q - (is_v ? p.heads_kv : 0);
  const int64_t page = p.page_shift >= 0 ? slot >> p.page_shift : slot / p.page_tokens;
  const int64_t in_page = slot - page * p.page_tokens;
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

// ---- in registers: a lane has two groups of four of a head, which hold both of a rotated pair

constexpr int kGroup = 4, kPair = 2 * kGroup;

template <class Op>
__device__ __forceinline__ float over_head(float v, int lanes, uint32_t mask) {
  for (int step = lanes / 2; step > 0; step /= 2) v = Op{}(v, __shfl_xor_sync(mask, v, step));
  return v;
}

/// 1 / sqrt(v) to about an ulp.
__device__ __forceinline__ float inverse_root(float v) {
  const float root = rsqrtf(v);
  return root * (1.5f - 0.5f * v * root * root);
}

/// v *= weight / sqrt(mean(v * v) + eps), by the lanes of a head.
__device__ __forceinline__ void normalise(float (&v)[kPair], const float* weights, const int (&at)[2],
                                          const Params& p, uint32_t mask) {
  float squares = 0.f;
#pragma unroll
  for (int j = 0; j < kPair; ++j) squares += v[j] * v[j];
  const float scale = inverse_root(over_head<Sum>(squares, p.lanes, mask) * p.inverse_dim + p.eps);
  const float4 a = *reinterpret_cast<const float4*>(weights + at[0]);
  const float4 b = *reinterpret_cast<const float4*>(weights + at[1]);
  const float w[kPair] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int j = 0; j < kPair; ++j) v[j] *= scale * w[j];
}

/// Cosines and sines of a lane's pairs.
struct Angles {
  float cos[kGroup], sin[kGroup];
};

__device__ __forceinline__ void rotate(float (&v)[kPair], const Angles& angles, RopeStyle style) {
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    float& a = style == RopeStyle::neox ? v[j] : v[2 * j];
    float& b = style == RopeStyle::neox ? v[j + kGroup] : v[2 * j + 1];
    const float a0 = a, b0 = b;
    a = a0 * angles.cos[j] - b0 * angles.sin[j];
    b = b0 * angles.cos[j] + a0 * angles.sin[j];
  }
}

/// The first element of each of a lane's groups. Of the rotated part of a NeoX head they are half of it apart.
__device__ __forceinline__ void groups_of(int index, const Params& p, int (&at)[2]) {
  const int pairs = p.style == RopeStyle::neox ? p.half / kGroup : 0;  // lanes with such groups
  at[0] = index < pairs ? index * kGroup : pairs * kPair + (index - pairs) * kPair;
  at[1] = at[0] + (index < pairs ? p.half : kGroup);
}

template <class T>
__device__ __forceinline__ void store_pair(const float (&v)[kPair], T* head, const int (&at)[2]) {
  const float a[kGroup] = {v[0], v[1], v[2], v[3]}, b[kGroup] = {v[4], v[5], v[6], v[7]};
  store_floats(a, head + at[0]);
  store_floats(b, head + at[1]);
}

/// Divides what becomes fp8 by its scale, which is first made with `make`; by the lanes of a head.
__device__ __forceinline__ void quantise(float (&v)[kPair], float* scale, bool make, int lanes, int index,
                                         uint32_t mask) {
  float divisor;
  if (make) {
    float max = 0.f;
#pragma unroll
    for (int j = 0; j < kPair; ++j) max = MaxMagnitude{}(max, v[j]);
    divisor = made_scale(over_head<MaxMagnitude>(max, lanes, mask));
    if (index == 0) *scale = divisor;
  } else {
    divisor = *scale;
  }
  divide(v, divisor);
}

/// Where the heads of q, of k or of v of a token go. It lies in shared memory: registers are for heads.
struct Places {
  char* data;
  float* scale;
  int64_t stride, scale_stride;  // between heads: in bytes; in scales
  int first_head;
  DType dtype;
  bool make;
};
__device__ __forceinline__ Places places_of(const Params& p, int64_t token, int kind, int64_t slot) {
  const int first = kind == 0 ? 0 : p.heads_q + (kind - 1) * p.heads_kv;
  const Place place = place_of(p, token, first, slot);
  const int64_t stride = kind == 0 ? p.q.stride[1] : kind == 1 ? p.k.stride[2] : p.v.stride[2];
  const int64_t scale_stride = kind == 0   ? p.q_scale_stride[1]
                               : kind == 1 ? p.k_scale_stride[2]
                                           : p.v_scale_stride;
  const int size = place.dtype == DType::f32 ? 4 : place.dtype == DType::fp8_e4m3 ? 1 : 2;
  return {static_cast<char*>(place.data) + place.offset * size,
          place.scale,
          stride * size,
          scale_stride,
          first,
          place.dtype,
          place.make};
}

/// A warp takes `passes` times 32 / lanes heads of a token, and has kAtOnce of those loads under way. Lanes of different heads
/// go different ways: they only ever wait for those of their own.
template <class In, RopeStyle kStyle, int kAtOnce>
__global__ __launch_bounds__(kWarps * 32,
                             4) void attention_prologue_pairs_kernel(const __grid_constant__ Params p) {
  __shared__ __align__(16) float weights[2][kMostWidth];
  __shared__ Places places[kWarps][3];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int at_once = 32 / p.lanes, index = lane % p.lanes;
  const int heads = p.heads_q + 2 * p.heads_kv;
  const uint32_t unit = blockIdx.x * kWarps + warp, parts = static_cast<uint32_t>(p.parts);
  const int64_t token = unit / parts;
  const int first = static_cast<int>(unit % parts) * p.passes * at_once + lane / p.lanes;
  const int end = min(heads, first + p.passes * at_once);
  const uint32_t mask = p.lanes == 32 ? kAllLanes : ((1u << p.lanes) - 1) << (lane - index);
  const bool in_head = index * kPair < p.head_dim;
  int at[2];
  groups_of(in_head ? index : 0, p, at);
  wait_for_previous_kernel();
  const bool works = token < p.tokens;
  const Entry entry = works ? entry_of(p, token) : Entry{-1, 0, true};
  const In* const from = static_cast<const In*>(p.qkv) + token * p.qkv_stride;
  using Four = Vec<In, kGroup>;
  Four some[kAtOnce][2];
  const auto load_some = [&](int h0) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int h = h0 + i * at_once;
      if (h >= end || !in_head || !works) continue;
      some[i][0] = *reinterpret_cast<const Four*>(from + h * p.head_dim + at[0]);
      some[i][1] = *reinterpret_cast<const Four*>(from + h * p.head_dim + at[1]);
    }
  };
  load_some(first);  // before it is known whether the token is lost
  if (p.norm != QkNorm::none) {
    for (int i = threadIdx.x; i < 2 * kMostWidth; i += kWarps * 32) {
      const int which = i / kMostWidth, d = i % kMostWidth;
      weights[which][d] = d < p.head_dim ? load_any(p.weight_type[which], p.weight[which], d) : 0.f;
    }
    __syncthreads();
  }
  if (!works) return;
  if (lane < 3) places[warp][lane] = places_of(p, token, lane, entry.slot);
  __syncwarp();
  const bool rotates = p.cos_sin != nullptr && !entry.lost && in_head && at[0] < 2 * p.half;
  Angles angles{};
  if (rotates) {
    const float* cos =
        p.cos_sin + entry.position * p.cos_sin_stride + (kStyle == RopeStyle::neox ? at[0] : at[0] / 2);
    load_floats(cos, angles.cos);
    load_floats(cos + p.half, angles.sin);
  }
  let_next_kernel_start();

  for (int h0 = first; h0 < end; h0 += kAtOnce * at_once) {
    if (h0 != first) load_some(h0);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int h = h0 + i * at_once;
      const bool is_q = h < p.heads_q, is_v = h >= p.heads_q + p.heads_kv;
      if (h >= end || (!is_q && (entry.lost || entry.slot < 0))) continue;
      float v[kPair] = {};
      if (in_head && !entry.lost) {
#pragma unroll
        for (int j = 0; j < kPair; ++j) v[j] = to_float(some[i][j / kGroup].v[j % kGroup]);
      }
      if (!is_v && !entry.lost) {
        const float* own_weights = weights[is_q ? 0 : 1];
        if (p.norm == QkNorm::norm_then_rope) normalise(v, own_weights, at, p, mask);
        if (rotates) rotate(v, angles, kStyle);
        if (p.norm == QkNorm::rope_then_norm) normalise(v, own_weights, at, p, mask);
      }
      const Places& to = places[warp][is_q ? 0 : is_v ? 2 : 1];
      const int head = h - to.first_head;
      if (to.dtype == DType::fp8_e4m3) {
        quantise(v, to.scale + head * to.scale_stride, to.make, p.lanes, index, mask);
      }
      if (!in_head) continue;
      char* const data = to.data + head * to.stride;
      if (to.dtype == DType::bf16) {
        store_pair(v, reinterpret_cast<bf16*>(data), at);
      } else if (to.dtype == DType::f32) {
        store_pair(v, reinterpret_cast<float*>(data), at);
      } else if (to.dtype == DType::f16) {
        store_pair(v, reinterpret_cast<f16*>(data), at);
      } else {
        store_pair(v, reinterpret_cast<fp8*>(data), at);
      }
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
  const auto page_tokens = static_cast<uint64_t>(p.page_tokens);
  p.page_shift = std::has_single_bit(page_tokens) ? std::countr_zero(page_tokens) : -1;
  p.heads_q = static_cast<int>(args.q.shape[1]);
  p.heads_kv = static_cast<int>(args.k.shape[2]);
  p.head_dim = static_cast<int>(args.q.shape[2]);
  p.half = static_cast<int>(args.cos_sin.shape[1] / 2);
  p.norm = args.qk_norm;
  p.style = args.rope_style;
  p.eps = static_cast<float>(args.eps);
  p.inverse_dim = 1.f / static_cast<float>(p.head_dim);

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
    return alignment_of(t) % (kGroup * info_of(t.dtype).block_bytes) == 0;
  };
  const bool groups = p.head_dim % kPair == 0 && p.head_dim <= kMostWidth && p.half % kGroup == 0 &&
                      fits(args.qkv) && fits(args.q) && fits(args.k) && fits(args.v) &&
                      (p.cos_sin == nullptr || fits(args.cos_sin));
  if (!groups) {
    return launch_for(is_f32 ? attention_prologue_kernel<float> : attention_prologue_kernel<bf16>,
                      p.tokens * heads, int64_t{kWarps} * p.head_dim * 4);
  }
  // A warp takes a whole token, or a part where there are too few of those to give every SM its warps.
  constexpr int kAtOnce = 2;
  constexpr int64_t kEnoughWarps = 4096;
  p.lanes = 1;
  while (p.lanes * kPair < p.head_dim) p.lanes *= 2;
  const int at_once = 32 / p.lanes, all = (heads + at_once - 1) / at_once;
  const auto parts =
      static_cast<int>(std::clamp<int64_t>(kEnoughWarps / std::max<int64_t>(p.tokens, 1), 1, all));
  p.passes = (all + parts - 1) / parts;
  p.parts = (all + p.passes - 1) / p.passes;
  Status status;
  with_type<float, bf16>(args.qkv.dtype, [&](auto type) {
    using In = decltype(type);
    const auto run = [&](auto one, auto some) {
      status = launch_for(p.passes > 1 ? some : one, p.tokens * p.parts, 0);
    };
    if (p.style == RopeStyle::neox) {
      run(attention_prologue_pairs_kernel<In, RopeStyle::neox, 1>,
          attention_prologue_pairs_kernel<In, RopeStyle::neox, kAtOnce>);
    } else {
      run(attention_prologue_pairs_kernel<In, RopeStyle::interleaved, 1>,
          attention_prologue_pairs_kernel<In, RopeStyle::interleaved, kAtOnce>);
    }
  });
  return status;
}

}  // namespace vivace
