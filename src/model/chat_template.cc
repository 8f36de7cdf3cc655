#include "src/model/chat_template.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "src/core/error.h"
#include "src/model/jinja_eval.h"
#include "src/model/jinja_parser.h"
#include "src/model/utf8.h"

namespace vivace::model {
namespace {

constexpr size_t kMaxTemplateBytes = size_t{1} << 20;

Status status_of(const jinja::Error& error) {
  const Code code = error.kind == jinja::Error::unsupported ? Code::unsupported : Code::invalid_argument;
  return Status(code, "chat template: " + error.message);
}

// Copying a JSON value recurses as deep as it nests, so untrusted ones are measured first.
bool nests_too_deep(const nlohmann::ordered_json& json, int levels = jinja::kMaxContainerDepth) {
  if (!json.is_structured()) return false;
  return levels == 0 || std::any_of(json.begin(), json.end(),
                                    [&](const auto& item) { return nests_too_deep(item, levels - 1); });
}

}  // namespace

struct ChatTemplate::Impl {
  jinja::Block block;
};

ChatTemplate::ChatTemplate() = default;
ChatTemplate::~ChatTemplate() = default;

Result<std::unique_ptr<ChatTemplate>> ChatTemplate::compile(std::string_view source) {
  if (source.size() > kMaxTemplateBytes) {
    return invalid_argument("chat template: has {} bytes, needs at most {}", source.size(),
                            kMaxTemplateBytes);
  }
  if (!is_valid_utf8(source)) return invalid_argument("chat template: is not valid UTF-8");
  std::unique_ptr<ChatTemplate> made(new ChatTemplate());
  try {
    made->impl_ = std::make_unique<Impl>(Impl{jinja::parse(source)});
  } catch (const jinja::Error& error) {
    return status_of(error);
  }
  return made;
}

Result<ChatTemplate::Marked> ChatTemplate::render_marked(const nlohmann::ordered_json& variables,
                                                         const nlohmann::ordered_json& trusted) const {
  for (const auto* object : {&variables, &trusted}) {
    if (!object->is_object())
      return invalid_argument("chat template: variables are {}, need an object", object->type_name());
  }
  try {
    std::vector<std::pair<std::string, jinja::Value>> names;
    for (const auto& [name, value] : trusted.items())
      names.emplace_back(name, jinja::from_json(value, jinja::kTemplate));
    for (const auto& [name, value] : variables.items()) {
      const bool known = std::any_of(names.begin(), names.end(),
                                     [&, n = name](const auto& item) { return item.first == n; });
      if (!known) names.emplace_back(name, jinja::from_json(value, jinja::kData));
    }
    jinja::Text text = jinja::render(impl_->block, std::move(names));
    return Marked{std::move(text.bytes), std::move(text.marks)};
  } catch (const jinja::Error& error) {
    return status_of(error);
  }
}

Result<std::string> ChatTemplate::render(const nlohmann::ordered_json& variables) const {
  VIVACE_TRY_ASSIGN(Marked marked, render_marked(variables, nlohmann::ordered_json::object()));
  return std::move(marked.text);
}

Result<ChatTemplate::Marked> render_chat(const ChatTemplate& chat_template,
                                         const nlohmann::ordered_json& messages, bool add_generation_prompt,
                                         const TokenizerSource& source,
                                         const nlohmann::ordered_json& extra_variables) {
  if (nests_too_deep(messages) || nests_too_deep(extra_variables)) {
    return invalid_argument("chat template: messages or variables nest more than {} deep",
                            jinja::kMaxContainerDepth);
  }
  nlohmann::ordered_json variables =
      extra_variables.is_null() ? nlohmann::ordered_json::object() : extra_variables;
  if (!variables.is_object()) {
    return invalid_argument("chat template: extra variables are {}, need an object", variables.type_name());
  }
  if (!messages.is_array())
    return invalid_argument("chat template: messages are {}, need an array", messages.type_name());
  variables["messages"] = messages;
  variables["add_generation_prompt"] = add_generation_prompt;
  // The model's own tokens: a template may print them, and then they are control tokens.
  const nlohmann::ordered_json trusted = {{"bos_token", source.bos_token}, {"eos_token", source.eos_token}};
  return chat_template.render_marked(variables, trusted);
}

Result<std::vector<int32_t>> encode_chat(const ChatTemplate& chat_template, const Tokenizer& tokenizer,
                                         const nlohmann::ordered_json& messages, bool add_generation_prompt,
                                         const TokenizerSource& source,
                                         const nlohmann::ordered_json& extra_variables) {
  VIVACE_TRY_ASSIGN(const ChatTemplate::Marked marked,
                    render_chat(chat_template, messages, add_generation_prompt, source, extra_variables));
  return tokenizer.encode_marked(marked.text, marked.from_template);
}

}  // namespace vivace::model
