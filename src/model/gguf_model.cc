#include "src/model/gguf_model.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "src/core/error.h"
#include "src/core/rename.h"

namespace vivace::model {

namespace {

// Typed reads of metadata; the first failure is kept and later reads return their defaults.
class Metadata {
 public:
  explicit Metadata(const GgufFile& file) : file_(file) {}

  const Status& status() const { return status_; }
  bool has(const std::string& key) const { return file_.find(key) != nullptr; }

  int64_t integer(const std::string& key, int64_t min, int64_t max, std::optional<int64_t> fallback = {}) {
    const GgufValue* value = find(key, fallback.has_value(), "a whole number");
    if (value == nullptr) return fallback.value_or(min);
    const std::optional<int64_t> whole = value->integer();
    if (whole && *whole >= min && *whole <= max) return *whole;
    fail(invalid_argument("gguf: {} is {}, needs a whole number in [{}, {}]", key, value->describe(), min,
                          max));
    return min;
  }
  double number(const std::string& key, std::optional<double> fallback = {}) {
    return get<double>(key, fallback, "a number", &GgufValue::number);
  }
  bool boolean(const std::string& key, bool fallback) {
    return get<bool>(key, fallback, "a bool", &GgufValue::boolean);
  }
  std::string text(const std::string& key, std::optional<std::string_view> fallback = {}) {
    return std::string(get<std::string_view>(key, fallback, "a string", &GgufValue::text));
  }
  std::vector<std::string> texts(const std::string& key) {
    return get<std::vector<std::string>>(key, std::vector<std::string>{}, "an array of strings",
                                         &GgufValue::texts);
  }
  std::vector<int32_t> integers(const std::string& key) {
    return get<std::vector<int32_t>>(key, std::vector<int32_t>{}, "an array of int32", &GgufValue::integers);
  }
  int32_t token_id(const std::string& key) { return static_cast<int32_t>(integer(key, -1, INT32_MAX, -1)); }

  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

 private:
  const GgufValue* find(const std::string& key, bool optional, std::string_view needs) {
    const GgufValue* value = file_.find(key);
    if (value == nullptr && !optional)
      fail(invalid_argument("gguf: metadata '{}' is missing, needs {}", key, needs));
    return value;
  }

  template <class T>
  T get(const std::string& key, std::optional<T> fallback, std::string_view needs,
        std::optional<T> (GgufValue::*read)() const) {
    const GgufValue* value = find(key, fallback.has_value(), needs);
    if (value != nullptr) {
      if (std::optional<T> result = (value->*read)()) return *std::move(result);
      fail(invalid_argument("gguf: {} is {}, needs {}", key, value->describe(), needs));
    }
    return fallback ? *std::move(fallback) : T{};
  }

  const GgufFile& file_;
  Status status_;
};

// The fields of ModelConfig as the file calls them; `arch` is a name with its dot, such as "llama.".
std::vector<std::pair<std::string_view, std::string>> keys_of(const std::string& arch) {
  return {
      {"layers", arch + "block_count"},
      {"hidden", arch + "embedding_length"},
      {"heads_q", arch + "attention.head_count"},
      {"heads_kv", arch + "attention.head_count_kv"},
      {"head_dim", arch + "attention.key_length"},
      {"rotary_dim", arch + "rope.dimension_count"},
      {"intermediate", arch + "feed_forward_length"},
      {"max_position", arch + "context_length"},
      {"sliding_window", arch + "attention.sliding_window"},
      {"rms_eps", arch + "attention.layer_norm_rms_epsilon"},
      {"rope_theta", arch + "rope.freq_base"},
      {"rope_scaling.factor", arch + "rope.scaling.factor"},
      {"experts", arch + "expert_count"},
      {"top_k", arch + "expert_used_count"},
      {"moe_intermediate", arch + "expert_feed_forward_length"},
      {"shared_experts", arch + "expert_shared_count"},
      {"router_scale", arch + "expert_weights_scale"},
      {"bos_id", "tokenizer.ggml.bos_token_id"},
      {"pad_id", "tokenizer.ggml.padding_token_id"},
      {"eos_id", "tokenizer.ggml.eos_token_id"},
  };
}

const GgufTensor* find_tensor(const GgufFile& file, std::string_view name) {
  for (const GgufTensor& tensor : file.tensors)
    if (tensor.name == name) return &tensor;
  return nullptr;
}

Status read_rope(Metadata& meta, const std::string& arch, ModelConfig& config) {
  config.rope_theta = meta.number(arch + "rope.freq_base", 10000.0);
  config.rotary_dim = meta.integer(arch + "rope.dimension_count", 2, limits::kMaxHeadDim, config.head_dim);
  const std::string type = meta.text(arch + "rope.scaling.type", "none");
  VIVACE_TRY(meta.status());
  if (type == "none") return {};
  if (type != "linear")
    return unsupported("gguf: {}rope.scaling.type is '{}', needs none or linear", arch, type);
  config.rope_scaling.type = type;
  config.rope_scaling.factor = meta.number(arch + "rope.scaling.factor");
  return meta.status();
}

Status read_experts(const GgufFile& file, Metadata& meta, const std::string& arch, ModelConfig& config) {
  config.experts = meta.integer(arch + "expert_count", 1, limits::kMaxExperts);
  config.top_k = meta.integer(arch + "expert_used_count", 1, limits::kMaxExperts);
  config.moe_intermediate = meta.integer(arch + "expert_feed_forward_length", 1, limits::kMaxWidth);
  config.router_score = RouterScore::softmax;
  config.router_renormalise = meta.boolean(arch + "expert_weights_norm", true);
  config.router_scale = meta.number(arch + "expert_weights_scale", 1.0);
  config.qk_norm = true;
  if (const int64_t shared = meta.integer(arch + "expert_shared_count", 0, limits::kMaxExperts, 0);
      shared != 0)
    return unsupported("gguf: {}expert_shared_count is {}, needs 0", arch, shared);
  VIVACE_TRY(meta.status());
  config.sparse_layer.assign(config.layers, false);
  for (int64_t layer = 0; layer < config.layers; ++layer)
    config.sparse_layer[layer] =
        find_tensor(file, fmt::format("blk.{}.ffn_gate_inp.weight", layer)) != nullptr;
  return {};
}

struct NamePair {
  std::string_view gguf, canonical;
};

constexpr NamePair kModelNames[] = {
    {"token_embd.weight", "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output.weight", "lm_head.weight"},
    {"rope_freqs.weight", "rope_freqs.weight"},
};
constexpr NamePair kLayerNames[] = {
    {"attn_norm.weight", "input_layernorm.weight"},    {"attn_q.weight", "self_attn.q_proj.weight"},
    {"attn_k.weight", "self_attn.k_proj.weight"},      {"attn_v.weight", "self_attn.v_proj.weight"},
    {"attn_output.weight", "self_attn.o_proj.weight"}, {"ffn_norm.weight", "post_attention_layernorm.weight"},
    {"ffn_gate.weight", "mlp.gate_proj.weight"},       {"ffn_up.weight", "mlp.up_proj.weight"},
    {"ffn_down.weight", "mlp.down_proj.weight"},
};
constexpr NamePair kMoeLayerNames[] = {
    {"attn_q_norm.weight", "self_attn.q_norm.weight"}, {"attn_k_norm.weight", "self_attn.k_norm.weight"},
    {"ffn_gate_inp.weight", "mlp.router.gate.weight"}, {"ffn_gate_exps.weight", "mlp.experts.gate_proj"},
    {"ffn_up_exps.weight", "mlp.experts.up_proj"},     {"ffn_down_exps.weight", "mlp.experts.down_proj"},
};

template <size_t N>
std::string_view lookup(const NamePair (&table)[N], std::string_view name) {
  for (const NamePair& pair : table)
    if (pair.gguf == name) return pair.canonical;
  return {};
}

}  // namespace

Result<ModelConfig> gguf_config(const GgufFile& file) {
  Metadata meta(file);
  ModelConfig config;
  const std::string name = meta.text("general.architecture");
  VIVACE_TRY(meta.status());
  if (name == "llama") {
    config.architecture = Architecture::llama;
    config.rope_style = RopeStyle::interleaved;
  } else if (name == "qwen3moe") {
    config.architecture = Architecture::qwen3_moe;
    config.rope_style = RopeStyle::neox;
  } else {
    return unsupported("gguf: general.architecture is {}, needs llama or qwen3moe",
                       file.find("general.architecture")->describe());
  }

  const std::string arch = name + ".";
  config.layers = meta.integer(arch + "block_count", 1, limits::kMaxLayers);
  config.hidden = meta.integer(arch + "embedding_length", 1, limits::kMaxWidth);
  config.heads_q = meta.integer(arch + "attention.head_count", 1, limits::kMaxHeads);
  config.heads_kv = meta.integer(arch + "attention.head_count_kv", 1, limits::kMaxHeads, config.heads_q);
  const int64_t even_share = config.hidden / config.heads_q;
  config.head_dim = meta.integer(arch + "attention.key_length", 2, limits::kMaxHeadDim, even_share);
  config.intermediate =
      meta.integer(arch + "feed_forward_length", 0, limits::kMaxWidth,
                   config.architecture == Architecture::llama ? std::nullopt : std::optional<int64_t>(0));
  config.rms_eps = meta.number(arch + "attention.layer_norm_rms_epsilon");
  config.max_position = meta.integer(arch + "context_length", 1, limits::kMaxPosition);
  config.sliding_window = meta.integer(arch + "attention.sliding_window", 0, limits::kMaxPosition, 0);
  if (config.sliding_window >= config.max_position) config.sliding_window = 0;
  const int64_t value_length =
      meta.integer(arch + "attention.value_length", 1, limits::kMaxHeadDim, even_share);
  VIVACE_TRY(meta.status());
  if (value_length != config.head_dim)
    return unsupported("gguf: {}attention.value_length is {}, needs the key length {}", arch, value_length,
                       config.head_dim);
  if (!meta.has(arch + "attention.key_length") && config.hidden % config.heads_q != 0)
    return invalid_argument("gguf: {}attention.head_count is {}, needs a divisor of {}embedding_length = {}",
                            arch, config.heads_q, arch, config.hidden);
  VIVACE_TRY(read_rope(meta, arch, config));

  if (config.architecture == Architecture::qwen3_moe) {
    VIVACE_TRY(read_experts(file, meta, arch, config));
  } else if (const int64_t experts = meta.integer(arch + "expert_count", 0, limits::kMaxExperts, 0);
             experts != 0) {
    return unsupported("gguf: {}expert_count is {}, needs 0 for this architecture", arch, experts);
  }

  // The embedding has a row per id, used or not; the list of tokens may be shorter.
  const GgufTensor* embedding = find_tensor(file, "token_embd.weight");
  if (embedding == nullptr || embedding->rank != 2)
    return invalid_argument(
        "gguf: tensor 'token_embd.weight' is {}, needs two dimensions",
        embedding == nullptr ? "missing" : fmt::format("of {} dimensions", embedding->rank));
  config.vocab = embedding->shape[0];
  config.tied_embeddings = find_tensor(file, "output.weight") == nullptr;

  config.bos_id = meta.token_id("tokenizer.ggml.bos_token_id");
  config.pad_id = meta.token_id("tokenizer.ggml.padding_token_id");
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"})
    if (const int32_t id = meta.token_id(key);
        id >= 0 && std::find(config.eos_ids.begin(), config.eos_ids.end(), id) == config.eos_ids.end())
      config.eos_ids.push_back(id);
  VIVACE_TRY(meta.status());
  if (const Status status = validate(config); !status.ok()) {
    return Status(status.code(), renamed(status.message(), keys_of(arch))).at("gguf");
  }
  return config;
}

Result<TokenizerSource> gguf_tokenizer(const GgufFile& file) {
  Metadata meta(file);
  TokenizerSource source;
  source.gguf_model = meta.text("tokenizer.ggml.model", "");
  source.gguf_pre = meta.text("tokenizer.ggml.pre", "");
  source.tokens = meta.texts("tokenizer.ggml.tokens");
  source.merges = meta.texts("tokenizer.ggml.merges");
  source.token_types = meta.integers("tokenizer.ggml.token_type");
  source.bos_id = meta.token_id("tokenizer.ggml.bos_token_id");
  source.eos_id = meta.token_id("tokenizer.ggml.eos_token_id");
  source.unk_id = meta.token_id("tokenizer.ggml.unknown_token_id");
  // Converters left the flag out for Llama 3, whose prompts begin with the bos token all the same.
  source.add_bos = meta.boolean("tokenizer.ggml.add_bos_token", source.gguf_pre == "llama-bpe");
  source.add_eos = meta.boolean("tokenizer.ggml.add_eos_token", false);
  source.chat_template = meta.text("tokenizer.chat_template", "");
  VIVACE_TRY(meta.status());

  if (!source.token_types.empty() && source.token_types.size() != source.tokens.size())
    return invalid_argument("gguf: tokenizer.ggml.token_type has {} entries, needs one per token ({})",
                            source.token_types.size(), source.tokens.size());
  const auto count = static_cast<int64_t>(source.tokens.size());
  const std::pair<const char*, int32_t> ids[] = {
      {"bos", source.bos_id}, {"eos", source.eos_id}, {"unknown", source.unk_id}};
  for (const auto& [name, id] : ids)
    if (count > 0 && id >= count)
      return invalid_argument(
          "gguf: tokenizer.ggml.{}_token_id is {}, needs an id below {} (the number of tokens)", name, id,
          count);
  if (count > 0) {
    if (source.bos_id >= 0) source.bos_token = source.tokens[source.bos_id];
    if (source.eos_id >= 0) source.eos_token = source.tokens[source.eos_id];
  }
  return source;
}

Result<std::string> gguf_tensor_name(const ModelConfig& config, std::string_view name) {
  if (const std::string_view found = lookup(kModelNames, name); !found.empty()) return std::string(found);
  constexpr std::string_view kBlock = "blk.";
  if (name.starts_with(kBlock)) {
    int64_t layer = -1;
    const char* end = name.data() + name.size();
    const auto [rest, failure] = std::from_chars(name.data() + kBlock.size(), end, layer);
    if (failure == std::errc() && rest != end && *rest == '.') {
      const std::string_view part(rest + 1, static_cast<size_t>(end - rest - 1));
      std::string_view found = lookup(kLayerNames, part);
      if (found.empty() && config.is_moe()) found = lookup(kMoeLayerNames, part);
      if (!found.empty()) {
        if (layer >= 0 && layer < config.layers) return fmt::format("model.layers.{}.{}", layer, found);
        return invalid_argument("gguf: tensor '{}' is of layer {}, needs a layer below block_count = {}",
                                name, layer, config.layers);
      }
    }
  }
  return unsupported("gguf: a {} model has no place for tensor '{}'", name_of(config.architecture), name);
}

}  // namespace vivace::model
