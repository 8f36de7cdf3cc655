#include "src/bench/openai.h"

#include <nlohmann/json.hpp>

#include "src/core/error.h"

namespace vivace::bench::openai {

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kExcerpt = 160;

std::string excerpt(std::string_view text) {
  std::string out(text.substr(0, kExcerpt));
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return text.size() > kExcerpt ? out + "..." : out;
}

const Json* find(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

int64_t count(const Json& object, const char* key, int64_t absent) {
  const Json* value = find(object, key);
  return value != nullptr && value->is_number_integer() ? value->get<int64_t>() : absent;
}

/// What an "error" field says: {"message": ...} or a text.
std::string message_of(const Json& error) {
  const Json* message = find(error, "message");
  if (message == nullptr) message = &error;
  return message->is_string() ? message->get<std::string>()
                              : excerpt(message->dump(-1, ' ', false, Json::error_handler_t::replace));
}

void read_choice(const Json& choice, Chunk& chunk) {
  chunk.finished = find(choice, "finish_reason") != nullptr;
  const Json* delta = find(choice, "delta");
  if (delta == nullptr) {
    const Json* text = find(choice, "text");
    if (text != nullptr && text->is_string()) chunk.text = text->get<std::string>();
    chunk.counted = true;
    return;
  }
  bool has_text = false;
  for (const char* field : {"reasoning_content", "reasoning", "content"}) {
    const Json* text = find(*delta, field);
    if (text == nullptr || !text->is_string()) continue;
    has_text = true;
    chunk.text += text->get<std::string>();
  }
  const bool role_alone = chunk.text.empty() && find(*delta, "role") != nullptr && !chunk.finished;
  chunk.counted = has_text && !role_alone;
}

}  // namespace

std::string_view path_of(const Prompt& prompt) {
  return prompt.messages.empty() ? "/v1/completions" : "/v1/chat/completions";
}

std::string body_of(const LoadRequest& request, const std::string& model) {
  Json body = {{"model", model}};
  if (!request.prompt.messages.empty()) {
    body["messages"] = Json::parse(request.prompt.messages, nullptr, false);
    body["max_completion_tokens"] = request.output_tokens;
  } else {
    body["prompt"] = request.prompt.ids.empty() ? Json(request.prompt.text) : Json(request.prompt.ids);
    body["max_tokens"] = request.output_tokens;
  }
  body["temperature"] = request.temperature;
  if (request.temperature > 0) body["seed"] = request.seed;
  if (request.ignore_eos) body["ignore_eos"] = true;
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  return body.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<Chunk> read_chunk(std::string_view data) {
  const Json json = Json::parse(data, nullptr, false);
  if (!json.is_object()) return invalid_argument("an event is not a JSON object: {}", excerpt(data));
  Chunk chunk;
  if (const Json* error = find(json, "error")) {
    chunk.error = message_of(*error);
    if (chunk.error.empty()) chunk.error = "an error without a message";
    return chunk;
  }
  const Json* choices = find(json, "choices");
  if (choices != nullptr && choices->is_array() && !choices->empty()) read_choice(choices->front(), chunk);
  if (const Json* usage = find(json, "usage")) {
    chunk.prompt_tokens = count(*usage, "prompt_tokens", -1);
    chunk.completion_tokens = count(*usage, "completion_tokens", -1);
    if (const Json* details = find(*usage, "prompt_tokens_details"))
      chunk.cached_tokens = count(*details, "cached_tokens", 0);
  }
  return chunk;
}

std::string error_message(std::string_view body) {
  const Json json = Json::parse(body, nullptr, false);
  if (const Json* error = find(json, "error")) return message_of(*error);
  if (const Json* message = find(json, "message"); message != nullptr && message->is_string())
    return message->get<std::string>();
  return excerpt(body);
}

Result<ServedModel> read_models(std::string_view body, const std::string& name) {
  const Json json = Json::parse(body, nullptr, false);
  const Json* data = find(json, "data");
  if (data == nullptr || !data->is_array() || data->empty())
    return invalid_argument("/v1/models: needs a list \"data\" with a model, is {}", excerpt(body));
  std::string names;
  for (const Json& model : *data) {
    const Json* id = find(model, "id");
    if (id == nullptr || !id->is_string()) continue;
    if (name.empty() || *id == name) {
      return ServedModel{id->get<std::string>(), std::max<int64_t>(0, count(model, "max_model_len", 0))};
    }
    names += (names.empty() ? "" : ", ") + id->get<std::string>();
  }
  if (name.empty()) return invalid_argument("/v1/models: no model has an \"id\": {}", excerpt(body));
  return not_found("/v1/models: there is no model '{}', only {}", name, excerpt(names));
}

}  // namespace vivace::bench::openai
