#include <cstdlib>
#include <string_view>

#include "src/model/config.h"

// Any text as a config.json; what follows a NUL is the generation_config.json.

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t end = text.find('\0');
  const std::string_view generation =
      end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  const auto config = vivace::model::parse_hf_config(text.substr(0, end), generation);
  if (config.ok() && !vivace::model::validate(*config).ok()) std::abort();
  return 0;
}
