#include "src/engine/generation.h"

#include <algorithm>
#include <utility>

namespace vivace {

std::string_view name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::none:
      return "";
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::cancelled:
      return "cancelled";
    case FinishReason::error:
      return "error";
  }
  return "";
}

}  // namespace vivace

namespace vivace::engine {

Generation::Generation(Request request, int64_t max_tokens, std::span<const int32_t> eos_ids,
                       const TokenBytes& bytes)
    : request_(std::move(request)),
      tokens_(std::move(request_.prompt_ids)),
      end_ids_(request_.stop_ids),
      prompt_tokens_(std::ssize(tokens_)),
      max_tokens_(max_tokens),
      bytes_(bytes) {
  if (!request_.ignore_eos) end_ids_.insert(end_ids_.end(), eos_ids.begin(), eos_ids.end());
  if (!request_.stop.empty()) stops_.emplace(request_.stop);
}

std::span<const int32_t> Generation::banned_ids(int64_t position) const {
  if (position >= request_.min_tokens) return {};
  return end_ids_;
}

Usage Generation::usage() const {
  return {.prompt_tokens = prompt_tokens_,
          .completion_tokens = std::ssize(output()),
          .cached_tokens = cached_tokens};
}

void Generation::append(std::span<const Sampled> drawn, std::vector<TokenEvent>& events) {
  for (const Sampled& sampled : drawn) {
    if (finished_) return;
    TokenEvent& event = events.emplace_back();
    if (!sampled.valid) {
      finished_ = true;
      event.finish = FinishReason::error;
      event.error = Status(Code::internal, "engine: the logits of output token " +
                                               std::to_string(std::ssize(output())) +
                                               " are not numbers (NaN), so no token can be chosen");
      event.usage = usage();
      continue;
    }
    const bool may_end = std::ssize(output()) >= request_.min_tokens;
    tokens_.push_back(sampled.id);
    event.id = sampled.id;
    event.logprob = sampled.logprob;
    event.top = sampled.top;
    event.usage = usage();
    if (may_end && std::ranges::find(end_ids_, sampled.id) != end_ids_.end()) {
      event.finish = FinishReason::stop;
      end_text(event.text);
    } else if (add_text(bytes_(sampled.id, request_.skip_special), event.text)) {
      event.finish = FinishReason::stop;
    } else if (std::ssize(output()) == max_tokens_) {
      event.finish = end_text(event.text) ? FinishReason::stop : FinishReason::length;
    }
    finished_ = event.finish != FinishReason::none;
  }
}

bool Generation::add_text(std::string_view bytes, std::string& text) {
  const std::string piece = utf8_.push(bytes);
  if (!stops_ || std::ssize(output()) <= request_.min_tokens) {
    text += piece;
    return false;
  }
  return match(piece, text);
}

bool Generation::end_text(std::string& text) {
  const std::string piece = utf8_.finish();
  if (!stops_) {
    text += piece;
    return false;
  }
  if (match(piece, text)) return true;
  text += stops_->finish();
  return false;
}

bool Generation::match(std::string_view piece, std::string& text) {
  model::StopMatcher::Piece found = stops_->push(piece);
  text += found.text;
  return found.stopped;
}

}  // namespace vivace::engine
