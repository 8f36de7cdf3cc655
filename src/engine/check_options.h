#pragma once

#include "vivace/engine.h"

namespace vivace::engine {

/// Most threads that an engine starts.
inline constexpr int kMaxThreads = 1024;

/// Checks the options that need no model. Model::load() checks the others: kv_dtype, router_mode, and max_model_len
/// against the model's context.
/// Fails  invalid_argument: the message names the option, its value and what would fit.
Status check_options(const EngineOptions& options);

}  // namespace vivace::engine
