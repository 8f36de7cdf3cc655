#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "src/model/checkpoint.h"
#include "src/model/mapped_file.h"

namespace vivace::model {

/// What a path to a model may be, for messages.
inline constexpr const char* kModelForms =
    "a .gguf file, or a folder with config.json, safetensors and tokenizer.json";

/// An error when `path` is one file of a folder that is a model, such as its config.json.
Status check_whole_model(const std::string& path);

/// A tensor of a checkpoint, or the reason why it cannot be had (an element type or alignment that nothing
/// here reads).
struct StoredTensor {
  Tensor tensor;
  Status refusal;
  std::string name_in_files;  ///< as add() was told
};

/// The Checkpoint that every reader fills: tensors under their canonical names, views of mapped files.
class MappedCheckpoint final : public Checkpoint {
 public:
  std::string path;  ///< as the caller gave it, for messages
  ModelConfig model_config;
  TokenizerSource tokenizer_source;
  std::map<std::string, StoredTensor, std::less<>> tensors;
  std::vector<std::shared_ptr<MappedFile>> files;
  std::string one_line;

  const ModelConfig& config() const override { return model_config; }
  const TokenizerSource& tokenizer() const override { return tokenizer_source; }
  std::vector<std::string> tensor_names() const override;
  bool has(std::string_view name) const override { return tensors.find(name) != tensors.end(); }
  Result<Tensor> tensor(std::string_view name) const override;
  std::string name_in_files(std::string_view name) const override;
  void drop_pages(const Tensor& tensor) const override;
  int64_t mapped_bytes() const override;
  std::string summary() const override { return one_line; }

  /// invalid_argument: two tensors of the files have the same canonical name.
  Status add(const std::string& canonical, const std::string& file_name, StoredTensor stored);
};

/// The safetensors files of a Hugging Face folder, and of each the tensors that the index puts there; an empty set
/// means all of them.
using WeightFiles = std::map<std::string, std::set<std::string>>;
Result<WeightFiles> hf_weight_files(const std::string& folder);

/// The two kinds that Checkpoint::open tells apart.
Result<std::unique_ptr<Checkpoint>> open_gguf(const std::string& path);
Result<std::unique_ptr<Checkpoint>> open_hf_folder(const std::string& path);

}  // namespace vivace::model
