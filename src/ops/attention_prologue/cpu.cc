// Splits qkv, normalises and rotates Q and K, stores Q and writes K and V into their slots.
//
// Two numbers for a token of heads_q + 2 heads_kv heads of width D, fp32
//   bytes  8 D (heads_q + 2 heads_kv)   read once, written once
//   flops  about 7 D (heads_q + heads_kv)   a head fits the first-level cache; memory is the only roof

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/attention_prologue/cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>

#include "src/cpu/convert-inl.h"
#include "src/cpu/simd.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/attention/args.h"
#include "src/ops/attention_prologue/table.h"
#include "src/ops/quantize_fp8/quantize.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

namespace {

using FloatTag = hn::ScalableTag<float>;

template <class From>
HWY_INLINE void load_head(const typename From::Element* from, int64_t head_dim, float* to) {
  const FloatTag d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + step <= head_dim; i += step) hn::StoreU(load_as_f32(d, From{}, from + i), d, to + i);
  for (; i < head_dim; ++i) to[i] = load_one(From{}, from + i);
}

template <class To>
HWY_INLINE void store_head(const float* from, int64_t head_dim, typename To::Element* to) {
  const FloatTag d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + step <= head_dim; i += step) store_from_f32(d, To{}, hn::LoadU(d, from + i), to + i);
  for (; i < head_dim; ++i) store_one(To{}, from[i], to + i);
}

/// The scale that quantize_fp8 makes of a row; NaN when any of x is.
HWY_INLINE float scale_of_head(const float* x, int64_t head_dim) {
  float largest = 0;
  for (int64_t i = 0; i < head_dim; ++i) {
    const float v = std::abs(x[i]);
    largest = v > largest || std::isnan(v) ? v : largest;
  }
  return made_scale(largest);
}

HWY_INLINE void quantise_head(const float* from, float scale, int64_t head_dim, uint8_t* to) {
  for (int64_t i = 0; i < head_dim; ++i) to[i] = f32_to_fp8(from[i] / scale);
}

/// x *= weight / sqrt(mean(x * x) + eps)
template <class W>
HWY_INLINE void norm(float* x, const typename W::Element* weight, float eps, int64_t head_dim) {
  const FloatTag d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d);
  float tail = 0;
  int64_t i = 0;
  for (; i + step <= head_dim; i += step) {
    const auto v = hn::LoadU(d, x + i);
    sum = hn::MulAdd(v, v, sum);
  }
  for (; i < head_dim; ++i) tail += x[i] * x[i];
  const float squares = hn::GetLane(hn::SumOfLanes(d, sum)) + tail;
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(head_dim) + eps);
  for (i = 0; i + step <= head_dim; i += step) {
    const auto scaled = hn::Mul(hn::LoadU(d, x + i), hn::Set(d, scale));
    hn::StoreU(hn::Mul(scaled, load_as_f32(d, W{}, weight + i)), d, x + i);
  }
  for (; i < head_dim; ++i) x[i] = x[i] * scale * load_one(W{}, weight + i);
}

/// Rotates the first 2 * half dimensions; `cos` is followed by `half` sines.
HWY_INLINE void rotate(float* x, const float* cos, int64_t half, RopeStyle style) {
  const FloatTag d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  const float* sin = cos + half;
  const bool neox = style == RopeStyle::neox;
  int64_t i = 0;
  for (; i + step <= half; i += step) {
    const auto c = hn::LoadU(d, cos + i), s = hn::LoadU(d, sin + i);
    hn::Vec<FloatTag> a, b;
    if (neox) {
      a = hn::LoadU(d, x + i);
      b = hn::LoadU(d, x + half + i);
    } else {
      hn::LoadInterleaved2(d, x + 2 * i, a, b);
    }
    const auto a1 = hn::NegMulAdd(b, s, hn::Mul(a, c)), b1 = hn::MulAdd(a, s, hn::Mul(b, c));
    if (neox) {
      hn::StoreU(a1, d, x + i);
      hn::StoreU(b1, d, x + half + i);
    } else {
      hn::StoreInterleaved2(a1, b1, d, x + 2 * i);
    }
  }
  for (; i < half; ++i) {
    float& a = neox ? x[i] : x[2 * i];
    float& b = neox ? x[half + i] : x[2 * i + 1];
    const float a0 = a;
    a = a * cos[i] - b * sin[i];
    b = b * cos[i] + a0 * sin[i];
  }
}

}  // namespace

void attention_prologue_token(const AttentionPrologueArgs& args, int64_t t) {
  const int64_t heads_q = args.q.shape[1], heads_kv = args.k.shape[2], head_dim = args.q.shape[2];
  const int64_t slot = args.slots.as<const int64_t>()[t], page_tokens = args.k.shape[1];
  const float* table = args.cos_sin.present()
                           ? args.cos_sin.at(args.positions.as<const int32_t>()[t]).as<const float>()
                           : nullptr;
  const int64_t half = args.cos_sin.shape[1] / 2;
  float head[kMaxHeadDim];

  const auto prepare = [&](const Tensor& weight) {
    const auto normalise = [&] {
      with_storage(weight.dtype, [&](auto type) {
        using W = decltype(type);
        norm<W>(head, weight.as<const typename W::Element>(), static_cast<float>(args.eps), head_dim);
      });
    };
    if (args.qk_norm == QkNorm::norm_then_rope) normalise();
    if (table != nullptr) rotate(head, table, half, args.rope_style);
    if (args.qk_norm == QkNorm::rope_then_norm) normalise();
  };
  // `given`: the scale of an fp8 tensor, unless one is made and stored at `made`.
  const auto store_to = [&](const Tensor& to, float given = 1, float* made = nullptr) {
    if (to.dtype == DType::fp8_e4m3) {
      if (made != nullptr) *made = given = scale_of_head(head, head_dim);
      return quantise_head(head, given, head_dim, to.as<uint8_t>());
    }
    with_storage(to.dtype, [&](auto type) {
      using To = decltype(type);
      store_head<To>(head, head_dim, to.as<typename To::Element>());
    });
  };

  with_storage(args.qkv.dtype, [&](auto type) {
    using From = decltype(type);
    const auto* from = args.qkv.at(t).as<const typename From::Element>();
    const Tensor q = args.q.at(t);
    const Tensor& q_scale = args.q_scale;
    for (int64_t h = 0; h < heads_q; ++h, from += head_dim) {
      load_head<From>(from, head_dim, head);
      prepare(args.q_norm_weight);
      store_to(q.at(h), 1, q_scale.present() ? q_scale.at(t).as<float>() + h * q_scale.stride[1] : nullptr);
    }
    if (slot < 0) return;
    const int64_t page = slot / page_tokens, offset = slot % page_tokens;
    const Tensor k = args.k.at(page).at(offset);
    float* made_k = args.k_scale.rank == 3 ? args.k_scale.at(page).at(offset).as<float>() : nullptr;
    for (int64_t h = 0; h < heads_kv; ++h, from += head_dim) {
      load_head<From>(from, head_dim, head);
      prepare(args.k_norm_weight);
      store_to(k.at(h), made_k ? 1 : k_scale_of(args.k_scale, page, offset, h),
               made_k ? made_k + h * args.k_scale.stride[2] : nullptr);
    }
    const Tensor v = args.v.at(page).at(offset);
    for (int64_t h = 0; h < heads_kv; ++h, from += head_dim) {
      load_head<From>(from, head_dim, head);
      store_to(v.at(h), v_scale_of(args.v_scale, h));
    }
  });
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vivace {

Status attention_prologue_cpu(const AttentionPrologueArgs& args, const Stream& stream) {
  const auto token = VIVACE_SIMD(attention_prologue_token);
  cpu::parallel_for(stream.threads, args.q.shape[0], [&](int64_t t, int) { token(args, t); });
  return {};
}

}  // namespace vivace
#endif
