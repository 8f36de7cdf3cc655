#pragma once

#include <string_view>

namespace vivace {

/// One line on standard error, "vivace: <text>": what a user should know although nothing failed.
void log_line(std::string_view text);
/// The same, unless this process has logged the text already: for what every load of a model would say again.
void log_once(std::string_view text);

}  // namespace vivace
