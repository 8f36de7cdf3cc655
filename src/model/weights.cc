#include "src/model/weights.h"

#include <fmt/format.h>

#include <cmath>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "src/core/error.h"
#include "src/core/number.h"

namespace vivace::model {

namespace {

constexpr int64_t kPlainTypes = dtypes_mask(DType::f32, DType::f16, DType::bf16);
constexpr int64_t kMatrixTypes =
    kPlainTypes | dtypes_mask(DType::q4_0, DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k);

/// An extent and what it means, for messages.
struct Extent {
  int64_t value;
  std::string_view meaning;
};

std::string type_names(int64_t mask) {
  std::string names;
  for (int type = 0; type < 64; ++type) {
    if ((mask >> type & 1) == 0) continue;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", name_of(static_cast<DType>(type)));
  }
  return names;
}

/// Takes tensors out of a checkpoint. The first failure is kept and later calls do nothing, so that a list of tensors
/// reads as one.
class Binder {
 public:
  explicit Binder(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  Tensor take(const std::string& name, std::initializer_list<Extent> needs, int64_t types) {
    if (!status_.ok()) return {};
    taken_.insert(name);
    Result<Tensor> found = checkpoint_.tensor(name);
    if (!found.ok()) {
      status_ = found.status();
      return {};
    }
    const Tensor tensor = *found;
    bool fits = tensor.rank == static_cast<int>(needs.size());
    std::string shape;
    int axis = 0;
    for (const Extent& need : needs) {
      fits = fits && tensor.shape[axis++] == need.value;
      shape += fmt::format("{}{} = {}", shape.empty() ? "" : ", ", need.meaning, need.value);
    }
    if (!fits) {
      status_ = invalid_argument("{} is {}, needs [{}]", name, to_string(tensor), shape);
    } else if ((types >> static_cast<int>(tensor.dtype) & 1) == 0) {
      status_ =
          unsupported("{} is {}, needs one of the types {}", name, to_string(tensor), type_names(types));
    }
    return status_.ok() ? tensor : Tensor();
  }
  Tensor vector(const std::string& name, Extent needs) { return take(name, {needs}, kPlainTypes); }
  Tensor matrix(const std::string& name, Extent rows, Extent columns) {
    return take(name, {rows, columns}, kMatrixTypes);
  }
  Tensor stack(const std::string& name, Extent experts, Extent rows, Extent columns) {
    return take(name, {experts, rows, columns}, kMatrixTypes);
  }

  bool has(const std::string& name) const { return checkpoint_.has(name); }
  bool ok() const { return status_.ok(); }
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  const Status& status() const { return status_; }

  /// Fails on tensors that nothing took: a bias or a norm that is left out changes every result.
  void refuse_leftovers() {
    const ModelConfig& config = checkpoint_.config();
    // Some writers store the head of a tied model a second time.
    if (config.tied_embeddings) taken_.insert("lm_head.weight");
    std::string first;
    int64_t count = 0;
    for (const std::string& name : checkpoint_.tensor_names()) {
      if (taken_.contains(name)) continue;
      if (count++ == 0) first = name;
    }
    if (count > 0) {
      fail(unsupported(
          "weights: a {} model with this configuration has no place for tensor '{}' ({} such tensors)",
          name_of(config.architecture), first.substr(0, 120), count));
    }
  }

 private:
  const Checkpoint& checkpoint_;
  std::set<std::string> taken_;
  Status status_;
};

uint8_t* own(Weights& weights, int64_t bytes) {
  weights.owned.push_back(std::make_unique<uint8_t[]>(static_cast<size_t>(bytes)));
  return weights.owned.back().get();
}

/// A small vector as f32: itself, or a converted copy.
Tensor as_f32(Weights& weights, const Tensor& source) {
  if (!source.present() || source.dtype == DType::f32) return source;
  const Tensor copy(own(weights, 4 * source.shape[0]), DType::f32, {source.shape[0]});
  for (int64_t i = 0; i < source.shape[0]; ++i) copy.as<float>()[i] = load(source.dtype, source.data, i);
  return copy;
}

ExpertWeights mlp(Binder& from, const std::string& prefix, Extent intermediate, Extent hidden) {
  return {.gate = from.matrix(prefix + "gate_proj.weight", intermediate, hidden),
          .up = from.matrix(prefix + "up_proj.weight", intermediate, hidden),
          .down = from.matrix(prefix + "down_proj.weight", hidden, intermediate)};
}

/// The routed experts of one layer from any of the three layouts, as views of single experts.
std::vector<ExpertWeights> routed_experts(Binder& from, const std::string& prefix,
                                          const ModelConfig& config) {
  const Extent hidden{config.hidden, "hidden"}, intermediate{config.moe_intermediate, "moe_intermediate"};
  const Extent count{config.experts, "experts"};
  std::vector<ExpertWeights> experts(static_cast<size_t>(config.experts));
  const bool fused = from.has(prefix + "gate_up_proj");
  if (!fused && !from.has(prefix + "gate_proj")) {
    for (int64_t e = 0; e < config.experts && from.ok(); ++e) {
      experts[e] = mlp(from, fmt::format("{}{}.", prefix, e), intermediate, hidden);
    }
    return experts;
  }
  const Extent both{2 * config.moe_intermediate, "2 * moe_intermediate"};
  const Tensor gate_up = fused ? from.stack(prefix + "gate_up_proj", count, both, hidden) : Tensor();
  const Tensor gate = fused ? Tensor() : from.stack(prefix + "gate_proj", count, intermediate, hidden);
  const Tensor up = fused ? Tensor() : from.stack(prefix + "up_proj", count, intermediate, hidden);
  const Tensor down = from.stack(prefix + "down_proj", count, hidden, intermediate);
  if (!from.ok()) return experts;
  for (int64_t e = 0; e < config.experts; ++e) {
    experts[e].gate = fused ? gate_up.at(e).rows(0, config.moe_intermediate) : gate.at(e);
    experts[e].up = fused ? gate_up.at(e).rows(config.moe_intermediate, config.moe_intermediate) : up.at(e);
    experts[e].down = down.at(e);
  }
  return experts;
}

RouterWeight router(Binder& from, Weights& weights, const std::string& name, const ModelConfig& config,
                    RouterMode mode) {
  const Tensor weight =
      from.take(name, {{config.experts, "experts"}, {config.hidden, "hidden"}}, kPlainTypes);
  if (!from.ok()) return {};
  RouterWeightSource source{.weight = weight, .mode = mode};
  if (const int64_t bytes = router_weight_bytes(source); bytes > 0) {
    source.storage = Tensor(own(weights, bytes), DType::u8, {bytes});
  }
  Result<RouterWeight> prepared = prepare_router_weight(source);
  if (!prepared.ok()) {
    from.fail(prepared.status().at(name));
    return {};
  }
  return *prepared;
}

LayerWeights layer_weights(Binder& from, Weights& weights, const ModelConfig& config, int64_t index,
                           RouterMode mode) {
  const std::string prefix = fmt::format("model.layers.{}.", index);
  const Extent hidden{config.hidden, "hidden"}, head_dim{config.head_dim, "head_dim"};
  const Extent rows_q{config.heads_q * config.head_dim, "heads_q * head_dim"};
  const Extent rows_kv{config.heads_kv * config.head_dim, "heads_kv * head_dim"};

  LayerWeights layer;
  layer.input_norm = from.vector(prefix + "input_layernorm.weight", hidden);
  layer.q = from.matrix(prefix + "self_attn.q_proj.weight", rows_q, hidden);
  layer.k = from.matrix(prefix + "self_attn.k_proj.weight", rows_kv, hidden);
  layer.v = from.matrix(prefix + "self_attn.v_proj.weight", rows_kv, hidden);
  layer.o = from.matrix(prefix + "self_attn.o_proj.weight", hidden, rows_q);
  if (config.qk_norm) {
    layer.q_norm = from.vector(prefix + "self_attn.q_norm.weight", head_dim);
    layer.k_norm = from.vector(prefix + "self_attn.k_norm.weight", head_dim);
  }
  layer.post_attention_norm = from.vector(prefix + "post_attention_layernorm.weight", hidden);

  const std::string block = prefix + "mlp.";
  if (!config.is_moe() || !config.sparse_layer[index]) {
    layer.dense = mlp(from, block, {config.intermediate, "intermediate"}, hidden);
    return layer;
  }
  layer.router = router(from, weights, block + "router.gate.weight", config, mode);
  if (from.has(block + "expert_bias")) {
    layer.expert_bias = as_f32(weights, from.vector(block + "expert_bias", {config.experts, "experts"}));
  } else if (config.architecture == Architecture::hy_v3) {
    from.fail(not_found("{}expert_bias: no such tensor, and {} routes with one", block,
                        name_of(config.architecture)));
  }
  layer.experts = routed_experts(from, block + "experts.", config);
  if (config.shared_experts > 0) {
    layer.shared =
        mlp(from, block + "shared_mlp.",
            {config.shared_experts * config.moe_intermediate, "shared_experts * moe_intermediate"}, hidden);
  }
  return layer;
}

}  // namespace

Result<Weights> bind_weights(const Checkpoint& checkpoint, RouterMode router_mode) {
  const ModelConfig& config = checkpoint.config();
  const Extent hidden{config.hidden, "hidden"}, vocab{config.vocab, "vocab"};
  Binder from(checkpoint);
  Weights weights;
  weights.embedding = from.matrix("model.embed_tokens.weight", vocab, hidden);
  weights.norm = from.vector("model.norm.weight", hidden);
  weights.lm_head = config.tied_embeddings ? weights.embedding : from.matrix("lm_head.weight", vocab, hidden);
  if (from.has("rope_freqs.weight")) {
    const Tensor factors = from.vector("rope_freqs.weight", {config.rotary_dim / 2, "rotary_dim / 2"});
    for (int64_t i = 0; from.ok() && i < factors.shape[0]; ++i) {
      const double factor = load(factors.dtype, factors.data, i);
      if (!std::isfinite(factor) || factor <= 0) {
        from.fail(invalid_argument("rope_freqs.weight[{}] is {}, needs a finite number > 0", i, factor));
      }
      weights.rope_factors.push_back(factor);
    }
  }
  for (int64_t l = 0; l < config.layers && from.ok(); ++l) {
    weights.layers.push_back(layer_weights(from, weights, config, l, router_mode));
  }
  from.refuse_leftovers();
  VIVACE_TRY(from.status());
  return weights;
}

}  // namespace vivace::model
