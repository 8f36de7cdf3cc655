#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "vivace/status.h"

namespace vivace::model {

/// Splits text into words: each step splits every piece of the step before at the matches of a pattern; what
/// lies between matches is a piece too. Nothing is dropped. Immutable; any thread may use it.
class PreTokenizer {
 public:
  PreTokenizer();
  ~PreTokenizer();
  PreTokenizer(PreTokenizer&&) noexcept;
  PreTokenizer& operator=(PreTokenizer&&) noexcept;

  /// Adds a step. `pattern` is written for Oniguruma, as tokenizer.json files are; `\s` means Unicode's
  /// White_Space there, which PCRE2's does not. unsupported: a construct that PCRE2 reads otherwise (`&&` and
  /// nested sets in a class, `\h`, `\G`, `(?m`, `{n,m}+`). invalid_argument: not a pattern.
  Status add_step(std::string_view pattern);

  /// A pattern that matches exactly `text`.
  static std::string literal(std::string_view text);

  using Sink = std::function<void(std::string_view word)>;
  /// Match memory of split() and the time it may still take; make one per call of encode and reuse it for its
  /// pieces.
  class Scratch {
   public:
    explicit Scratch(const PreTokenizer& owner);
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

   private:
    friend class PreTokenizer;
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };
  /// `text` must be valid UTF-8. Words are views into it, in order. invalid_argument: matching took more than half
  /// a second and 2 microseconds per byte given to `scratch` so far (CPU time, about 50 times what published
  /// patterns take), or a single match more backtracking than a limit that grows with the text. A single try cannot be
  /// interrupted: dozens of lookarounds that each walk to the end of a long text may take longer.
  Status split(std::string_view text, Scratch& scratch, const Sink& sink) const;

  static constexpr size_t kMaxSteps = 16;
  static constexpr size_t kMaxPatternBytes = 64 << 10;

 private:
  struct Step;
  Status split_from(size_t step, std::string_view text, Scratch::Impl& scratch) const;

  std::vector<Step> steps_;
};

}  // namespace vivace::model
