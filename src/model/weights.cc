#include "src/model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "src/core/error.h"
#include "src/core/number.h"
#include "src/core/rename.h"
#include "src/ops/quantize_fp8/quantize.h"

namespace vivace::model {

namespace {

constexpr int64_t kPlainTypes = dtypes_mask(DType::f32, DType::f16, DType::bf16);
constexpr int64_t kTableTypes =
    kPlainTypes | dtypes_mask(DType::q4_0, DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k);
constexpr int64_t kMatrixTypes = kTableTypes | dtypes_mask(DType::fp8_e4m3);

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
  /// An embedding or the head, which stay unquantised in fp8 checkpoints.
  Tensor table(const std::string& name, Extent rows, Extent columns) {
    return take(name, {rows, columns}, kTableTypes);
  }
  Tensor matrix(const std::string& name, Extent rows, Extent columns) {
    return take(name, {rows, columns}, kMatrixTypes);
  }
  Tensor stack(const std::string& name, Extent experts, Extent rows, Extent columns) {
    return take(name, {experts, rows, columns}, kMatrixTypes);
  }
  /// A tensor of scales of any shape; the reader checks that.
  Tensor scales(const std::string& name) {
    if (!status_.ok()) return {};
    taken_.insert(name);
    Result<Tensor> found = checkpoint_.tensor(name);
    if (!found.ok()) {
      status_ = found.status();
    } else if ((kPlainTypes >> static_cast<int>(found->dtype) & 1) == 0) {
      status_ = unsupported("{} is {}, needs one of the types {}", name, to_string(*found),
                            type_names(kPlainTypes));
    }
    return status_.ok() ? *found : Tensor();
  }

  bool has(const std::string& name) const { return checkpoint_.has(name); }
  bool static_activations() const { return checkpoint_.config().weight_format == WeightFormat::fp8_static; }
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
          "weights: a {} model with this configuration has no place for tensor '{}' ({} such tensor{})",
          name_of(config.architecture), first.substr(0, 120), count, count == 1 ? "" : "s"));
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

/// A matrix as a checkpoint has it, or those of one expert out of a stack.
struct StoredMatrix {
  Matrix matrix;
  Tensor input_scale;  ///< f32 [1]: what it is multiplied by is quantised with it; absent: with made scales
};

bool is_fp8(const Tensor& weight) {
  return weight.dtype == DType::fp8_e4m3;
}

/// Reads the scales of fp8 matrices. They are f16, bf16 or f32 in files and f32 here; an expert layer has thousands of
/// one number each, so that they share memory.
class ScaleReader {
 public:
  ScaleReader(Binder& from, Weights& weights) : from_(from), weights_(weights) {}

  /// [rows, columns] under `name`, which ends in ".weight", with its scales if it is fp8.
  StoredMatrix matrix(const std::string& name, Extent rows, Extent columns) {
    StoredMatrix stored{.matrix = {.weight = from_.matrix(name, rows, columns)}};
    if (!from_.ok() || !is_fp8(stored.matrix.weight)) return stored;
    const std::string stem = name.substr(0, name.rfind('.'));
    const std::string scale_name = name_of_scale(name, {stem + ".weight_scale", stem + ".weight_scale_inv"});
    const Tensor scale = from_.scales(scale_name);
    if (!from_.ok()) return stored;
    const int64_t block_rows = scale_blocks(rows.value), block_columns = scale_blocks(columns.value);
    if (scale.rank == 2 && scale.shape[0] == block_rows && scale.shape[1] == block_columns) {
      stored.matrix.scale = as_f32(scale, scale_name);
    } else if (scale.elements() == 1) {
      stored.matrix.scale = one_of(scale, scale_name, 1, 0);
      stored.input_scale = given_input({stem + ".input_scale", stem + ".activation_scale"}, 1, 0);
    } else {
      from_.fail(unsupported("{} is {}, needs one element, or [{}, {}] for blocks of 128 x 128 of {}",
                             scale_name, to_string(scale), block_rows, block_columns,
                             to_string(stored.matrix.weight)));
    }
    return stored;
  }

  /// `parts` matrices of [rows, columns] of each expert, one below the other in a stack.
  struct Stack {
    Tensor weight, scale, input_scale;
    int64_t parts, rows;

    StoredMatrix at(int64_t expert, int64_t part) const {
      StoredMatrix stored{.matrix = {.weight = weight.at(expert).rows(part * rows, rows)}};
      if (!scale.present()) return stored;
      if (scale.rank == 3) {
        const int64_t blocks = scale.shape[1] / parts;
        stored.matrix.scale = scale.at(expert).rows(part * blocks, blocks);
        return stored;
      }
      // One for all, one for each expert, or one for each matrix.
      const auto pick = [&](const Tensor& of) {
        const int64_t count = of.elements(), experts = weight.shape[0];
        const int64_t index = count == 1 ? 0 : count == experts ? expert : expert * parts + part;
        return Tensor(of.as<float>() + index, DType::f32, {1});
      };
      stored.matrix.scale = pick(scale);
      if (input_scale.present()) stored.input_scale = pick(input_scale);
      return stored;
    }
  };
  Stack stack(const std::string& name, Extent experts, Extent rows, Extent columns, int64_t parts = 1) {
    const Extent all_rows{parts * rows.value, parts == 1 ? rows.meaning : "2 * moe_intermediate"};
    Stack stack{.weight = from_.stack(name, experts, all_rows, columns), .parts = parts, .rows = rows.value};
    if (!from_.ok() || !is_fp8(stack.weight)) return stack;
    const std::string scale_name = name_of_scale(
        name, {name + "_scale", name + "_scale_inv", name + ".weight_scale", name + ".weight_scale_inv"});
    const Tensor scale = from_.scales(scale_name);
    if (!from_.ok()) return stack;
    const int64_t block_rows = scale_blocks(all_rows.value), block_columns = scale_blocks(columns.value);
    if (scale.rank == 3 && scale.shape[0] == experts.value && scale.shape[1] == block_rows &&
        scale.shape[2] == block_columns) {
      if (parts > 1 && rows.value % kFp8ScaleBlock != 0) {
        from_.fail(unsupported(
            "{}: blocks of 128 rows hold rows of gate and of up, as moe_intermediate is {}, needs a "
            "multiple of 128, or experts stored one by one",
            scale_name, rows.value));
      }
      stack.scale = as_f32(scale, scale_name);
    } else if (scale.rank < 3 && fits_experts(scale, experts.value, parts)) {
      stack.scale = as_f32(scale, scale_name);
      stack.input_scale = given_input({name + "_input_scale", name + "_activation_scale",
                                       name + ".input_scale", name + ".activation_scale"},
                                      experts.value, parts);
    } else {
      from_.fail(unsupported("{} is {}, needs one element, [{}]{}, or [{}, {}, {}] for blocks of 128 x 128",
                             scale_name, to_string(scale), experts.value,
                             parts == 1 ? "" : fmt::format(", [{}, {}]", experts.value, parts), experts.value,
                             block_rows, block_columns));
    }
    return stack;
  }

  /// One number under `name`, if it is there.
  Tensor optional_scale(const std::string& name) {
    return from_.has(name) ? one_of(from_.scales(name), name, 1, 0) : Tensor();
  }
  /// f32 [1] with this value.
  Tensor make(float value) {
    float* at = floats(1);
    *at = value;
    return Tensor(at, DType::f32, {1});
  }

 private:
  static bool fits_experts(const Tensor& scale, int64_t experts, int64_t parts) {
    if (scale.elements() == 1) return true;
    const bool one_column = scale.rank == 1 || (scale.rank == 2 && scale.shape[1] == 1);
    return (one_column && scale.shape[0] == experts) ||
           (parts > 1 && scale.rank == 2 && scale.shape[0] == experts && scale.shape[1] == parts);
  }

  /// The one of `names` that is there.
  std::string name_of_scale(const std::string& weight, std::initializer_list<std::string> names) {
    std::string found;
    for (const std::string& name : names) {
      if (!from_.has(name)) continue;
      if (!found.empty())
        from_.fail(invalid_argument("{} has both {} and {}, needs one of them", weight, found, name));
      found = name;
    }
    if (found.empty()) from_.fail(not_found("{} is fp8 and {} is missing", weight, *names.begin()));
    return found;
  }

  /// The scale that the file gives for what a matrix is multiplied by; absent when it gives none and need not.
  Tensor given_input(std::initializer_list<std::string> names, int64_t experts, int64_t parts) {
    for (const std::string& name : names) {
      if (from_.has(name)) return one_of(from_.scales(name), name, experts, parts);
    }
    if (from_.static_activations()) {
      from_.fail(
          not_found("{} is missing, and quantization_config.activation_scheme is 'static'", *names.begin()));
    }
    return {};
  }

  Tensor one_of(const Tensor& scale, const std::string& name, int64_t experts, int64_t parts) {
    if (!from_.ok()) return {};
    if (fits_experts(scale, experts, parts)) {
      const Tensor values = as_f32(scale, name);
      return values.elements() == 1 ? Tensor(values.data, DType::f32, {1}) : values;
    }
    from_.fail(unsupported("{} is {}, needs one element{}", name, to_string(scale),
                           experts == 1 ? "" : fmt::format(", or one of each of {} experts", experts)));
    return {};
  }

  /// A copy in f32 of the same shape, or [1] for one number; every number must be finite and above 0.
  Tensor as_f32(const Tensor& source, const std::string& name) {
    const int64_t count = source.elements();
    Tensor copy = source;
    copy.dtype = DType::f32;
    copy.data = floats(count);
    if (copy.rank < 2 && count == 1) copy = Tensor(copy.data, DType::f32, {1});
    for (int64_t i = 0; i < count; ++i) {
      const float value = load(source.dtype, source.data, i);
      copy.as<float>()[i] = value;
      if (std::isfinite(value) && value > 0) continue;
      from_.fail(invalid_argument("{}: element {} is {}, needs a finite number > 0", name, i, value));
      return {};
    }
    return copy;
  }

  float* floats(int64_t count) {
    constexpr int64_t kPiece = 4096;
    if (count > left_) {
      left_ = std::max(count, kPiece);
      free_ = reinterpret_cast<float*>(own(weights_, 4 * left_));
    }
    float* at = free_;
    free_ += count;
    left_ -= count;
    return at;
  }

  Binder& from_;
  Weights& weights_;
  float* free_ = nullptr;
  int64_t left_ = 0;
};

/// Finds what the matrices that share an input agree on.
class InputAgreement {
 public:
  explicit InputAgreement(Binder& from) : from_(from) {}

  /// `name` is for messages.
  void add(const std::string& name, const StoredMatrix& stored) {
    if (!agrees(name, stored)) return;
    if (stored.input_scale.present()) largest_ = std::max(largest_, *stored.input_scale.as<const float>());
  }
  /// The same for a matrix whose input is another, but must be quantised in the same way.
  bool agrees(const std::string& name, const StoredMatrix& stored) {
    if (!from_.ok()) return false;
    const BlockInputFormat format = format_of(stored);
    if (first_.empty()) {
      first_ = name;
      format_ = format;
    } else if (format.fp8 != format_.fp8 || format.scaling != format_.scaling) {
      from_.fail(unsupported("{} is {}, but {} is {}; both must be quantised in the same way", name,
                             describe(format), first_, describe(format_)));
    }
    return from_.ok();
  }
  BlockInputFormat finish(ScaleReader& scales) {
    if (from_.ok() && format_.fp8 && format_.scaling == Fp8Scaling::tensor)
      format_.scale = scales.make(largest_);
    return format_;
  }

 private:
  static BlockInputFormat format_of(const StoredMatrix& stored) {
    if (!is_fp8(stored.matrix.weight)) return {};
    if (stored.matrix.scale.rank == 2) return {.fp8 = true, .scaling = Fp8Scaling::block};
    return {.fp8 = true, .scaling = stored.input_scale.present() ? Fp8Scaling::tensor : Fp8Scaling::token};
  }
  static std::string_view describe(const BlockInputFormat& format) {
    if (!format.fp8) return "not fp8";
    if (format.scaling == Fp8Scaling::block) return "fp8 with a scale per 128 x 128";
    return format.scaling == Fp8Scaling::tensor ? "fp8 with one scale and an input_scale"
                                                : "fp8 with one scale and no input_scale";
  }

  Binder& from_;
  std::string first_;
  BlockInputFormat format_;
  float largest_ = 0;
};

BlockInputFormat input_of(Binder& from, ScaleReader& scales,
                          std::initializer_list<std::pair<std::string, const StoredMatrix*>> matrices) {
  InputAgreement agreement(from);
  for (const auto& [name, stored] : matrices) agreement.add(name, *stored);
  return agreement.finish(scales);
}

/// The matrices of an MLP or an expert as a checkpoint has them.
struct StoredMlp {
  StoredMatrix gate, up, down;

  ExpertWeights weights() const {
    return {.gate = gate.matrix.weight,
            .up = up.matrix.weight,
            .down = down.matrix.weight,
            .gate_scale = gate.matrix.scale,
            .up_scale = up.matrix.scale,
            .down_scale = down.matrix.scale,
            .act_scale = down.input_scale};
  }
};

StoredMlp mlp(ScaleReader& scales, const std::string& prefix, Extent intermediate, Extent hidden) {
  return {.gate = scales.matrix(prefix + "gate_proj.weight", intermediate, hidden),
          .up = scales.matrix(prefix + "up_proj.weight", intermediate, hidden),
          .down = scales.matrix(prefix + "down_proj.weight", hidden, intermediate)};
}

/// Experts, the shared one among them, get one x: all must be quantised in one way, and so must what goes into down.
void agree_on_expert(InputAgreement& agreement, const std::string& prefix, const StoredMlp& expert) {
  agreement.add(prefix + "gate_proj", expert.gate);
  agreement.add(prefix + "up_proj", expert.up);
  agreement.agrees(prefix + "down_proj", expert.down);
}

/// The routed experts of one layer from any of the three layouts, as views of single experts.
std::vector<ExpertWeights> routed_experts(Binder& from, ScaleReader& scales, InputAgreement& agreement,
                                          const std::string& prefix, const ModelConfig& config) {
  const Extent hidden{config.hidden, "hidden"}, intermediate{config.moe_intermediate, "moe_intermediate"};
  const Extent count{config.experts, "experts"};
  std::vector<ExpertWeights> experts(static_cast<size_t>(config.experts));
  const bool fused = from.has(prefix + "gate_up_proj");
  if (!fused && !from.has(prefix + "gate_proj")) {
    for (int64_t e = 0; e < config.experts && from.ok(); ++e) {
      const std::string name = fmt::format("{}{}.", prefix, e);
      const StoredMlp expert = mlp(scales, name, intermediate, hidden);
      agree_on_expert(agreement, name, expert);
      experts[e] = expert.weights();
    }
    return experts;
  }
  using Stack = ScaleReader::Stack;
  const Stack both = fused ? scales.stack(prefix + "gate_up_proj", count, intermediate, hidden, 2) : Stack();
  const Stack gate = fused ? Stack() : scales.stack(prefix + "gate_proj", count, intermediate, hidden);
  const Stack up = fused ? Stack() : scales.stack(prefix + "up_proj", count, intermediate, hidden);
  const Stack down = scales.stack(prefix + "down_proj", count, hidden, intermediate);
  if (!from.ok()) return experts;
  for (int64_t e = 0; e < config.experts && from.ok(); ++e) {
    const StoredMlp expert{.gate = fused ? both.at(e, 0) : gate.at(e, 0),
                           .up = fused ? both.at(e, 1) : up.at(e, 0),
                           .down = down.at(e, 0)};
    agree_on_expert(agreement, fmt::format("{}{}.", prefix, e), expert);
    experts[e] = expert.weights();
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

LayerWeights layer_weights(Binder& from, ScaleReader& scales, Weights& weights, const ModelConfig& config,
                           int64_t index, RouterMode mode) {
  const std::string prefix = fmt::format("model.layers.{}.", index);
  const Extent hidden{config.hidden, "hidden"}, head_dim{config.head_dim, "head_dim"};
  const Extent rows_q{config.heads_q * config.head_dim, "heads_q * head_dim"};
  const Extent rows_kv{config.heads_kv * config.head_dim, "heads_kv * head_dim"};

  LayerWeights layer;
  layer.input_norm = from.vector(prefix + "input_layernorm.weight", hidden);
  const std::string attention = prefix + "self_attn.";
  const StoredMatrix q = scales.matrix(attention + "q_proj.weight", rows_q, hidden);
  const StoredMatrix k = scales.matrix(attention + "k_proj.weight", rows_kv, hidden);
  const StoredMatrix v = scales.matrix(attention + "v_proj.weight", rows_kv, hidden);
  const StoredMatrix o = scales.matrix(attention + "o_proj.weight", hidden, rows_q);
  layer.q = q.matrix, layer.k = k.matrix, layer.v = v.matrix, layer.o = o.matrix;
  layer.qkv_input = input_of(
      from, scales, {{attention + "q_proj", &q}, {attention + "k_proj", &k}, {attention + "v_proj", &v}});
  layer.o_input = input_of(from, scales, {{attention + "o_proj", &o}});
  layer.k_scale = scales.optional_scale(attention + "k_scale");
  layer.v_scale = scales.optional_scale(attention + "v_scale");
  if (config.qk_norm) {
    layer.q_norm = from.vector(prefix + "self_attn.q_norm.weight", head_dim);
    layer.k_norm = from.vector(prefix + "self_attn.k_norm.weight", head_dim);
  }
  layer.post_attention_norm = from.vector(prefix + "post_attention_layernorm.weight", hidden);

  const std::string block = prefix + "mlp.";
  if (!config.is_moe() || !config.sparse_layer[index]) {
    const StoredMlp dense = mlp(scales, block, {config.intermediate, "intermediate"}, hidden);
    layer.dense = dense.weights();
    layer.mlp_input =
        input_of(from, scales, {{block + "gate_proj", &dense.gate}, {block + "up_proj", &dense.up}});
    layer.down_input = input_of(from, scales, {{block + "down_proj", &dense.down}});
    return layer;
  }
  layer.router = router(from, weights, block + "router.gate.weight", config, mode);
  if (from.has(block + "expert_bias")) {
    layer.expert_bias = as_f32(weights, from.vector(block + "expert_bias", {config.experts, "experts"}));
  } else if (config.architecture == Architecture::hy_v3) {
    from.fail(not_found("{}expert_bias: no such tensor, and {} routes with one", block,
                        name_of(config.architecture)));
  }
  InputAgreement agreement(from);
  layer.experts = routed_experts(from, scales, agreement, block + "experts.", config);
  if (config.shared_experts > 0) {
    const Extent intermediate{config.shared_experts * config.moe_intermediate,
                              "shared_experts * moe_intermediate"};
    const StoredMlp shared = mlp(scales, block + "shared_mlp.", intermediate, hidden);
    agree_on_expert(agreement, block + "shared_mlp.", shared);
    layer.shared = shared.weights();
  }
  layer.mlp_input = agreement.finish(scales);
  if (layer.mlp_input.fp8 && layer.mlp_input.scaling == Fp8Scaling::token) {
    from.fail(unsupported(
        "{}experts: fp8 experts have one scale and no input_scale, needs one, or scales per 128 x 128",
        block));
  }
  return layer;
}

Result<Weights> bind(const Checkpoint& checkpoint, RouterMode router_mode) {
  const ModelConfig& config = checkpoint.config();
  const Extent hidden{config.hidden, "hidden"}, vocab{config.vocab, "vocab"};
  Binder from(checkpoint);
  Weights weights;
  ScaleReader scales(from, weights);
  weights.embedding = from.table("model.embed_tokens.weight", vocab, hidden);
  weights.norm = from.vector("model.norm.weight", hidden);
  weights.lm_head = config.tied_embeddings ? weights.embedding : from.table("lm_head.weight", vocab, hidden);
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
    weights.layers.push_back(layer_weights(from, scales, weights, config, l, router_mode));
  }
  from.refuse_leftovers();
  VIVACE_TRY(from.status());
  return weights;
}

/// The message with tensors, and what their names have in front of the last dot, as the files call them.
Status in_names_of_files(const Status& status, const Checkpoint& checkpoint) {
  const std::vector<std::string> names = checkpoint.tensor_names();
  std::vector<std::pair<std::string_view, std::string>> known;
  for (const std::string_view name : names) {
    const std::string in_files = checkpoint.name_in_files(name);
    if (in_files == name) continue;
    known.emplace_back(name, in_files);
    const size_t dot = name.rfind('.'), dot_in_files = in_files.rfind('.');
    if (dot == std::string_view::npos || dot_in_files == std::string::npos) continue;
    if (name.substr(dot) == std::string_view(in_files).substr(dot_in_files)) {
      known.emplace_back(name.substr(0, dot), in_files.substr(0, dot_in_files));
    }
  }
  return Status(status.code(), renamed(status.message(), known));
}

}  // namespace

Result<Weights> bind_weights(const Checkpoint& checkpoint, RouterMode router_mode) {
  Result<Weights> weights = bind(checkpoint, router_mode);
  if (!weights.ok()) return in_names_of_files(weights.status(), checkpoint);
  return weights;
}

int64_t complete_kv_scales(Weights& weights) {
  const Tensor one(own(weights, 4), DType::f32, {1});
  *one.as<float>() = 1;
  int64_t layers = 0;
  for (LayerWeights& layer : weights.layers) {
    layers += !layer.k_scale.present() || !layer.v_scale.present();
    if (!layer.k_scale.present()) layer.k_scale = one;
    if (!layer.v_scale.present()) layer.v_scale = one;
  }
  return layers;
}

}  // namespace vivace::model
