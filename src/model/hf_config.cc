#include <algorithm>
#include <nlohmann/json.hpp>

#include "src/core/error.h"
#include "src/core/rename.h"
#include "src/model/config.h"
#include "src/model/json.h"

// config.json and generation_config.json, as transformers 4 and 5 write them.

namespace vivace::model {

namespace {

using nlohmann::json;

constexpr int64_t kMaxId = INT32_MAX;

// The fields of ModelConfig as the file calls them.
const std::pair<std::string_view, std::string> kKeys[] = {
    {"layers", "num_hidden_layers"},
    {"hidden", "hidden_size"},
    {"vocab", "vocab_size"},
    {"heads_q", "num_attention_heads"},
    {"heads_kv", "num_key_value_heads"},
    {"rotary_dim", "head_dim"},
    {"intermediate", "intermediate_size"},
    {"max_position", "max_position_embeddings"},
    {"rms_eps", "rms_norm_eps"},
    {"rope_scaling.original_max_position", "rope_scaling.original_max_position_embeddings"},
    {"experts", "num_experts"},
    {"top_k", "num_experts_per_tok"},
    {"moe_intermediate", "moe_intermediate_size"},
    {"shared_experts", "num_shared_experts"},
    {"router_scale", "router_scaling_factor"},
    {"bos_id", "bos_token_id"},
    {"pad_id", "pad_token_id"},
    {"eos_id", "eos_token_id"},
};

// What transformers' configuration class of a model says about fields that its files may leave out.
struct ClassDefaults {
  const char* model_type;
  Architecture architecture;
  double rms_eps;
  double rope_theta;
  int64_t max_position;
  int64_t heads_kv;      // 0: as many as query heads
  int64_t intermediate;  // 0: must be present
  int64_t top_k, moe_intermediate, shared_experts;
};

constexpr ClassDefaults kClasses[] = {
    {"llama", Architecture::llama, 1e-6, 10000, 2048, 0, 0, 0, 0, 0},
    {"qwen3_moe", Architecture::qwen3_moe, 1e-6, 10000, 32768, 4, 6144, 8, 768, 0},
    {"hy_v3", Architecture::hy_v3, 1e-5, 11158840, 131072, 8, 13312, 8, 1536, 1},
};

Result<ClassDefaults> class_of(const std::string& place, JsonFields& fields) {
  const std::string model_type = fields.text("model_type", "");
  VIVACE_TRY(fields.status());
  for (const ClassDefaults& c : kClasses)
    if (model_type == c.model_type) return c;
  if (model_type.empty())
    return invalid_argument("{}: model_type is missing, needs llama, qwen3_moe or hy_v3", place);
  return unsupported("{}: model_type is '{}', needs llama, qwen3_moe or hy_v3", place, model_type);
}

// Features that a file may ask for and that would change the result if they were ignored.
Status refuse_unknown_features(const std::string& place, JsonFields& fields) {
  for (const char* field : {"attention_bias", "mlp_bias", "qkv_bias"})
    if (fields.boolean(field, false))
      return unsupported("{}: {} is true, needs false (no biases)", place, field);
  if (const std::string act = fields.text("hidden_act", "silu"); act != "silu")
    return unsupported("{}: hidden_act is '{}', needs silu", place, act);
  for (const char* field : {"n_group", "topk_group", "num_expert_group"})
    if (const int64_t groups = fields.integer(field, 0, limits::kMaxExperts, 1); groups > 1)
      return unsupported("{}: {} is {}, needs 1 (no group-limited routing)", place, field, groups);
  if (!fields.boolean("moe_router_use_sigmoid", true))
    return unsupported("{}: moe_router_use_sigmoid is false, needs true", place);
  if (const double part = fields.number("partial_rotary_factor", 1.0); part != 1.0)
    return unsupported("{}: partial_rotary_factor is {}, needs 1", place, part);
  return fields.status();
}

// Modules that stay unquantised. Whether a matrix is fp8 is seen from its tensors, so the names are only checked.
Status check_module_list(const std::string& place, const JsonFields& fields, const char* field) {
  const json* list = fields.find(field);
  if (list == nullptr) return {};
  const auto is_name = [](const json& entry) { return entry.is_string(); };
  if (list->is_array() && std::all_of(list->begin(), list->end(), is_name)) return {};
  return invalid_argument("{}: {} is {}, needs a list of module names", place, field, excerpt(*list));
}

// "static", or {"num_bits": 8, "type": "float", ...}. Scales are looked for among the tensors.
Status check_kv_cache_scheme(const std::string& place, const JsonFields& fields) {
  const json* scheme = fields.find("kv_cache_scheme");
  if (scheme == nullptr || scheme->is_string()) return {};
  if (!scheme->is_object()) {
    return invalid_argument("{}: kv_cache_scheme is {}, needs a string or an object", place,
                            excerpt(*scheme));
  }
  JsonFields object(fmt::format("{}: kv_cache_scheme", place), *scheme);
  const int64_t bits = object.integer("num_bits", 1, 64, 8);
  const std::string type = object.text("type", "float");
  VIVACE_TRY(object.status());
  if (bits == 8 && type == "float") return {};
  return unsupported("{}: kv_cache_scheme has num_bits {} and type '{}', needs 8 and 'float'", place, bits,
                     type);
}

Result<WeightFormat> read_quantisation(const std::string& config_place, const JsonFields& config) {
  const json* value = config.find("quantization_config");
  if (value == nullptr) return WeightFormat::plain;
  const std::string place = fmt::format("{}: quantization_config", config_place);
  if (!value->is_object()) return unsupported("{} is {}, needs an object", place, excerpt(*value));
  JsonFields fields(place, *value);
  const std::string method = fields.text("quant_method", "");
  const std::string scheme = fields.text("activation_scheme", "dynamic"), number = fields.text("fmt", "e4m3");
  VIVACE_TRY(fields.status());
  if (method != "fp8") {
    return unsupported("{} has quant_method '{}', needs fp8 or an unquantised checkpoint (bf16, f16, f32)",
                       place, method);
  }
  if (number != "e4m3") return unsupported("{}.fmt is '{}', needs e4m3", place, number);
  if (scheme != "static" && scheme != "dynamic") {
    return unsupported("{}.activation_scheme is '{}', needs static or dynamic", place, scheme);
  }
  for (const char* list : {"ignored_layers", "modules_to_not_convert"}) {
    VIVACE_TRY(check_module_list(place, fields, list));
  }
  VIVACE_TRY(check_kv_cache_scheme(place, fields));
  const json* block = fields.find("weight_block_size");
  if (block == nullptr) return scheme == "static" ? WeightFormat::fp8_static : WeightFormat::fp8_dynamic;
  if (*block != json::array({128, 128})) {
    return unsupported("{}.weight_block_size is {}, needs [128, 128], or null for one scale per tensor",
                       place, block->dump().substr(0, 60));
  }
  if (scheme == "static") {
    return unsupported("{}.activation_scheme is 'static' with blocks of weights, needs dynamic", place);
  }
  return WeightFormat::fp8_block128;
}

// transformers 4: rope_theta and rope_scaling beside each other; 5: both inside rope_parameters.
Status read_rope(const std::string& place, JsonFields& fields, const ClassDefaults& defaults,
                 ModelConfig& config) {
  config.rope_theta = fields.number("rope_theta", defaults.rope_theta);
  config.rope_style = RopeStyle::neox;
  config.rotary_dim = config.head_dim;
  const char* name = fields.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const json* object = fields.find(name);
  if (object == nullptr) return fields.status();
  if (name == std::string_view("rope_parameters")) {  // what stands beside it must say the same
    const json* scaling = fields.find("rope_scaling");
    if (scaling != nullptr && *scaling != *object) {
      return invalid_argument(
          "{}: rope_scaling is {} and rope_parameters {}, needs one of them, or both alike", place,
          excerpt(*scaling), excerpt(*object));
    }
    if (fields.has("rope_theta") && object->is_object() && object->contains("rope_theta") &&
        (*object)["rope_theta"] != *fields.find("rope_theta")) {
      return invalid_argument("{}: rope_theta is {} and rope_parameters.rope_theta {}, needs both alike",
                              place, excerpt(*fields.find("rope_theta")), excerpt((*object)["rope_theta"]));
    }
  }
  if (!object->is_object())
    return invalid_argument("{}: {} is {}, needs an object", place, name, excerpt(*object));
  for (const auto& [key, value] : object->items())
    if (value.is_object())
      return unsupported("{}: {}.{} is an object, needs one set of values for all layers", place, name, key);

  JsonFields rope(fmt::format("{}: {}", place, name), *object);
  const std::string type = rope.text(rope.has("rope_type") ? "rope_type" : "type", "default");
  config.rope_theta = rope.number("rope_theta", config.rope_theta);
  if (const double part = rope.number("partial_rotary_factor", 1.0); part != 1.0)
    return unsupported("{}: {}.partial_rotary_factor is {}, needs 1", place, name, part);
  VIVACE_TRY(rope.status());
  RopeScaling& scaling = config.rope_scaling;
  scaling.type = type;
  if (type == "default") return fields.status();
  if (type != "linear" && type != "llama3")
    return unsupported("{}: {}.rope_type is '{}', needs default, linear or llama3", place, name, type);
  scaling.factor = rope.number("factor");
  if (type == "llama3") {
    scaling.low_freq_factor = rope.number("low_freq_factor");
    scaling.high_freq_factor = rope.number("high_freq_factor");
    scaling.original_max_position =
        rope.integer("original_max_position_embeddings", 1, limits::kMaxPosition, config.max_position);
  }
  VIVACE_TRY(rope.status());
  return fields.status();
}

Result<std::vector<bool>> layer_types(const std::string& place, const json& list, int64_t layers) {
  if (!list.is_array() || static_cast<int64_t>(list.size()) != layers)
    return invalid_argument(
        "{}: mlp_layer_types is {}, needs a list with one of 'dense', 'sparse' per layer ({})", place,
        excerpt(list), layers);
  std::vector<bool> sparse;
  for (const json& entry : list) {
    if (entry != "dense" && entry != "sparse")
      return invalid_argument("{}: mlp_layer_types[{}] is {}, needs 'dense' or 'sparse'", place,
                              sparse.size(), excerpt(entry));
    sparse.push_back(entry == "sparse");
  }
  return sparse;
}

Result<std::vector<bool>> sparse_layers(const std::string& place, JsonFields& fields,
                                        const ModelConfig& config) {
  if (const json* list = fields.find("mlp_layer_types")) return layer_types(place, *list, config.layers);
  std::vector<bool> sparse(config.layers, true);
  if (config.architecture == Architecture::hy_v3) {
    const int64_t dense = fields.integer("first_k_dense_replace", 0, config.layers, 1);
    VIVACE_TRY(fields.status());
    std::fill_n(sparse.begin(), dense, false);
    return sparse;
  }
  const int64_t step = fields.integer("decoder_sparse_step", 1, limits::kMaxLayers, 1);
  VIVACE_TRY(fields.status());
  for (int64_t i = 0; i < config.layers; ++i) sparse[i] = (i + 1) % step == 0;
  if (const json* list = fields.find("mlp_only_layers")) {
    if (!list->is_array())
      return invalid_argument("{}: mlp_only_layers is {}, needs a list of layer numbers", place,
                              excerpt(*list));
    for (const json& entry : *list) {
      // Out-of-range entries are legal: a file keeps its list when layers are cut off.
      if (!entry.is_number_unsigned())
        return invalid_argument("{}: mlp_only_layers has the entry {}, needs layer numbers", place,
                                excerpt(entry));
      if (const auto layer = entry.get<uint64_t>(); layer < sparse.size()) sparse[layer] = false;
    }
  }
  return sparse;
}

Status read_experts(const std::string& place, JsonFields& fields, const ClassDefaults& defaults,
                    ModelConfig& config) {
  config.experts = fields.integer({"num_experts", "num_local_experts"}, 0, limits::kMaxExperts);
  config.top_k = fields.integer("num_experts_per_tok", 1, limits::kMaxExperts, defaults.top_k);
  config.moe_intermediate = fields.integer({"moe_intermediate_size", "expert_hidden_dim"}, 1,
                                           limits::kMaxWidth, defaults.moe_intermediate);
  config.shared_experts =
      fields.integer("num_shared_experts", 0, limits::kMaxExperts, defaults.shared_experts);
  if (config.architecture == Architecture::hy_v3) {
    config.router_score = RouterScore::sigmoid;
    config.router_renormalise = fields.boolean("route_norm", true);
    config.router_scale = fields.number("router_scaling_factor", 2.826);
    config.qk_norm = fields.boolean("qk_norm", true);
  } else {
    config.router_score = RouterScore::softmax;
    config.router_renormalise = fields.boolean("norm_topk_prob", false);
    config.qk_norm = true;
  }
  VIVACE_TRY(fields.status());
  VIVACE_TRY_ASSIGN(config.sparse_layer, sparse_layers(place, fields, config));
  if (config.experts == 0) config.sparse_layer.assign(config.layers, false);
  return {};
}

// eos_token_id is a number or a list of them, in either file.
Status add_eos_ids(const std::string& place, const JsonFields& fields, int64_t vocab,
                   std::vector<int32_t>& ids) {
  const json* value = fields.find("eos_token_id");
  if (value == nullptr) return {};
  const json list = value->is_array() ? *value : json::array({*value});
  for (const json& id : list) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(vocab))
      return invalid_argument("{}: eos_token_id is {}, needs token ids in [0, {}]", place, excerpt(id),
                              vocab - 1);
    if (const auto known = id.get<int32_t>(); std::find(ids.begin(), ids.end(), known) == ids.end())
      ids.push_back(known);
  }
  return {};
}

// One window serves all layers, so whatever makes layers differ is refused.
Result<int64_t> read_sliding_window(const std::string& place, JsonFields& fields, const ModelConfig& config) {
  const json* types = fields.find("layer_types");
  if (types != nullptr && !types->is_array())
    return invalid_argument("{}: layer_types is {}, needs a list", place, excerpt(*types));
  for (size_t i = 0; types != nullptr && i < types->size(); ++i)
    if (const json& type = (*types)[i]; type != "full_attention")
      return unsupported("{}: layer_types[{}] is {}, needs \"full_attention\"", place, i, excerpt(type));
  // Only this family has the field; elsewhere transformers ignores it.
  if (config.architecture != Architecture::qwen3_moe || !fields.boolean("use_sliding_window", false))
    return 0;
  const int64_t window = fields.integer("sliding_window", 0, limits::kMaxPosition, 0);
  if (window == 0 || window >= config.max_position) return 0;  // hides nothing
  if (types != nullptr)
    return unsupported(
        "{}: use_sliding_window is true with sliding_window = {}, but layer_types has full_attention alone",
        place, window);
  // Layers from this one on have the window.
  const int64_t first = fields.integer("max_window_layers", 0, limits::kMaxPosition, 0);
  if (first > 0 && first < config.layers)
    return unsupported(
        "{}: max_window_layers is {}, needs 0 or at least num_hidden_layers = {} (one window for all layers)",
        place, first, config.layers);
  return first == 0 ? window : 0;
}

}  // namespace

Result<ModelConfig> parse_hf_config(std::string_view config_json, std::string_view generation_config_json) {
  const std::string place = "config.json";
  VIVACE_TRY_ASSIGN(const json object, parse_json_object(place, config_json));
  JsonFields fields(place, object);
  VIVACE_TRY_ASSIGN(const ClassDefaults defaults, class_of(place, fields));
  VIVACE_TRY(refuse_unknown_features(place, fields));

  ModelConfig config;
  config.architecture = defaults.architecture;
  config.layers = fields.integer("num_hidden_layers", 1, limits::kMaxLayers);
  config.hidden = fields.integer("hidden_size", 1, limits::kMaxWidth);
  config.vocab = fields.integer("vocab_size", 1, limits::kMaxVocab);
  config.heads_q = fields.integer("num_attention_heads", 1, limits::kMaxHeads);
  config.heads_kv = fields.integer("num_key_value_heads", 1, limits::kMaxHeads,
                                   defaults.heads_kv != 0 ? defaults.heads_kv : config.heads_q);
  VIVACE_TRY(fields.status());
  if (!fields.has("head_dim") && config.hidden % config.heads_q != 0)
    return invalid_argument(
        "{}: head_dim is missing and hidden_size = {} is not a multiple of num_attention_heads = {}", place,
        config.hidden, config.heads_q);
  config.head_dim = fields.integer("head_dim", 2, limits::kMaxHeadDim, config.hidden / config.heads_q);
  config.intermediate =
      fields.integer("intermediate_size", 1, limits::kMaxWidth,
                     defaults.intermediate != 0 ? std::optional(defaults.intermediate) : std::nullopt);
  config.rms_eps = fields.number("rms_norm_eps", defaults.rms_eps);
  config.max_position =
      fields.integer("max_position_embeddings", 1, limits::kMaxPosition, defaults.max_position);
  config.tied_embeddings = fields.boolean("tie_word_embeddings", false);
  VIVACE_TRY_ASSIGN(config.sliding_window, read_sliding_window(place, fields, config));
  config.bos_id = static_cast<int32_t>(fields.integer("bos_token_id", -1, kMaxId, -1));
  config.pad_id = static_cast<int32_t>(fields.integer("pad_token_id", -1, kMaxId, -1));
  VIVACE_TRY(fields.status());
  VIVACE_TRY_ASSIGN(config.weight_format, read_quantisation(place, fields));
  VIVACE_TRY(read_rope(place, fields, defaults, config));
  if (config.architecture != Architecture::llama) VIVACE_TRY(read_experts(place, fields, defaults, config));

  VIVACE_TRY(add_eos_ids(place, fields, config.vocab, config.eos_ids));
  if (!generation_config_json.empty()) {
    const std::string generation_place = "generation_config.json";
    VIVACE_TRY_ASSIGN(const json generation, parse_json_object(generation_place, generation_config_json));
    VIVACE_TRY(add_eos_ids(generation_place, JsonFields(generation_place, generation), config.vocab,
                           config.eos_ids));
  }
  if (const Status status = validate(config); !status.ok()) {
    return Status(status.code(), renamed(status.message(), kKeys)).at(place);
  }
  return config;
}

}  // namespace vivace::model
