#include "src/model/synthetic.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "src/core/error.h"
#include "src/device/random.h"
#include "src/ops/quantize_fp8/quantize.h"

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
  c.weight_format = WeightFormat::fp8_block128;
  c.sparse_layer.assign(static_cast<size_t>(c.layers), true);
  return c;
}

ModelConfig qwen3_235b_tp8() {
  ModelConfig c = qwen3_30b();
  c.layers = 94, c.hidden = 4096, c.vocab = 151936 / 8;
  c.heads_q = 64 / 8, c.heads_kv = 1;  // four KV heads, each on two ranks
  c.moe_intermediate = 1536 / 8;
  c.weight_format = WeightFormat::fp8_static;  // a slice of 192 is no whole number of blocks
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
  c.weight_format = WeightFormat::fp8_static;
  c.router_score = RouterScore::sigmoid;
  c.router_scale = 2.826;
  return c;
}

class SyntheticCheckpoint final : public Checkpoint {
 public:
  SyntheticCheckpoint(std::string name, ModelConfig config)
      : name_(std::move(name)), config_(std::move(config)) {}
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
    return fmt::format("{}, random weights ({}), {} layers", name_,
                       config_.weight_format == WeightFormat::plain ? "bf16" : name_of(config_.weight_format),
                       config_.layers);
  }
  bool synthetic() const override { return true; }

 private:
  std::string name_;
  ModelConfig config_;
  TokenizerSource tokenizer_;
};

// Stored fp8 values have this deviation: seven of them fit below 448.
constexpr double kFp8Deviation = 64;
// What static scales let activations reach, in units of the deviation 1 that they have behind a norm; and what they let
// silu(gate) * up reach, whose tail is longer.
constexpr double kActivationRange = 8, kGatedRange = 32;

/// Makes tensors on the device, each from the next seed. The first failure is kept.
class Maker {
 public:
  Maker(Weights& weights, WeightFormat format, const Stream& stream)
      : weights_(weights), format_(format), stream_(stream) {}

  bool fp8() const { return format_ != WeightFormat::plain; }
  bool blocks() const { return format_ == WeightFormat::fp8_block128; }

  Tensor random(DType dtype, std::initializer_list<int64_t> shape, double deviation, const char* what) {
    const Tensor tensor = make(dtype, shape, what);
    if (status_.ok() && !only_shapes(stream_))
      status_ = device::fill_normal(tensor, static_cast<float>(deviation), ++seed_, stream_);
    return tensor;
  }
  /// A matrix whose products with values of deviation 1 have this deviation, in bf16 whatever the format.
  Tensor plain(int64_t rows, int64_t columns, const char* what, double deviation = 1) {
    return random(DType::bf16, {rows, columns}, deviation / std::sqrt(static_cast<double>(columns)), what);
  }
  /// A matrix of the format whose products with values of deviation 1 have deviation 1.
  Matrix matrix(int64_t rows, int64_t columns, const char* what) {
    if (!fp8()) return {.weight = plain(rows, columns, what)};
    const Tensor weight = random(DType::fp8_e4m3, {rows, columns}, kFp8Deviation, what);
    return {.weight = weight,
            .scale = blocks() ? filled({scale_blocks(rows), scale_blocks(columns)}, scale_of(columns))
                              : filled({1}, scale_of(columns))};
  }
  Tensor stack(int64_t experts, int64_t rows, int64_t columns, const char* what) {
    const double deviation = fp8() ? kFp8Deviation : 1 / std::sqrt(static_cast<double>(columns));
    return random(fp8() ? DType::fp8_e4m3 : DType::bf16, {experts, rows, columns}, deviation, what);
  }
  /// What the values of a matrix with these columns are multiplied by.
  static double scale_of(int64_t columns) {
    return 1 / (kFp8Deviation * std::sqrt(static_cast<double>(columns)));
  }
  /// The input of matrices of the format, when its values stay below `range`.
  BlockInputFormat input(double range = kActivationRange) {
    if (!fp8()) return {};
    if (blocks()) return {.fp8 = true, .scaling = Fp8Scaling::block};
    return {.fp8 = true, .scaling = Fp8Scaling::tensor, .scale = filled({1}, range / kFp8Max)};
  }
  /// f32 with one value everywhere.
  Tensor filled(std::initializer_list<int64_t> shape, double value, const char* what = "scale") {
    const Tensor tensor = make(DType::f32, shape, what);
    if (!status_.ok() || only_shapes(stream_)) return tensor;
    const std::vector<float> values(static_cast<size_t>(tensor.elements()), static_cast<float>(value));
    status_ = device::copy_to_device(tensor.data, values.data(), tensor.bytes(), stream_);
    if (status_.ok()) status_ = device::synchronize(stream_);
    return tensor;
  }
  Tensor ones(int64_t count) { return filled({count}, 1, "norm weight"); }
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
  WeightFormat format_;
  const Stream& stream_;
  Status status_;
  uint64_t seed_ = 0;
};

/// gate and up as one matrix and as two, in `joined` and in the result. With a scale each, as checkpoints have them,
/// they are two.
ExpertWeights mlp_of(Maker& maker, int64_t intermediate, int64_t hidden, Matrix* joined) {
  ExpertWeights mlp;
  const bool together = !maker.fp8() || (maker.blocks() && intermediate % kFp8ScaleBlock == 0);
  if (together) {
    const Matrix both = maker.matrix(2 * intermediate, hidden, "gate and up projection");
    mlp.gate = both.weight.rows(0, intermediate);
    mlp.up = both.weight.rows(intermediate, intermediate);
    if (maker.fp8()) {
      const int64_t blocks = intermediate / kFp8ScaleBlock;
      mlp.gate_scale = both.scale.rows(0, blocks);
      mlp.up_scale = both.scale.rows(blocks, blocks);
    }
    if (joined != nullptr) *joined = both;
  } else {
    const Matrix gate = maker.matrix(intermediate, hidden, "gate projection");
    const Matrix up = maker.matrix(intermediate, hidden, "up projection");
    mlp.gate = gate.weight, mlp.gate_scale = gate.scale;
    mlp.up = up.weight, mlp.up_scale = up.scale;
  }
  const Matrix down = maker.matrix(hidden, intermediate, "down projection");
  mlp.down = down.weight, mlp.down_scale = down.scale;
  mlp.act_scale = maker.input(kGatedRange).scale;
  return mlp;
}

void make_expert_scales(Maker& maker, const ModelConfig& config, LayerWeights& layer) {
  const int64_t experts = config.experts, intermediate = config.moe_intermediate;
  const double up = Maker::scale_of(config.hidden), down = Maker::scale_of(intermediate);
  if (maker.blocks()) {
    const int64_t blocks = scale_blocks(intermediate), hidden_blocks = scale_blocks(config.hidden);
    layer.experts_gate_up_scale = maker.filled({experts, 2, blocks, hidden_blocks}, up);
    layer.experts_down_scale = maker.filled({experts, hidden_blocks, blocks}, down);
  } else {
    layer.experts_gate_up_scale = maker.filled({experts, 2}, up);
    layer.experts_down_scale = maker.filled({experts}, down);
    layer.experts_act_scale = maker.filled({experts}, kGatedRange / kFp8Max);
  }
}

void make_attention(Maker& maker, const ModelConfig& config, LayerWeights& layer) {
  const int64_t hidden = config.hidden;
  const int64_t rows_q = config.heads_q * config.head_dim, rows_kv = config.heads_kv * config.head_dim;
  if (!maker.fp8() || (maker.blocks() && rows_q % kFp8ScaleBlock == 0 && rows_kv % kFp8ScaleBlock == 0)) {
    layer.qkv = maker.matrix(rows_q + 2 * rows_kv, hidden, "q, k and v projection");
  } else {
    layer.q = maker.matrix(rows_q, hidden, "q projection");
    layer.k = maker.matrix(rows_kv, hidden, "k projection");
    layer.v = maker.matrix(rows_kv, hidden, "v projection");
  }
  layer.o = maker.matrix(hidden, rows_q, "output projection");
  layer.qkv_input = maker.input();
  layer.o_input = maker.input();
  layer.k_scale = maker.filled({1}, kActivationRange / kFp8Max);
  layer.v_scale = maker.filled({1}, kActivationRange / kFp8Max);
}

LayerWeights layer_of(Maker& maker, const ModelConfig& config, int64_t index) {
  const int64_t hidden = config.hidden;
  LayerWeights layer;
  layer.input_norm = maker.ones(hidden);
  layer.post_attention_norm = maker.ones(hidden);
  if (config.qk_norm) {
    layer.q_norm = maker.ones(config.head_dim);
    layer.k_norm = maker.ones(config.head_dim);
  }
  make_attention(maker, config, layer);
  layer.mlp_input = maker.input();
  if (!config.is_moe() || !config.sparse_layer[index]) {
    layer.dense = mlp_of(maker, config.intermediate, hidden, &layer.dense_gate_up);
    layer.down_input = maker.input(kGatedRange);
    return layer;
  }
  layer.router.terms[0] = maker.plain(config.experts, hidden, "router weight");
  layer.router.term_count = 1;
  if (config.architecture == Architecture::hy_v3) {
    layer.expert_bias = maker.random(DType::f32, {config.experts}, 0.01, "expert bias");
  }
  layer.experts_gate_up =
      maker.stack(config.experts, 2 * config.moe_intermediate, hidden, "experts' gate and up projections");
  layer.experts_down =
      maker.stack(config.experts, hidden, config.moe_intermediate, "experts' down projections");
  if (maker.fp8()) make_expert_scales(maker, config, layer);
  if (config.shared_experts > 0) {
    layer.shared = mlp_of(maker, config.shared_experts * config.moe_intermediate, hidden, nullptr);
  }
  return layer;
}

/// Reads "layers=N" or "dtype=NAME" into `config`.
Status apply_option(std::string_view path, std::string_view option, ModelConfig& config) {
  const size_t equals = std::min(option.find('='), option.size());
  const std::string_view key = option.substr(0, equals),
                         value = option.substr(std::min(equals + 1, option.size()));
  if (key == "layers") {
    int64_t layers = 0;
    const bool read =
        std::from_chars(value.data(), value.data() + value.size(), layers).ptr == value.data() + value.size();
    if (!read || layers < 1 || layers > config.layers) {
      return invalid_argument("{}: '{}' needs layers=N with N from 1 to {}", path, option, config.layers);
    }
    config.layers = layers;
    if (config.is_moe()) config.sparse_layer.resize(static_cast<size_t>(layers));
    return {};
  }
  constexpr std::pair<std::string_view, WeightFormat> kFormats[] = {
      {"bf16", WeightFormat::plain},
      {"fp8", WeightFormat::fp8_static},
      {"fp8-block128", WeightFormat::fp8_block128}};
  for (const auto& [name, format] : kFormats) {
    if (key != "dtype" || value != name) continue;
    config.weight_format = format;
    return {};
  }
  return invalid_argument("{}: '{}' needs layers=N, or dtype= with bf16, fp8 or fp8-block128", path, option);
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
    std::vector<std::string_view> given;
    for (size_t at = comma; at < rest.size();) {
      const size_t end = std::min(rest.find(',', at + 1), rest.size());
      const std::string_view option = rest.substr(at + 1, end - at - 1),
                             key = option.substr(0, option.find('='));
      if (std::ranges::find(given, key) != given.end())
        return invalid_argument("{}: '{}' is given twice", path, key);
      given.push_back(key);
      VIVACE_TRY(apply_option(path, option, config));
      at = end;
    }
    return std::unique_ptr<Checkpoint>(
        std::make_unique<SyntheticCheckpoint>(std::string(path), std::move(config)));
  }
  return not_found("{}: there is no synthetic model '{}'; there are {}", path, name, names);
}

Result<Weights> synthetic_weights(const ModelConfig& config, const Stream& stream) {
  if (stream.device != Device::cuda) {
    return unsupported("device is '{}', needs cuda: random weights are made on a GPU",
                       name_of(stream.device));
  }
  Weights weights;
  Maker maker(weights, config.weight_format, stream);
  weights.embedding = maker.random(DType::bf16, {config.vocab, config.hidden}, 1, "embedding");
  weights.norm = maker.ones(config.hidden);
  // Logits of deviation 4 are as peaked as a language model's.
  weights.lm_head = maker.plain(config.vocab, config.hidden, "output head", 4);
  for (int64_t l = 0; l < config.layers && maker.status().ok(); ++l)
    weights.layers.push_back(layer_of(maker, config, l));
  VIVACE_TRY(maker.status());
  if (!only_shapes(stream)) VIVACE_TRY(device::synchronize(stream));
  return weights;
}

}  // namespace vivace::model
