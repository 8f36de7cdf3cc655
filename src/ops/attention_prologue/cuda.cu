// Splits qkv, normalises and rotates Q and K, stores Q and writes K and V into their slots.
//
// Two numbers for a token of H = heads_q + 2 heads_kv heads of width D, bf16
//   bytes  4 D H                        read once, written once; with fp8 out 3 D H
//   flops  7 D (heads_q + heads_kv)     below two flops per byte: memory is the only roof
//
// A warp takes several heads of a token, so that it reads cosines and sines once, and asks for all of them before it looks at
// any. A lane holds two groups of eight values of a head, which hold both of a rotated pair. Heads whose width does not fit that go
// a warp each. What is computed depends on widths alone: addresses decide how values come and go, not what they are.
//
// Scales of fp8 are those of quantize_fp8. A quotient is a product with the reciprocal of its scale: beside the roundings of norm and
// rotation an ulp more, for a third of the instructions.
//
// Types of what leaves are known when it runs: a kernel per pair of them would only cost size.

#include <algorithm>
#include <bit>
#include <cfloat>

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
  bool vectors;  // groups of eight lie so that accesses of up to 16 bytes reach them
  float eps, inverse_dim;

  __device__ __forceinline__ Kind kind_of(int head) const {
    return head < heads_q ? kQ : head < heads_q + heads_kv ? kK : kV;
  }
};

/// 1 / scale, and never so large that a zero times it is NaN.
__device__ __forceinline__ float inverse_of(float scale) {
  float inverse, bounded;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(bounded) : "f"(inverse), "f"(FLT_MAX));
  return bounded;
}

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

/// Where the heads of a kind of a token go. `lost`: what the CPU refuses; the token is not stored, and its query is zero.
struct alignas(16) Places {
  char* data;      ///< null: they are not stored
  int64_t stride;  ///< between heads, in bytes
  float* scale;
  int64_t scale_stride;
  int first_head;
  DType dtype;
  bool make, lost;
};
__device__ __forceinline__ Places places_of(const Params& p, int kind, int64_t token) {
  const Target& to = p.to[kind];
  const int64_t slot = p.slots[token];
  const int32_t position = p.cos_sin != nullptr ? p.positions[token] : 0;
  const bool lost = slot < -1 || slot >= p.pages * p.page_tokens || position < 0 ||
                    (p.cos_sin != nullptr && position >= p.max_position);
  int64_t page = token, in_page = 0;
  if (kind != kQ) {
    page = p.page_shift >= 0 ? slot >> p.page_shift : slot / p.page_tokens;
    in_page = slot - page * p.page_tokens;
  }
  const bool stored = kind == kQ || (!lost && slot >= 0);
  return {stored ? to.data + page * to.stride[0] + in_page * to.stride[1] : nullptr,
          to.stride[2],
          to.scale + page * to.scale_stride[0] + in_page * to.scale_stride[1],
          to.scale_stride[2],
          to.first_head,
          to.dtype,
          to.make,
          lost};
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
  float made_or_given;
  if (to.make) {
    float max = 0.f;
    for (int d = lane; d < p.head_dim; d += 32) max = MaxMagnitude{}(max, head[d]);
    made_or_given = made_scale(warp_reduce<MaxMagnitude>(max));
    if (lane == 0) *scale = made_or_given;
  } else {
    made_or_given = *scale;
  }
  const float inverse = inverse_of(made_or_given);
  for (int d = lane; d < p.head_dim; d += 32) head[d] *= inverse;
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
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (token >= p.tokens) return;
  const Kind kind = p.kind_of(h);
  const Places places = places_of(p, kind, token);
  if (places.data == nullptr) return;

  const In* from = static_cast<const In*>(p.qkv) + token * p.qkv_stride + int64_t{h} * p.head_dim;
  for (int d = lane; d < p.head_dim; d += 32) head[d] = places.lost ? 0.f : to_float(from[d]);
  __syncwarp();
  if (kind != kV && !places.lost) {
    if (p.norm == QkNorm::norm_then_rope) normalise(head, p, kind, lane);
    if (p.cos_sin != nullptr) rotate(head, p.cos_sin + p.positions[token] * p.cos_sin_stride, p, lane);
    if (p.norm == QkNorm::rope_then_norm) normalise(head, p, kind, lane);
  }
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

/// v *= weight; returns 1 / sqrt(mean(v * v) + eps), of which the lanes of a head have parts, for a later product. 1 if not
/// `normed`, without a branch.
template <int kLanes>
__device__ __forceinline__ float normalise(float (&v)[kPair], const float* weights, const int (&at)[2],
                                           const Params& p, bool normed) {
  float squares[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < kPair; ++j) squares[j % 2] = fmaf(v[j], v[j], squares[j % 2]);
  const float mean = warp_reduce<Sum, kLanes>(squares[0] + squares[1]) * p.inverse_dim;
#pragma unroll
  for (int j = 0; j < kPair; j += 4) {
    const float4 w = *reinterpret_cast<const float4*>(weights + at[j / kGroup] + j % kGroup);
    v[j] *= w.x, v[j + 1] *= w.y, v[j + 2] *= w.z, v[j + 3] *= w.w;
  }
  return normed ? inverse_root(mean + p.eps) : 1.f;
}

/// Cosines and sines of a lane's pairs.
struct Angles {
  float cos[kGroup], sin[kGroup];

  __device__ __forceinline__ void load(const float* from_cos, const float* from_sin) {
#pragma unroll
    for (int j = 0; j < kGroup; j += 4) {
      const float4 c = *reinterpret_cast<const float4*>(from_cos + j);
      const float4 s = *reinterpret_cast<const float4*>(from_sin + j);
      cos[j] = c.x, cos[j + 1] = c.y, cos[j + 2] = c.z, cos[j + 3] = c.w;
      sin[j] = s.x, sin[j + 1] = s.y, sin[j + 2] = s.z, sin[j + 3] = s.w;
    }
  }
};

template <RopeStyle kStyle>
__device__ __forceinline__ void rotate(float (&v)[kPair], const Angles& angles) {
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    float& a = kStyle == RopeStyle::neox ? v[j] : v[2 * j];
    float& b = kStyle == RopeStyle::neox ? v[j + kGroup] : v[2 * j + 1];
    const float a0 = a, b0 = b;
    a = fmaf(a0, angles.cos[j], -(b0 * angles.sin[j]));
    b = fmaf(b0, angles.cos[j], a0 * angles.sin[j]);
  }
}

/// The first element of each of a lane's groups. Of the rotated part of a NeoX head they are half of it apart.
template <RopeStyle kStyle>
__device__ __forceinline__ void groups_of(int index, const Params& p, int (&at)[2]) {
  const int pairs = kStyle == RopeStyle::neox ? p.half >> 3 : 0;  // lanes with such groups
  at[0] = index < pairs ? index * kGroup : pairs * kPair + (index - pairs) * kPair;
  at[1] = at[0] + (index < pairs ? p.half : kGroup);
}

/// Where value i of a lane lies in its head.
__device__ __forceinline__ int element(const int (&at)[2], int i) {
  return i < kGroup ? at[0] + i : at[1] + i - kGroup;
}

/// Stores a lane's values of a head at `data`, as accesses of up to 16 bytes.
template <class T>
__device__ __forceinline__ void store_groups(const float (&v)[kPair], char* data, const int (&at)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* const group = v + i * kGroup;
    T* const to = reinterpret_cast<T*>(data) + at[i];
    if constexpr (std::is_same_v<T, fp8>) {
      uint32_t words[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float* const four = group + 4 * j;
        words[j] = pack<fp8>(four[0], four[1]) | pack<fp8>(four[2], four[3]) << 16;
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
/// The same one by one, from shared memory, where a lane's values lie a warp apart.
template <class T>
__device__ __forceinline__ void store_each(const float* v, char* data, const int (&at)[2]) {
#pragma unroll 1
  for (int i = 0; i < kPair; ++i) reinterpret_cast<T*>(data)[element(at, i)] = from_float<T>(v[i * 32]);
}

/// Bytes of shared memory of a warp: its heads as they were read; without vectors a pass's values in fp32 too.
constexpr int stage_bytes(int passes, int element, bool vectors) {
  return 32 * kPair * (passes * element + (vectors ? 0 : 4));
}

/// A warp takes p.passes times 32 / kLanes heads of a token, those of row blockIdx.y of its parts. All that it reads is under
/// way before it looks at any of it; a lane's groups come to shared memory, so that one loop does for all passes. What warps of
/// a block share is prepared by some of them. All lanes go the same way: they add up by shuffles.
template <class In, RopeStyle kStyle, bool kNormLast, int kLanes>
__global__ __launch_bounds__(kWarps * 32,
                             4) void attention_prologue_pairs_kernel(const __grid_constant__ Params p) {
  constexpr int kHeads = 32 / kLanes, kCopies = kGroup / kVec<In>, kPassCopies = 2 * kCopies;
  extern __shared__ uint4 staged[];                            // [warp, pass, group of a pair, copy, lane]
  __shared__ __align__(16) float weights[kKinds][kMostWidth];  // ones where there is no norm
  __shared__ Places places[kWarps][kKinds];
  const int thread = static_cast<int>(threadIdx.x), lane = static_cast<int>(threadIdx.x % 32),
            warp = static_cast<int>(threadIdx.x / 32), index = static_cast<int>(threadIdx.x % kLanes);
  const int heads = p.heads_q + 2 * p.heads_kv;
  const int64_t token = int64_t{blockIdx.x} * kWarps + warp;
  const int first =
      static_cast<int>(blockIdx.y) * p.passes * kHeads + static_cast<int>(threadIdx.x % 32 / kLanes);
  const bool works = token < p.tokens, in_head = index * kPair < p.head_dim;
  int at[2];
  groups_of<kStyle>(in_head ? index : 0, p, at);
  const bool rotates = at[0] < 2 * p.half;
  char* const own = reinterpret_cast<char*>(staged) + warp * stage_bytes(p.passes, sizeof(In), p.vectors);
  uint4* const stage = reinterpret_cast<uint4*>(own) + lane;
  let_next_kernel_start();
  wait_for_previous_kernel();

  const int32_t position = works && rotates ? p.positions[token] : -1;
  const In* head = static_cast<const In*>(p.qkv) + token * p.qkv_stride + int64_t{first} * p.head_dim;
  const int own_heads = works && in_head ? heads : 0;
  if (p.vectors) {
    const In* group = head + at[0];
    uint4* to = stage;
#pragma unroll 1
    for (int pass = 0; pass < p.passes; ++pass, group += kHeads * p.head_dim, to += kPassCopies * 32) {
#pragma unroll
      for (int i = 0; i < kPassCopies; ++i) {
        copy_16_async(to + i * 32, group + i / kCopies * (at[1] - at[0]) + i % kCopies * kVec<In>,
                      first + pass * kHeads < own_heads);
      }
    }
    commit_copies();
  } else {
#pragma unroll 1
    for (int i = 0; i < p.passes * kPair; ++i) {
      const int pass = i / kPair, j = i % kPair, copy = pass * kPassCopies + j / kVec<In>;
      const bool reads =
          first + pass * kHeads < own_heads;  // a lane without values adds zeros to its head's sums
      reinterpret_cast<In*>(stage + copy * 32)[j % kVec<In>] =
          reads ? head[pass * kHeads * p.head_dim + element(at, j)] : from_float<In>(0.f);
    }
  }
  Angles angles{};
  if (position >= 0 && position < p.max_position) {
    const float* cos =
        p.cos_sin + position * p.cos_sin_stride + (kStyle == RopeStyle::neox ? at[0] : at[0] / 2);
    const float* sin = cos + p.half;
    if (!p.vectors) {
      float* const each =
          reinterpret_cast<float*>(own + stage_bytes(p.passes, sizeof(In), true)) + lane * kPair;
#pragma unroll 1
      for (int i = 0; i < kGroup; ++i) each[i] = cos[i], each[kGroup + i] = sin[i];
      cos = each, sin = each + kGroup;
    }
    angles.load(cos, sin);
  }
  constexpr int kPlaces = kWarps * kKinds, kWeightThreads = kWarps / 2 * 32;
  static_assert(kPlaces <= 32, "a lane each");
  if (warp == kWarps - 1 && lane < kPlaces) {
    const int64_t of = int64_t{blockIdx.x} * kWarps + lane / kKinds;
    if (of < p.tokens) places[lane / kKinds][lane % kKinds] = places_of(p, lane % kKinds, of);
  }
#pragma unroll 1
  for (int d = thread; d < p.head_dim && thread < kWeightThreads; d += kWeightThreads) {
    const bool norms = p.norm != QkNorm::none;
#pragma unroll
    for (const Kind kind : {kQ, kK})
      weights[kind][d] = norms ? load_any(p.weight_type[kind], p.weight[kind], d) : 1.f;
    weights[kV][d] = 1.f;
  }
  wait_for_copies<0>();
  __syncthreads();
  if (!works) return;
  const bool lost = places[warp][kQ].lost;
  if (lost) {
#pragma unroll 1
    for (int i = 0; i < p.passes * kPassCopies; ++i) stage[i * 32] = {0, 0, 0, 0};
  }

  const uint4* from = stage;
#pragma unroll 1
  for (int pass = 0; pass < p.passes; ++pass, from += kPassCopies * 32) {
    const int h = first + pass * kHeads;
    const Kind kind = p.kind_of(h);
    const Places& place = places[warp][kind];
    float v[kPair];
    unpack<In>(from, v);
    unpack<In>(from + kCopies * 32, v + kGroup);
    const bool normed = p.norm != QkNorm::none && kind != kV && !lost;
    float factor;
    if constexpr (!kNormLast) factor = normalise<kLanes>(v, weights[kind], at, p, normed);
    if (rotates && kind != kV) rotate<kStyle>(v, angles);
    if constexpr (kNormLast) factor = normalise<kLanes>(v, weights[kind], at, p, normed);
    float max = 0.f;
    if (p.makes_scales) {
#pragma unroll
      for (int j = 0; j < kPair; ++j) max = MaxMagnitude{}(max, v[j]);
      max = warp_reduce<MaxMagnitude, kLanes>(max);
    }
    if (h >= heads || !in_head || place.data == nullptr) continue;
    const int of_kind = h - place.first_head;
    char* const data = place.data + of_kind * place.stride;
    if (place.dtype == DType::fp8_e4m3) {
      float* const scale = place.scale + of_kind * place.scale_stride;
      const float made_or_given = place.make ? made_scale(max * factor) : *scale;
      if (place.make && index == 0) *scale = made_or_given;
      const float inverse = inverse_of(made_or_given);
      if (factor * inverse > FLT_MAX) {  // both are large for values near 0, their product is for none
#pragma unroll
        for (int j = 0; j < kPair; ++j) v[j] *= factor;
        factor = inverse;
      } else {
        factor *= inverse;
      }
    }
#pragma unroll
    for (int j = 0; j < kPair; ++j) v[j] *= factor;
    const auto store = [&](auto type) {
      using T = decltype(type);
      if (p.vectors) return store_groups<T>(v, data, at);
      float* const each = reinterpret_cast<float*>(own + stage_bytes(p.passes, sizeof(In), true)) + lane;
#pragma unroll
      for (int j = 0; j < kPair; ++j) each[j * 32] = v[j];
      store_each<T>(each, data, at);
    };
    if (place.dtype == DType::fp8_e4m3) {
      store(fp8{});
    } else if (place.dtype == DType::bf16) {
      store(bf16{});
    } else if (place.dtype == DType::f32) {
      store(float{});
    } else {
      store(f16{});
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
  p.vectors = fits(args.qkv) && fits(args.q) && fits(args.k) && fits(args.v) &&
              (p.cos_sin == nullptr || fits(args.cos_sin));
  const bool groups = p.head_dim % kPair == 0 && p.head_dim <= kMostWidth && p.half % kGroup == 0;
  Status status;
  with_type<float, bf16>(args.qkv.dtype, [&](auto type) {
    using In = decltype(type);
    if (!groups) {
      status =
          launch_for(attention_prologue_kernel<In>, p.tokens * heads, 1, int64_t{kWarps} * p.head_dim * 4);
      return;
    }
    // A warp takes up to most_passes of a token's heads, and fewer where there are too few tokens to give every SM its warps.
    // Without vectors a pass takes twice the shared memory, of which some GPUs give a block 99 KB.
    const int most_passes = p.vectors ? 5 : 4;
    constexpr int64_t kEnoughWarps = 4096;
    const auto run = [&](auto kernel, int lanes) {
      const int at_once = 32 / lanes, all = (heads + at_once - 1) / at_once;
      const auto parts = static_cast<int>(std::clamp<int64_t>(kEnoughWarps / std::max<int64_t>(p.tokens, 1),
                                                              (all + most_passes - 1) / most_passes, all));
      p.passes = (all + parts - 1) / parts;
      status = launch_for(kernel, p.tokens, (all + p.passes - 1) / p.passes,
                          kWarps * stage_bytes(p.passes, sizeof(In), p.vectors));
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
