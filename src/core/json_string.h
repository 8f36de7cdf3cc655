#pragma once

#include <string>
#include <string_view>

namespace vivace {

/// Appends `text` as a JSON string, quotes included. Bytes from 0x80 on are copied: text that may not be UTF-8 is the caller's to mend.
void append_json_string(std::string& out, std::string_view text);

}  // namespace vivace
