#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "src/model/tokenizer.h"
#include "vivace/status.h"

namespace vivace::model {

/// A compiled chat template: the subset of Jinja that published templates use (output, if/elif/else, for with
/// else and loop.*, set, namespace, macro-free expressions, filters, slices, tests, whitespace control),
/// rendered exactly as Python's jinja2 does with trim_blocks and lstrip_blocks on, as transformers sets it. A
/// construct outside the subset is refused when the template is compiled, with its name and line. Rendering
/// is bounded in steps, depth and output.
class ChatTemplate {
 public:
  static Result<std::unique_ptr<ChatTemplate>> compile(std::string_view source);
  ~ChatTemplate();

  /// `variables` is an object: messages, add_generation_prompt, bos_token, eos_token, tools, ...
  /// `raise_exception` in a template becomes invalid_argument with its message.
  Result<std::string> render(const nlohmann::ordered_json& variables) const;

 private:
  ChatTemplate();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Renders `messages` (an array of {role, content, ...}) and tokenises the result so that only the template's
/// own text can become control tokens: message text that spells one stays text (an injection-safe prompt).
Result<std::vector<int32_t>> encode_chat(const ChatTemplate& chat_template, const Tokenizer& tokenizer,
                                         const nlohmann::ordered_json& messages, bool add_generation_prompt,
                                         const TokenizerSource& source,
                                         const nlohmann::ordered_json& extra_variables);

}  // namespace vivace::model
