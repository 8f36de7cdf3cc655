#include <cmath>
#include <vector>

#include "src/core/number.h"
#include "src/ops/fused_moe/table.h"
#include "src/ops/linear/block_formats.h"

namespace vivace {

namespace {

double dot(const Tensor& matrix, int64_t row, const std::vector<double>& v) {
  std::vector<float> weights(v.size());
  dequantize_row(matrix.dtype, matrix.at(row).data, static_cast<int64_t>(v.size()), weights.data());
  double sum = 0;
  for (size_t i = 0; i < v.size(); ++i) sum += weights[i] * v[i];
  return sum;
}

std::vector<double> run_expert(const ExpertWeights& w, const std::vector<double>& x) {
  std::vector<double> h(w.gate.shape[0]), out(w.down.shape[0]);
  for (size_t i = 0; i < h.size(); ++i) {
    const double gate = dot(w.gate, static_cast<int64_t>(i), x), up = dot(w.up, static_cast<int64_t>(i), x);
    h[i] = gate / (1 + std::exp(-gate)) * up;
  }
  for (size_t i = 0; i < out.size(); ++i) out[i] = dot(w.down, static_cast<int64_t>(i), h);
  return out;
}

}  // namespace

Status fused_moe_reference(const FusedMoeArgs& args, const Stream&) {
  const int64_t hidden = args.x.shape[1], experts = expert_count(args);
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    const Tensor row = args.x.at(t);
    std::vector<double> x(hidden), y(hidden, 0.0);
    for (int64_t i = 0; i < hidden; ++i) x[i] = load(row.dtype, row.data, i);
    const auto add = [&](const ExpertWeights& w, double factor) {
      const std::vector<double> out = run_expert(w, x);
      for (int64_t i = 0; i < hidden; ++i) y[i] += factor * out[i];
    };
    for (int64_t j = 0; j < args.expert_ids.shape[1]; ++j) {
      const int32_t id = args.expert_ids.at(t).as<const int32_t>()[j];
      if (has_work(id, experts)) add(expert_at(args, id), args.expert_weights.at(t).as<const float>()[j]);
    }
    if (args.shared.present()) add(args.shared, 1);
    for (int64_t i = 0; i < hidden; ++i) store(args.y.dtype, args.y.at(t).data, i, y[i]);
  }
  return {};
}

}  // namespace vivace
