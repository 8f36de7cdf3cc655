#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace vivace::model {

/// What stands at one position of a byte string.
struct Utf8Step {
  enum Kind { character, invalid, incomplete };
  Kind kind;
  int length;      ///< bytes it takes, at least 1; for `invalid` the maximal subpart that one U+FFFD replaces
  uint32_t value;  ///< the code point of a `character`
};

/// Reads at `position` < text.size(). `incomplete`: all bytes to the end of `text` begin a character that is
/// not finished; with more bytes it may become one.
Utf8Step utf8_step(std::string_view text, size_t position);

/// Appends `code_point` (at most 0x10FFFF, not a surrogate) to `out`.
void append_utf8(std::string& out, uint32_t code_point);

/// `text` with each maximal invalid sequence replaced by U+FFFD, as Python's bytes.decode(errors="replace")
/// does.
std::string replace_invalid_utf8(std::string_view text);

bool is_valid_utf8(std::string_view text);

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

}  // namespace vivace::model
