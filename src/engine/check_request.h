#pragma once

#include <cstdint>

#include "vivace/engine.h"

namespace vivace::engine {

/// Checks every field of a request against the model. Returns how many tokens it may generate: max_tokens, or
/// what the prompt leaves of the context.
/// Fails  invalid_argument: the message names the field, its value and what would fit.
Result<int64_t> check_request(const Request& request, int64_t vocab, int64_t max_model_len);

/// Bounds on what a request may bring along; far above any use, so that checking and matching stay cheap.
inline constexpr int64_t kMaxStops = 64, kMaxStopBytes = 4096, kMaxStopIds = 1024, kMaxSaltBytes = 4096;
inline constexpr int kMaxLogprobs = 20;

}  // namespace vivace::engine
