#include <cmath>
#include <vector>

#include "src/core/number.h"
#include "src/ops/fused_moe/table.h"
#include "src/ops/linear/block_formats.h"

namespace vivace {

namespace {

double dot(const Tensor& matrix, const Fp8Scales& scales, int64_t row, const std::vector<double>& v) {
  std::vector<float> weights(v.size());
  dequantize_row(matrix.dtype, matrix.at(row).data, static_cast<int64_t>(v.size()), weights.data());
  double sum = 0;
  for (size_t i = 0; i < v.size(); ++i) {
    sum += double{weights[i]} * scales.at(row, static_cast<int64_t>(i)) * v[i];
  }
  return sum;
}

/// Values [begin, end) become what fp8 keeps of them under this scale.
void round_to_fp8(std::vector<double>& h, size_t begin, size_t end, double scale) {
  for (size_t i = begin; i < end; ++i) {
    h[i] = scale * double{fp8_to_f32(f32_to_fp8(static_cast<float>(h[i] / scale)))};
  }
}

void requantise(const FusedMoeArgs& args, const ExpertWeights& w, std::vector<double>& h) {
  if (!has_block_scales(args)) {
    return round_to_fp8(h, 0, h.size(), double{*w.act_scale.as<const float>()});
  }
  const auto block_of = [&](size_t i) { return (static_cast<int64_t>(i) + args.block_offset) / kFp8ScaleBlock; };
  for (size_t begin = 0, end = 0; begin < h.size(); begin = end) {
    double largest = 0;
    for (end = begin; end < h.size() && block_of(end) == block_of(begin); ++end) {
      if (!std::isnan(largest) && !(std::abs(h[end]) <= largest)) largest = std::abs(h[end]);
    }
    round_to_fp8(h, begin, end, double{made_scale(largest)});
  }
}

std::vector<double> run_expert(const FusedMoeArgs& args, const ExpertWeights& w, const std::vector<double>& x) {
  std::vector<double> h(w.gate.shape[0]), out(w.down.shape[0]);
  for (size_t i = 0; i < h.size(); ++i) {
    const double gate = dot(w.gate, up_scales(args, w.gate_scale), static_cast<int64_t>(i), x);
    const double up = dot(w.up, up_scales(args, w.up_scale), static_cast<int64_t>(i), x);
    h[i] = gate_of<double>(args.swiglu)(gate, up);
  }
  if (is_fp8(args)) requantise(args, w, h);
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = dot(w.down, down_scales(args, w.down_scale), static_cast<int64_t>(i), h);
  }
  return out;
}

}  // namespace

Status fused_moe_reference(const FusedMoeArgs& args, const Stream&) {
  const int64_t hidden = args.x.shape[1];
  const LocalExperts local = local_experts(args);
  const Fp8Scales x_scales = activation_scales(args.x_scale);
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    const Tensor row = args.x.at(t);
    std::vector<double> x(hidden), y(hidden, 0.0);
    for (int64_t i = 0; i < hidden; ++i) x[i] = double{load(row.dtype, row.data, i)} * x_scales.at(t, i);
    const auto add = [&](const ExpertWeights& w, double factor) {
      const std::vector<double> out = run_expert(args, w, x);
      for (int64_t i = 0; i < hidden; ++i) y[i] += factor * out[i];
    };
    for (int64_t j = 0; j < args.expert_ids.shape[1]; ++j) {
      const int32_t e = local.of(args.expert_ids.at(t).as<const int32_t>()[j]);
      if (e >= 0) add(expert_at(args, e), args.expert_weights.at(t).as<const float>()[j]);
    }
    if (args.shared.present()) add(args.shared, 1);
    for (int64_t i = 0; i < hidden; ++i) store(args.y.dtype, args.y.at(t).data, i, y[i]);
  }
  return {};
}

}  // namespace vivace
