// Input: the body of a request. Whatever it is, each of the three APIs refuses it with an error of the client's, or makes
// of it a request that the engine takes or refuses.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <variant>

#include "src/engine/check_request.h"
#include "src/server/api.h"
#include "tests/fuzz/served_model.h"

namespace {

using namespace vivace;          // NOLINT: a fuzz target
using namespace vivace::server;  // NOLINT

constexpr int64_t kVocab = 4096, kMaxModelLen = 64;
/// Lists and objects may have so many elements in a second look at each body: few enough for the fuzzer to exceed.
constexpr int64_t kFewElements = 100;

void check(const ApiError& error) {
  if (error.status < 400 || error.status >= 500 || error.message.empty() || error.code.empty())
    __builtin_trap();
  if (error.message.size() > 2000) __builtin_trap();
  const auto body = nlohmann::json::parse(error_body(error), nullptr, false);  // which is UTF-8 and JSON
  if (body.is_discarded() || body["error"]["message"].get<std::string>().empty()) __builtin_trap();
}

void check(ApiKind kind, std::string_view body, const ServedModel& model) {
  ApiLimits limits{.model = model.name, .vocab = kVocab, .max_model_len = kMaxModelLen};
  const auto parsed = parse_request(kind, body, limits);
  limits.vocab = limits.least_elements = kFewElements;
  if (const auto strict = parse_request(kind, body, limits); std::holds_alternative<ApiError>(strict))
    check(std::get<ApiError>(strict));
  if (const auto* error = std::get_if<ApiError>(&parsed)) return check(*error);
  const auto& request = std::get<ApiRequest>(parsed);
  if (request.choices() < 1 || request.choices() > kMaxChoices) __builtin_trap();
  const auto tokenized = tokenize(request, model, kMaxModelLen);
  if (const auto* error = std::get_if<ApiError>(&tokenized)) return check(*error);
  const auto& prompts = std::get<std::vector<PromptTokens>>(tokenized);
  for (const int64_t choice : {int64_t{0}, request.choices() - 1}) {
    const Request made = engine_request(request, prompts, choice, kMaxModelLen);
    const Result<int64_t> most = engine::check_request(made, kVocab, kMaxModelLen);
    if (!most.ok())
      check(error_of(most.status(), kind));
    else if (*most < 0 || std::ssize(made.prompt_ids) + *most > kMaxModelLen)
      __builtin_trap();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ServedModel model = fuzz::served_model();
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  for (const ApiKind kind : {ApiKind::completions, ApiKind::chat, ApiKind::generate})
    check(kind, body, model);
  return 0;
}
