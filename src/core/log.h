#pragma once

#include <string_view>

namespace vivace {

/// One line on standard error, "vivace: <text>": what a user should know although nothing failed.
void log_line(std::string_view text);

}  // namespace vivace
