#include "src/model/calibrate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "src/core/error.h"
#include "src/model/model.h"
#include "vivace/silu_mul.h"

namespace vivace::model {

namespace {

/// Raises `largest` to the largest magnitude of a row; NaN shows and stays.
void widen(float& largest, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::abs(values[i]);
    if (!(magnitude <= largest) && !std::isnan(largest)) largest = magnitude;
  }
}

void widen(float& largest, const Tensor& rows) {
  for (int64_t t = 0; t < rows.shape[0]; ++t) widen(largest, rows.at(t).as<const float>(), rows.shape[1]);
}

/// Watches the calls of a model whose weights are the checkpoint's own memory.
class Watcher {
 public:
  Watcher(const Checkpoint& checkpoint, const Stream& stream) : stream_(stream) {
    const ModelConfig& config = checkpoint.config();
    layers_.resize(static_cast<size_t>(config.layers));
    for (int64_t l = 0; l < config.layers; ++l) {
      LayerRanges& ranges = layers_[l];
      if (config.is_moe() && config.sparse_layer[l])
        ranges.experts_down.assign(static_cast<size_t>(config.experts), 0.f);
      // A call is recognised by its first matrix.
      const auto know = [&](const char* matrix, float& range) {
        const auto tensor = checkpoint.tensor(fmt::format("model.layers.{}.{}.weight", l, matrix));
        if (tensor.ok()) input_of_[tensor->data] = &range;
      };
      know("self_attn.q_proj", ranges.qkv);
      know("self_attn.o_proj", ranges.o);
      know("mlp.gate_proj", ranges.mlp);
      know("mlp.down_proj", ranges.down);
    }
  }

  Model::CallObserver observer() {
    return {.linear = [this](int64_t layer, const LinearArgs& args) { return see(layer, args); },
            .attention_prologue = [this](int64_t layer,
                                         const AttentionPrologueArgs& args) { return see(layer, args); },
            .fused_moe = [this](int64_t layer, const FusedMoeArgs& args) { return see(layer, args); }};
  }
  std::vector<LayerRanges> take() { return std::move(layers_); }

 private:
  Status see(int64_t layer, const LinearArgs& args) {
    if (layer < 0) return {};  // the head stays unquantised
    const auto range = input_of_.find(args.parts[0].weight.data);
    if (range == input_of_.end()) {
      return error(Code::internal,
                   "calibration: layer {} has a product that no tensor of the checkpoint explains", layer);
    }
    widen(*range->second, args.x);
    return {};
  }

  Status see(int64_t layer, const AttentionPrologueArgs& args) {
    const int64_t page_tokens = args.k.shape[1], heads = args.k.shape[2], head_dim = args.k.shape[3];
    for (int64_t t = 0; t < args.slots.shape[0]; ++t) {
      const int64_t slot = args.slots.as<const int64_t>()[t];
      if (slot < 0) continue;
      for (int64_t h = 0; h < heads; ++h) {
        const auto head = [&](const Tensor& cache) {
          return cache.at(slot / page_tokens).at(slot % page_tokens).at(h).as<const float>();
        };
        widen(layers_[layer].k, head(args.k), head_dim);
        widen(layers_[layer].v, head(args.v), head_dim);
      }
    }
    return {};
  }

  Status see(int64_t layer, const FusedMoeArgs& args) {
    LayerRanges& ranges = layers_[layer];
    widen(ranges.mlp, args.x);
    const int64_t tokens = args.x.shape[0], top_k = args.expert_ids.shape[1];
    std::vector<std::vector<int64_t>> visitors(args.experts.size());
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t j = 0; j < top_k; ++j) visitors[args.expert_ids.at(t).as<const int32_t>()[j]].push_back(t);
    }
    for (size_t e = 0; e < visitors.size(); ++e) {
      VIVACE_TRY(widen_down(ranges.experts_down[e], args.experts[e], args.x, visitors[e]));
    }
    if (!args.shared.present()) return {};
    std::vector<int64_t> all(static_cast<size_t>(tokens));
    for (int64_t t = 0; t < tokens; ++t) all[t] = t;
    return widen_down(ranges.shared_down, args.shared, args.x, all);
  }

  /// What reaches the down projection of an expert is inside fused_moe, so its first half is computed once more.
  Status widen_down(float& range, const ExpertWeights& expert, const Tensor& x,
                    const std::vector<int64_t>& tokens) {
    if (tokens.empty()) return {};
    const auto rows = static_cast<int64_t>(tokens.size());
    const int64_t hidden = x.shape[1], intermediate = expert.gate.shape[0];
    const auto matrix = [&](std::vector<float>& memory, int64_t width) {
      memory.resize(static_cast<size_t>(rows * width));
      return Tensor(memory.data(), DType::f32, {rows, width});
    };
    const Tensor gathered = matrix(x_, hidden), gate = matrix(gate_, intermediate),
                 up = matrix(up_, intermediate);
    for (int64_t i = 0; i < rows; ++i) {
      std::copy_n(x.at(tokens[i]).as<const float>(), hidden, gathered.at(i).as<float>());
    }
    LinearArgs args{.x = gathered, .part_count = 2, .exact = true};
    args.parts[0] = {.weight = expert.gate, .y = gate};
    args.parts[1] = {.weight = expert.up, .y = up};
    VIVACE_TRY(linear(args, stream_));
    VIVACE_TRY(silu_mul({.gate = gate, .up = up, .y = gate}, stream_));
    widen(range, gate);
    return {};
  }

  const Stream& stream_;
  std::vector<LayerRanges> layers_;
  std::map<const void*, float*> input_of_;
  std::vector<float> x_, gate_, up_;
};

Status check_finite(const std::vector<LayerRanges>& layers) {
  for (size_t l = 0; l < layers.size(); ++l) {
    const LayerRanges& r = layers[l];
    bool finite = true;
    for (const float value : {r.qkv, r.o, r.mlp, r.down, r.shared_down, r.k, r.v})
      finite = finite && std::isfinite(value);
    for (const float value : r.experts_down) finite = finite && std::isfinite(value);
    if (!finite) {
      return invalid_argument("calibration: layer {} has activations that are not finite; no scale fits them",
                              l);
    }
  }
  return {};
}

}  // namespace

Result<Calibration> calibrate(const Checkpoint& checkpoint, std::span<const int32_t> ids,
                              const ScoreOptions& options, const Stream& stream) {
  if (stream.device != Device::cpu) return unsupported("calibration runs on the CPU alone");
  if (checkpoint.config().weight_format != WeightFormat::plain) {
    return unsupported("calibration needs an unquantised model, this one is {}",
                       name_of(checkpoint.config().weight_format));
  }
  const ModelOptions model_options{
      .exact = true,
      .max_requests = 1,
      .max_model_len = std::min(options.window, checkpoint.config().max_position)};
  VIVACE_TRY_ASSIGN(const std::unique_ptr<Model> model, Model::load(checkpoint, model_options));
  Watcher watcher(checkpoint, stream);
  model->observe_calls(watcher.observer());
  Calibration calibration;
  VIVACE_TRY_ASSIGN(calibration.score, score(*model, ids, options, stream));
  calibration.layers = watcher.take();
  VIVACE_TRY(check_finite(calibration.layers));
  return calibration;
}

}  // namespace vivace::model
