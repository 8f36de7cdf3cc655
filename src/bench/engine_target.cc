#include "src/bench/engine_target.h"

#include <nlohmann/json.hpp>
#include <utility>

namespace vivace::bench {

Result<std::unique_ptr<EngineTarget>> EngineTarget::create(Engine& engine, const model::Tokenizer& tokenizer,
                                                           const model::TokenizerSource& source) {
  auto target = std::make_unique<EngineTarget>(engine);
  target->tokenizer_ = &tokenizer;
  target->source_ = &source;
  if (!source.chat_template.empty()) {
    // Only messages need it: one that does not compile is told to those who send some.
    Result<std::unique_ptr<model::ChatTemplate>> compiled =
        model::ChatTemplate::compile(source.chat_template);
    if (compiled.ok()) target->chat_template_ = std::move(compiled).value();
  }
  return target;
}

Result<std::vector<int32_t>> EngineTarget::ids_of(const Prompt& prompt) const {
  if (!prompt.ids.empty()) return prompt.ids;
  if (tokenizer_ == nullptr) return Status(Code::unsupported, "text needs a model with a tokenizer");
  if (!prompt.messages.empty()) {
    if (chat_template_ == nullptr)
      return Status(Code::unsupported, "messages need a model with a chat template");
    const auto messages = nlohmann::ordered_json::parse(prompt.messages, nullptr, false);
    return model::encode_chat(*chat_template_, *tokenizer_, messages, true, *source_,
                              nlohmann::ordered_json::object());
  }
  VIVACE_TRY_ASSIGN(std::vector<int32_t> ids, tokenizer_->encode(prompt.text, model::SpecialTokens::parse));
  const int32_t bos = tokenizer_->bos_id();
  if (tokenizer_->add_bos() && bos >= 0 && (ids.empty() || ids.front() != bos)) ids.insert(ids.begin(), bos);
  return ids;
}

Status EngineTarget::start(const LoadRequest& load, Sink sink) {
  Request request;
  VIVACE_TRY_ASSIGN(request.prompt_ids, ids_of(load.prompt));
  request.max_tokens = load.output_tokens;
  request.ignore_eos = load.ignore_eos;
  request.sampling.temperature = load.temperature;
  request.sampling.seed = load.seed;
  const Result<RequestId> id =
      engine_.submit(std::move(request), [sink = std::move(sink)](const TokenEvent& token) {
        LoadEvent event;
        event.chunk = token.id >= 0;
        event.text = token.text;
        event.time = token.time;
        event.last = token.finish != FinishReason::none;
        if (event.last) {
          event.prompt_tokens = token.usage.prompt_tokens;
          event.completion_tokens = token.usage.completion_tokens;
          event.cached_tokens = token.usage.cached_tokens;
          if (token.finish == FinishReason::error) event.error = token.error.message();
          if (token.finish == FinishReason::cancelled) event.error = "the request was cancelled";
          if (!event.error.empty()) event.error_kind = name_of(token.finish);
        }
        sink(event);
      });
  return id.ok() ? Status() : id.status();
}

}  // namespace vivace::bench
