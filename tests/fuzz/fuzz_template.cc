// Input: a chat template. What compiles renders a conversation or fails with a message; origins match the text.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "src/model/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace vivace::model;
  static const nlohmann::ordered_json variables = nlohmann::ordered_json::parse(R"({
    "n": 3, "text": "Hello wörld", "items": [1, 2, 3, 4], "d": {"b": 2, "a": 1, "c": "x"}, "half": 0.5, "none": null,
    "people": [{"name": "Ann", "age": 31}, {"name": "Bob"}], "add_generation_prompt": true,
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>a</think>b"}]})");
  const auto made = ChatTemplate::compile(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!made.ok()) return 0;
  const auto text = (*made)->render_marked(variables, {{"bos_token", "<s>"}});
  if (text.ok() && text->text.size() != text->from_template.size()) __builtin_trap();
  return 0;
}
