#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "vivace/attention.h"
#include "vivace/status.h"

namespace vivace::model {

enum class Architecture { llama, qwen3_moe, hy_v3 };
std::string_view name_of(Architecture architecture);

/// How RoPE pairs dimensions: (i, i + rotary/2), or (2i, 2i + 1) as GGUF's permuted llama rows want it.
enum class RopeStyle { neox, interleaved };

/// Llama-3 style frequency scaling; `factor` 1 means none.
struct RopeScaling {
  std::string type = "default";  ///< "default", "linear", "llama3"
  double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
  int64_t original_max_position = 0;
};

enum class RouterScore { softmax, sigmoid };

/// How the matrices of the layers are stored, and who makes the scales of what they are multiplied by.
enum class WeightFormat : uint8_t {
  plain,         ///< f32, f16, bf16 or a block format
  fp8_static,    ///< fp8 and activations with a given scale per tensor
  fp8_dynamic,   ///< fp8 with a scale per tensor, activations with a made one per token
  fp8_block128,  ///< fp8 with a scale per 128 x 128, activations with made ones per 128 of a token
};
std::string_view name_of(WeightFormat format);

/// What a decoder needs to know about itself, whichever file format it came from.
struct ModelConfig {
  Architecture architecture = Architecture::llama;
  int64_t layers = 0, hidden = 0, vocab = 0;
  int64_t heads_q = 0, heads_kv = 0, head_dim = 0;
  int64_t intermediate = 0;  ///< of a dense MLP
  double rms_eps = 1e-6;
  double rope_theta = 10000;
  int64_t rotary_dim = 0;  ///< head_dim unless the model rotates a part only
  RopeStyle rope_style = RopeStyle::neox;
  RopeScaling rope_scaling;
  bool qk_norm = false;  ///< per-head RMSNorm of Q and K before RoPE
  bool tied_embeddings = false;
  int64_t max_position = 0;    ///< context length
  int64_t sliding_window = 0;  ///< 0: none

  // Mixture of experts; experts == 0 means a dense model.
  int64_t experts = 0, top_k = 0, moe_intermediate = 0, shared_experts = 0;
  std::vector<bool> sparse_layer;  ///< per layer: true = MoE, false = dense MLP
  RouterScore router_score = RouterScore::softmax;
  bool router_renormalise = true;  ///< chosen weights sum to 1
  double router_scale = 1;         ///< factor on the weights after renormalisation

  /// What the files announce. A loader goes by the tensors: some matrices may be left as they were.
  WeightFormat weight_format = WeightFormat::plain;

  int32_t bos_id = -1, pad_id = -1;
  std::vector<int32_t> eos_ids;  ///< any of them ends a generation

  bool is_moe() const { return experts > 0; }
  int64_t sparse_layers() const { return is_moe() ? std::ranges::count(sparse_layer, true) : 0; }
};

/// What every reader bounds its sizes by: far above any published model, and small enough that products of
/// two stay far from overflow and that an array per layer or per expert is harmless.
namespace limits {
inline constexpr int64_t kMaxLayers = 4096, kMaxWidth = int64_t{1} << 22, kMaxVocab = int64_t{1} << 24;
inline constexpr int64_t kMaxHeads = 4096, kMaxHeadDim = vivace::kMaxHeadDim, kMaxExperts = 65536;
inline constexpr int64_t kMaxPosition = int64_t{1} << 31;
/// Keys (or values) of one token in all layers. Both, in f32, for kMaxPosition tokens take 2^62 bytes.
inline constexpr int64_t kMaxCacheWidth = int64_t{1} << 28;
}  // namespace limits

/// Reads a Hugging Face `config.json` as transformers 4 and 5 write it. `generation_config` may be empty; its
/// eos ids are added. An absent field has the value that transformers gives it; sizes without which there is
/// no model must be present. Every number is checked: a message names the field, its value and what would
/// fit. unsupported: the values are well-formed and ask for something that is not there (another model_type,
/// biases, a rope_type, weights quantised to anything but fp8).
Result<ModelConfig> parse_hf_config(std::string_view config_json,
                                    std::string_view generation_config_json = {});

/// Cross-field checks that every reader runs last (heads divide, sizes positive and bounded, ids inside the
/// vocabulary).
Status validate(const ModelConfig& config);

}  // namespace vivace::model
