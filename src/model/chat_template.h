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
/// else and loop.*, set, namespace, macros, filters, slices, tests, whitespace control, generation tags), rendered exactly as Python's jinja2 does with trim_blocks and lstrip_blocks on, as transformers sets it. A
/// construct outside the subset is refused when the template is compiled, with its name and line. Rendering
/// is bounded in steps, depth and output.
class ChatTemplate {
 public:
  static Result<std::unique_ptr<ChatTemplate>> compile(std::string_view source);
  ~ChatTemplate();

  /// `variables` is an object: messages, add_generation_prompt, bos_token, eos_token, tools, ...
  /// `raise_exception` in a template becomes invalid_argument with its message.
  Result<std::string> render(const nlohmann::ordered_json& variables) const;

  /// A rendered text that knows, byte by byte, whether the template wrote it (1) or a variable (0).
  struct Marked {
    std::string text, from_template;  // of equal length
  };
  /// As render(), but what comes from `trusted` (an object that takes precedence) counts as the template's own. The
  /// origin follows each character through slices, split, replace, case and so on; what tojson or printing a list
  /// makes counts as a variable's.
  Result<Marked> render_marked(const nlohmann::ordered_json& variables,
                               const nlohmann::ordered_json& trusted) const;

 private:
  ChatTemplate();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The first half of encode_chat(): the text, and which of it the template wrote.
Result<ChatTemplate::Marked> render_chat(const ChatTemplate& chat_template,
                                         const nlohmann::ordered_json& messages, bool add_generation_prompt,
                                         const TokenizerSource& source,
                                         const nlohmann::ordered_json& extra_variables);

/// Renders `messages` (an array of {role, content, ...}) and tokenises the result so that only the template's
/// own text can become control tokens: message text that spells one stays text (an injection-safe prompt). The text is
/// tokenised in one go, so that for harmless messages the ids are those of the plain rendering; a control token is
/// taken only where the template (or bos_token, eos_token of `source`) wrote every byte of it.
Result<std::vector<int32_t>> encode_chat(const ChatTemplate& chat_template, const Tokenizer& tokenizer,
                                         const nlohmann::ordered_json& messages, bool add_generation_prompt,
                                         const TokenizerSource& source,
                                         const nlohmann::ordered_json& extra_variables);

}  // namespace vivace::model
