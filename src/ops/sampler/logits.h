#pragma once

// A row of logits on the GPU: how it is cut for a block's warps, and what bans and penalties change in it. For look.h and
// select.h.

#include "src/device/number.h"
#include "src/device/ptx.h"
#include "src/device/reduce.h"
#include "src/ops/sampler/row.h"

namespace vivace::device::select {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kGroup = 8;                                    // neighbouring logits of one access of a lane
constexpr int kBatch = 4;                                    // accesses that a lane has under way
constexpr int kStep = 32 * kGroup, kChunk = kStep * kBatch;  // logits of a warp's access, and of its batch
constexpr int kMostSegments = 256;

__device__ __forceinline__ int lane_id() {
  return threadIdx.x % 32;
}
__device__ __forceinline__ int warp_id() {
  return threadIdx.x / 32;
}

/// A number that orders as the float does, -0 equal to 0, NaN above all others.
__device__ __forceinline__ uint32_t key_of(float v) {
  const uint32_t bits = __float_as_uint(v + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

/// `scale` is log2(e) / temperature, finite.
struct Softmax {
  float max, scale;
};

/// exp((v - max) / temperature), where equals of an infinite maximum count 1.
__device__ __forceinline__ float weight_of(float v, Softmax softmax) {
  return v == softmax.max ? 1.f : exp2_of((v - softmax.max) * softmax.scale);
}

/// How a row is cut, the same for every call with this vocabulary: warps look at whole segments. Each has a chunk of
/// logits; of a vocabulary beyond kMostSegments chunks several, of a small one a part, so that all warps work.
struct Segments {
  uint32_t length;
  int count;
  __device__ __forceinline__ explicit Segments(int64_t vocab) {
    const int64_t steps = (vocab + kStep - 1) / kStep;
    const int64_t part = (steps + kWarps - 1) / kWarps;
    const int64_t chunks = (steps + int64_t{kMostSegments} * kBatch - 1) / (int64_t{kMostSegments} * kBatch);
    length = static_cast<uint32_t>(part < kBatch ? part * kStep : chunks * kChunk);
    count = static_cast<int>((vocab + length - 1) / length);
  }
};

/// Logits that are changed, a bit each: of group b of several in byte b. Those `seen` are of the prompt or were drawn;
/// repetition changes them all the same way. `special` ones are few and have more to them.
struct Touched {
  uint32_t seen, special;
};

/// v / repetition, or v * repetition where v is not above 0, of a repetition that is far from 0 and from infinity. The quotient
/// comes from a reciprocal and a correction, as in device/row.h.
struct Repetition {
  float factor, inverse;  // negated for a repetition below 1, so that one minimum does for both

  __device__ __forceinline__ static Repetition of(float repetition) {
    const float sign = repetition < 1.f ? -1.f : 1.f;
    return {sign * repetition, sign * __frcp_rn(repetition)};
  }
  __device__ __forceinline__ float operator()(float v) const {
    const float quotient = v * inverse;
    // A quotient that overflows has no remainder.
    const float corrected =
        fabsf(quotient) < INFINITY ? fmaf(-fmaf(quotient, factor, -v), inverse, quotient) : quotient;
    return copysignf(fminf(corrected, v * factor), v);
  }
};

/// What bans and penalties do to the logits of a row; null where a row has none of a kind. It lies in shared memory: registers
/// are for logits.
struct Changes {
  const uint32_t *allowed, *prompt;
  const int32_t* counts;
  float repetition, presence, frequency;
  Repetition repeat;
  bool quick;  // whether that may be used

  __device__ __forceinline__ static Changes of(const uint32_t* allowed, const uint32_t* prompt,
                                               const int32_t* counts, float repetition, float presence,
                                               float frequency) {
    const bool quick = repetition >= 0x1p-20f && repetition <= 0x1p20f &&
                       (__float_as_uint(repetition) & 0x7fffffu) != 0x7fffffu;
    return {allowed, prompt, counts, repetition, presence, frequency, Repetition::of(repetition), quick};
  }
  __device__ __forceinline__ bool any() const {
    return allowed != nullptr || prompt != nullptr || counts != nullptr;
  }
  /// Whether a changed logit may be the larger.
  __device__ __forceinline__ bool raise() const {
    return repetition < 1.f || presence < 0.f || frequency < 0.f;
  }

  /// What of groups b at first + b * kStep is changed.
  template <int kCount>
  __device__ __forceinline__ Touched touched(uint32_t first, uint32_t end) const {
    uint32_t seen = 0, special = 0;
    const auto each = [&](uint32_t& bits, auto&& of_group) {
#pragma unroll
      for (int b = 0; b < kCount; ++b) {
        const uint32_t at = first + b * kStep;
        if (at < end) bits |= of_group(at) << (kGroup * b);
      }
    };
    const auto byte_of = [](const uint32_t* of, uint32_t at) {
      return uint32_t{reinterpret_cast<const uint8_t*>(of)[at / kGroup]};
    };
    if (counts != nullptr) {
#pragma unroll 1
      for (int b = 0; b < kCount; ++b) seen |= counted(first + b * kStep, end) << (kGroup * b);
      if (presence != 0.f || frequency != 0.f) special = seen;
    }
    if (prompt != nullptr) each(seen, [&](uint32_t at) { return byte_of(prompt, at); });
    if (!quick) special |= seen, seen = 0;
    if (allowed != nullptr) each(special, [&](uint32_t at) { return byte_of(allowed, at) ^ 0xffu; });
    if (end % kGroup != 0) {  // no bits past the end
      uint32_t inside = 0;
      each(inside, [&](uint32_t at) { return at + kGroup <= end ? 0xffu : (1u << (end - at)) - 1; });
      seen &= inside, special &= inside;
    }
    return {seen, special};
  }

  /// The logit `v` of a special token, seen before. No ban hides a NaN.
  __device__ __forceinline__ float of_special(float v, uint32_t id) const {
    if (allowed != nullptr && (allowed[id / 32] >> (id % 32) & 1) == 0) return v == v ? -INFINITY : v;
    SampleParams penalties;
    penalties.repetition_penalty = quick ? 1.f : repetition;
    penalties.presence_penalty = presence;
    penalties.frequency_penalty = frequency;
    return penalised_logit(v, penalties, counts != nullptr ? counts[id] : 0, true);
  }

 private:
  __device__ __forceinline__ uint32_t counted(uint32_t at, uint32_t end) const {
    uint32_t bits = 0;
    if (reinterpret_cast<uintptr_t>(counts) % sizeof(int4) == 0 && at + kGroup <= end) {
      const int4 a = reinterpret_cast<const int4*>(counts + at)[0];
      const int4 b = reinterpret_cast<const int4*>(counts + at)[1];
      const int count[kGroup] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int j = 0; j < kGroup; ++j) bits |= (count[j] > 0 ? 1u : 0u) << j;
    } else {
#pragma unroll 1
      for (uint32_t j = 0; j < kGroup && at + j < end; ++j) bits |= (counts[at + j] > 0 ? 1u : 0u) << j;
    }
    return bits;
  }
};

/// The logits of a row as they are drawn from: read as given, or from a copy that has its biases and is padded with -inf to
/// whole groups, then changed at each look. Places are 32-bit: a vocabulary is below 2^31, and registers are scarce.
template <class T>
struct RowOfLogits {
  const T* given;
  const float* copy;
  uint32_t vocab;
  bool whole;  // groups are aligned, and none is cut off by the end of the row
  Segments segments;
  const Changes* changes;  // null: none

  /// Before changes: groups b at first + b * kStep, which a lane reads all at once; -inf from `end` on, a multiple of kStep
  /// or the end of the row.
  template <int kCount>
  __device__ __forceinline__ void load_unchanged(uint32_t first, uint32_t end,
                                                 float (&v)[kCount][kGroup]) const {
    const uint32_t left = first < end ? end - first : 0;
    if (copy != nullptr) {
      load_from(copy + first, left, true, v);
    } else {
      load_from(given + first, left, whole, v);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void change(uint32_t first, Touched touched, float (&v)[kCount][kGroup]) const {
    if ((touched.seen | touched.special) == 0) return;
    const Repetition repeat = changes->repeat;
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      const uint32_t seen = touched.seen >> (kGroup * b) & 0xffu;
      if (seen != 0) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) v[b][j] = seen >> j & 1 ? repeat(v[b][j]) : v[b][j];
      }
      for (uint32_t left = touched.special >> (kGroup * b) & 0xffu; left != 0; left &= left - 1) {
        const int which = __ffs(left) - 1;
        float one = v[b][0];
#pragma unroll
        for (int j = 1; j < kGroup; ++j) one = j == which ? v[b][j] : one;
        one = changes->of_special(one, first + b * kStep + which);
#pragma unroll
        for (int j = 0; j < kGroup; ++j) v[b][j] = j == which ? one : v[b][j];
      }
    }
  }

  template <int kCount>
  __device__ __forceinline__ void load(uint32_t first, uint32_t end, float (&v)[kCount][kGroup]) const {
    const Touched touched = changes != nullptr ? changes->touched<kCount>(first, end) : Touched{0, 0};
    load_unchanged(first, end, v);
    change(first, touched, v);
  }

  __device__ __forceinline__ float at(uint32_t id) const {
    float v = copy != nullptr ? copy[id] : to_float(given[id]);
    if (changes == nullptr) return v;
    const uint32_t group = id / kGroup * kGroup;
    const Touched touched = changes->touched<1>(group, vocab);
    if (touched.seen >> (id - group) & 1) v = changes->repeat(v);
    return touched.special >> (id - group) & 1 ? changes->of_special(v, id) : v;
  }

  /// Asks for segment `i`, as it is given, to come to the L2; a lane for a line, up to 32 of them.
  __device__ __forceinline__ void prefetch(int i) const {
    constexpr uint32_t kLine = 128 / sizeof(T);
    const uint32_t at = lane_id() * kLine;
    if (i < segments.count && at < segments.length && i * segments.length + at < vocab) {
      prefetch_line(given + i * segments.length + at);
    }
  }

  /// Where segment `i` ends.
  __device__ __forceinline__ uint32_t end_of(int i) const {
    return min((i + 1) * segments.length, vocab);
  }

  /// body(logit, id) for all tokens, those of this thread.
  template <class Body>
  __device__ __forceinline__ void for_each(Body&& body) const {
    for (int i = warp_id(); i < segments.count; i += kWarps) {
      const uint32_t end = end_of(i);
      for (uint32_t first = i * segments.length + lane_id() * kGroup; first < end; first += kStep) {
        float v[1][kGroup];
        load(first, end, v);
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          if (first + j < end) body(v[0][j], static_cast<int>(first + j));
        }
      }
    }
  }

 private:
  /// All accesses are under way before the first is looked at.
  template <class From, int kCount>
  static __device__ __forceinline__ void load_from(const From* from, uint32_t left, bool whole,
                                                   float (&v)[kCount][kGroup]) {
    if (whole && left > (kCount - 1) * kStep) {
      constexpr int kParts = kGroup / kVec<From>;
      Vec<From, kVec<From>> parts[kCount * kParts];
#pragma unroll
      for (int i = 0; i < kCount * kParts; ++i) {
        parts[i] = reinterpret_cast<const Vec<From, kVec<From>>*>(from + i / kParts * kStep)[i % kParts];
      }
#pragma unroll
      for (int i = 0; i < kCount * kGroup; ++i) {
        v[i / kGroup][i % kGroup] = to_float(parts[i / kVec<From>].v[i % kVec<From>]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount * kGroup; ++i) {
        const uint32_t at = i / kGroup * kStep + i % kGroup;
        v[i / kGroup][i % kGroup] = at < left ? to_float(from[at]) : -INFINITY;
      }
    }
  }
};

}  // namespace vivace::device::select
