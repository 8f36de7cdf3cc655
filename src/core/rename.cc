#include "src/core/rename.h"

#include <algorithm>

namespace vivace {

namespace {

bool in_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
         c == '-' || c == '/';
}

}  // namespace

std::string renamed(std::string_view text, std::span<const std::pair<std::string_view, std::string>> names) {
  std::string out;
  while (!text.empty()) {
    const auto is_word = in_word(text.front());
    const size_t size =
        std::find_if(text.begin(), text.end(), [&](char c) { return in_word(c) != is_word; }) - text.begin();
    const std::string_view piece = text.substr(0, size);
    const auto found =
        std::find_if(names.begin(), names.end(), [&](auto& name) { return name.first == piece; });
    if (found != names.end()) {
      out += found->second;
    } else {
      out += piece;
    }
    text.remove_prefix(size);
  }
  return out;
}

}  // namespace vivace
