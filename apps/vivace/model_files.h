#pragma once

#include <memory>
#include <string>

#include "src/model/checkpoint.h"
#include "src/model/tokenizer.h"

namespace vivace::cli {

/// What commands read from a model's files beside its weights.
struct ModelFiles {
  std::unique_ptr<model::Checkpoint> checkpoint;
  std::unique_ptr<model::Tokenizer> tokenizer;  ///< null when the model has none
};

/// Opens the model and makes its tokenizer, if it has one.
Result<ModelFiles> open_model_files(const std::string& path);
/// not_found: the model has no tokenizer; `instead` says what the user can do.
Status need_tokenizer(const ModelFiles& files, const std::string& path, const std::string& instead);

}  // namespace vivace::cli
