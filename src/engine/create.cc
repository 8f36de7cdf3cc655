#include <memory>
#include <string_view>
#include <utility>

#include "src/engine/engine.h"
#include "src/engine/model_runner.h"
#include "src/model/checkpoint.h"
#include "src/model/tokenizer.h"
#include "vivace/engine.h"

namespace vivace {

Result<std::unique_ptr<Engine>> Engine::create(const EngineOptions& options) {
  VIVACE_TRY_ASSIGN(std::unique_ptr<model::Checkpoint> opened, model::Checkpoint::open(options.model));
  const std::shared_ptr<const model::Checkpoint> checkpoint = std::move(opened);
  std::shared_ptr<const model::Tokenizer> tokenizer;
  if (checkpoint->tokenizer().present()) {
    VIVACE_TRY_ASSIGN(std::unique_ptr<model::Tokenizer> made,
                      model::Tokenizer::create(checkpoint->tokenizer()));
    tokenizer = std::move(made);
  }
  VIVACE_TRY_ASSIGN(std::unique_ptr<engine::Runner> runner, engine::make_model_runner(checkpoint, options));
  if (tokenizer != nullptr) return engine::make_engine(std::move(runner), std::move(tokenizer), options);
  // A model without a tokenizer speaks in ids alone.
  const auto no_text = [](int32_t, bool) { return std::string_view(); };
  return engine::make_engine(std::move(runner), engine::TokenBytes(no_text), options);
}

}  // namespace vivace
