#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "src/model/config.h"
#include "vivace/status.h"
#include "vivace/tensor.h"

namespace vivace::model {

/// What a tokenizer is built from; exactly one of the two sources is filled.
struct TokenizerSource {
  std::string tokenizer_json;  ///< the text of a Hugging Face tokenizer.json

  // GGUF metadata (tokenizer.ggml.*).
  std::string gguf_model, gguf_pre;  ///< "gpt2", "smollm"
  std::vector<std::string> tokens, merges;
  std::vector<int32_t> token_types;
  bool add_bos = false, add_eos = false;
  int32_t bos_id = -1, eos_id = -1, unk_id = -1;

  std::string chat_template;         ///< Jinja text, empty when the model has none
  std::string bos_token, eos_token;  ///< their text, as chat templates use them

  bool present() const { return !tokenizer_json.empty() || !tokens.empty(); }
};

/// A model on disk: its configuration, its tokenizer source and its tensors, memory-mapped. One interface
/// over GGUF (v2, v3) and Hugging Face folders (config.json + safetensors, one file or sharded with an
/// index).
///
/// Tensor names are Hugging Face's whatever the file calls them; shapes are row-major, [out, in]. Layer N has
/// the prefix `model.layers.N.`:
///
///   model.embed_tokens.weight, model.norm.weight, lm_head.weight (absent when tied)
///   N.input_layernorm.weight, N.post_attention_layernorm.weight
///   N.self_attn.{q,k,v,o}_proj.weight, N.self_attn.{q,k}_norm.weight
///   N.mlp.{gate,up,down}_proj.weight               a dense MLP
///   N.mlp.router.gate.weight [experts, H]          both MoE families (Qwen3's files say mlp.gate.weight)
///   N.mlp.expert_bias [experts]                    Hy3
///   N.mlp.shared_mlp.{gate,up,down}_proj.weight    Hy3's shared expert
///   rope_freqs.weight [rotary_dim / 2]             some GGUF files: every RoPE frequency is divided by its
///                                                  entry (how they carry Llama 3's scaling)
///
/// Routed experts come in one of three forms, the same for all of a layer's:
///   N.mlp.experts.E.{gate,up,down}_proj.weight     one tensor per expert: [I, H], [I, H], [H, I]
///   N.mlp.experts.gate_up_proj, .down_proj         [experts, 2 I, H] (gate rows first), [experts, H, I]
///   N.mlp.experts.{gate,up,down}_proj              GGUF: [experts, I, H] twice, [experts, H, I]
///
/// fp8 matrices have scales beside them; X is the name without `.weight` where it has one:
///   X.weight_scale, X.weight_scale_inv             one scale, or one per 128 x 128; stored * scale is the weight
///   X.input_scale, X.activation_scale              given scale of what the matrix is multiplied by
///   X_scale, X_scale_inv, X_input_scale, ...       the same of stacked experts: one for all, one each, or (gate_up)
///                                                  [experts, 2]
///   N.self_attn.{k,v}_scale                        scales of fp8 keys and values
///
/// A view is valid while the checkpoint lives, and read-only although Tensor cannot say so. Element types are
/// the file's.
class Checkpoint {
 public:
  virtual ~Checkpoint() = default;

  /// `path` is a .gguf file, a folder with config.json and model.safetensors or model.safetensors.index.json, or
  /// "synthetic:NAME".
  /// Cost: linear in the directory of the files; no tensor is touched. Messages start with the path.
  static Result<std::unique_ptr<Checkpoint>> open(const std::string& path);

  virtual const ModelConfig& config() const = 0;
  virtual const TokenizerSource& tokenizer() const = 0;
  virtual std::vector<std::string> tensor_names() const = 0;
  virtual bool has(std::string_view name) const = 0;
  /// not_found names the tensor and the path; unsupported: its element type is one that DType does not have.
  virtual Result<Tensor> tensor(std::string_view name) const = 0;
  /// What the files call the tensor, for messages.
  virtual std::string name_in_files(std::string_view name) const { return std::string(name); }
  /// Takes the tensor's pages out of resident memory, for a caller that made its own copy. The view stays valid; the
  /// next access reads the file again. Pages shared with a neighbour stay.
  virtual void drop_pages(const Tensor& tensor) const = 0;
  /// Bytes of all mapped files.
  virtual int64_t mapped_bytes() const = 0;
  /// "GGUF v3, llama, 272 tensors" - one line for logs and `doctor`.
  virtual std::string summary() const = 0;
  /// It has a configuration alone; the model's weights are made (src/model/synthetic.h).
  virtual bool synthetic() const { return false; }
};

}  // namespace vivace::model
