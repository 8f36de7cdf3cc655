#include "src/model/hf_names.h"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "src/core/error.h"

namespace vivace::model {

namespace {

struct Rename {
  std::string_view from, to;
  bool prefix;  // whether the rest of the name is kept
};

constexpr Rename kMoeRenames[] = {
    {"mlp.gate.weight", "mlp.router.gate.weight", false},
};
// The layout that Tencent's converter writes and transformers holds in memory.
constexpr Rename kHy3Renames[] = {
    {"mlp.e_score_correction_bias", "mlp.expert_bias", false},
    {"mlp.shared_experts.", "mlp.shared_mlp.", true},
};

// Scales of an fp8 KV cache, as different writers call them.
constexpr Rename kScaleRenames[] = {
    {"self_attn.k_cache.scale", "self_attn.k_scale", false},
    {"self_attn.v_cache.scale", "self_attn.v_scale", false},
    {"self_attn.attn.k_scale", "self_attn.k_scale", false},
    {"self_attn.attn.v_scale", "self_attn.v_scale", false},
    {"self_attn.k_proj.k_scale", "self_attn.k_scale", false},
    {"self_attn.v_proj.v_scale", "self_attn.v_scale", false},
};
// Every step makes its own scales of Q.
constexpr std::string_view kUnusedScales[] = {"self_attn.q.scale", "self_attn.q_scale",
                                              "self_attn.attn.q_scale"};

template <size_t N>
std::string renamed(const Rename (&table)[N], std::string_view part) {
  for (const Rename& r : table) {
    if (part == r.from && !r.prefix) return std::string(r.to);
    if (r.prefix && part.starts_with(r.from)) return fmt::format("{}{}", r.to, part.substr(r.from.size()));
  }
  return std::string(part);
}

}  // namespace

Result<HfName> hf_tensor_name(const ModelConfig& config, std::string_view name) {
  constexpr std::string_view kLayers = "model.layers.";
  HfName result{HfName::Use::keep, std::string(name)};
  if (!name.starts_with(kLayers)) return result;
  int64_t layer = -1;
  const char* end = name.data() + name.size();
  const auto [rest, failure] = std::from_chars(name.data() + kLayers.size(), end, layer);
  if (failure != std::errc() || rest == end || *rest != '.' || layer < 0)
    return invalid_argument("safetensors: tensor '{}' has no layer number after '{}'", name, kLayers);
  if (layer >= config.layers) {
    result.use = HfName::Use::mtp_layer;
    if (config.architecture == Architecture::hy_v3 && layer == config.layers) return result;
    return invalid_argument(
        "safetensors: tensor '{}' is of layer {}, needs a layer below num_hidden_layers = {}", name, layer,
        config.layers);
  }
  std::string part(rest + 1, static_cast<size_t>(end - rest - 1));
  if (part.ends_with("rotary_emb.inv_freq") ||
      std::find(std::begin(kUnusedScales), std::end(kUnusedScales), part) != std::end(kUnusedScales)) {
    result.use = HfName::Use::derived;
    return result;
  }
  part = renamed(kScaleRenames, part);
  if (config.is_moe()) part = renamed(kMoeRenames, part);
  if (config.architecture == Architecture::hy_v3) part = renamed(kHy3Renames, part);
  result.canonical = fmt::format("{}{}.{}", kLayers, layer, part);
  return result;
}

}  // namespace vivace::model
