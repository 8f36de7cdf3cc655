#include <algorithm>

#include "src/model/tokenizer.h"

namespace vivace::model {

// Each stop string has a Knuth-Morris-Pratt state: how many of its bytes the text so far ends with. Stepping
// byte by byte makes the outcome independent of how the text was cut, and the largest state is exactly what
// must be held back.

StopMatcher::StopMatcher(std::vector<std::string> stops) {
  for (std::string& text : stops) {
    if (text.empty()) continue;
    Stop stop;
    stop.fallback.assign(text.size() + 1, 0);
    for (size_t i = 1, matched = 0; i < text.size(); ++i) {
      while (matched > 0 && text[i] != text[matched]) matched = stop.fallback[matched];
      if (text[i] == text[matched]) ++matched;
      stop.fallback[i + 1] = matched;
    }
    stop.text = std::move(text);
    stops_.push_back(std::move(stop));
  }
}

StopMatcher::Piece StopMatcher::push(std::string_view text) {
  held_ += text;
  size_t held = 0;
  for (size_t i = held_.size() - text.size(); i < held_.size(); ++i) {
    held = 0;
    const Stop* hit = nullptr;
    for (Stop& stop : stops_) {
      while (stop.matched > 0 && held_[i] != stop.text[stop.matched])
        stop.matched = stop.fallback[stop.matched];
      if (held_[i] == stop.text[stop.matched]) ++stop.matched;
      if (stop.matched == stop.text.size()) {
        if (hit == nullptr || stop.text.size() > hit->text.size()) hit = &stop;
      }
      held = std::max(held, stop.matched);
    }
    if (hit != nullptr) {
      Piece piece{held_.substr(0, i + 1 - hit->text.size()), true, hit->text};
      reset();
      return piece;
    }
  }
  if (text.empty()) return {};
  Piece piece{held_.substr(0, held_.size() - held), false, {}};
  held_.erase(0, held_.size() - held);
  return piece;
}

std::string StopMatcher::finish() {
  std::string rest = std::move(held_);
  reset();
  return rest;
}

void StopMatcher::reset() {
  held_.clear();
  for (Stop& stop : stops_) stop.matched = 0;
}

}  // namespace vivace::model
