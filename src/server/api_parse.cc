#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include "src/engine/check_request.h"
#include "src/model/json.h"
#include "src/server/api.h"
#include "src/server/fields.h"

namespace vivace::server {

namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
constexpr double kHuge = std::numeric_limits<float>::max();
constexpr size_t kMaxPrompts = 1024;

/// What distinguishes the names that the dialects give to the same thing.
struct Names {
  std::string_view max_tokens, min_tokens, seed;
};
constexpr Names kOpenAi{"max_tokens", "min_tokens", "seed"};
constexpr Names kSglang{"max_new_tokens", "min_new_tokens", "sampling_seed"};

std::vector<int32_t> token_ids(Fields& fields, std::string_view name, const Json& list, int64_t vocab) {
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    const std::optional<int64_t> id = whole(list[i], 0, vocab - 1);
    if (!id) {
      fields.misfit(fmt::format("{}[{}]", name, i), list[i], fmt::format("a token id of 0..{}", vocab - 1));
      return {};
    }
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

void read_stops(Fields& fields, Request& request, int64_t vocab) {
  if (const Json* stop = fields.find("stop")) {
    const auto add = [&](const std::string& name, const Json& value) {
      if (!value.is_string()) return fields.misfit(name, value, "a string");
      const auto bytes = std::ssize(value.get_ref<const std::string&>());
      if (bytes < 1 || bytes > engine::kMaxStopBytes)
        return fields.fail(name, fmt::format("{} has {} bytes, needs 1..{}", fields.path(name), bytes,
                                             engine::kMaxStopBytes));
      request.stop.push_back(value.get<std::string>());
    };
    if (!stop->is_array()) {
      add("stop", *stop);
    } else if (std::ssize(*stop) > engine::kMaxStops) {
      fields.fail("stop", fmt::format("{} has {} strings, needs at most {}", fields.path("stop"),
                                      stop->size(), engine::kMaxStops));
    } else {
      for (size_t i = 0; i < stop->size(); ++i) add(fmt::format("stop[{}]", i), (*stop)[i]);
    }
  }
  if (const Json* ids = fields.find("stop_token_ids")) {
    if (!ids->is_array()) return fields.misfit("stop_token_ids", *ids, "a list of token ids");
    if (std::ssize(*ids) > engine::kMaxStopIds)
      return fields.fail("stop_token_ids",
                         fmt::format("{} has {} ids, needs at most {}", fields.path("stop_token_ids"),
                                     ids->size(), engine::kMaxStopIds));
    request.stop_ids = token_ids(fields, "stop_token_ids", *ids, vocab);
  }
}

void read_logit_bias(Fields& fields, SamplingParams& sampling, int64_t vocab) {
  const Json* biases = fields.find("logit_bias");
  if (biases == nullptr) return;
  if (!biases->is_object())
    return fields.misfit("logit_bias", *biases, "an object of token ids and numbers of -100..100");
  for (const auto& [key, value] : biases->items()) {
    int64_t id = -1;
    const auto parsed = std::from_chars(key.data(), key.data() + key.size(), id);
    if (parsed.ec != std::errc() || parsed.ptr != key.data() + key.size() || id < 0 || id >= vocab)
      return fields.fail("logit_bias", fmt::format("{} names token {}, needs a token id of 0..{}",
                                                   fields.path("logit_bias"), shown(Json(key)), vocab - 1));
    if (!value.is_number() || !(value.get<double>() >= -100 && value.get<double>() <= 100))
      return fields.misfit(fmt::format("logit_bias.{}", id), value, "a number of -100..100");
    sampling.logit_bias.emplace_back(static_cast<int32_t>(id), value.get<float>());
  }
}

/// What all dialects call the same, and what they name differently.
void read_sampling(Fields& fields, Request& request, const Names& names, int64_t vocab) {
  SamplingParams& s = request.sampling;
  s.temperature = fields.number("temperature", 0, kHuge, false, "a finite number of at least 0 in fp32", 1);
  s.top_k = std::max<int64_t>(0, fields.integer("top_k", -1, kAny, 0));  // -1: off, as elsewhere
  s.top_p = fields.number("top_p", 0, 1, true, "a number above 0 and at most 1", 1);
  s.min_p = fields.number("min_p", 0, 1, false, "a number of 0..1", 0);
  s.repetition_penalty =
      fields.number("repetition_penalty", 0, kHuge, true, "a finite number above 0 in fp32", 1);
  s.presence_penalty = fields.number("presence_penalty", -2, 2, false, "a number of -2..2", 0);
  s.frequency_penalty = fields.number("frequency_penalty", -2, 2, false, "a number of -2..2", 0);
  if (const auto seed = fields.integer(names.seed, std::numeric_limits<int64_t>::min(), kAny))
    s.seed = static_cast<uint64_t>(*seed);
  read_logit_bias(fields, s, vocab);
  request.max_tokens = fields.integer(names.max_tokens, 0, kAny);
  request.min_tokens = fields.integer(names.min_tokens, 0, kAny, 0);
  request.ignore_eos = fields.boolean("ignore_eos", false);
  request.skip_special = fields.boolean("skip_special_tokens", true);
  read_stops(fields, request, vocab);
}

/// An answer without these would not be what the client asked for.
void refuse_unsupported(Fields& f) {
  const char* const schema = "it does not constrain the output";
  for (const char* name : {"guided_json", "guided_regex", "guided_choice", "guided_grammar",
                           "structured_outputs", "json_schema", "regex", "ebnf", "structural_tag"})
    f.unsupported(name, {}, schema);
  f.unsupported("use_beam_search", {false}, "there is no beam search");
  f.unsupported("include_stop_str_in_output", {false}, "the text ends before a stop string");
  f.unsupported("no_stop_trim", {false}, "the text ends before a stop string");
  f.unsupported("prompt_logprobs", {}, "it has log-probabilities of generated tokens only");
  f.unsupported("truncate_prompt_tokens", {}, "a prompt is taken whole or refused");
  f.unsupported("priority", {0}, "requests are served in the order of their arrival");
  f.unsupported("logits_processors", {Json::array()}, "it has no plug-ins");
  f.unsupported("allowed_token_ids", {}, "logit_bias can favour tokens");
  f.unsupported("bad_words", {Json::array()}, "logit_bias can ban tokens");
  f.unsupported("kv_transfer_params", {}, "it is one engine");
}

void refuse_unsupported_openai(Fields& f) {
  refuse_unsupported(f);
  const char* const tools = "it does not call tools";
  f.unsupported("tools", {Json::array()}, tools);
  f.unsupported("tool_choice", {"none", "auto"}, tools);
  f.unsupported("functions", {Json::array()}, tools);
  f.unsupported("function_call", {"none", "auto"}, tools);
  f.unsupported("modalities", {Json::array({"text"})}, "it answers with text");
  f.unsupported("audio", {}, "it answers with text");
  if (const Json* format = f.find("response_format")) {
    const bool text = format->is_object() && format->contains("type") && (*format)["type"] == "text";
    if (!text)
      f.fail(
          "response_format",
          fmt::format("response_format is {}, which this server cannot do: it does not constrain the output, "
                      "needs {{\"type\": \"text\"}}",
                      format->is_object()
                          ? format->dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 80)
                          : shown(*format)),
          "unsupported_parameter");
  }
}

void refuse_unsupported_chat(Fields& f) {
  f.unsupported("prediction", {}, "it has no use for one");
  f.unsupported("web_search_options", {}, "it does not search");
  f.unsupported("reasoning_effort", {}, "chat_template_kwargs reaches the template");
  f.unsupported("verbosity", {}, "the model has no such setting");
  f.unsupported("chat_template", {}, "the template is the model's");
  f.unsupported("documents", {Json::array()}, "chat_template_kwargs reaches the template");
  f.unsupported("continue_final_message", {false}, "an answer begins a message");
  f.unsupported("echo", {false}, "an answer begins a message");
}

void read_stream(Fields& fields, ApiRequest& out) {
  out.stream = fields.boolean("stream", false);
  const Json* options = fields.find("stream_options");
  if (options == nullptr) return;
  if (!options->is_object()) return fields.misfit("stream_options", *options, "an object");
  if (!out.stream) return fields.fail("stream_options", "stream_options is given, needs stream to be true");
  Fields inner(*options, "stream_options.");
  out.include_usage = inner.boolean("include_usage", false);
  inner.unsupported("continuous_usage_stats", {false}, "usage comes once, at the end");
  if (!inner.ok()) fields.fail(inner.error());
}

void read_model(Fields& fields, const ApiLimits& limits) {
  const Json* model = fields.find("model");
  if (model == nullptr) return;
  if (!model->is_string()) return fields.misfit("model", *model, "a string");
  if (*model == limits.model) return;
  fields.fail(ApiError{
      .status = 404,
      .message = fmt::format("model is {}, needs \"{}\", which is served here", shown(*model), limits.model),
      .param = "model",
      .code = "model_not_found"});
}

void read_n(Fields& fields, ApiRequest& out) {
  out.n = fields.integer("n", 1, kMaxN, 1);
  const auto best_of = fields.integer("best_of", 1, kMaxN);
  if (best_of && *best_of != out.n)
    fields.fail("best_of",
                fmt::format("best_of is {}, needs n = {}: every answer that is generated is returned",
                            *best_of, out.n),
                "unsupported_parameter");
}

/// The ids of one prompt, unless they are so many that it cannot fit.
std::vector<int32_t> prompt_ids(Fields& fields, std::string_view field, std::string_view place,
                                const Json& list, const ApiLimits& limits) {
  if (std::ssize(list) < limits.max_model_len) return token_ids(fields, place, list, limits.vocab);
  fields.fail(field, no_room_message(place, std::ssize(list), limits.max_model_len),
              "context_length_exceeded");
  return {};
}

/// A string, token ids, or a list of either. `name` is "prompt", or "text" and "input_ids" of /generate.
void read_prompts(Fields& fields, std::string_view name, ApiRequest& out, const ApiLimits& limits) {
  const Json* prompt = fields.find(name);
  if (prompt == nullptr)
    return fields.fail(name, fmt::format("{} is missing, needs a string or token ids", name));
  if (prompt->is_string()) {
    out.prompts.emplace_back(prompt->get<std::string>());
    return;
  }
  if (!prompt->is_array())
    return fields.misfit(name, *prompt,
                         "a string, a list of token ids, or a list of strings or of such lists");
  if (prompt->empty())
    return fields.fail(name, fmt::format("{} is an empty list, needs at least one token", name));
  const Json& first = prompt->front();
  if (!first.is_string() && !first.is_array()) {
    out.prompts.emplace_back(prompt_ids(fields, name, name, *prompt, limits));
    return;
  }
  if (prompt->size() > kMaxPrompts)
    return fields.fail(name,
                       fmt::format("{} has {} prompts, needs at most {}", name, prompt->size(), kMaxPrompts));
  out.list = true;
  for (size_t i = 0; i < prompt->size() && fields.ok(); ++i) {
    const Json& one = (*prompt)[i];
    const std::string place = fmt::format("{}[{}]", name, i);
    if (one.type() != first.type())
      return fields.misfit(
          place, one,
          first.is_string() ? "a string, as the first has" : "a list of token ids, as the first has");
    if (one.is_string()) {
      out.prompts.emplace_back(one.get<std::string>());
    } else if (one.empty()) {
      return fields.fail(name, fmt::format("{} is an empty list, needs at least one token", place));
    } else {
      out.prompts.emplace_back(prompt_ids(fields, name, place, one, limits));
    }
  }
}

void check_choices(Fields& fields, const ApiRequest& out, int64_t max_choices) {
  if (!fields.ok() || out.choices() <= max_choices) return;
  const char* const why = max_choices < kMaxChoices ? ", what --max-batch and --max-queue hold together" : "";
  fields.fail("n", fmt::format("n is {} for {} prompt{}, needs at most {} answers in all{}", out.n,
                               out.choices() / out.n, out.choices() == out.n ? "" : "s", max_choices, why));
}

/// The number of alternatives whose log-probabilities are wanted.
int64_t most_logprobs(int64_t vocab) {
  return std::min<int64_t>(engine::kMaxLogprobs, vocab);
}

void read_completions(Fields& fields, ApiRequest& out, const ApiLimits& limits) {
  read_model(fields, limits);
  read_prompts(fields, "prompt", out, limits);
  refuse_unsupported_openai(fields);
  fields.unsupported("suffix", {""}, "it does not fill gaps");
  fields.unsupported("prompt_embeds", {}, "a prompt is text or token ids");
  read_n(fields, out);
  read_stream(fields, out);
  read_sampling(fields, out.request, kOpenAi, limits.vocab);
  out.add_special_tokens = fields.boolean("add_special_tokens", true);
  out.echo = fields.boolean("echo", false);
  if (const auto count = fields.integer("logprobs", 0, most_logprobs(limits.vocab))) {
    out.logprobs = true;
    out.request.sampling.logprobs = static_cast<int>(*count);
    if (out.echo)
      fields.fail(
          "logprobs",
          fmt::format("logprobs is {} with echo true, which this server cannot do: it has log-probabilities "
                      "of generated tokens only",
                      *count),
          "unsupported_parameter");
  }
}

OrderedJson read_content(Fields& fields, const std::string& name, const Json* content) {
  if (content == nullptr) {
    fields.fail(name, fmt::format("{} is missing, needs a string or a list of text parts", name));
    return {};
  }
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) {
    fields.misfit(name, *content, "a string or a list of text parts");
    return {};
  }
  std::string text;
  for (size_t i = 0; i < content->size(); ++i) {
    const Json& part = (*content)[i];
    const std::string place = fmt::format("{}[{}]", name, i);
    if (!part.is_object()) {
      fields.misfit(place, part, "an object with type and text");
      return {};
    }
    const auto type = part.find("type");
    if (type != part.end() && *type != "text") {
      fields.fail(
          place + ".type",
          fmt::format("{}.type is {}, needs \"text\": this server reads nothing else", place, shown(*type)),
          "unsupported_parameter");
      return {};
    }
    const auto piece = part.find("text");
    if (type == part.end() || piece == part.end() || !piece->is_string()) {
      fields.fail(place, fmt::format("{} needs type \"text\" and a string text", place));
      return {};
    }
    if (i > 0) text += '\n';
    text += piece->get_ref<const std::string&>();
  }
  return text;
}

void read_messages(Fields& fields, ApiRequest& out) {
  static constexpr std::array<std::string_view, 5> kRoles = {"system", "developer", "user", "assistant",
                                                             "tool"};
  const Json* messages = fields.find("messages");
  if (messages == nullptr) return fields.fail("messages", "messages is missing, needs a list of messages");
  if (!messages->is_array()) return fields.misfit("messages", *messages, "a list of messages");
  if (messages->empty())
    return fields.fail("messages", "messages is an empty list, needs at least one message");
  if (std::ssize(*messages) > kMaxMessages)
    return fields.fail("messages", fmt::format("messages has {} messages, needs at most {}", messages->size(),
                                               kMaxMessages));
  out.messages = OrderedJson::array();
  for (size_t i = 0; i < messages->size() && fields.ok(); ++i) {
    const Json& given = (*messages)[i];
    const std::string place = fmt::format("messages[{}]", i);
    if (!given.is_object()) return fields.misfit(place, given, "an object with role and content");
    const auto value_of = [&](const char* key) {
      const auto it = given.find(key);
      return it == given.end() || it->is_null() ? nullptr : &*it;
    };
    const Json* role = value_of("role");
    if (role == nullptr)
      return fields.fail(place + ".role",
                         fmt::format("{}.role is missing, needs {}", place, fmt::join(kRoles, ", ")));
    if (!role->is_string() || std::ranges::find(kRoles, role->get<std::string>()) == kRoles.end())
      return fields.misfit(place + ".role", *role, fmt::format("{}", fmt::join(kRoles, ", ")));
    for (const char* call : {"tool_calls", "function_call"}) {
      const Json* calls = value_of(call);
      if (calls != nullptr && !(calls->is_array() && calls->empty()))
        return fields.fail(fmt::format("{}.{}", place, call),
                           fmt::format("{}.{} is {}, which this server cannot do: it does not call tools",
                                       place, call, shown(*calls)),
                           "unsupported_parameter");
    }
    OrderedJson message = {{"role", role->get<std::string>()}};
    message["content"] = read_content(fields, place + ".content", value_of("content"));
    for (const char* key : {"name", "tool_call_id"}) {
      const Json* text = value_of(key);
      if (text == nullptr) continue;
      if (!text->is_string()) return fields.misfit(fmt::format("{}.{}", place, key), *text, "a string");
      message[key] = text->get<std::string>();
    }
    out.messages.push_back(std::move(message));
  }
}

void read_chat(Fields& fields, ApiRequest& out, const ApiLimits& limits) {
  read_model(fields, limits);
  read_messages(fields, out);
  refuse_unsupported_chat(fields);
  refuse_unsupported_openai(fields);
  read_n(fields, out);
  read_stream(fields, out);
  read_sampling(fields, out.request, kOpenAi, limits.vocab);
  const auto most = fields.integer("max_completion_tokens", 0, kAny);
  if (most && out.request.max_tokens && *most != *out.request.max_tokens)
    fields.fail("max_tokens",
                fmt::format("max_tokens is {} and max_completion_tokens is {}, needs one of them",
                            *out.request.max_tokens, *most));
  if (most) out.request.max_tokens = most;
  out.logprobs = fields.boolean("logprobs", false);
  const auto top = fields.integer("top_logprobs", 0, most_logprobs(limits.vocab));
  if (top && *top > 0 && !out.logprobs)
    fields.fail("top_logprobs", fmt::format("top_logprobs is {}, needs logprobs to be true", *top));
  if (out.logprobs) out.request.sampling.logprobs = static_cast<int>(top.value_or(0));
  out.add_generation_prompt = fields.boolean("add_generation_prompt", true);
  out.template_variables = OrderedJson::object();
  if (const Json* variables = fields.find("chat_template_kwargs")) {
    if (!variables->is_object()) return fields.misfit("chat_template_kwargs", *variables, "an object");
    out.template_variables = *variables;
  }
}

void read_generate(Fields& fields, ApiRequest& out, const ApiLimits& limits) {
  out.stream = fields.boolean("stream", false);
  const bool ids = fields.find("input_ids") != nullptr;
  if (ids && fields.find("text") != nullptr)
    return fields.fail("input_ids", "input_ids and text are both given, needs one of them");
  read_prompts(fields, ids ? "input_ids" : "text", out, limits);
  const char* const text_only = "a prompt is text or token ids";
  for (const char* name : {"image_data", "audio_data", "video_data", "input_embeds"})
    fields.unsupported(name, {}, text_only);
  fields.unsupported("lora_path", {}, "it serves one model without adapters");
  fields.unsupported("return_hidden_states", {false}, "it returns text");
  out.logprobs = fields.boolean("return_logprob", false);
  const auto top = fields.integer("top_logprobs_num", 0, most_logprobs(limits.vocab));
  if (out.logprobs) out.request.sampling.logprobs = static_cast<int>(top.value_or(0));
  const auto start = fields.integer("logprob_start_len", -1, kAny);
  if (out.logprobs && start && *start >= 0)
    fields.fail(
        "logprob_start_len",
        fmt::format("logprob_start_len is {}, needs -1: there are log-probabilities of generated tokens only",
                    *start),
        "unsupported_parameter");
  const Json empty = Json::object();
  const Json* given = fields.find("sampling_params");
  if (given != nullptr && !given->is_object()) return fields.misfit("sampling_params", *given, "an object");
  Fields inner(given != nullptr ? *given : empty, "sampling_params.");
  refuse_unsupported(inner);
  out.n = inner.integer("n", 1, kMaxN, 1);
  read_sampling(inner, out.request, kSglang, limits.vocab);
  if (!inner.ok()) fields.fail(inner.error());
  constexpr int64_t kDefault = 128;  // SGLang's
  if (!out.request.max_tokens) out.request.max_tokens = kDefault;
}

/// What a body of this kind has at least.
std::string_view needed_field(ApiKind kind) {
  switch (kind) {
    case ApiKind::completions:
      return "prompt";
    case ApiKind::chat:
      return "messages";
    case ApiKind::generate:
      return "text or input_ids";
  }
  return {};
}

ApiError too_many_elements(const model::JsonFault& where, int64_t most, int64_t max_model_len) {
  const std::string place = where.path.empty() ? std::string("the body") : where.path;
  if (where.of_number && (where.field == "prompt" || where.field == "input_ids"))
    return {.message = fmt::format(
                "{} has more than {} elements: the context holds {} tokens, prompt and answer together",
                place, most, max_model_len),
            .param = where.field,
            .code = "context_length_exceeded"};
  return {.message = fmt::format("{} has more than {} elements, which is the limit of a{}", place, most,
                                 where.list ? " list" : "n object"),
          .param = where.field,
          .code = "invalid_value"};
}

/// Why a body is not read at all; `message` is the parser's.
ApiError unread(ApiKind kind, const model::JsonFault& fault, std::string message) {
  using enum model::JsonFault::Kind;
  constexpr std::string_view kPlace = "the body: ";
  if (fault.kind == empty)
    return {.message = fmt::format("the body is empty, needs a JSON object with {}", needed_field(kind)),
            .param = {},
            .code = "invalid_json"};
  if (fault.kind == number && !fault.path.empty())
    return {.message = message.substr(kPlace.size()), .param = fault.path, .code = "invalid_value"};
  if (fault.path.empty()) message.erase(kPlace.size() - 2, 1);  // "the body is ..."
  return {.message = std::move(message),
          .param = fault.path.empty() ? fault.field : fault.path,
          .code = "invalid_json"};
}

}  // namespace

std::variant<ApiRequest, ApiError> parse_request(ApiKind kind, std::string_view body,
                                                 const ApiLimits& limits) {
  // As long as a prompt of ids, or a bias for every token; also in fields that nobody reads, which take memory too.
  const int64_t max_elements = std::max({limits.least_elements, limits.max_model_len, limits.vocab});
  model::JsonFault fault;
  const Result<Json> json = model::parse_json_object("the body", body, max_elements, &fault);
  if (json.status().code() == Code::resource_exhausted)
    return too_many_elements(fault, max_elements, limits.max_model_len);
  if (!json.ok()) return unread(kind, fault, json.status().message());
  ApiRequest out;
  out.kind = kind;
  Fields fields(*json);
  switch (kind) {
    case ApiKind::completions:
      read_completions(fields, out, limits);
      break;
    case ApiKind::chat:
      read_chat(fields, out, limits);
      break;
    case ApiKind::generate:
      read_generate(fields, out, limits);
      break;
  }
  check_choices(fields, out, limits.max_choices);
  if (fields.ok()) out.request.cache_salt = fields.text("cache_salt", engine::kMaxSaltBytes);
  if (!fields.ok()) return fields.error();
  return out;
}

}  // namespace vivace::server
