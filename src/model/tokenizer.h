#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "src/model/checkpoint.h"
#include "vivace/status.h"

namespace vivace::model {

enum class SpecialTokens {
  as_text,  ///< text that spells a control token is encoded as ordinary text
  parse,    ///< such text becomes the control token
};

/// Byte-level BPE as a tokenizer.json or GGUF metadata describes it: normaliser (none, NFC), added tokens,
/// the file's pre-tokenizer pattern, merges. Immutable after construction: any thread may call any method.
///
/// Control tokens are the added tokens marked special (GGUF: token types 2 and 3). Added tokens that are not
/// (`<think>`, `<tool_call>` of Qwen3; GGUF type 4) are ordinary vocabulary with a spelling of their own: their text
/// becomes the token in both modes, as in Hugging Face's tokenizers. With `as_text`, encode() returns no
/// control id, whatever the text. Bytes that are not valid UTF-8 are encoded as U+FFFD, one per maximal
/// invalid sequence. Bytes that have no token become the unknown token if the file names one that is not a
/// control token, else they are dropped.
class Tokenizer {
 public:
  /// invalid_argument: the source is broken. unsupported: it asks for something else (WordPiece,
  /// byte_fallback, an unknown `tokenizer.ggml.pre`, ...), named in the message.
  static Result<std::unique_ptr<Tokenizer>> create(const TokenizerSource& source);
  ~Tokenizer();

  /// O(n log n) in the text (no recursion, bounded stack); at most about 30 bytes of scratch per byte of
  /// text. invalid_argument: `text` is longer than `kMaxTextBytes`, or the file's pattern backtracks without
  /// end on it or takes longer than PreTokenizer::split() allows.
  Result<std::vector<int32_t>> encode(std::string_view text, SpecialTokens special) const;
  /// As encode(), but a control token is taken only where every byte of its text has a non-zero `marks` byte; `marks`
  /// is as long as `text`, which must be valid UTF-8 (else invalid_argument).
  Result<std::vector<int32_t>> encode_marked(std::string_view text, std::string_view marks) const;
  /// No fewer tokens than these are in `text`, from its length alone: O(n), without the cost of encode(). 0 where
  /// nothing can be said.
  int64_t least_tokens(std::string_view text) const;
  int64_t longest_token() const;  ///< bytes
  /// The bytes of one token (not necessarily valid UTF-8 by itself); empty for ids outside the vocabulary
  /// and, with `skip_special`, for control tokens.
  std::string_view bytes_of(int32_t id, bool skip_special = false) const;
  /// Bytes of all ids joined, invalid UTF-8 replaced by U+FFFD.
  std::string decode(const std::vector<int32_t>& ids, bool skip_special = false) const;

  int64_t vocab() const;  ///< ids are in [0, vocab)
  bool is_special(int32_t id) const;
  /// The id of a token with exactly this content, or -1.
  int32_t id_of(std::string_view token) const;
  bool add_bos() const;  ///< encode() does not add it; callers of a raw prompt do
  int32_t bos_id() const;

  static constexpr size_t kMaxTextBytes = size_t{64} << 20;

 private:
  Tokenizer();
  Result<std::vector<int32_t>> encode_with(std::string_view text, SpecialTokens special,
                                           std::string_view marks) const;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Turns token bytes into text piece by piece: never emits half a UTF-8 character; each maximal invalid
/// sequence becomes U+FFFD (Unicode's "substitution of maximal subparts"). The joined pieces do not depend on
/// how the bytes were cut.
class Utf8Stream {
 public:
  /// The text that became complete with these bytes.
  std::string push(std::string_view bytes);
  /// What is held back, as U+FFFD if incomplete; the stream is empty afterwards.
  std::string finish();

 private:
  std::string held_;
};

/// Finds stop strings in a growing text. Text that may be the beginning of a stop string is held back; the
/// match that is completed first wins (of those completed by the same byte, the longest), and nothing from
/// its first byte on is delivered. Text and match do not depend on how the text was cut. Cost: O(stops) per
/// byte. Empty stops are ignored.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops);
  struct Piece {
    std::string text;      ///< safe to deliver
    bool stopped = false;  ///< a stop string was completed; push no more
    std::string matched;   ///< which one
  };
  Piece push(std::string_view text);
  /// The text still held back when generation ends without a match.
  std::string finish();

 private:
  struct Stop {
    std::string text;
    std::vector<size_t> fallback;  ///< by matched bytes: the longest proper border of that prefix
    size_t matched = 0;
  };
  void reset();

  std::vector<Stop> stops_;
  std::string held_;
};

}  // namespace vivace::model
