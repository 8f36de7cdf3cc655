#include "src/server/api.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "src/core/rename.h"
#include "src/model/utf8.h"

namespace vivace::server {

namespace {

using OrderedJson = nlohmann::ordered_json;

std::string_view type_of(int status) {
  if (status == 401) return "authentication_error";
  if (status == 404) return "not_found_error";
  if (status == 429) return "rate_limit_error";
  return status < 500 ? "invalid_request_error" : "server_error";
}

std::string_view prompt_field(const ApiRequest& request) {
  if (request.kind == ApiKind::chat) return "messages";
  if (request.kind == ApiKind::completions) return "prompt";
  return std::holds_alternative<std::string>(request.prompts.front()) ? "text" : "input_ids";
}

std::string_view max_tokens_field(ApiKind kind) {
  return kind == ApiKind::generate ? "sampling_params.max_new_tokens" : "max_tokens";
}

/// "prompt[3]" of several, else "prompt".
std::string prompt_name(const ApiRequest& request, size_t index) {
  const std::string_view field = prompt_field(request);
  return request.prompts.size() > 1 ? fmt::format("{}[{}]", field, index) : std::string(field);
}

std::optional<ApiError> check_context(const ApiRequest& request, size_t index, int64_t tokens,
                                      int64_t max_model_len) {
  const std::string name = prompt_name(request, index);
  const char* const plural = tokens == 1 ? "" : "s";
  ApiError error{.param = std::string(prompt_field(request)), .code = "context_length_exceeded"};
  if (tokens == 0) {
    error.code = "invalid_value";
    error.message = fmt::format("{} has 0 tokens, needs at least 1", name);
    return error;
  }
  const int64_t room = max_model_len - tokens;
  if (room < 1) {
    error.message = no_room_message(name, tokens, max_model_len);
    return error;
  }
  if (const auto most = request.request.max_tokens; most && *most > room) {
    error.message = fmt::format(
        "{} has {} token{} and {} is {}: the context holds {} tokens, which leaves {} for the "
        "answer",
        name, tokens, plural, max_tokens_field(request.kind), *most, max_model_len, room);
    return error;
  }
  return std::nullopt;
}

/// Tokenising costs seconds for megabytes; this costs nothing.
std::optional<ApiError> check_length(const ApiRequest& request, const std::string& name,
                                     std::string_view text, const ServedModel& model, int64_t max_model_len) {
  const int64_t least = model.tokenizer->least_tokens(text);
  if (least <= max_model_len) return std::nullopt;
  const int64_t longest = model.tokenizer->longest_token();
  return ApiError{.message = fmt::format(
                      "{} has {} bytes{}, which are at least {} tokens: the context holds {} tokens of at "
                      "most {} bytes each, prompt and answer together",
                      name, text.size(), request.kind == ApiKind::chat ? " as the template writes them" : "",
                      least, max_model_len, longest),
                  .param = std::string(prompt_field(request)),
                  .code = "context_length_exceeded"};
}

std::variant<std::vector<int32_t>, ApiError> encode_chat(const ApiRequest& request, const ServedModel& model,
                                                         int64_t max_model_len) {
  if (model.chat_template == nullptr)
    return ApiError{.message = fmt::format(
                        "messages cannot be rendered: the model \"{}\" has no chat template", model.name),
                    .param = "messages",
                    .code = "no_chat_template"};
  const auto failed = [](const Status& status) {
    return ApiError{.message = fmt::format("messages cannot be rendered: {}", status.message()),
                    .param = "messages",
                    .code = "invalid_value"};
  };
  const Result<model::ChatTemplate::Marked> marked =
      model::render_chat(*model.chat_template, request.messages, request.add_generation_prompt, model.source,
                         request.template_variables);
  if (!marked.ok()) return failed(marked.status());
  if (auto error = check_length(request, "messages", marked->text, model, max_model_len))
    return *std::move(error);
  Result<std::vector<int32_t>> ids = model.tokenizer->encode_marked(marked->text, marked->from_template);
  if (!ids.ok()) return failed(ids.status());
  return std::move(ids).value();
}

std::variant<std::vector<int32_t>, ApiError> encode_text(const ApiRequest& request, const std::string& text,
                                                         const ServedModel& model, const std::string& name,
                                                         int64_t max_model_len) {
  const model::Tokenizer& tokenizer = *model.tokenizer;
  if (auto error = check_length(request, name, text, model, max_model_len)) return *std::move(error);
  Result<std::vector<int32_t>> ids = tokenizer.encode(text, model::SpecialTokens::parse);
  if (!ids.ok())
    return ApiError{.message = fmt::format("{} cannot be tokenised: {}", name, ids.status().message()),
                    .param = std::string(prompt_field(request)),
                    .code = "invalid_value"};
  const int32_t bos = tokenizer.bos_id();
  if (request.add_special_tokens && tokenizer.add_bos() && bos >= 0 && (ids->empty() || ids->front() != bos))
    ids->insert(ids->begin(), bos);
  return std::move(ids).value();
}

ApiError no_tokenizer(const ApiRequest& request) {
  const char* const instead =
      request.kind == ApiKind::chat ? "/v1/completions takes token ids" : "token ids are taken";
  return {
      .message = fmt::format("{} is text: the model has no tokenizer, {}", prompt_field(request), instead),
      .param = std::string(prompt_field(request)),
      .code = "no_tokenizer"};
}

}  // namespace

std::string no_room_message(std::string_view name, int64_t tokens, int64_t max_model_len) {
  return fmt::format(
      "{} has {} token{}, which leaves no room for an answer: the context holds {} tokens, prompt and "
      "answer together",
      name, tokens, tokens == 1 ? "" : "s", max_model_len);
}

std::string error_body(const ApiError& error) {
  const auto text_or_null = [](const std::string& text) {
    return text.empty() ? OrderedJson() : OrderedJson(text);
  };
  const OrderedJson json = {{"error",
                             {{"message", error.message},
                              {"type", type_of(error.status)},
                              {"param", text_or_null(error.param)},
                              {"code", text_or_null(error.code)}}}};
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

HttpResponse error_response(const ApiError& error) {
  HttpResponse response{.status = error.status, .body = error_body(error)};
  if (error.retry_after_s > 0)
    response.headers.emplace_back("Retry-After", std::to_string(error.retry_after_s));
  if (error.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

ApiError error_of(const Status& status, ApiKind kind) {
  const bool sglang = kind == ApiKind::generate;
  const std::string place = sglang ? "sampling_params." : "";
  const std::array<std::pair<std::string_view, std::string>, 6> names = {{
      {"prompt_ids", kind == ApiKind::chat ? "messages"
                     : sglang              ? "the prompt"
                                           : "prompt"},
      {"max_tokens", std::string(max_tokens_field(kind))},
      {"min_tokens", sglang ? "sampling_params.min_new_tokens" : "min_tokens"},
      {"stop_ids", place + "stop_token_ids"},
      {"max_batch", "--max-batch"},
      {"max_waiting", "--max-queue"},
  }};
  ApiError error{.message = renamed(status.message(), names)};
  for (const std::string_view prefix : {"request: ", "engine: "})
    if (error.message.starts_with(prefix)) error.message.erase(0, prefix.size());
  switch (status.code()) {
    case Code::invalid_argument:
    case Code::unsupported:
      error.code = "invalid_value";
      error.param = error.message.substr(0, error.message.find_first_of(" ["));
      break;
    case Code::resource_exhausted:
      error.status = 429;
      error.code = "queue_full";
      error.retry_after_s = 1;
      break;
    case Code::cancelled:
      error.status = 503;
      error.code = "shutting_down";
      error.retry_after_s = 5;
      break;
    default:
      error.status = 500;
      error.code = "engine_error";
  }
  return error;
}

std::variant<std::vector<PromptTokens>, ApiError> tokenize(const ApiRequest& request,
                                                           const ServedModel& model, int64_t max_model_len) {
  std::vector<PromptTokens> prompts;
  if (request.kind == ApiKind::chat) {
    if (model.tokenizer == nullptr) return no_tokenizer(request);
    auto ids = encode_chat(request, model, max_model_len);
    if (auto* error = std::get_if<ApiError>(&ids)) return std::move(*error);
    prompts.push_back({.ids = std::get<std::vector<int32_t>>(std::move(ids)), .text = {}});
    if (auto error = check_context(request, 0, std::ssize(prompts[0].ids), max_model_len))
      return *std::move(error);
  }
  for (size_t i = 0; i < request.prompts.size(); ++i) {
    PromptTokens prompt;
    if (const auto* given = std::get_if<std::vector<int32_t>>(&request.prompts[i])) {
      prompt.ids = *given;
      if (request.echo) {
        std::string bytes;
        for (const int32_t id : prompt.ids) bytes += model.bytes_of(id);
        prompt.text = model::replace_invalid_utf8(bytes);
      }
    } else {
      if (model.tokenizer == nullptr) return no_tokenizer(request);
      const auto& text = std::get<std::string>(request.prompts[i]);
      auto ids = encode_text(request, text, model, prompt_name(request, i), max_model_len);
      if (auto* error = std::get_if<ApiError>(&ids)) return std::move(*error);
      prompt.ids = std::get<std::vector<int32_t>>(std::move(ids));
      if (request.echo) prompt.text = text;
    }
    if (auto error = check_context(request, i, std::ssize(prompt.ids), max_model_len))
      return *std::move(error);
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

Request engine_request(const ApiRequest& request, const std::vector<PromptTokens>& prompts, int64_t index,
                       int64_t max_model_len) {
  constexpr int64_t kCompletionDefault = 16;  // OpenAI's
  Request out = request.request;
  out.prompt_ids = prompts[static_cast<size_t>(index / request.n)].ids;
  if (!out.max_tokens && request.kind == ApiKind::completions)
    out.max_tokens = std::min(kCompletionDefault, max_model_len - std::ssize(out.prompt_ids));
  // Several answers to one prompt shall differ, and repeat together.
  if (out.sampling.seed) *out.sampling.seed += static_cast<uint64_t>(index % request.n);
  return out;
}

}  // namespace vivace::server
