#include "src/core/log.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <string>

namespace vivace {

void log_line(std::string_view text) {
  std::fprintf(stderr, "vivace: %.*s\n", static_cast<int>(text.size()), text.data());
}

void log_once(std::string_view text) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> logged;
  const std::lock_guard lock(mutex);
  if (logged.insert(std::string(text)).second) log_line(text);
}

}  // namespace vivace
