#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "src/model/bpe.h"
#include "src/model/checkpoint.h"
#include "src/model/pre_tokenizer.h"
#include "vivace/status.h"

namespace vivace::model {

enum class TokenKind : uint8_t {
  none,     ///< an id between others that no token has
  normal,   ///< made by merges
  control,  ///< never made from ordinary text
  user,     ///< an added token with a spelling of its own, not a control token
};

/// What a tokenizer.json and GGUF metadata have in common once read and checked.
struct TokenizerDefinition {
  struct Added {
    std::string content;
    int32_t id;
    bool control;
    bool normalized;  ///< looked for after normalisation, else before
  };

  std::vector<std::string> bytes;  ///< by id: the text a token stands for
  std::vector<TokenKind> kinds;    ///< by id
  std::vector<Added> added;
  std::vector<Bpe::Merge> merges;  ///< none makes a control token
  std::array<int32_t, 256> byte_ids{};
  int32_t unknown_id = -1;  ///< for bytes without a token
  int32_t bos_id = -1;
  bool add_bos = false;
  bool nfc = false;
  bool ignore_merges = false;  ///< a word that is a token becomes it at once
  PreTokenizer pre_tokenizer;
};

/// Errors as Tokenizer::create.
Result<TokenizerDefinition> read_tokenizer_definition(const TokenizerSource& source);

/// Longest added token; bounds the cost of looking for one at each byte of a text.
inline constexpr size_t kMaxAddedTokenBytes = 1024;

}  // namespace vivace::model
