#include <algorithm>
#include <cmath>
#include <vector>

#include "src/core/number.h"
#include "src/ops/attention/args.h"
#include "src/ops/attention_prologue/table.h"
#include "src/ops/quantize_fp8/quantize.h"

namespace vivace {

namespace {

using Head = std::vector<double>;

void norm(Head& x, const Tensor& weight, double eps) {
  double squares = 0;
  for (double v : x) squares += v * v;
  const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + eps);
  for (size_t i = 0; i < x.size(); ++i)
    x[i] *= scale * load(weight.dtype, weight.data, static_cast<int64_t>(i));
}

/// `cos_sin`: the table's row of this token's position.
void rotate(Head& x, const Tensor& cos_sin, RopeStyle style) {
  const int64_t half = cos_sin.shape[0] / 2;
  const float* table = cos_sin.as<const float>();
  for (int64_t i = 0; i < half; ++i) {
    double& a = style == RopeStyle::neox ? x[i] : x[2 * i];
    double& b = style == RopeStyle::neox ? x[i + half] : x[2 * i + 1];
    const double c = table[i], s = table[half + i], a0 = a;
    a = a * c - b * s;
    b = b * c + a0 * s;
  }
}

/// The scale that quantize_fp8 makes of a row; a NaN shows.
float scale_of_head(const Head& x) {
  double largest = 0;
  for (double v : x) largest = std::abs(v) > largest || std::isnan(v) ? std::abs(v) : largest;
  return made_scale(static_cast<float>(largest));
}

}  // namespace

Status attention_prologue_reference(const AttentionPrologueArgs& args, const Stream&) {
  const int64_t heads_q = args.q.shape[1], heads_kv = args.k.shape[2], head_dim = args.q.shape[2];
  for (int64_t t = 0; t < args.q.shape[0]; ++t) {
    const int64_t slot = args.slots.as<const int64_t>()[t];
    for (int64_t h = 0; h < heads_q + 2 * heads_kv; ++h) {
      Head x(head_dim);
      for (int64_t d = 0; d < head_dim; ++d)
        x[d] = load(args.qkv.dtype, args.qkv.at(t).data, h * head_dim + d);
      const bool is_q = h < heads_q, is_v = h >= heads_q + heads_kv;
      if (!is_v) {
        const Tensor& weight = is_q ? args.q_norm_weight : args.k_norm_weight;
        if (args.qk_norm == QkNorm::norm_then_rope) norm(x, weight, args.eps);
        if (args.cos_sin.present())
          rotate(x, args.cos_sin.at(args.positions.as<const int32_t>()[t]), args.rope_style);
        if (args.qk_norm == QkNorm::rope_then_norm) norm(x, weight, args.eps);
      }
      Tensor to;
      float scale = 1, *made_to = nullptr;  // both of fp8
      if (is_q) {
        to = args.q.at(t).at(h);
        if (args.q_scale.present()) made_to = args.q_scale.at(t).as<float>() + h * args.q_scale.stride[1];
      } else if (slot >= 0) {
        const Tensor& cache = is_v ? args.v : args.k;
        const int64_t head = is_v ? h - heads_q - heads_kv : h - heads_q;
        const int64_t page = slot / cache.shape[1], offset = slot % cache.shape[1];
        to = cache.at(page).at(offset).at(head);
        if (is_v) {
          scale = v_scale_of(args.v_scale, head);
        } else if (args.k_scale.rank == 3) {
          made_to = args.k_scale.at(page).at(offset).as<float>() + head * args.k_scale.stride[2];
        } else {
          scale = k_scale_of(args.k_scale, page, offset, head);
        }
      }
      if (!to.present()) continue;
      if (made_to != nullptr) *made_to = scale = scale_of_head(x);
      for (int64_t d = 0; d < head_dim; ++d)
        store(to.dtype, to.data, d, to.dtype == DType::fp8_e4m3 ? static_cast<float>(x[d]) / scale : x[d]);
    }
  }
  return {};
}

}  // namespace vivace
