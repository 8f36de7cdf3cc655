#include "src/server/stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>

#include "src/model/utf8.h"

namespace vivace::server {

namespace {

/// Characters of valid UTF-8.
int64_t characters_of(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

/// JSON has no infinity; OpenAI says -9999 for what is out of the question.
void append_logprob(std::string& out, float logprob) {
  if (std::isfinite(logprob))
    fmt::format_to(std::back_inserter(out), "{}", logprob);
  else
    out += "-9999.0";
}

void append_finish(std::string& out, FinishReason finish) {
  if (finish == FinishReason::none)
    out += "null";
  else
    fmt::format_to(std::back_inserter(out), "\"{}\"", name_of(finish));
}

Choice::Token token_of(const TokenEvent& event) {
  return {
      .id = event.id, .logprob = event.logprob, .top = event.top, .characters = characters_of(event.text)};
}

}  // namespace

AnswerWriter::AnswerWriter(Options options) : options_(std::move(options)) {
  progress_.resize(static_cast<size_t>(options_.choices));
  if (options_.kind == ApiKind::generate) return;
  head_ = "{\"id\":";
  append_json_string(head_, options_.id);
  head_ += ",\"object\":";
  // The object of whole answers differs in chat alone.
  head_ += options_.kind == ApiKind::chat ? "\"chat.completion.chunk\"" : "\"text_completion\"";
  head_ += fmt::format(",\"created\":{},\"model\":", options_.created);
  append_json_string(head_, options_.model);
  head_ += ",\"choices\":[";
}

const std::string* AnswerWriter::echo_of(int64_t index) const {
  return options_.echo.empty() ? nullptr : &options_.echo[static_cast<size_t>(index / options_.n)];
}

std::string AnswerWriter::event(int64_t index, const TokenEvent& token) {
  std::string out = "data: ";
  if (options_.kind == ApiKind::generate)
    generate_event(out, index, token);
  else
    choice_event(out, index, token);
  out += "\n\n";
  return out;
}

void AnswerWriter::choice_event(std::string& out, int64_t index, const TokenEvent& token) {
  Progress& progress = progress_[static_cast<size_t>(index)];
  const bool first = !std::exchange(progress.begun, true);
  const std::vector<Choice::Token> tokens =
      options_.logprobs && token.id >= 0 ? std::vector{token_of(token)} : std::vector<Choice::Token>{};
  out += head_;
  fmt::format_to(std::back_inserter(out), "{{\"index\":{},", index);
  if (options_.kind == ApiKind::chat) {
    // The role comes with the first token and never before it: clients take a first event for the first token.
    out += first ? "\"delta\":{\"role\":\"assistant\",\"content\":" : "\"delta\":{\"content\":";
    append_json_string(out, token.text);
    out += "},\"logprobs\":";
    if (tokens.empty())
      out += "null";
    else
      chat_logprobs(out, tokens);
  } else {
    const std::string* echo = first ? echo_of(index) : nullptr;
    if (echo != nullptr) progress.characters += characters_of(*echo);
    out += "\"text\":";
    append_json_string(out, echo != nullptr ? *echo + token.text : token.text);
    out += ",\"logprobs\":";
    if (tokens.empty())
      out += "null";
    else
      completion_logprobs(out, tokens, progress.characters);
    progress.characters += characters_of(token.text);
  }
  out += ",\"finish_reason\":";
  append_finish(out, token.finish);
  out += options_.usage ? "}],\"usage\":null}" : "}]}";
}

void AnswerWriter::generate_event(std::string& out, int64_t index, const TokenEvent& token) {
  Progress& progress = progress_[static_cast<size_t>(index)];
  progress.text += token.text;
  if (token.id >= 0) ++progress.count;
  if (options_.logprobs && token.id >= 0) progress.tokens.push_back(token_of(token));
  out += "{\"text\":";
  append_json_string(out, progress.text);
  out += ",\"meta_info\":";
  meta_info(out, index, progress.tokens, token.finish, token.usage, progress.count);
  if (options_.choices > 1) fmt::format_to(std::back_inserter(out), ",\"index\":{}", index);
  out += "}";
}

std::string AnswerWriter::usage_event(const std::vector<Usage>& usages) const {
  std::string out = "data: " + head_ + "],\"usage\":";
  append_usage(out, usages);
  return out + "}\n\n";
}

std::string AnswerWriter::error_event(const ApiError& error) {
  return "data: " + error_body(error) + "\n\n";
}

std::string AnswerWriter::answer(const std::vector<Choice>& choices, double seconds) const {
  std::string out;
  if (options_.kind == ApiKind::generate) {
    const bool list = options_.list || choices.size() > 1;
    if (list) out += "[";
    for (size_t i = 0; i < choices.size(); ++i) {
      if (i > 0) out += ",";
      generate_answer(out, choices[i], static_cast<int64_t>(i), seconds);
    }
    if (list) out += "]";
    return out;
  }
  out = head_;
  const bool chat = options_.kind == ApiKind::chat;
  if (chat) {
    static constexpr std::string_view kChunk = "chat.completion.chunk", kWhole = "chat.completion";
    out.replace(out.find(kChunk, 6 + options_.id.size()), kChunk.size(), kWhole);
  }
  std::vector<Usage> usages;
  for (size_t i = 0; i < choices.size(); ++i) {
    const Choice& choice = choices[i];
    usages.push_back(choice.usage);
    fmt::format_to(std::back_inserter(out), "{}{{\"index\":{},", i > 0 ? "," : "", i);
    const std::string* echo = echo_of(static_cast<int64_t>(i));
    out += chat ? "\"message\":{\"role\":\"assistant\",\"content\":" : "\"text\":";
    append_json_string(out, echo != nullptr ? *echo + choice.text : choice.text);
    if (chat) out += ",\"refusal\":null}";
    out += ",\"logprobs\":";
    if (!options_.logprobs)
      out += "null";
    else if (chat)
      chat_logprobs(out, choice.tokens);
    else
      completion_logprobs(out, choice.tokens, echo != nullptr ? characters_of(*echo) : 0);
    out += ",\"finish_reason\":";
    append_finish(out, choice.finish);
    out += "}";
  }
  out += "],\"usage\":";
  append_usage(out, usages);
  return out + "}";
}

void AnswerWriter::generate_answer(std::string& out, const Choice& choice, int64_t index,
                                   double seconds) const {
  out += "{\"text\":";
  append_json_string(out, choice.text);
  out += ",\"output_ids\":[";
  for (size_t i = 0; i < choice.tokens.size(); ++i)
    fmt::format_to(std::back_inserter(out), "{}{}", i > 0 ? "," : "", choice.tokens[i].id);
  out += "],\"meta_info\":";
  meta_info(out, index, choice.tokens, choice.finish, choice.usage, choice.usage.completion_tokens);
  out.pop_back();
  fmt::format_to(std::back_inserter(out), ",\"e2e_latency\":{:.6f}}}}}", seconds);
}

void AnswerWriter::meta_info(std::string& out, int64_t index, const std::vector<Choice::Token>& tokens,
                             FinishReason finish, const Usage& usage, int64_t completion_tokens) const {
  out += "{\"id\":";
  append_json_string(out, options_.choices > 1 ? fmt::format("{}-{}", options_.id, index) : options_.id);
  out += ",\"finish_reason\":";
  if (finish == FinishReason::none)
    out += "null";
  else if (finish == FinishReason::length)
    fmt::format_to(std::back_inserter(out), "{{\"type\":\"length\",\"length\":{}}}", completion_tokens);
  else
    fmt::format_to(std::back_inserter(out), "{{\"type\":\"{}\"}}", name_of(finish));
  fmt::format_to(std::back_inserter(out),
                 ",\"prompt_tokens\":{},\"completion_tokens\":{},\"cached_tokens\":{}", usage.prompt_tokens,
                 completion_tokens, usage.cached_tokens);
  if (options_.logprobs) {
    const auto triple = [&](float logprob, int32_t id) {
      out += "[";
      append_logprob(out, logprob);
      fmt::format_to(std::back_inserter(out), ",{},null]", id);
    };
    out += ",\"output_token_logprobs\":[";
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (i > 0) out += ",";
      triple(tokens[i].logprob, tokens[i].id);
    }
    out += "],\"output_top_logprobs\":[";
    for (size_t i = 0; i < tokens.size(); ++i) {
      out += i > 0 ? ",[" : "[";
      for (size_t j = 0; j < tokens[i].top.size(); ++j) {
        if (j > 0) out += ",";
        triple(tokens[i].top[j].logprob, tokens[i].top[j].id);
      }
      out += "]";
    }
    out += "]";
  }
  out += "}";
}

void AnswerWriter::append_token_text(std::string& out, int32_t id) const {
  append_json_string(out, model::replace_invalid_utf8(options_.bytes_of(id)));
}

/// tokens, token_logprobs, top_logprobs and text_offset, side by side.
void AnswerWriter::completion_logprobs(std::string& out, const std::vector<Choice::Token>& tokens,
                                       int64_t offset) const {
  std::string texts, logprobs, tops, offsets;
  for (const Choice::Token& token : tokens) {
    if (!texts.empty())
      for (std::string* list : {&texts, &logprobs, &tops, &offsets}) *list += ",";
    append_token_text(texts, token.id);
    append_logprob(logprobs, token.logprob);
    // An object cannot have a key twice: of tokens with the same text, the likeliest. The chosen one comes first.
    std::set<std::string, std::less<>> seen;
    std::string top;
    const auto add = [&](int32_t id, float logprob) {
      std::string key;
      append_token_text(key, id);
      if (!seen.insert(key).second) return;
      top += (top.empty() ? "" : ",") + key + ":";
      append_logprob(top, logprob);
    };
    add(token.id, token.logprob);
    for (const TopLogprob& other : token.top) add(other.id, other.logprob);
    tops += "{" + top + "}";
    offsets += std::to_string(offset);
    offset += token.characters;
  }
  out += "{\"tokens\":[" + texts + "],\"token_logprobs\":[" + logprobs + "],\"top_logprobs\":[" + tops +
         "],\"text_offset\":[" + offsets + "]}";
}

void AnswerWriter::chat_logprobs(std::string& out, const std::vector<Choice::Token>& tokens) const {
  const auto entry = [&](int32_t id, float logprob) {
    out += "{\"token\":";
    append_token_text(out, id);
    out += ",\"logprob\":";
    append_logprob(out, logprob);
    out += ",\"bytes\":[";
    const std::string_view bytes = options_.bytes_of(id);
    for (size_t i = 0; i < bytes.size(); ++i)
      fmt::format_to(std::back_inserter(out), "{}{}", i > 0 ? "," : "", static_cast<unsigned char>(bytes[i]));
    out += "]";
  };
  out += "{\"content\":[";
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) out += ",";
    entry(tokens[i].id, tokens[i].logprob);
    out += ",\"top_logprobs\":[";
    for (size_t j = 0; j < tokens[i].top.size(); ++j) {
      if (j > 0) out += ",";
      entry(tokens[i].top[j].id, tokens[i].top[j].logprob);
      out += "}";
    }
    out += "]}";
  }
  out += "],\"refusal\":null}";
}

/// The tokens of a prompt count once, however many answers it has.
void AnswerWriter::append_usage(std::string& out, const std::vector<Usage>& usages) const {
  Usage sum;
  for (size_t i = 0; i < usages.size(); ++i) {
    sum.completion_tokens += usages[i].completion_tokens;
    if (static_cast<int64_t>(i) % options_.n != 0) continue;
    sum.prompt_tokens += usages[i].prompt_tokens;
    sum.cached_tokens += usages[i].cached_tokens;
  }
  fmt::format_to(std::back_inserter(out),
                 "{{\"prompt_tokens\":{},\"completion_tokens\":{},\"total_tokens\":{},"
                 "\"prompt_tokens_details\":{{\"cached_tokens\":{}}}}}",
                 sum.prompt_tokens, sum.completion_tokens, sum.prompt_tokens + sum.completion_tokens,
                 sum.cached_tokens);
}

}  // namespace vivace::server
