// Input: a tokenizer.json, a NUL byte, a text. Any tokenizer that is accepted encodes and decodes any text.

#include <cstdint>
#include <string_view>

#include "src/model/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace vivace::model;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = input.find('\0');
  const std::string_view text = end == input.npos ? input : input.substr(end + 1);
  TokenizerSource source;
  source.tokenizer_json = input.substr(0, end);
  const auto tokenizer = Tokenizer::create(source);
  if (!tokenizer.ok()) return 0;
  for (SpecialTokens special : {SpecialTokens::parse, SpecialTokens::as_text}) {
    const auto ids = (*tokenizer)->encode(text, special);
    if (!ids.ok()) continue;
    (*tokenizer)->decode(*ids);
    for (int32_t id : *ids) {
      if (id < 0 || id >= (*tokenizer)->vocab()) __builtin_trap();
      if (special == SpecialTokens::as_text && (*tokenizer)->is_special(id)) __builtin_trap();
    }
  }
  return 0;
}
