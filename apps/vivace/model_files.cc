#include "apps/vivace/model_files.h"

#include "src/core/error.h"

namespace vivace::cli {

Result<ModelFiles> open_model_files(const std::string& path) {
  ModelFiles files;
  VIVACE_TRY_ASSIGN(files.checkpoint, model::Checkpoint::open(path));
  if (files.checkpoint->tokenizer().present()) {
    Result<std::unique_ptr<model::Tokenizer>> tokenizer =
        model::Tokenizer::create(files.checkpoint->tokenizer());
    if (!tokenizer.ok()) return tokenizer.status().at(path);
    files.tokenizer = std::move(*tokenizer);
  }
  return files;
}

Status need_tokenizer(const ModelFiles& files, const std::string& path, const std::string& instead) {
  if (files.tokenizer != nullptr) return {};
  return not_found("--model {}: the model has no tokenizer; {}", path, instead);
}

}  // namespace vivace::cli
