#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "src/model/chat_template.h"
#include "src/model/tokenizer.h"

namespace vivace::server {

/// What the server knows of the model beside its engine. Any thread may read it.
struct ServedModel {
  std::string name;  ///< in requests and answers
  std::string path;
  std::shared_ptr<const model::Tokenizer> tokenizer;         ///< null: requests bring token ids
  std::shared_ptr<const model::ChatTemplate> chat_template;  ///< null: no chat
  model::TokenizerSource source;  ///< for the template; its vocabulary is not needed
  /// The bytes of a token, for log-probabilities and echo.
  std::function<std::string_view(int32_t id)> bytes_of = [](int32_t) { return std::string_view(); };
};

}  // namespace vivace::server
