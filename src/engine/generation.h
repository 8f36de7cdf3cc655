#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/engine/runner.h"
#include "src/model/tokenizer.h"
#include "vivace/engine.h"

namespace vivace::engine {

/// The bytes of one token; with `skip_special`, none for control tokens. May be called from any thread.
using TokenBytes = std::function<std::string_view(int32_t id, bool skip_special)>;

/// The tokens and the text of one request, and when it ends.
///
/// It ends, whichever comes first, with
///   an end token   one of stop_ids, or an eos id unless ignore_eos; not among the first min_tokens. It has no
///                  text and is counted.
///   a stop string  in the text after the first min_tokens tokens; the text ends before it.
///   max_tokens     reason `length`.
class Generation {
 public:
  /// `request` was checked and `max_tokens` > 0; `bytes` outlives this object.
  Generation(Request request, int64_t max_tokens, std::span<const int32_t> eos_ids, const TokenBytes& bytes);

  const Request& request() const { return request_; }  ///< without its prompt
  /// Prompt and output; valid until the next append().
  std::span<const int32_t> tokens() const { return tokens_; }
  std::span<const int32_t> prompt() const { return tokens().first(static_cast<size_t>(prompt_tokens_)); }
  std::span<const int32_t> output() const { return tokens().subspan(static_cast<size_t>(prompt_tokens_)); }
  /// What must not be drawn as output token `position`, counted from 0.
  std::span<const int32_t> banned_ids(int64_t position) const;
  Usage usage() const;
  bool finished() const { return finished_; }

  /// Appends tokens in order, one event each, up to and including the one that ends the request; what was
  /// drawn after it does not exist.
  void append(std::span<const Sampled> drawn, std::vector<TokenEvent>& events);

  int64_t cached_tokens = 0;  ///< of the prompt, when the request first ran

 private:
  /// The text that `bytes` made final. True when a stop string was completed.
  bool add_text(std::string_view bytes, std::string& text);
  /// What was held back.
  bool end_text(std::string& text);
  bool match(std::string_view piece, std::string& text);

  Request request_;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> end_ids_;
  int64_t prompt_tokens_, max_tokens_;
  const TokenBytes& bytes_;
  model::Utf8Stream utf8_;
  std::optional<model::StopMatcher> stops_;
  bool finished_ = false;
};

}  // namespace vivace::engine
