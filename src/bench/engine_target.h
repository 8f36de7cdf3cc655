#pragma once

#include <memory>

#include "src/bench/target.h"
#include "src/model/chat_template.h"
#include "src/model/tokenizer.h"
#include "vivace/engine.h"

namespace vivace::bench {

/// An engine of this process; it must outlive the target. Text and messages are tokenised in start(), on the
/// caller's thread, as a server would do it after the request was sent.
class EngineTarget : public Target {
 public:
  /// Takes prompts of token ids alone.
  explicit EngineTarget(Engine& engine) : engine_(engine) {}
  /// Takes text too, and messages when `source` has a chat template; both must outlive the target.
  static Result<std::unique_ptr<EngineTarget>> create(Engine& engine, const model::Tokenizer& tokenizer,
                                                      const model::TokenizerSource& source);
  Status start(const LoadRequest& request, Sink sink) override;

 private:
  Result<std::vector<int32_t>> ids_of(const Prompt& prompt) const;

  Engine& engine_;
  const model::Tokenizer* tokenizer_ = nullptr;
  const model::TokenizerSource* source_ = nullptr;
  std::unique_ptr<model::ChatTemplate> chat_template_;
};

}  // namespace vivace::bench
