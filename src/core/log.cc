#include "src/core/log.h"

#include <cstdio>

namespace vivace {

void log_line(std::string_view text) {
  std::fprintf(stderr, "vivace: %.*s\n", static_cast<int>(text.size()), text.data());
}

}  // namespace vivace
