#include <memory>
#include <string_view>
#include <utility>

#include "src/core/guard.h"
#include "src/engine/check_options.h"
#include "src/engine/engine.h"
#include "src/engine/model_runner.h"
#include "src/model/checkpoint.h"
#include "src/model/tokenizer.h"
#include "vivace/engine.h"

namespace vivace {

namespace {

Result<std::unique_ptr<Engine>> create_engine(const EngineOptions& options) {
  VIVACE_TRY(engine::check_options(options));
  VIVACE_TRY_ASSIGN(std::unique_ptr<model::Checkpoint> opened, model::Checkpoint::open(options.model));
  const std::shared_ptr<const model::Checkpoint> checkpoint = std::move(opened);
  std::shared_ptr<const model::Tokenizer> tokenizer;
  if (checkpoint->tokenizer().present()) {
    Result<std::unique_ptr<model::Tokenizer>> made = model::Tokenizer::create(checkpoint->tokenizer());
    if (!made.ok()) return made.status().at(options.model);
    tokenizer = std::move(*made);
  }
  VIVACE_TRY_ASSIGN(std::unique_ptr<engine::Runner> runner, engine::make_model_runner(checkpoint, options));
  if (tokenizer != nullptr) return engine::make_engine(std::move(runner), std::move(tokenizer), options);
  // A model without a tokenizer speaks in ids alone.
  const auto no_text = [](int32_t, bool) { return std::string_view(); };
  return engine::make_engine(std::move(runner), engine::TokenBytes(no_text), options);
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::create(const EngineOptions& options) {
  return guarded("engine", [&] { return create_engine(options); });
}

}  // namespace vivace
