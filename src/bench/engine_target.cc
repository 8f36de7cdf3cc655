#include "src/bench/engine_target.h"

#include <utility>

namespace vivace::bench {

Status EngineTarget::start(const LoadRequest& load, Sink sink) {
  Request request;
  request.prompt_ids = load.prompt_ids;
  request.max_tokens = load.output_tokens;
  request.ignore_eos = true;
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
          event.completion_tokens = token.usage.completion_tokens;
          event.cached_tokens = token.usage.cached_tokens;
          if (token.finish == FinishReason::error) event.error = token.error.message();
          if (token.finish == FinishReason::cancelled) event.error = "the request was cancelled";
        }
        sink(event);
      });
  return id.ok() ? Status() : id.status();
}

}  // namespace vivace::bench
