#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/bench/target.h"
#include "vivace/status.h"

namespace vivace::bench {

/// uniform: 128 tokens in, 64 out. mixed: lengths as chat traffic has them, most short and a few very long.
/// multi_turn: conversations of four turns that begin with the same text.
enum class Workload { uniform, mixed, multi_turn };
std::string_view name_of(Workload workload);
/// invalid_argument lists the names there are.
Result<Workload> workload_from_name(std::string_view name);

/// One request of a plan. The lengths decide how much work it is; the words do not.
struct PlannedRequest {
  Prompt prompt;
  int64_t output_tokens = 0;  ///< generated exactly, when end tokens are ignored
  double arrival_s = 0;       ///< open loop: when it is sent, counted from the start
  uint64_t seed = 0;          ///< of its sampling; below 2^53
  bool cut = false;           ///< the drawn lengths do not fit into max_model_len
  int64_t after = -1;         ///< the earlier request that must have ended before it is sent; -1: none
};

struct WorkloadOptions {
  Workload workload = Workload::mixed;
  int64_t requests = 64;
  double rate = 0;  ///< > 0: Poisson arrivals per second; 0: all may be sent at once
  uint64_t seed = 0;
  int64_t max_model_len = 0;  ///< prompt + output of every request stay within it
  int64_t vocab = 0;          ///< for prompts without `text_ids`: ids are drawn from [0, vocab)
  /// A tokenised text that prompts are cut out of (cyclically, each from its own offset); empty: random ids.
  std::vector<int32_t> text_ids;
  /// > 0: prompts are text, cut out of prompt_text(), with this many bytes for a token.
  double bytes_per_token = 0;
  bool chat = false;            ///< with bytes_per_token: the text is the message of a user
  int64_t template_tokens = 0;  ///< what a prompt has beside its text, such as a chat template's own
};

/// The same options give the same plan on every machine.
/// Mixed: prompts log-normal with median 96 and sigma 1.2, outputs log-normal with median 48 and sigma 0.8.
/// Where the context is too short for an output the output is cut, then the prompt.
/// Multi-turn: a prompt is 192 tokens that all requests share, then what was said before in its conversation (each
/// turn's user text, and a reply as long as that turn's output), then the user's text; user texts and outputs
/// are log-normal with median 48 and sigma 0.8. The replies in prompts are part of the plan, not what the
/// target generated, so that every target gets the same requests. A turn waits for the one before it; with a
/// rate, conversations arrive. Where the next turn does not fit into the context a new conversation begins.
/// Fails  invalid_argument: the context is too short for the workload, or there is neither text nor vocabulary.
Result<std::vector<PlannedRequest>> plan_workload(const WorkloadOptions& options);

/// The text as the one message of a chat.
Prompt user_message(const std::string& text);

/// Requests out of a file's lines (JSON Lines): each an object with "prompt" (a text, or a list of token ids) or
/// "messages" (a list of {"role", "content"}), and "max_tokens" (absent: `default_tokens`). Other fields are not
/// looked at; empty lines are skipped. `requests` of them from the line `first` on, from the beginning again after
/// the last; 0: each line once.
struct DatasetOptions {
  std::string path;
  int64_t default_tokens = 128;
  int64_t requests = 0;
  int64_t first = 0;
  double rate = 0;
  uint64_t seed = 0;  ///< of arrivals and draws
  bool chat = false;  ///< a prompt of text is sent as the message of a user
};
/// Fails  io_error: the file. invalid_argument: a line, named with the field, its value and what fits.
Result<std::vector<PlannedRequest>> plan_dataset(const DatasetOptions& options);

/// A number that plans with the same prompts, lengths and order share, as text.
std::string fingerprint(const std::vector<PlannedRequest>& plan);

/// Plain prose that prompts are cut out of, written for this purpose.
std::string_view prompt_text();

}  // namespace vivace::bench
