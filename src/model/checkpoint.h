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
/// Tensor names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`) whatever the file calls them.
/// Fused expert tensors have the names `model.layers.N.mlp.experts.gate_up_proj` [experts, 2 I, H] and
/// `model.layers.N.mlp.experts.down_proj` [experts, H, I]. Hy3's two layouts are given the names of the
/// per-expert one
/// (`mlp.router.gate.weight`, `mlp.expert_bias`, `mlp.shared_mlp.*`), except for the fused expert tensors.
/// Shapes are row-major ([out, in]); a view is valid while the checkpoint lives.
class Checkpoint {
 public:
  virtual ~Checkpoint() = default;

  /// `path` is a .gguf file, or a folder with config.json.
  static Result<std::unique_ptr<Checkpoint>> open(const std::string& path);

  virtual const ModelConfig& config() const = 0;
  virtual const TokenizerSource& tokenizer() const = 0;
  virtual std::vector<std::string> tensor_names() const = 0;
  virtual bool has(std::string_view name) const = 0;
  /// not_found names the tensor and the file.
  virtual Result<Tensor> tensor(std::string_view name) const = 0;
  /// Bytes of all mapped files.
  virtual int64_t mapped_bytes() const = 0;
  /// "GGUF v3, llama, 272 tensors" - one line for logs and `doctor`.
  virtual std::string summary() const = 0;
};

}  // namespace vivace::model
