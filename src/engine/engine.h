#pragma once

#include <functional>
#include <memory>

#include "src/engine/generation.h"
#include "src/engine/plan.h"
#include "src/engine/runner.h"
#include "src/model/tokenizer.h"
#include "vivace/engine.h"

namespace vivace::engine {

/// What tests watch; called on the engine thread.
struct EngineHooks {
  std::function<void(const StepPlan&)> on_plan;  ///< before the plan is executed
  std::function<void(const Status&)> on_audit;   ///< when set, KvPages::audit() runs after every step
};

/// The engine over a runner.
/// Fails  invalid_argument: an option does not fit the runner; the message names it.
Result<std::unique_ptr<Engine>> make_engine(std::unique_ptr<Runner> runner, TokenBytes bytes,
                                            const EngineOptions& options, EngineHooks hooks = {});

/// With the text of `tokenizer`.
Result<std::unique_ptr<Engine>> make_engine(std::unique_ptr<Runner> runner,
                                            std::shared_ptr<const model::Tokenizer> tokenizer,
                                            const EngineOptions& options, EngineHooks hooks = {});

}  // namespace vivace::engine
