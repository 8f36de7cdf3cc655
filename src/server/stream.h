#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "src/core/json_string.h"
#include "src/server/api.h"
#include "vivace/engine.h"

// What clients read: server-sent events and whole answers, in the three dialects.

namespace vivace::server {

/// What an answer to a prompt has become.
struct Choice {
  struct Token {
    int32_t id = -1;
    float logprob = 0;
    std::vector<TopLogprob> top;
    int64_t characters = 0;  ///< of the text that it made final
  };
  std::string text;
  std::vector<Token> tokens;  ///< kept when log-probabilities or ids are shown
  FinishReason finish = FinishReason::none;
  Usage usage;
};

/// Formats one request's answer. Not thread-safe; events and whole answers are never mixed.
class AnswerWriter {
 public:
  struct Options {
    ApiKind kind = ApiKind::completions;
    std::string id, model;
    int64_t created = 0;  ///< Unix time
    int64_t choices = 1, n = 1;
    bool logprobs = false, usage = false;  ///< usage: as an event of its own
    bool list = false;                     ///< of /generate
    std::vector<std::string> echo;         ///< per prompt; empty: none
    std::function<std::string_view(int32_t)> bytes_of;
  };
  explicit AnswerWriter(Options options);

  /// One event for one token, with the finish reason on the last of its choice.
  std::string event(int64_t index, const TokenEvent& token);
  /// No choices, only the usage of all.
  std::string usage_event(const std::vector<Usage>& usages) const;
  static std::string done_event() { return "data: [DONE]\n\n"; }
  static std::string error_event(const ApiError& error);

  /// The whole answer as one JSON document.
  std::string answer(const std::vector<Choice>& choices, double seconds) const;

 private:
  struct Progress {
    std::string text;  ///< /generate repeats all of it
    std::vector<Choice::Token> tokens;
    int64_t characters = 0, count = 0;
    bool begun = false;
  };

  void choice_event(std::string& out, int64_t index, const TokenEvent& token);
  void generate_event(std::string& out, int64_t index, const TokenEvent& token);
  void generate_answer(std::string& out, const Choice& choice, int64_t index, double seconds) const;
  void meta_info(std::string& out, int64_t index, const std::vector<Choice::Token>& tokens,
                 FinishReason finish, const Usage& usage, int64_t completion_tokens) const;
  void completion_logprobs(std::string& out, const std::vector<Choice::Token>& tokens, int64_t offset) const;
  void chat_logprobs(std::string& out, const std::vector<Choice::Token>& tokens) const;
  void append_token_text(std::string& out, int32_t id) const;
  void append_usage(std::string& out, const std::vector<Usage>& usages) const;
  const std::string* echo_of(int64_t index) const;

  const Options options_;
  std::string head_;  ///< of each event: {"id": ..., "choices":[
  std::vector<Progress> progress_;
};

}  // namespace vivace::server
