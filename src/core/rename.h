#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace vivace {

/// `text` with the first of each pair as the second, where it stands as a whole word: messages of one layer in the
/// terms of another. Letters, digits and the characters `_ . - /` make a word, so that paths stay.
std::string renamed(std::string_view text, std::span<const std::pair<std::string_view, std::string>> names);

}  // namespace vivace
