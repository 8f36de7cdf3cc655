// Filling a Panel from eight weight rows, and multiplying it by rows of quantised activations: AVX2 by
// intrinsics, every other instruction set in plain loops. Included once per SIMD target.
#if defined(VIVACE_LINEAR_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef VIVACE_LINEAR_PANEL_INL_H_
#undef VIVACE_LINEAR_PANEL_INL_H_
#else
#define VIVACE_LINEAR_PANEL_INL_H_
#endif

#include <hwy/highway.h>
#if HWY_TARGET == HWY_AVX2
#include <immintrin.h>
#endif

#include "src/ops/linear/panel.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX2

/// Four dwords of each of eight rows, at `offset` bytes, transposed: out[j] lane r is dword j of row r.
HWY_INLINE void transpose_rows(const uint8_t* const* rows, int64_t offset, __m256i* out) {
  const auto pair = [&](int r) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + offset));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r + 4] + offset));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
  };
  const __m256i r0 = pair(0), r1 = pair(1), r2 = pair(2), r3 = pair(3);
  const __m256i a = _mm256_unpacklo_epi32(r0, r1), b = _mm256_unpackhi_epi32(r0, r1);
  const __m256i c = _mm256_unpacklo_epi32(r2, r3), d = _mm256_unpackhi_epi32(r2, r3);
  out[0] = _mm256_unpacklo_epi64(a, c);
  out[1] = _mm256_unpackhi_epi64(a, c);
  out[2] = _mm256_unpacklo_epi64(b, d);
  out[3] = _mm256_unpackhi_epi64(b, d);
}

/// The f16 at `offset` bytes of each row.
HWY_INLINE __m256 load_f16_of_rows(const uint8_t* const* rows, int64_t offset) {
  const auto at = [&](int r) {
    int16_t half;
    std::memcpy(&half, rows[r] + offset, sizeof half);
    return half;
  };
  return _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)));
}

/// Two f16 side by side at `offset` bytes of each row.
HWY_INLINE void load_f16_pairs_of_rows(const uint8_t* const* rows, int64_t offset, __m256& first,
                                       __m256& second) {
  const auto at = [&](int r) {
    int32_t pair;
    std::memcpy(&pair, rows[r] + offset, sizeof pair);
    return pair;
  };
  const __m256i pairs = _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
  const __m256i low = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)), high = _mm256_srli_epi32(pairs, 16);
  // Packing works in 128-bit halves: first 0-3, second 0-3, first 4-7, second 4-7.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), _MM_SHUFFLE(3, 1, 2, 0));
  first = _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
  second = _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1));
}

/// Asks for the part of the next eight rows that lies `at` bytes into them. Eight short rows at once are more streams
/// than the hardware follows; taken together they are one.
HWY_INLINE void prefetch_next(const uint8_t* next, int64_t at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(next + at + i), _MM_HINT_T0);
}

HWY_INLINE __m256i low_nibbles(__m256i v) {
  return _mm256_and_si256(v, _mm256_set1_epi8(15));
}
HWY_INLINE __m256i high_nibbles(__m256i v) {
  return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
}

/// Four int8 of each row become two vectors of the int16 order.
HWY_INLINE void store_widened(__m256i v, __m256i scale, __m256i* to) {
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), odd = _mm256_srai_epi16(v, 8);
  _mm256_store_si256(to, _mm256_mullo_epi16(even, scale));
  _mm256_store_si256(to + 1, _mm256_mullo_epi16(odd, scale));
}

/// q4_0 and q4_1: 16 bytes of nibbles after a header of 2 or 4 bytes.
template <class Block>
HWY_INLINE void unpack_nibble_blocks(const uint8_t* const* w, const uint8_t* next, int64_t begin,
                                     int64_t count, cpu::Panel& panel) {
  constexpr bool kHasMin = std::is_same_v<Block, BlockQ4_1>;
  auto* to = reinterpret_cast<__m256i*>(panel.q);
  int64_t offset = begin * static_cast<int64_t>(sizeof(Block));
  for (int64_t g = 0; g < count; ++g, offset += sizeof(Block), to += 8) {
    prefetch_next(next, 8 * offset, 8 * sizeof(Block));
    __m256i v[4];
    transpose_rows(w, offset + (kHasMin ? 4 : 2), v);
#pragma GCC unroll 8
    for (int j = 0; j < 4; ++j) {
      _mm256_store_si256(to + j, low_nibbles(v[j]));
      _mm256_store_si256(to + 4 + j, high_nibbles(v[j]));
    }
    const __m256 d = load_f16_of_rows(w, offset);
    _mm256_store_ps(panel.d[g], d);
    _mm256_store_ps(panel.m[g],
                    kHasMin ? load_f16_of_rows(w, offset + 2) : _mm256_mul_ps(d, _mm256_set1_ps(-8)));
  }
}

HWY_INLINE void unpack_q8_0(const uint8_t* const* w, const uint8_t* next, int64_t begin, int64_t count,
                            cpu::Panel& panel) {
  auto* to = reinterpret_cast<__m256i*>(panel.q);
  int64_t offset = begin * static_cast<int64_t>(sizeof(BlockQ8_0));
  for (int64_t g = 0; g < count; ++g, offset += sizeof(BlockQ8_0)) {
    prefetch_next(next, 8 * offset, 8 * sizeof(BlockQ8_0));
    for (int half = 0; half < 2; ++half) {
      __m256i v[4];
      transpose_rows(w, offset + 2 + 16 * half, v);
#pragma GCC unroll 8
      for (int j = 0; j < 4; ++j, to += 2) {
        _mm256_store_si256(to, _mm256_srai_epi16(_mm256_slli_epi16(v[j], 8), 8));
        _mm256_store_si256(to + 1, _mm256_srai_epi16(v[j], 8));
      }
    }
    _mm256_store_ps(panel.d[g], load_f16_of_rows(w, offset));
  }
}

/// `begin` and `count` are multiples of 8 groups: whole blocks.
HWY_INLINE void unpack_q4_k(const uint8_t* const* w, const uint8_t* next, int64_t begin, int64_t count,
                            cpu::Panel& panel) {
  auto* to = reinterpret_cast<__m256i*>(panel.q);
  int64_t offset = begin / 8 * static_cast<int64_t>(sizeof(BlockQ4K));
  for (int64_t g = 0; g < count; g += 8, offset += sizeof(BlockQ4K)) {
    prefetch_next(next, 8 * offset, 8 * sizeof(BlockQ4K));
    for (int pair = 0; pair < 4; ++pair, to += 16) {
      __m256i v[8];
      transpose_rows(w, offset + 16 + 32 * pair, v);
      transpose_rows(w, offset + 32 + 32 * pair, v + 4);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        _mm256_store_si256(to + j, low_nibbles(v[j]));
        _mm256_store_si256(to + 8 + j, high_nibbles(v[j]));
      }
    }
    alignas(32) float scale[8][8], min[8][8];
    for (int r = 0; r < 8; ++r) {
      for (int j = 0; j < 8; ++j) {
        uint8_t s, m;
        q4k_scale_min(w[r] + offset + 4, j, s, m);
        scale[j][r] = s;
        min[j][r] = m;
      }
    }
    const __m256 d = load_f16_of_rows(w, offset);
    const __m256 dmin = _mm256_sub_ps(_mm256_setzero_ps(), load_f16_of_rows(w, offset + 2));
    for (int j = 0; j < 8; ++j) {
      _mm256_store_ps(panel.d[g + j], _mm256_mul_ps(d, _mm256_load_ps(scale[j])));
      _mm256_store_ps(panel.m[g + j], _mm256_mul_ps(dmin, _mm256_load_ps(min[j])));
    }
  }
}

HWY_INLINE void unpack_q6_k(const uint8_t* const* w, const uint8_t* next, int64_t begin, int64_t count,
                            cpu::Panel& panel) {
  auto* to = reinterpret_cast<__m256i*>(panel.q);
  int64_t offset = begin / 8 * static_cast<int64_t>(sizeof(BlockQ6K));
  for (int64_t g = 0; g < count; g += 8, offset += sizeof(BlockQ6K)) {
    prefetch_next(next, 8 * offset, 8 * sizeof(BlockQ6K));
    alignas(32) int32_t scale[16][8];  // the same int16 twice in a lane
    for (int r = 0; r < 8; ++r) {
      for (int j = 0; j < 16; ++j) {
        const int s = static_cast<int8_t>(w[r][offset + 192 + j]);
        scale[j][r] = (s & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(s) << 16);
      }
    }
    for (int half = 0; half < 2; ++half) {
      __m256i low[16], high[8];
#pragma GCC unroll 8
      for (int part = 0; part < 4; ++part) transpose_rows(w, offset + 64 * half + 16 * part, low + 4 * part);
#pragma GCC unroll 8
      for (int part = 0; part < 2; ++part)
        transpose_rows(w, offset + 128 + 32 * half + 16 * part, high + 4 * part);
      for (int group = 0; group < 4; ++group) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j, to += 2) {
          const __m256i nibbles = low[8 * (group & 1) + j];
          const __m256i pairs = _mm256_and_si256(_mm256_srli_epi16(high[j], 2 * group), _mm256_set1_epi8(3));
          const __m256i bits = _mm256_or_si256(group < 2 ? low_nibbles(nibbles) : high_nibbles(nibbles),
                                               _mm256_slli_epi16(pairs, 4));
          const int sixteen = 8 * half + 2 * group + j / 4;
          store_widened(_mm256_sub_epi8(bits, _mm256_set1_epi8(32)),
                        _mm256_load_si256(reinterpret_cast<const __m256i*>(scale[sixteen])), to);
        }
      }
    }
    const __m256 d = load_f16_of_rows(w, offset + 208);
    for (int j = 0; j < 8; ++j) _mm256_store_ps(panel.d[g + j], d);
  }
}

/// Groups [begin, begin + count) of the eight rows at `w`. `next` is where the eight after them start; it is not read,
/// only asked for.
HWY_INLINE void unpack_panel(DType dtype, const uint8_t* const* w, const uint8_t* next, int64_t begin,
                             int64_t count, cpu::Panel& panel) {
  switch (dtype) {
    case DType::q4_0:
      return unpack_nibble_blocks<BlockQ4_0>(w, next, begin, count, panel);
    case DType::q4_1:
      return unpack_nibble_blocks<BlockQ4_1>(w, next, begin, count, panel);
    case DType::q8_0:
      return unpack_q8_0(w, next, begin, count, panel);
    case DType::q4_k:
      return unpack_q4_k(w, next, begin, count, panel);
    default:
      return unpack_q6_k(w, next, begin, count, panel);
  }
}

HWY_INLINE __m256i broadcast_dword(const uint8_t* p) {
  int32_t dword;
  std::memcpy(&dword, p, sizeof dword);
  return _mm256_set1_epi32(dword);
}

/// Keeps `sum` in a register at this point. Left alone, GCC turns a chain of integer adds into a tree, whose products
/// then spill.
HWY_INLINE void pin(__m256i& sum) {
  asm("" : "+x"(sum));
}

/// sums[token][row] += panel · x for `count` groups, where x is kTokens quantised rows of length k and the
/// panel starts at group `begin` of them. A product of two is at most 2 * 15 * 127, so the eight of a group
/// fit an int16.
template <int kTokens>
HWY_INLINE void multiply_int8(const cpu::Panel& panel, int64_t count, const uint8_t* const* x, int64_t k,
                              int64_t begin, float (*sums)[cpu::Panel::kRows]) {
  const auto* w = reinterpret_cast<const __m256i*>(panel.q);
  const __m256i ones = _mm256_set1_epi16(1);
  const uint8_t* q[kTokens];
  const float* d[kTokens];
  __m256 acc[kTokens];
  const int64_t sums_after = k / 32;  // floats from a group's d to its s
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    q[t] = x[t] + begin * 32;
    d[t] = reinterpret_cast<const float*>(x[t] + k) + begin;
    acc[t] = _mm256_load_ps(sums[t]);
  }
  for (int64_t g = 0; g < count; ++g, w += 8) {
    __m256i products[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
      products[t] = _mm256_maddubs_epi16(w[0], broadcast_dword(q[t] + 32 * g));
#pragma GCC unroll 8
    for (int j = 1; j < 8; ++j) {
      const __m256i row = _mm256_load_si256(w + j);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        products[t] =
            _mm256_add_epi16(products[t], _mm256_maddubs_epi16(row, broadcast_dword(q[t] + 32 * g + 4 * j)));
        pin(products[t]);
      }
    }
    const __m256 scale = _mm256_load_ps(panel.d[g]), min = _mm256_load_ps(panel.m[g]);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(products[t], ones));
      acc[t] = _mm256_fmadd_ps(_mm256_mul_ps(sum, _mm256_broadcast_ss(d[t] + g)), scale, acc[t]);
      acc[t] = _mm256_fmadd_ps(min, _mm256_broadcast_ss(d[t] + sums_after + g), acc[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) _mm256_store_ps(sums[t], acc[t]);
}

/// The same with int16.
template <int kTokens>
HWY_INLINE void multiply_int16(const cpu::Panel& panel, int64_t count, const uint8_t* const* x, int64_t k,
                               int64_t begin, float (*sums)[cpu::Panel::kRows]) {
  const auto* w = reinterpret_cast<const __m256i*>(panel.q);
  const uint8_t* q[kTokens];
  const float* d[kTokens];
  __m256 acc[kTokens];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    q[t] = x[t] + begin * 64;
    d[t] = reinterpret_cast<const float*>(x[t] + 2 * k) + begin;
    acc[t] = _mm256_load_ps(sums[t]);
  }
  for (int64_t g = 0; g < count; ++g, w += 16) {
    __m256i products[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) products[t] = _mm256_madd_epi16(w[0], broadcast_dword(q[t] + 64 * g));
#pragma GCC unroll 16
    for (int j = 1; j < 16; ++j) {
      const __m256i row = _mm256_load_si256(w + j);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        products[t] =
            _mm256_add_epi32(products[t], _mm256_madd_epi16(row, broadcast_dword(q[t] + 64 * g + 4 * j)));
        pin(products[t]);
      }
    }
    const __m256 scale = _mm256_load_ps(panel.d[g]);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(products[t]), _mm256_broadcast_ss(d[t] + g));
      acc[t] = _mm256_fmadd_ps(scaled, scale, acc[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) _mm256_store_ps(sums[t], acc[t]);
}

#else  // every other instruction set

inline void unpack_panel(DType dtype, const uint8_t* const* w, const uint8_t*, int64_t begin, int64_t count,
                         cpu::Panel& panel) {
  constexpr int64_t kRows = cpu::Panel::kRows;
  const bool int8 = cpu::quantized_type_for(dtype) == cpu::QuantizedType::int8;
  auto* q16 = reinterpret_cast<int16_t*>(panel.q);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t g = 0; g < count; ++g) {
      int16_t q[32];
      cpu::decode_group(dtype, w[r], begin + g, q, panel.d[g][r], panel.m[g][r]);
      for (int64_t i = 0; i < 32; ++i) {
        const int64_t four = g * 8 + i / 4, within = i % 4;
        if (int8) {
          panel.q[(four * kRows + r) * 4 + within] = static_cast<uint8_t>(q[i]);
        } else {
          q16[((four * 2 + within / 2) * kRows + r) * 2 + within % 2] =
              q[i - within + cpu::kInt16Order[within]];
        }
      }
    }
  }
}

/// One token's group times the panel's: exact sums. kLane integers of a row lie side by side.
template <int kLane, class W, class X>
HWY_INLINE void group_sums(const W* w, const X* x, int32_t* sums) {
  for (int r = 0; r < cpu::Panel::kRows; ++r) sums[r] = 0;
  for (int j = 0; j < 32 / kLane; ++j)
    for (int r = 0; r < cpu::Panel::kRows; ++r)
      for (int i = 0; i < kLane; ++i)
        sums[r] += static_cast<int32_t>(w[(j * cpu::Panel::kRows + r) * kLane + i]) * x[j * kLane + i];
}

template <int kTokens>
inline void multiply_int8(const cpu::Panel& panel, int64_t count, const uint8_t* const* x, int64_t k,
                          int64_t begin, float (*sums)[cpu::Panel::kRows]) {
  for (int t = 0; t < kTokens; ++t) {
    const auto* q = reinterpret_cast<const int8_t*>(x[t]) + begin * 32;
    const auto* d = reinterpret_cast<const float*>(x[t] + k) + begin;
    for (int64_t g = 0; g < count; ++g) {
      int32_t products[cpu::Panel::kRows];
      group_sums<4>(panel.q + g * 256, q + 32 * g, products);
      for (int r = 0; r < cpu::Panel::kRows; ++r) {
        sums[t][r] += static_cast<float>(products[r]) * d[g] * panel.d[g][r];
        sums[t][r] += panel.m[g][r] * d[k / 32 + g];
      }
    }
  }
}

template <int kTokens>
inline void multiply_int16(const cpu::Panel& panel, int64_t count, const uint8_t* const* x, int64_t k,
                           int64_t begin, float (*sums)[cpu::Panel::kRows]) {
  const auto* w = reinterpret_cast<const int16_t*>(panel.q);
  for (int t = 0; t < kTokens; ++t) {
    const auto* q = reinterpret_cast<const int16_t*>(x[t]) + begin * 32;
    const auto* d = reinterpret_cast<const float*>(x[t] + 2 * k) + begin;
    for (int64_t g = 0; g < count; ++g) {
      int32_t products[cpu::Panel::kRows];
      group_sums<2>(w + g * 256, q + 32 * g, products);
      for (int r = 0; r < cpu::Panel::kRows; ++r)
        sums[t][r] += static_cast<float>(products[r]) * d[g] * panel.d[g][r];
    }
  }
}

#endif

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
