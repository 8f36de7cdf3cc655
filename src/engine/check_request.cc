#include "src/engine/check_request.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/core/error.h"

namespace vivace::engine {

namespace {

constexpr double kHuge = std::numeric_limits<float>::max();  // the sampler computes in fp32

Status check_range(std::string_view field, double value, double low, double high, std::string_view needs) {
  if (value >= low && value <= high) return {};  // false for NaN
  return invalid_argument("request: {} is {}, needs {}", field, value, needs);
}

Status check_ids(std::string_view field, const std::vector<int32_t>& ids, int64_t vocab) {
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= vocab)
      return invalid_argument("request: {}[{}] is {}, needs a token id of 0..{}", field, i, ids[i],
                              vocab - 1);
  return {};
}

Status check_sampling(const SamplingParams& p, int64_t vocab) {
  VIVACE_TRY(check_range("temperature", p.temperature, 0, kHuge, "a finite number of at least 0 in fp32"));
  if (p.top_k < 0)
    return invalid_argument("request: top_k is {}, needs at least 0 (0 turns it off)", p.top_k);
  constexpr double kAboveZero = std::numeric_limits<double>::denorm_min();
  VIVACE_TRY(check_range("top_p", p.top_p, kAboveZero, 1, "a number above 0 and at most 1"));
  VIVACE_TRY(check_range("min_p", p.min_p, 0, 1, "a number of 0..1"));
  VIVACE_TRY(check_range("repetition_penalty", p.repetition_penalty, kAboveZero, kHuge,
                         "a finite number above 0 in fp32"));
  VIVACE_TRY(check_range("presence_penalty", p.presence_penalty, -2, 2, "a number of -2..2"));
  VIVACE_TRY(check_range("frequency_penalty", p.frequency_penalty, -2, 2, "a number of -2..2"));
  if (static_cast<int64_t>(p.logit_bias.size()) > vocab)
    return invalid_argument("request: logit_bias has {} entries, needs at most {} (the vocabulary)",
                            p.logit_bias.size(), vocab);
  for (const auto& [id, bias] : p.logit_bias) {
    if (id < 0 || id >= vocab)
      return invalid_argument("request: logit_bias names token {}, needs a token id of 0..{}", id, vocab - 1);
    if (!std::isfinite(bias))
      return invalid_argument("request: logit_bias of token {} is {}, needs a finite number", id, bias);
  }
  const int64_t most = std::min<int64_t>(kMaxLogprobs, vocab);
  if (p.logprobs < -1 || p.logprobs > most)
    return invalid_argument("request: logprobs is {}, needs -1 (none) or 0..{}", p.logprobs, most);
  return {};
}

Status check_stops(const Request& request, int64_t vocab) {
  if (std::ssize(request.stop) > kMaxStops)
    return invalid_argument("request: stop has {} strings, needs at most {}", request.stop.size(), kMaxStops);
  for (size_t i = 0; i < request.stop.size(); ++i) {
    const int64_t bytes = std::ssize(request.stop[i]);
    if (bytes < 1 || bytes > kMaxStopBytes)
      return invalid_argument("request: stop[{}] has {} bytes, needs 1..{}", i, bytes, kMaxStopBytes);
  }
  if (std::ssize(request.stop_ids) > kMaxStopIds)
    return invalid_argument("request: stop_ids has {} ids, needs at most {}", request.stop_ids.size(),
                            kMaxStopIds);
  return check_ids("stop_ids", request.stop_ids, vocab);
}

}  // namespace

Result<int64_t> check_request(const Request& request, int64_t vocab, int64_t max_model_len) {
  const int64_t prompt = std::ssize(request.prompt_ids);
  if (prompt == 0) return invalid_argument("request: prompt_ids has 0 tokens, needs at least 1");
  // Lengths before contents: a prompt that cannot run is not worth reading.
  const int64_t room = max_model_len - prompt;
  if (request.max_tokens && *request.max_tokens < 0)
    return invalid_argument("request: max_tokens is {}, needs at least 0", *request.max_tokens);
  if (room < 1)
    return invalid_argument(
        "request: prompt_ids has {} token{}, which leaves no room for an answer: the "
        "context holds {} tokens, prompt and answer together",
        prompt, prompt == 1 ? "" : "s", max_model_len);
  if (request.max_tokens && *request.max_tokens > room)
    return invalid_argument(
        "request: prompt_ids has {} token{} and max_tokens is {}: the context holds {} "
        "tokens, which leaves {} for the answer",
        prompt, prompt == 1 ? "" : "s", *request.max_tokens, max_model_len, room);
  const int64_t max_tokens = request.max_tokens.value_or(room);
  if (request.min_tokens < 0 || request.min_tokens > max_tokens)
    return invalid_argument("request: min_tokens is {}, needs 0..{} (max_tokens)", request.min_tokens,
                            max_tokens);
  VIVACE_TRY(check_ids("prompt_ids", request.prompt_ids, vocab));
  VIVACE_TRY(check_sampling(request.sampling, vocab));
  VIVACE_TRY(check_stops(request, vocab));
  if (std::ssize(request.cache_salt) > kMaxSaltBytes)
    return invalid_argument("request: cache_salt has {} bytes, needs at most {}", request.cache_salt.size(),
                            kMaxSaltBytes);
  return max_tokens;
}

}  // namespace vivace::engine
