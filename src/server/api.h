#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "src/server/http.h"
#include "src/server/model.h"
#include "vivace/engine.h"

// What clients send, as typed requests, and errors in OpenAI's shape. Pure functions: they run on the worker pool.

namespace vivace::server {

enum class ApiKind : uint8_t { completions, chat, generate };

struct ApiError {
  int status = 400;
  std::string message, param, code;  ///< an empty `param` or `code` is null in the answer
  int retry_after_s = 0;             ///< > 0: the Retry-After header
};

/// {"error": {"message", "type", "param", "code"}}; the type follows from the status.
std::string error_body(const ApiError& error);
HttpResponse error_response(const ApiError& error);
/// What an engine's refusal is to a client.
ApiError error_of(const Status& status, ApiKind kind);

using Prompt = std::variant<std::string, std::vector<int32_t>>;

struct ApiRequest {
  ApiKind kind = ApiKind::completions;
  std::vector<Prompt> prompts;  ///< one or more; none for chat
  nlohmann::ordered_json messages, template_variables;
  bool add_generation_prompt = true;
  bool add_special_tokens = true;  ///< the token that begins a text, where the tokenizer asks for it
  Request request;                 ///< without its prompt; max_tokens as the client gave it
  int64_t n = 1;                   ///< answers per prompt
  bool stream = false, include_usage = false, echo = false;
  bool logprobs = false;  ///< request.sampling.logprobs says how many alternatives
  bool list = false;      ///< /generate: the prompts came as a list, so the answers go as one

  int64_t choices() const { return static_cast<int64_t>(kind == ApiKind::chat ? 1 : prompts.size()) * n; }
};

/// Most answers of one request.
inline constexpr int64_t kMaxChoices = 1024, kMaxN = 128;
inline constexpr int64_t kMaxMessages = 4096;

struct ApiLimits {
  std::string model;  ///< its name; a request that names another is 404
  int64_t vocab = 0;
  int64_t max_model_len = std::numeric_limits<int64_t>::max();  ///< longer lists of ids are not even copied
  int64_t max_choices = kMaxChoices;                            ///< fewer: what the engine can ever hold
  /// What a list or an object of a body may have whatever the context and the vocabulary are, which else limit it.
  int64_t least_elements = kMaxMessages;
};

/// Reads a body. Unknown fields are ignored unless they are too long, and null counts as absent; a field that is known
/// and cannot be honoured is an error that names it, its value and what fits.
std::variant<ApiRequest, ApiError> parse_request(ApiKind kind, std::string_view body,
                                                 const ApiLimits& limits);

/// That a prompt of so many ids, named `name`, fills the context or more.
std::string no_room_message(std::string_view name, int64_t tokens, int64_t max_model_len);

struct PromptTokens {
  std::vector<int32_t> ids;
  std::string text;  ///< for echo
};

/// Tokenises the prompts (chat: renders the template), and sees to it that each fits the context. Text that cannot fit,
/// whatever its tokens, is refused by its length.
std::variant<std::vector<PromptTokens>, ApiError> tokenize(const ApiRequest& request,
                                                           const ServedModel& model, int64_t max_model_len);

/// The request of choice `index`: prompt, default of max_tokens, and a seed of its own.
Request engine_request(const ApiRequest& request, const std::vector<PromptTokens>& prompts, int64_t index,
                       int64_t max_model_len);

}  // namespace vivace::server
