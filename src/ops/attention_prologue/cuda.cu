// Splits qkv, normalises and rotates Q and K, stores Q and writes K and V into their slots.
//
// Two numbers for a token of H = heads_q + 2 heads_kv heads of width D, bf16
//   bytes  4 D H                        read once, written once; with fp8 out 3 D H
//   flops  7 D (heads_q + heads_kv)     below two flops per byte: memory is the only roof
//
// A warp takes several heads of a token, so that it reads cosines and sines once, and asks for all of them before it looks at
// any. A lane holds two groups of eight values of a head, which hold both of a rotated pair. Heads that do not fit that, by
// their width or their addresses, go a warp each.
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

/// Where heads of a kind go: q, k, or v. A token's heads of q lie as if in a page of its own.
struct Target {
  char* data;
  float* scale;                        // of fp8
  int64_t stride[3], scale_stride[3];  // of pages, of slots in a page, of heads: in bytes; in scales
  int first_head;                      // in qkv
  DType dtype;
  bool make;  // the scale is made of the head, not given
};
enum Kind : int { kQ, kK, kV, kKinds };

struct Params {
  const void* qkv;
  int64_t qkv_stride;
  const void* weight[2];  // of q, of k
  DType weight_type[2];
  const float* cos_sin;
  int64_t cos_sin_stride, max_position;
  const int32_t* positions;
  const int64_t* slots;
  Target to[kKinds];
  int64_t tokens, pages, page_tokens;
  int page_shift;  // log2 of page_tokens; -1 when it is no power of two
  int heads_q, heads_kv, head_dim, half;
  int passes;  // of a warp, each with 32 / lanes heads
  QkNorm norm;
  RopeStyle style;
  bool makes_scales;
  float eps, inverse_dim;

  __device__ __forceinline__ Kind kind_of(int head) const {
    return head < heads_q ? kQ : head < heads_q + heads_kv ? kK : kV;
  }
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
  int64_t slot;
  int32_t position;
  bool lost;
  __device__ __forceinline__ bool stored() const { return !lost && slot >= 0; }
};
__device__ __forceinline__ Entry entry_of(const Params& p, int64_t slot, int32_t position) {
  const bool lost = slot < -1 || slot >= p.pages * p.page_tokens || position < 0 ||
                    (p.cos_sin != nullptr && position >= p.max_position);
  return {slot, position, lost};
}

/// Where the heads of a kind of a token go.
struct alignas(16) Places {
  char* data;
  int64_t stride;  // between heads, in bytes
  float* scale;
  int64_t scale_stride;
  int first_head;
  DType dtype;
  bool make;
};
__device__ __forceinline__ Places places_of(const Params& p, int kind, int64_t token, int64_t slot) {
  const Target& to = p.to[kind];
  int64_t page = token, in_page = 0;
  if (kind != kQ) {
    page = p.page_shift >= 0 ? slot >> p.page_shift : slot / p.page_tokens;
    in_page = slot - page * p.page_tokens;
  }
  return {to.data + page * to.stride[0] + in_page * to.stride[1],
          to.stride[2],
          to.scale + page * to.scale_stride[0] + in_page * to.scale_stride[1],
          to.scale_stride[2],
          to.first_head,
          to.dtype,
          to.make};
}

// ---- any width, through shared memory

template <class T>
__device__ void store_as(const float* head, const Params& p, char* data, int lane) {
  T* to = reinterpret_cast<T*>(data);
  for (int d = lane; d < p.head_dim; d += 32) to[d] = from_float<T>(head[d]);
}

__device__ void store_head(float* head, const Params& p, const Places& to, char* data, float* scale,
                           int lane) {
  if (to.dtype == DType::f32) return store_as<float>(head, p, data, lane);
  if (to.dtype == DType::bf16) return store_as<bf16>(head, p, data, lane);
  if (to.dtype == DType::f16) return store_as<f16>(head, p, data, lane);
  float divisor;
  if (to.make) {
    float max = 0.f;
    for (int d = lane; d < p.head_dim; d += 32) max = MaxMagnitude{}(max, head[d]);
    divisor = made_scale(warp_reduce<MaxMagnitude>(max));
    if (lane == 0) *scale = divisor;
  } else {
    divisor = *scale;
  }
  for (int d = lane; d < p.head_dim; d += 32) head[d] = __fdiv_rn(head[d], divisor);
  __syncwarp();
  store_as<fp8>(head, p, data, lane);
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
  const Kind kind = p.kind_of(h);
  const Entry entry = entry_of(p, p.slots[token], p.cos_sin != nullptr ? p.positions[token] : 0);
  if (kind != kQ && !entry.stored()) return;

  const In* from = static_cast<const In*>(p.qkv) + token * p.qkv_stride + int64_t{h} * p.head_dim;
  for (int d = lane; d < p.head_dim; d += 32) head[d] = entry.lost ? 0.f : to_float(from[d]);
  __syncwarp();
  if (kind != kV && !entry.lost) {
    if (p.norm == QkNorm::norm_then_rope) normalise(head, p, kind, lane);
    if (p.cos_sin != nullptr) rotate(head, p.cos_sin + entry.position * p.cos_sin_stride, p, lane);
    if (p.norm == QkNorm::rope_then_norm) normalise(head, p, kind, lane);
  }
  let_next_kernel_start();
  const Places places = places_of(p, kind, token, entry.slot);
  const int of_kind = h - places.first_head;
  store_head(head, p, places, places.data + of_kind * places.stride,
             places.scale + of_kind * places.scale_stride, lane);
}

// ---- in registers: a lane has two groups of eight of a head, which hold both of a rotated pair

constexpr int kGroup = 8, kPair = 2 * kGroup;

/// 1 / sqrt(v) to about an ulp.
__device__ __forceinline__ float inverse_root(float v) {
  const float root = rsqrtf(v);
  return root * (1.5f - 0.5f * v * root * root);
}

/// A group as it was read. Two of bf16 share a word, and each is one instruction away.
template <class In>
__device__ __forceinline__ void unpack(const uint4* group, float* v) {
#pragma unroll
  for (int i = 0; i < kGroup / kVec<In>; ++i) {
    const uint4 some = group[i * 32];
    const uint32_t words[4] = {some.x, some.y, some.z, some.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (sizeof(In) == 4) {
        v[4 * i + j] = __uint_as_float(words[j]);
      } else {
        v[2 * j] = __uint_as_float(words[j] << 16);
        v[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
      }
    }
  }
}

/// v *= weight / sqrt(mean(v * v) + eps), by the lanes of a head; v *= weight if that is not `normed`, without a branch.
template <int kLanes>
__device__ __forceinline__ void normalise(float (&v)[kPair], const float* weights, const int (&at)[2],
                                          const Params& p, bool normed) {
  float squares[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < kPair; ++j) squares[j % 2] += v[j] * v[j];
  const float mean = warp_reduce<Sum, kLanes>(squares[0] + squares[1]) * p.inverse_dim;
  const float scale = normed ? inverse_root(mean + p.eps) : 1.f;
#pragma unroll
  for (int j = 0; j < kPair; j += 4) {
    const float4 w = *reinterpret_cast<const float4*>(weights + at[j / kGroup] + j % kGroup);
    v[j] *= scale * w.x, v[j + 1] *= scale * w.y, v[j + 2] *= scale * w.z, v[j + 3] *= scale * w.w;
  }
}

/// Cosines and sines of a lane's pairs.
struct Angles {
  float cos[kGroup], sin[kGroup];
};

template <RopeStyle kStyle>
__device__ __forceinline__ void rotate(float (&v)[kPair], const Angles& angles) {
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    float& a = kStyle == RopeStyle::neox ? v[j] : v[2 * j];
    float& b = kStyle == RopeStyle::neox ? v[j + kGroup] : v[2 * j + 1];
    const float a0 = a, b0 = b;
    a = a0 * angles.cos[j] - b0 * angles.sin[j];
    b = b0 * angles.cos[j] + a0 * angles.sin[j];
  }
}

/// The first element of each of a lane's groups. Of the rotated part of a NeoX head they are half of it apart.
template <RopeStyle kStyle>
__device__ __forceinline__ void groups_of(int index, const Params& p, int (&at)[2]) {
  const int pairs = kStyle == RopeStyle::neox ? p.half / kGroup : 0;  // lanes with such groups
  at[0] = index < pairs ? index * kGroup : pairs * kPair + (index - pairs) * kPair;
  at[1] = at[0] + (index < pairs ? p.half : kGroup);
}

template <class T>
__device__ __forceinline__ void store_pair(const float (&v)[kPair], char* data, const int (&at)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* const group = v + i * kGroup;
    T* const to = reinterpret_cast<T*>(data) + at[i];
    if constexpr (std::is_same_v<T, fp8>) {
      uint32_t words[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float* const four = group + 4 * j;
        const uint32_t low = __nv_cvt_float2_to_fp8x2({four[0], four[1]}, __NV_SATFINITE, __NV_E4M3);
        const uint32_t high = __nv_cvt_float2_to_fp8x2({four[2], four[3]}, __NV_SATFINITE, __NV_E4M3);
        words[j] = low | high << 16;
      }
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    } else {
#pragma unroll
      for (int j = 0; j < kGroup; j += kVec<T>) {
        float some[kVec<T>];
#pragma unroll
        for (int k = 0; k < kVec<T>; ++k) some[k] = group[j + k];
        store_floats(some, to + j);
      }
    }
  }
}

/// A warp takes p.passes times 32 / kLanes heads of a token, those of row blockIdx.y of its parts. All that it reads is under
/// way before it looks at any of it; a lane's groups come to shared memory, so that one loop does for all passes. All lanes
/// go the same way: they add up by shuffles.
template <class In, RopeStyle kStyle, bool kNormLast, int kLanes>
__global__ __launch_bounds__(kWarps * 32,
                             4) void attention_prologue_pairs_kernel(const __grid_constant__ Params p) {
  constexpr int kHeads = 32 / kLanes, kCopies = kGroup / kVec<In>;
  extern __shared__ uint4 staged[];                            // [warp, pass, group of a pair, copy, lane]
  __shared__ __align__(16) float weights[kKinds][kMostWidth];  // ones where there is no norm
  __shared__ Places places[kWarps][kKinds];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = lane % kLanes;
  const int heads = p.heads_q + 2 * p.heads_kv;
  const int64_t token = int64_t{blockIdx.x} * kWarps + warp;
  const int first = static_cast<int>(blockIdx.y) * p.passes * kHeads + lane / kLanes;
  const bool works = token < p.tokens, in_head = index * kPair < p.head_dim;
  int at[2];
  groups_of<kStyle>(in_head ? index : 0, p, at);
  uint4* const stage = staged + warp * p.passes * 2 * kCopies * 32 + lane;
  wait_for_previous_kernel();

  const int64_t slot = works ? p.slots[token] : -1;
  const int32_t position = works && p.cos_sin != nullptr ? p.positions[token] : 0;
  const In* head = static_cast<const In*>(p.qkv) + token * p.qkv_stride + int64_t{first} * p.head_dim;
#pragma unroll 1
  for (int pass = 0; pass < p.passes; ++pass, head += kHeads * p.head_dim) {
    const bool reads = works && in_head && first + pass * kHeads < heads;
#pragma unroll
    for (int i = 0; i < 2 * kCopies; ++i) {
      copy_16_async(stage + (pass * 2 * kCopies + i) * 32, head + at[i / kCopies] + i % kCopies * kVec<In>,
                    reads);
    }
  }
  commit_copies();
  const Entry entry = entry_of(p, slot, position);
  const bool rotates = p.cos_sin != nullptr && !entry.lost && in_head && at[0] < 2 * p.half;
  Angles angles{};
  if (rotates) {
    const float* cos =
        p.cos_sin + entry.position * p.cos_sin_stride + (kStyle == RopeStyle::neox ? at[0] : at[0] / 2);
#pragma unroll
    for (int j = 0; j < kGroup; j += 4) {
      const float4 c = *reinterpret_cast<const float4*>(cos + j);
      const float4 s = *reinterpret_cast<const float4*>(cos + p.half + j);
      angles.cos[j] = c.x, angles.cos[j + 1] = c.y, angles.cos[j + 2] = c.z, angles.cos[j + 3] = c.w;
      angles.sin[j] = s.x, angles.sin[j + 1] = s.y, angles.sin[j + 2] = s.z, angles.sin[j + 3] = s.w;
    }
  }
  if (lane < kKinds) places[warp][lane] = places_of(p, lane, token, slot);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kKinds * p.head_dim; i += kWarps * 32) {
    const int kind = i < p.head_dim ? kQ : i < 2 * p.head_dim ? kK : kV, d = i - kind * p.head_dim;
    const bool normed = kind != kV && p.norm != QkNorm::none;
    weights[kind][d] = normed ? load_any(p.weight_type[kind], p.weight[kind], d) : 1.f;
  }
  wait_for_copies<0>();
  if (entry.lost) {
    for (int i = 0; i < p.passes * 2 * kCopies; ++i) stage[i * 32] = {0, 0, 0, 0};
  }
  __syncthreads();
  let_next_kernel_start();
  if (!works) return;

#pragma unroll 1
  for (int pass = 0; pass < p.passes; ++pass) {
    const int h = first + pass * kHeads;
    const Kind kind = p.kind_of(h);
    const Places& place = places[warp][kind];
    const int of_kind = h - place.first_head;
    const bool stores = h < heads && (kind == kQ || entry.stored());
    float v[kPair];
    unpack<In>(stage + pass * 2 * kCopies * 32, v);
    unpack<In>(stage + (pass * 2 + 1) * kCopies * 32, v + kGroup);
    const bool normed = p.norm != QkNorm::none && kind != kV && !entry.lost;
    if constexpr (!kNormLast) normalise<kLanes>(v, weights[kind], at, p, normed);
    if (rotates && kind != kV) rotate<kStyle>(v, angles);
    if constexpr (kNormLast) normalise<kLanes>(v, weights[kind], at, p, normed);
    float max = 0.f;
    if (p.makes_scales) {
#pragma unroll
      for (int j = 0; j < kPair; ++j) max = MaxMagnitude{}(max, v[j]);
      max = warp_reduce<MaxMagnitude, kLanes>(max);
    }
    if (!stores || !in_head) continue;
    char* const data = place.data + of_kind * place.stride;
    if (place.dtype == DType::fp8_e4m3) {
      float* const scale = place.scale + of_kind * place.scale_stride;
      if (place.make) {
        const float made = made_scale(max);
        if (index == 0) *scale = made;
        divide<true>(v, made);
      } else {
        divide(v, *scale);
      }
      store_pair<fp8>(v, data, at);
    } else if (place.dtype == DType::bf16) {
      store_pair<bf16>(v, data, at);
    } else if (place.dtype == DType::f32) {
      store_pair<float>(v, data, at);
    } else {
      store_pair<f16>(v, data, at);
    }
  }
}

/// Scales with a stride of 0 where one is for several.
Target target_of(const Tensor& t, const Tensor& scale, int first_head, bool is_q) {
  Target to{.data = t.as<char>(),
            .scale = scale.as<float>(),
            .stride = {},
            .scale_stride = {},
            .first_head = first_head,
            .dtype = t.dtype,
            .make = t.dtype == DType::fp8_e4m3 && scale.rank > 1};
  // [tokens, heads, dim], or [pages, tokens of a page, heads, dim]
  const int heads = is_q ? 1 : 2;
  const int64_t size = info_of(t.dtype).block_bytes;
  to.stride[0] = t.stride[0] * size, to.stride[1] = is_q ? 0 : t.stride[1] * size;
  to.stride[2] = t.stride[heads] * size;
  if (scale.rank > 1) {
    to.scale_stride[0] = scale.stride[0];
    to.scale_stride[1] = is_q ? 0 : scale.stride[1];
    to.scale_stride[2] = scale.stride[heads];
  } else if (scale.shape[0] > 1) {
    to.scale_stride[2] = scale.stride[0];
  }
  return to;
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
  p.tokens = args.q.shape[0];
  p.pages = args.k.shape[0];
  p.page_tokens = args.k.shape[1];
  const auto page_tokens = static_cast<uint64_t>(p.page_tokens);
  p.page_shift = std::has_single_bit(page_tokens) ? std::countr_zero(page_tokens) : -1;
  p.heads_q = static_cast<int>(args.q.shape[1]);
  p.heads_kv = static_cast<int>(args.k.shape[2]);
  p.head_dim = static_cast<int>(args.q.shape[2]);
  p.to[kQ] = target_of(args.q, args.q_scale, 0, true);
  p.to[kK] = target_of(args.k, args.k_scale, p.heads_q, false);
  p.to[kV] = target_of(args.v, args.v_scale, p.heads_q + p.heads_kv, false);
  p.makes_scales = p.to[kQ].make || p.to[kK].make;
  p.half = static_cast<int>(args.cos_sin.shape[1] / 2);
  p.norm = args.qk_norm;
  p.style = args.rope_style;
  p.eps = static_cast<float>(args.eps);
  p.inverse_dim = 1.f / static_cast<float>(p.head_dim);

  const auto launch_for = [&](auto kernel, int64_t warps, int64_t parts, int64_t smem_bytes) {
    const LaunchShape shape{
        .grid = dim3(static_cast<unsigned>((warps + kWarps - 1) / kWarps), static_cast<unsigned>(parts)),
        .block = dim3(kWarps * 32),
        .smem_bytes = smem_bytes,
        .overlap_previous = true};
    return launch("attention_prologue", kernel, shape, stream, p);
  };
  const int heads = p.heads_q + 2 * p.heads_kv;
  if (heads == 0) return {};
  const auto fits = [&](const Tensor& t) {
    return alignment_of(t) % std::min<int64_t>(kGroup * info_of(t.dtype).block_bytes, sizeof(uint4)) == 0;
  };
  const bool groups = p.head_dim % kPair == 0 && p.head_dim <= kMostWidth && p.half % kGroup == 0 &&
                      fits(args.qkv) && fits(args.q) && fits(args.k) && fits(args.v) &&
                      (p.cos_sin == nullptr || fits(args.cos_sin));
  Status status;
  with_type<float, bf16>(args.qkv.dtype, [&](auto type) {
    using In = decltype(type);
    if (!groups) {
      status =
          launch_for(attention_prologue_kernel<In>, p.tokens * heads, 1, int64_t{kWarps} * p.head_dim * 4);
      return;
    }
    // A warp takes up to kMostPasses of a token's heads, and fewer where there are too few tokens to give every SM its warps.
    constexpr int kMostPasses = 5;
    constexpr int64_t kEnoughWarps = 4096;
    const auto run = [&](auto kernel, int lanes) {
      const int at_once = 32 / lanes, all = (heads + at_once - 1) / at_once;
      const auto parts = static_cast<int>(std::clamp<int64_t>(kEnoughWarps / std::max<int64_t>(p.tokens, 1),
                                                              (all + kMostPasses - 1) / kMostPasses, all));
      p.passes = (all + parts - 1) / parts;
      status = launch_for(kernel, p.tokens, (all + p.passes - 1) / p.passes,
                          int64_t{kWarps} * p.passes * 32 * kPair * sizeof(In));
    };
    const auto run_as = [&]<RopeStyle kStyle, bool kNormLast>() {
      if (p.head_dim <= 64) {
        run(attention_prologue_pairs_kernel<In, kStyle, kNormLast, 4>, 4);
      } else if (p.head_dim <= 128) {
        run(attention_prologue_pairs_kernel<In, kStyle, kNormLast, 8>, 8);
      } else {
        run(attention_prologue_pairs_kernel<In, kStyle, kNormLast, 16>, 16);
      }
    };
    const auto run_style = [&]<RopeStyle kStyle>() {
      if (p.norm == QkNorm::rope_then_norm) {
        run_as.template operator()<kStyle, true>();
      } else {
        run_as.template operator()<kStyle, false>();
      }
    };
    if (p.style == RopeStyle::neox) {
      run_style.template operator()<RopeStyle::neox>();
    } else {
      run_style.template operator()<RopeStyle::interleaved>();
    }
  });
  return status;
}

}  // namespace vivace
