#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "src/bench/report.h"
#include "src/model/model.h"
#include "vivace/engine.h"

namespace vivace::cli {

/// The operator calls of decode steps with these numbers of requests and of one prompt chunk, as long as the token
/// budget and the context allow, with the sampler after each; and which rows they would take under the engine's
/// options. Where --device is cuda and there is no GPU they are those of an H200, and a line says so. Binds the model's
/// weights, runs nothing.
Result<std::vector<model::OpUse>> explain_model(const EngineOptions& options,
                                                const std::vector<int64_t>& batches);

/// The same of a model that is loaded, decode steps alone.
std::vector<model::OpUse> explain_decodes(model::Model& model, const std::vector<int64_t>& batches,
                                          const Stream& stream);

/// Why a row of `op` may run only after those before it in its table: what they need, or that --prefer does not name
/// them. For what explain_model() does not cover.
std::vector<Refusal> table_reasons(const Dispatch& dispatch, std::string_view op, std::string_view row);

/// Calls per row so far; bench::rows_since() takes the difference.
std::vector<bench::RowUse> row_calls(const Dispatch& dispatch);
/// Adds why earlier rows did not run: what the calls of such steps were refused for, else what the rows need.
Status add_reasons(std::vector<bench::RowUse>& rows, const std::vector<model::OpUse>& explained,
                   const std::string& prefer);

/// The options as a report names them.
std::vector<std::pair<std::string, std::string>> settings_of(const EngineOptions& options);

}  // namespace vivace::cli
