#include <fmt/format.h>

#include <condition_variable>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>

#include "apps/vivace/commands.h"
#include "apps/vivace/model_files.h"
#include "apps/vivace/output.h"
#include "src/core/error.h"
#include "src/core/rename.h"
#include "src/model/chat_template.h"

namespace vivace::cli {

namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

double ms_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double, std::milli>(b - a).count();
}

/// Token events on their way from the engine thread to this one: a slow reader of standard output must not hold up
/// the engine.
class EventQueue {
 public:
  void push(const TokenEvent& event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
    ready_.notify_one();
  }
  TokenEvent pop() {
    std::unique_lock lock(mutex_);
    ready_.wait(lock, [&] { return !events_.empty(); });
    TokenEvent event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<TokenEvent> events_;
};

struct Prompt {
  std::vector<int32_t> ids;
  std::unique_ptr<model::Tokenizer> tokenizer;  ///< null with --prompt-ids
};

Result<std::vector<int32_t>> encode_chat_prompt(const GenerateArgs& args, const ModelFiles& files) {
  const model::TokenizerSource& source = files.checkpoint->tokenizer();
  if (source.chat_template.empty()) {
    return not_found("--chat: {} has no chat template; --prompt takes raw text", args.engine.model);
  }
  VIVACE_TRY_ASSIGN(const auto chat_template, model::ChatTemplate::compile(source.chat_template));
  Json messages = Json::array();
  if (!args.system.empty()) messages.push_back({{"role", "system"}, {"content", args.system}});
  messages.push_back({{"role", "user"}, {"content", *args.chat}});
  return model::encode_chat(*chat_template, *files.tokenizer, messages, true, source, Json::object());
}

Result<Prompt> make_prompt(const GenerateArgs& args) {
  Prompt prompt;
  if (!args.prompt_ids.empty()) {
    prompt.ids = args.prompt_ids;
    return prompt;
  }
  VIVACE_TRY_ASSIGN(ModelFiles files, open_model_files(args.engine.model));
  VIVACE_TRY(need_tokenizer(files, args.engine.model, "--prompt-ids takes token ids"));
  if (args.chat) {
    VIVACE_TRY_ASSIGN(prompt.ids, encode_chat_prompt(args, files));
  } else {
    VIVACE_TRY_ASSIGN(prompt.ids, files.tokenizer->encode(*args.prompt, model::SpecialTokens::parse));
    const int32_t bos = files.tokenizer->bos_id();
    if (files.tokenizer->add_bos() && bos >= 0 && (prompt.ids.empty() || prompt.ids.front() != bos)) {
      prompt.ids.insert(prompt.ids.begin(), bos);
    }
  }
  if (prompt.ids.empty()) {
    return invalid_argument(
        "--prompt is '', needs at least one token: the model has no token that begins a text");
  }
  prompt.tokenizer = std::move(files.tokenizer);
  return prompt;
}

/// The flag that the prompt came from.
std::string prompt_flag(const GenerateArgs& args) {
  return !args.prompt_ids.empty() ? "--prompt-ids" : args.chat ? "--chat" : "--prompt";
}

/// What was generated, with times.
struct Generated {
  std::vector<TokenEvent> tokens;
  std::string text;
  FinishReason finish = FinishReason::none;
  Usage usage;
  double ttft_ms = 0, tpot_ms = 0;  ///< NaN where there is none
};

Result<Generated> generate(const GenerateArgs& args, Engine& engine, const std::vector<int32_t>& prompt_ids) {
  Request request;
  request.prompt_ids = prompt_ids;
  request.sampling = args.sampling;
  request.max_tokens = args.max_tokens;
  request.stop = args.stop;
  request.ignore_eos = args.ignore_eos;
  const auto queue = std::make_shared<EventQueue>();
  const auto start = Clock::now();
  const Result<RequestId> id =
      engine.submit(std::move(request), [queue](const TokenEvent& event) { queue->push(event); });
  if (!id.ok()) {
    const std::pair<std::string_view, std::string> flag = {"prompt_ids", prompt_flag(args)};
    return Status(id.status().code(), renamed(id.status().message(), {&flag, 1}));
  }
  Generated out;
  while (out.finish == FinishReason::none) {
    TokenEvent event = queue->pop();
    out.text += event.text;
    if (!args.json && !event.text.empty()) write_out(event.text);
    out.finish = event.finish;
    out.usage = event.usage;
    if (event.finish == FinishReason::error) return event.error;
    if (event.id >= 0) out.tokens.push_back(std::move(event));
  }
  const size_t count = out.tokens.size();
  out.ttft_ms = count > 0 ? ms_between(start, out.tokens.front().time) : NAN;
  out.tpot_ms =
      count > 1 ? ms_between(out.tokens.front().time, out.tokens.back().time) / static_cast<double>(count - 1)
                : NAN;
  return out;
}

Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json to_json(const GenerateArgs& args, const std::vector<int32_t>& prompt_ids, const Generated& out) {
  Json ids = Json::array(), logprobs = args.sampling.logprobs >= 0 ? Json::array() : Json(nullptr);
  for (const TokenEvent& token : out.tokens) {
    ids.push_back(token.id);
    if (args.sampling.logprobs < 0) continue;
    Json top = Json::array();
    for (const TopLogprob& t : token.top) top.push_back({{"id", t.id}, {"logprob", number(t.logprob)}});
    logprobs.push_back({{"id", token.id}, {"logprob", number(token.logprob)}, {"top", top}});
  }
  return {{"prompt_ids", prompt_ids},
          {"ids", ids},
          {"text", out.text},
          {"logprobs", logprobs},
          {"finish_reason", name_of(out.finish)},
          {"usage",
           {{"prompt_tokens", out.usage.prompt_tokens},
            {"completion_tokens", out.usage.completion_tokens},
            {"cached_tokens", out.usage.cached_tokens}}},
          {"ttft_ms", number(out.ttft_ms)},
          {"tpot_ms", number(out.tpot_ms)}};
}

std::string logprob_table(const Generated& out, const model::Tokenizer* tokenizer) {
  const auto shown = [&](int32_t id) {
    return tokenizer ? fmt::format("{} '{}'", id, visible(tokenizer->bytes_of(id))) : fmt::format("{}", id);
  };
  std::string text = "\n";
  for (const TokenEvent& token : out.tokens) {
    text += fmt::format("{:>9.4f}  {:<24}", token.logprob, shown(token.id));
    for (const TopLogprob& t : token.top) text += fmt::format("  {:.4f} {}", t.logprob, shown(t.id));
    text += "\n";
  }
  return text;
}

Status run_generate(const GenerateArgs& args) {
  // The tokenizer is made while the engine loads the weights.
  std::future<Result<Prompt>> pending = std::async(std::launch::async, [&] { return make_prompt(args); });
  EngineOptions options = args.engine;
  options.log = note;
  Result<std::unique_ptr<Engine>> engine = Engine::create(options);
  const Result<Prompt> prompt = pending.get();
  if (!engine.ok()) return engine.status();
  if (!prompt.ok()) return prompt.status();
  VIVACE_TRY_ASSIGN(const Generated out, generate(args, **engine, prompt->ids));
  if (args.json) {
    print_json(to_json(args, prompt->ids, out));
    return {};
  }
  if (prompt->tokenizer == nullptr && out.text.empty()) {
    std::string ids;
    for (const TokenEvent& token : out.tokens) ids += fmt::format("{}{}", ids.empty() ? "" : ",", token.id);
    write_out(ids);
  }
  write_out("\n");
  if (args.sampling.logprobs >= 0) write_out(logprob_table(out, prompt->tokenizer.get()));
  std::string line =
      fmt::format("[{} tokens in, {} out, finish: {}, first token after {:.0f} ms", out.usage.prompt_tokens,
                  out.usage.completion_tokens, name_of(out.finish), out.ttft_ms);
  if (std::isfinite(out.tpot_ms)) {
    line += fmt::format(", then {:.1f} ms per token ({:.1f} tok/s)", out.tpot_ms, 1000 / out.tpot_ms);
  }
  note(line + "]");
  return {};
}

}  // namespace

int run(const GenerateArgs& args) {
  const Status status = run_generate(args);
  return status.ok() ? 0 : fail(status);
}

}  // namespace vivace::cli
