// Online-softmax attention of a block of query rows over a range of keys. Included once per SIMD target by the
// cpu.cc files of attention_prefill and attention_decode, which thereby give a row the same bits.
//
// What fixes the bits of a row: its query, its keys, and where `attend` is told to begin and end. A score is
// one sum per lane over the head and one tree over the lanes; keys come in blocks of 64 counted from the
// request's start, with one maximum and one sum of weights per block; an output element adds its weighted
// values in key order. Neither the rows beside it nor the size of a page appears in this order, and a key that
// a row does not see is not multiplied by zero but left out.
#if defined(VIVACE_OPS_ATTENTION_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef VIVACE_OPS_ATTENTION_TILE_INL_H_
#undef VIVACE_OPS_ATTENTION_TILE_INL_H_
#else
#define VIVACE_OPS_ATTENTION_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "src/cpu/convert-inl.h"
#include "src/cpu/exp2-inl.h"
#include "src/ops/attention/args.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

namespace {

constexpr int64_t kBlockKeys = 64;
constexpr int64_t kMaxRows = 128;  ///< query rows that share one read of a key
constexpr int64_t kRowGroup = 3;   ///< rows whose sums stay in registers together
constexpr float kNoKeys = -__builtin_inff();
constexpr double kLog2E = 1.4426950408889634;

using FloatTag = hn::ScalableTag<float>;

HWY_INLINE int64_t lanes() {
  return static_cast<int64_t>(hn::Lanes(FloatTag()));
}

/// Length of a row in scratch: head_dim rounded up to whole vectors; the padding holds zeros.
HWY_INLINE int64_t pitch_of(int64_t head_dim) {
  return (head_dim + lanes() - 1) / lanes() * lanes();
}

/// What the codes of e4m3 mean.
HWY_INLINE const float* fp8_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> v;
    for (int i = 0; i < 256; ++i) v[i] = fp8_to_f32(static_cast<uint8_t>(i));
    return v;
  }();
  return values.data();
}

/// The keys and values of one (request, KV head).
struct KeySource {
  Tensor k, v;     ///< [pages, page_tokens, head_dim]
  Tensor k_scale;  ///< with fp8: [1], or [pages, page_tokens]
  float v_scale = 1;
  const int32_t* table;

  KeySource(const AttentionArgs& args, int64_t request, int64_t head_kv)
      : k(of_head(args.k, head_kv)),
        v(of_head(args.v, head_kv)),
        k_scale(args.k_scale.rank == 3 ? of_head(args.k_scale, head_kv) : args.k_scale),
        v_scale(v_scale_of(args.v_scale, head_kv)),
        table(args.page_table.as<const int32_t>() + request * args.page_table.stride[0]) {}

  float k_scale_at(int64_t page, int64_t offset) const {
    if (k_scale.rank != 2) return *k_scale.as<const float>();
    return k_scale.as<const float>()[page * k_scale.stride[0] + offset * k_scale.stride[1]];
  }

  /// Without its dimension 2, which is that of the head.
  static Tensor of_head(const Tensor& cache, int64_t head) {
    Tensor one = cache;
    one.data = static_cast<char*>(cache.data) + head * cache.stride[2] * info_of(cache.dtype).block_bytes;
    one.rank = cache.rank - 1;
    one.shape[2] = cache.shape[3];
    one.stride[2] = 1;
    return one;
  }
};

/// The weights of a row so far: sum of 2^(s - maximum), and the maximum in units of log2. A NaN score shows in
/// the sum alone: the maximum may pass over it.
struct RowState {
  float maximum = kNoKeys, sum = 0;
  /// No key so far, or keys of score -infinity only, which weigh nothing.
  bool weightless() const { return maximum == kNoKeys && sum == 0; }
};

/// Query rows of one KV head with their running sums. Rows are in order of their token.
struct QueryBlock {
  int64_t rows = 0, pitch = 0, head_dim = 0;
  double cap_log2 = 0;                      ///< soft_cap * log2(e), 0: none
  int64_t first[kMaxRows], last[kMaxRows];  ///< keys that a row sees
  RowState state[kMaxRows];
  /// Scaled, so that a score is in units of log2 (or of the cap).
  alignas(64) float q[kMaxRows * kMaxHeadDim];
  alignas(64) float sum[kMaxRows * kMaxHeadDim];

  void clear() {
    std::fill(state, state + rows, RowState());
    std::fill(sum, sum + rows * pitch, 0.0f);
  }
};

/// One block of keys as fp32 rows: in place when the cache is fp32 and needs no padding, else converted.
struct KeyBlock {
  const float* k_rows[kBlockKeys];
  const float* v_rows[kBlockKeys];
  alignas(64) float scores[kRowGroup * kBlockKeys];
  alignas(64) float zeros[kMaxHeadDim];
  alignas(64) float k[kBlockKeys * kMaxHeadDim];
  alignas(64) float v[kBlockKeys * kMaxHeadDim];
};

/// gather() of an fp8 cache; scale(page, offset) is of one key.
template <class Scale>
HWY_INLINE void gather_fp8(const Tensor& cache, const int32_t* table, int64_t block, int64_t begin,
                           int64_t end, int64_t pitch, float* scratch, const float** rows, Scale&& scale) {
  const int64_t page_tokens = cache.shape[1], head_dim = cache.shape[2];
  const float* values = fp8_values();
  for (int64_t j = begin; j < end; ++j) {
    const int64_t page = table[j / page_tokens], offset = j % page_tokens;
    const uint8_t* row = cache.as<const uint8_t>() + page * cache.stride[0] + offset * cache.stride[1];
    const float factor = scale(page, offset);
    float* to = scratch + (j - block) * pitch;
    rows[j - block] = to;
    for (int64_t i = 0; i < head_dim; ++i) to[i] = values[row[i]] * factor;
    for (int64_t i = head_dim; i < pitch; ++i) to[i] = 0;
  }
}

/// Rows [begin, end) of a block that starts at key `block`, as pointers into `rows`.
HWY_INLINE void gather(const Tensor& cache, const int32_t* table, int64_t block, int64_t begin, int64_t end,
                       int64_t pitch, float* scratch, const float** rows) {
  const FloatTag d;
  const int64_t page_tokens = cache.shape[1], head_dim = cache.shape[2];
  const bool in_place = cache.dtype == DType::f32 && pitch == head_dim;
  with_storage(cache.dtype, [&](auto type) {
    using T = decltype(type);
    const auto* data = static_cast<const typename T::Element*>(cache.data);
    int64_t j = begin;
    while (j < end) {
      const int64_t page = j / page_tokens, offset = j - page * page_tokens;
      const auto* row = data + table[page] * cache.stride[0] + offset * cache.stride[1];
      const int64_t until = std::min(end, (page + 1) * page_tokens);
      for (; j < until; ++j, row += cache.stride[1]) {
        if constexpr (std::is_same_v<T, F32>) {
          if (in_place) {
            rows[j - block] = row;
            continue;
          }
        }
        float* to = scratch + (j - block) * pitch;
        rows[j - block] = to;
        int64_t i = 0;
        for (; i + lanes() <= head_dim; i += lanes()) hn::Store(load_as_f32(d, T{}, row + i), d, to + i);
        for (; i < head_dim; ++i) to[i] = load_one(T{}, row + i);
        for (; i < pitch; ++i) to[i] = 0;
      }
    }
  });
}

/// Asks for rows [begin, end) of the cache. A head's rows lie apart (the other heads are between them), which
/// the hardware does not foresee: without this a decode step waits for each row.
HWY_INLINE void prefetch(const Tensor& cache, const int32_t* table, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 64;
  const int64_t page_tokens = cache.shape[1], element = info_of(cache.dtype).block_bytes;
  const int64_t row_bytes = cache.shape[2] * element;
  for (int64_t j = begin; j < end;) {
    const int64_t page = j / page_tokens, offset = j - page * page_tokens;
    const char* row = static_cast<const char*>(cache.data) +
                      (table[page] * cache.stride[0] + offset * cache.stride[1]) * element;
    const int64_t until = std::min(end, (page + 1) * page_tokens);
    for (; j < until; ++j, row += cache.stride[1] * element) {
      for (int64_t line = 0; line < row_bytes; line += kLine) __builtin_prefetch(row + line, 0, 2);
    }
  }
}

/// Sums over the lanes of four vectors, as four floats.
template <class V>
HWY_INLINE void store_lane_sums(V a0, V a1, V a2, V a3, float* to) {
  const FloatTag d;
  const hn::Repartition<uint64_t, FloatTag> d64;
  const auto t01 = hn::Add(hn::InterleaveLower(d, a0, a1), hn::InterleaveUpper(d, a0, a1));
  const auto t23 = hn::Add(hn::InterleaveLower(d, a2, a3), hn::InterleaveUpper(d, a2, a3));
  const auto low = hn::InterleaveLower(d64, hn::BitCast(d64, t01), hn::BitCast(d64, t23));
  const auto high = hn::InterleaveUpper(d64, hn::BitCast(d64, t01), hn::BitCast(d64, t23));
  const auto sum = hn::Add(hn::BitCast(d, low), hn::BitCast(d, high));  // per 16 bytes
  static_assert(hn::MaxLanes(d) == 4 || hn::MaxLanes(d) == 8, "wider vectors need one more fold");
  if constexpr (hn::MaxLanes(d) == 8) {
    const hn::Half<FloatTag> half;
    hn::StoreU(hn::Add(hn::LowerHalf(half, sum), hn::UpperHalf(half, sum)), half, to);
  } else {
    hn::StoreU(sum, d, to);
  }
}

/// scores[r][j] = q[r] . k[j] for kRows rows and keys [begin, end), both multiples of 4 within the block.
template <int kRows>
HWY_INLINE void score(const float* q, int64_t pitch, const float* const* k_rows, int64_t begin, int64_t end,
                      float* scores) {
  const FloatTag d;
  const int64_t step = lanes();
  for (int64_t j = begin; j < end; j += 4) {
    const float *k0 = k_rows[j], *k1 = k_rows[j + 1], *k2 = k_rows[j + 2], *k3 = k_rows[j + 3];
    hn::Vec<FloatTag> a0[kRows], a1[kRows], a2[kRows], a3[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) a0[r] = a1[r] = a2[r] = a3[r] = hn::Zero(d);
    for (int64_t i = 0; i < pitch; i += step) {
      const auto x0 = hn::LoadU(d, k0 + i), x1 = hn::LoadU(d, k1 + i);
      const auto x2 = hn::LoadU(d, k2 + i), x3 = hn::LoadU(d, k3 + i);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const auto y = hn::Load(d, q + r * pitch + i);
        a0[r] = hn::MulAdd(x0, y, a0[r]);
        a1[r] = hn::MulAdd(x1, y, a1[r]);
        a2[r] = hn::MulAdd(x2, y, a2[r]);
        a3[r] = hn::MulAdd(x3, y, a3[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) store_lane_sums(a0[r], a1[r], a2[r], a3[r], scores + r * kBlockKeys + j);
  }
}

/// sum[r] += sum over keys [begin, end) of weights[r][j] v[j], for kVecs vectors of the head.
template <int kRows, int kVecs>
HWY_INLINE void add_values_at(const float* weights, const float* const* v_rows, int64_t begin, int64_t end,
                              int64_t column, float* sum, int64_t pitch) {
  const FloatTag d;
  const int64_t step = lanes();
  hn::Vec<FloatTag> a[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) a[r][c] = hn::Load(d, sum + r * pitch + column + c * step);
  }
  for (int64_t j = begin; j < end; ++j) {
    const float* v = v_rows[j] + column;
    hn::Vec<FloatTag> w[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) w[r] = hn::Set(d, weights[r * kBlockKeys + j]);
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
      const auto x = hn::LoadU(d, v + c * step);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) a[r][c] = hn::MulAdd(w[r], x, a[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) hn::Store(a[r][c], d, sum + r * pitch + column + c * step);
  }
}

template <int kRows>
HWY_INLINE void add_values(const float* weights, const float* const* v_rows, int64_t begin, int64_t end,
                           float* sum, int64_t pitch) {
  if (begin >= end) return;
  const int64_t step = lanes();
  int64_t column = 0;
  for (; column + 4 * step <= pitch; column += 4 * step)
    add_values_at<kRows, 4>(weights, v_rows, begin, end, column, sum, pitch);
  for (; column < pitch; column += step)
    add_values_at<kRows, 1>(weights, v_rows, begin, end, column, sum, pitch);
}

/// Turns the scores [begin, end) of a row into weights and brings the row's sums to their new maximum.
HWY_NOINLINE void weigh(float* scores, int64_t begin, int64_t end, double cap_log2, RowState& state,
                        float* sum, int64_t pitch) {
  const FloatTag d;
  const int64_t step = lanes();
  const int64_t low = begin / step * step, high = (end + step - 1) / step * step;
  std::fill(scores + low, scores + begin, kNoKeys);
  std::fill(scores + end, scores + high, kNoKeys);
  if (cap_log2 > 0) {
    // cap * tanh(x), x = scores, by 2^(2 x log2 e); from 16 on the quotient is 1 in fp32. A NaN stays.
    const auto cap = hn::Set(d, static_cast<float>(cap_log2)), one = hn::Set(d, 1.0f);
    for (int64_t j = low; j < high; j += step) {
      const auto given = hn::Load(d, scores + j), most = hn::Set(d, 16.0f);
      const auto x = hn::IfThenElse(hn::Gt(given, most), most, given);
      const auto e = exp2(d, hn::Mul(x, hn::Set(d, static_cast<float>(2 * kLog2E))));
      hn::Store(hn::Mul(cap, hn::Div(hn::Sub(e, one), hn::Add(e, one))), d, scores + j);
    }
    std::fill(scores + low, scores + begin, kNoKeys);
    std::fill(scores + end, scores + high, kNoKeys);
  }
  auto highest = hn::Set(d, kNoKeys);
  for (int64_t j = low; j < high; j += step) highest = hn::Max(highest, hn::Load(d, scores + j));
  const float block_maximum = hn::GetLane(hn::MaxOfLanes(d, highest));
  if (block_maximum > state.maximum) {
    if (state.maximum != kNoKeys) {
      const auto scale = exp2(d, hn::Set(d, state.maximum - block_maximum));
      for (int64_t i = 0; i < pitch; i += step) hn::Store(hn::Mul(hn::Load(d, sum + i), scale), d, sum + i);
      state.sum *= hn::GetLane(scale);
    }
    state.maximum = block_maximum;
  }
  // Without a score above -infinity the weights are 0, or NaN for a NaN; -infinity - -infinity would be NaN for both.
  const auto maximum = hn::Set(d, state.maximum == kNoKeys ? 0.0f : state.maximum);
  auto total = hn::Zero(d);
  for (int64_t j = low; j < high; j += step) {
    const auto weight = exp2(d, hn::Sub(hn::Load(d, scores + j), maximum));
    hn::Store(weight, d, scores + j);
    total = hn::Add(total, weight);
  }
  state.sum += hn::GetLane(hn::SumOfLanes(d, total));
}

/// One group of rows [row, row + kRows) against the gathered keys [begin, end) of the block at `block`.
template <int kRows>
HWY_INLINE void attend_rows(QueryBlock& rows, int64_t row, int64_t block, int64_t begin, int64_t end,
                            KeyBlock& keys) {
  int64_t from[kRows], to[kRows];
  int64_t all_from = 0, all_to = kBlockKeys, any_from = kBlockKeys, any_to = 0;
  for (int r = 0; r < kRows; ++r) {
    from[r] = std::max(begin, rows.first[row + r]) - block;
    to[r] = std::min(end, rows.last[row + r]) - block;
    all_from = std::max(all_from, from[r]);
    all_to = std::min(all_to, to[r]);
    if (from[r] >= to[r]) continue;
    any_from = std::min(any_from, from[r]);
    any_to = std::max(any_to, to[r]);
  }
  if (any_from >= any_to) return;
  float* scores = keys.scores;
  score<kRows>(rows.q + row * rows.pitch, rows.pitch, keys.k_rows, any_from / 4 * 4, (any_to + 3) / 4 * 4,
               scores);
  for (int r = 0; r < kRows; ++r) {
    if (from[r] >= to[r]) continue;
    weigh(scores + r * kBlockKeys, from[r], to[r], rows.cap_log2, rows.state[row + r],
          rows.sum + (row + r) * rows.pitch, rows.pitch);
  }
  // Keys that all rows see, together; those before and after, row by row: each row adds in key order.
  const bool together = kRows > 1 && all_from < all_to;
  for (int r = 0; r < kRows; ++r) {
    add_values<1>(scores + r * kBlockKeys, keys.v_rows, from[r], together ? all_from : to[r],
                  rows.sum + (row + r) * rows.pitch, rows.pitch);
  }
  if (!together) return;
  add_values<kRows>(scores, keys.v_rows, all_from, all_to, rows.sum + row * rows.pitch, rows.pitch);
  for (int r = 0; r < kRows; ++r) {
    add_values<1>(scores + r * kBlockKeys, keys.v_rows, all_to, to[r], rows.sum + (row + r) * rows.pitch,
                  rows.pitch);
  }
}

/// Adds keys [begin, end) of `source` to the rows that see them.
HWY_NOINLINE void attend(const KeySource& source, int64_t begin, int64_t end, QueryBlock& rows,
                         KeyBlock& keys) {
  if (rows.rows == 0) return;
  // Rows are in order of their token, so the first begins and the last ends furthest out.
  begin = std::max(begin, rows.first[0]);
  end = std::min(end, rows.last[rows.rows - 1]);
  std::fill(keys.zeros, keys.zeros + rows.pitch, 0.0f);
  for (int64_t block = begin / kBlockKeys * kBlockKeys; block < end; block += kBlockKeys) {
    const int64_t from = std::max(begin, block), to = std::min(end, block + kBlockKeys);
    if (source.k.dtype == DType::fp8_e4m3) {
      gather_fp8(source.k, source.table, block, from, to, rows.pitch, keys.k, keys.k_rows,
                 [&](int64_t page, int64_t offset) { return source.k_scale_at(page, offset); });
      gather_fp8(source.v, source.table, block, from, to, rows.pitch, keys.v, keys.v_rows,
                 [&](int64_t, int64_t) { return source.v_scale; });
    } else {
      gather(source.k, source.table, block, from, to, rows.pitch, keys.k, keys.k_rows);
      gather(source.v, source.table, block, from, to, rows.pitch, keys.v, keys.v_rows);
    }
    const int64_t next = std::min(end, to + kBlockKeys);
    prefetch(source.k, source.table, to, next);
    prefetch(source.v, source.table, to, next);
    // Scores come in fours; what lies outside [from, to) is computed from zeros and never looked at.
    for (int64_t j = (from - block) / 4 * 4; j < from - block; ++j) keys.k_rows[j] = keys.zeros;
    for (int64_t j = to - block; j % 4 != 0; ++j) keys.k_rows[j] = keys.zeros;
    int64_t row = 0;
    for (; row + 3 <= rows.rows; row += 3) attend_rows<3>(rows, row, block, from, to, keys);
    if (rows.rows - row == 2) attend_rows<2>(rows, row, block, from, to, keys);
    if (rows.rows - row == 1) attend_rows<1>(rows, row, block, from, to, keys);
  }
}

/// Fills the block with the rows of `tokens` tokens from the request's token `token` on and `heads` query heads
/// from `head` on, token by token, and clears its sums.
HWY_NOINLINE void load_queries(const AttentionArgs& args, const RequestRange& range, int64_t token,
                               int64_t tokens, int64_t head, int64_t heads, QueryBlock& rows) {
  const FloatTag d;
  rows.rows = tokens * heads;
  rows.head_dim = args.q.shape[2];
  rows.pitch = pitch_of(rows.head_dim);
  rows.cap_log2 = args.soft_cap * kLog2E;
  const double scale = softmax_scale_of(args);
  const float factor = static_cast<float>(args.soft_cap > 0 ? scale / args.soft_cap : scale * kLog2E);
  int64_t row = 0;
  for (int64_t t = token; t < token + tokens; ++t) {
    for (int64_t h = head; h < head + heads; ++h, ++row) {
      rows.first[row] = range.first_key(t, args.window);
      rows.last[row] = range.last_key(t);
      float* to = rows.q + row * rows.pitch;
      if (args.q.dtype == DType::fp8_e4m3) {
        const auto* from = args.q.at(range.row_begin + t).at(h).as<const uint8_t>();
        const float scaled = factor * q_scale_of(args.q_scale, range.row_begin + t, h);
        for (int64_t i = 0; i < rows.head_dim; ++i) to[i] = fp8_values()[from[i]] * scaled;
        for (int64_t i = rows.head_dim; i < rows.pitch; ++i) to[i] = 0;
        continue;
      }
      with_storage(args.q.dtype, [&](auto type) {
        using T = decltype(type);
        const auto* from = args.q.at(range.row_begin + t).at(h).template as<const typename T::Element>();
        int64_t i = 0;
        for (; i + lanes() <= rows.head_dim; i += lanes())
          hn::Store(hn::Mul(load_as_f32(d, T{}, from + i), hn::Set(d, factor)), d, to + i);
        for (; i < rows.head_dim; ++i) to[i] = load_one(T{}, from + i) * factor;
        for (; i < rows.pitch; ++i) to[i] = 0;
      });
    }
  }
  rows.clear();
}

/// total += part, where both are sums over disjoint keys. Adding a part without weight changes no bit, and
/// adding to nothing copies.
HWY_NOINLINE void merge(RowState& total, float* total_sum, const RowState& part, const float* part_sum,
                        int64_t pitch) {
  if (part.weightless()) return;
  if (total.weightless()) {
    total = part;
    std::copy(part_sum, part_sum + pitch, total_sum);
    return;
  }
  const FloatTag d;
  const float maximum = std::max(total.maximum, part.maximum);
  const auto a = exp2(d, hn::Set(d, total.maximum - maximum)),
             b = exp2(d, hn::Set(d, part.maximum - maximum));
  for (int64_t i = 0; i < pitch; i += lanes()) {
    const auto scaled = hn::Mul(hn::Load(d, total_sum + i), a);
    hn::Store(hn::MulAdd(hn::LoadU(d, part_sum + i), b, scaled), d, total_sum + i);
  }
  total.sum = hn::GetLane(hn::MulAdd(hn::Set(d, part.sum), b, hn::Mul(hn::Set(d, total.sum), a)));
  total.maximum = maximum;
}

/// Writes one row of output and lse: the request's token `token`, query head `head`.
HWY_NOINLINE void finish(const AttentionArgs& args, const RequestRange& range, int64_t token, int64_t head,
                         const RowState& state, const float* sum) {
  const FloatTag d;
  const int64_t head_dim = args.q.shape[2], row = range.row_begin + token;
  double scale = 0, lse = kNoKeys;
  if (range.last_key(token) > 0) {
    double maximum = state.maximum, total = state.sum;
    scale = 1;
    if (args.sinks.present()) {
      const double sink = args.sinks.as<const float>()[head] * kLog2E;
      maximum = std::max(maximum, sink);
      scale = std::exp2(state.maximum - maximum);
      total = total * scale + std::exp2(sink - maximum);
    }
    scale /= total;
    if (args.lse.present()) lse = (maximum + std::log2(total)) / kLog2E;
  }
  if (args.lse.present()) args.lse.at(row).as<float>()[head] = static_cast<float>(lse);
  const float factor = static_cast<float>(scale);
  with_storage(args.output.dtype, [&](auto type) {
    using T = decltype(type);
    auto* to = args.output.at(row).at(head).template as<typename T::Element>();
    int64_t i = 0;
    for (; i + lanes() <= head_dim; i += lanes())
      store_from_f32(d, T{}, hn::Mul(hn::Load(d, sum + i), hn::Set(d, factor)), to + i);
    for (; i < head_dim; ++i) store_one(T{}, sum[i] * factor, to + i);
  });
}

}  // namespace

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
