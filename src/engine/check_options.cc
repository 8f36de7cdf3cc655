#include "src/engine/check_options.h"

#include <bit>
#include <string_view>

#include "src/core/error.h"

namespace vivace::engine {

namespace {

constexpr int64_t kMostTokens = int64_t{1} << 20;  // of one step

Status check_range(std::string_view option, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid_argument("engine: {} is {}, needs {}..{}", option, value, low, high);
}

}  // namespace

Status check_options(const EngineOptions& options) {
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return invalid_argument("engine: threads is {}, needs 0 (every usable core) to {}", options.threads,
                            kMaxThreads);
  }
  VIVACE_TRY(check_range("max_model_len", options.max_model_len, 0, INT32_MAX));
  VIVACE_TRY(check_range("max_batch", options.max_batch, 1, kMostTokens));
  VIVACE_TRY(check_range("token_budget", options.token_budget, 1, kMostTokens));
  if (options.token_budget < options.max_batch) {
    return invalid_argument(
        "engine: token_budget is {}, needs at least max_batch = {} (every running request gets a token per "
        "step): raise token_budget or lower max_batch",
        options.token_budget, options.max_batch);
  }
  if (options.page_tokens < 1 || options.page_tokens > 256 ||
      !std::has_single_bit(static_cast<uint64_t>(options.page_tokens))) {
    return invalid_argument("engine: page_tokens is {}, needs a power of two from 1 to 256",
                            options.page_tokens);
  }
  if (options.kv_memory_bytes < 0) {
    return invalid_argument("engine: kv_memory_bytes is {}, needs a number >= 0 (0 chooses)",
                            options.kv_memory_bytes);
  }
  return check_range("max_waiting", options.max_waiting, 1, INT64_MAX);
}

}  // namespace vivace::engine
