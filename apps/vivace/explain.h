#pragma once

#include <cstdint>
#include <vector>

#include "src/model/model.h"
#include "vivace/engine.h"

namespace vivace::cli {

/// The operator calls of decode steps with these numbers of requests and of one prompt chunk, as long as the token
/// budget and the context allow, with the sampler after each; and which rows they would take under the engine's
/// options. Binds the model's weights, runs nothing.
Result<std::vector<model::OpUse>> explain_model(const EngineOptions& options,
                                                const std::vector<int64_t>& batches);

/// Why a row of `op` may run only after those before it in its table: what they need. For calls that
/// explain_model() does not cover.
std::vector<Refusal> table_reasons(const Dispatch& dispatch, std::string_view op, std::string_view row);

}  // namespace vivace::cli
