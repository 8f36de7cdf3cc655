#include "src/model/synthetic.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "src/core/error.h"
#include "src/device/random.h"

namespace vivace::model {

namespace {

struct Named {
  std::string_view name;
  ModelConfig config;
};

ModelConfig llama3_8b() {
  ModelConfig c;
  c.architecture = Architecture::llama;
  c.layers = 32, c.hidden = 4096, c.vocab = 128256;
  c.heads_q = 32, c.heads_kv = 8, c.head_dim = c.rotary_dim = 128;
  c.intermediate = 14336;
  c.rms_eps = 1e-5;
  c.rope_theta = 500000;
  c.max_position = 8192;
  return c;
}

ModelConfig qwen3_30b() {
  ModelConfig c;
  c.architecture = Architecture::qwen3_moe;
  c.layers = 48, c.hidden = 2048, c.vocab = 151936;
  c.heads_q = 32, c.heads_kv = 4, c.head_dim = c.rotary_dim = 128;
  c.rope_theta = 1e6;
  c.qk_norm = true;
  c.max_position = 40960;
  c.experts = 128, c.top_k = 8, c.moe_intermediate = 768;
  c.sparse_layer.assign(static_cast<size_t>(c.layers), true);
  return c;
}

ModelConfig qwen3_235b_tp8() {
  ModelConfig c = qwen3_30b();
  c.layers = 94, c.hidden = 4096, c.vocab = 151936 / 8;
  c.heads_q = 64 / 8, c.heads_kv = 1;  // four KV heads, each on two ranks
  c.moe_intermediate = 1536 / 8;
  c.sparse_layer.assign(static_cast<size_t>(c.layers), true);
  return c;
}

ModelConfig hy3(int64_t ranks) {
  ModelConfig c;
  c.architecture = Architecture::hy_v3;
  c.layers = 80, c.hidden = 4096, c.vocab = 120832 / ranks;
  c.heads_q = 64 / ranks, c.heads_kv = 8 / ranks, c.head_dim = c.rotary_dim = 128;
  c.intermediate = 13312 / ranks;
  c.rms_eps = 1e-5;
  c.rope_theta = 11158840;
  c.qk_norm = true;
  c.max_position = 262144;
  c.experts = 192, c.top_k = 8, c.moe_intermediate = 1536 / ranks, c.shared_experts = 1;
  c.sparse_layer.assign(static_cast<size_t>(c.layers), true);
  c.sparse_layer[0] = false;
  c.router_score = RouterScore::sigmoid;
  c.router_scale = 2.826;
  return c;
}

class SyntheticCheckpoint final : public Checkpoint {
 public:
  SyntheticCheckpoint(std::string name, ModelConfig config) : name_(std::move(name)), config_(std::move(config)) {}
  const ModelConfig& config() const override { return config_; }
  const TokenizerSource& tokenizer() const override { return tokenizer_; }
  std::vector<std::string> tensor_names() const override { return {}; }
  bool has(std::string_view) const override { return false; }
  Result<Tensor> tensor(std::string_view name) const override {
    return not_found("{}: random weights have no tensor '{}'", name_, name);
  }
  void drop_pages(const Tensor&) const override {}
  int64_t mapped_bytes() const override { return 0; }
  std::string summary() const override {
    return fmt::format("{}, random weights, {} layers", name_, config_.layers);
  }
  bool synthetic() const override { return true; }

 private:
  std::string name_;
  ModelConfig config_;
  TokenizerSource tokenizer_;
};

/// Makes tensors on the device, each from the next seed. The first failure is kept.
class Maker {
 public:
  Maker(Weights& weights, const Stream& stream) : weights_(weights), stream_(stream) {}

  Tensor random(DType dtype, std::initializer_list<int64_t> shape, double deviation, const char* what) {
    const Tensor tensor = make(dtype, shape, what);
    if (status_.ok()) status_ = device::fill_normal(tensor, static_cast<float>(deviation), ++seed_, stream_);
    return tensor;
  }
  /// A matrix whose products with values of deviation 1 have this deviation.
  Tensor matrix(int64_t rows, int64_t columns, const char* what, double deviation = 1) {
    return random(DType::bf16, {rows, columns}, deviation / std::sqrt(static_cast<double>(columns)), what);
  }
  Tensor stack(int64_t experts, int64_t rows, int64_t columns, const char* what) {
    return random(DType::bf16, {experts, rows, columns}, 1 / std::sqrt(static_cast<double>(columns)), what);
  }
  Tensor ones(int64_t count) {
    const Tensor tensor = make(DType::f32, {count}, "norm weight");
    if (!status_.ok()) return tensor;
    const std::vector<float> values(static_cast<size_t>(count), 1.f);
    status_ = device::copy_to_device(tensor.data, values.data(), tensor.bytes(), stream_);
    if (status_.ok()) status_ = device::synchronize(stream_);
    return tensor;
  }
  const Status& status() const { return status_; }

 private:
  Tensor make(DType dtype, std::initializer_list<int64_t> shape, const char* what) {
    if (!status_.ok()) return {};
    Result<Memory> memory = Memory::reserve(Tensor(nullptr, dtype, shape).bytes(), what, stream_);
    if (!memory.ok()) {
      status_ = memory.status();
      return {};
    }
    weights_.placed.push_back(std::move(*memory));
    return weights_.placed.back().tensor(dtype, shape);
  }

  Weights& weights_;
  const Stream& stream_;
  Status status_;
  uint64_t seed_ = 0;
};

ExpertWeights mlp_of(Maker& maker, int64_t intermediate, int64_t hidden, Tensor* gate_up) {
  const Tensor both = maker.matrix(2 * intermediate, hidden, "gate and up projection");
  ExpertWeights mlp;
  mlp.gate = both.rows(0, intermediate);
  mlp.up = both.rows(intermediate, intermediate);
  mlp.down = maker.matrix(hidden, intermediate, "down projection");
  if (gate_up != nullptr) *gate_up = both;
  return mlp;
}

LayerWeights layer_of(Maker& maker, const ModelConfig& config, int64_t index) {
  const int64_t hidden = config.hidden;
  const int64_t rows_q = config.heads_q * config.head_dim, rows_kv = config.heads_kv * config.head_dim;
  LayerWeights layer;
  layer.input_norm = maker.ones(hidden);
  layer.post_attention_norm = maker.ones(hidden);
  if (config.qk_norm) {
    layer.q_norm = maker.ones(config.head_dim);
    layer.k_norm = maker.ones(config.head_dim);
  }
  layer.qkv = maker.matrix(rows_q + 2 * rows_kv, hidden, "q, k and v projection");
  layer.q = layer.qkv.rows(0, rows_q);
  layer.k = layer.qkv.rows(rows_q, rows_kv);
  layer.v = layer.qkv.rows(rows_q + rows_kv, rows_kv);
  layer.o = maker.matrix(hidden, rows_q, "output projection");
  if (!config.is_moe() || !config.sparse_layer[index]) {
    layer.dense = mlp_of(maker, config.intermediate, hidden, &layer.dense_gate_up);
    return layer;
  }
  layer.router.terms[0] = maker.matrix(config.experts, hidden, "router weight");
  layer.router.term_count = 1;
  if (config.architecture == Architecture::hy_v3) {
    layer.expert_bias = maker.random(DType::f32, {config.experts}, 0.01, "expert bias");
  }
  layer.experts_gate_up = maker.stack(config.experts, 2 * config.moe_intermediate, hidden, "experts' gate and up projections");
  layer.experts_down = maker.stack(config.experts, hidden, config.moe_intermediate, "experts' down projections");
  if (config.shared_experts > 0) {
    layer.shared = mlp_of(maker, config.shared_experts * config.moe_intermediate, hidden, nullptr);
  }
  return layer;
}

}  // namespace

Result<std::unique_ptr<Checkpoint>> open_synthetic(std::string_view path) {
  const Named models[] = {{"hy3", hy3(1)},
                          {"hy3@tp8", hy3(8)},
                          {"qwen3-30b-a3b", qwen3_30b()},
                          {"qwen3-235b@tp8", qwen3_235b_tp8()},
                          {"llama3-8b", llama3_8b()}};
  std::string_view rest = path.substr(path.find(':') + 1);
  const size_t comma = rest.find(',');
  const std::string_view name = rest.substr(0, comma);
  std::string names;
  for (const Named& model : models) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", model.name);
    if (model.name != name) continue;
    ModelConfig config = model.config;
    if (comma != std::string_view::npos) {
      constexpr std::string_view kLayers = "layers=";
      const std::string_view option = rest.substr(comma + 1);
      int64_t layers = 0;
      const char* end = option.data() + option.size();
      const bool read = option.starts_with(kLayers) &&
                        std::from_chars(option.data() + kLayers.size(), end, layers).ptr == end;
      if (!read || layers < 1 || layers > config.layers) {
        return invalid_argument("{}: '{}' needs layers=N with N from 1 to {}", path, option, config.layers);
      }
      config.layers = layers;
      if (config.is_moe()) config.sparse_layer.resize(static_cast<size_t>(layers));
    }
    return std::unique_ptr<Checkpoint>(std::make_unique<SyntheticCheckpoint>(std::string(path), std::move(config)));
  }
  return not_found("{}: there is no synthetic model '{}'; there are {}", path, name, names);
}

Result<Weights> synthetic_weights(const ModelConfig& config, const Stream& stream) {
  if (stream.device != Device::cuda) {
    return unsupported("synthetic models are made on a GPU: use --device cuda");
  }
  Weights weights;
  Maker maker(weights, stream);
  weights.embedding = maker.random(DType::bf16, {config.vocab, config.hidden}, 1, "embedding");
  weights.norm = maker.ones(config.hidden);
  // Logits of deviation 4 are as peaked as a language model's.
  weights.lm_head = maker.matrix(config.vocab, config.hidden, "output head", 4);
  for (int64_t l = 0; l < config.layers && maker.status().ok(); ++l) weights.layers.push_back(layer_of(maker, config, l));
  VIVACE_TRY(maker.status());
  VIVACE_TRY(device::synchronize(stream));
  return weights;
}

}  // namespace vivace::model
