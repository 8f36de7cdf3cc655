#include "src/bench/workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "src/bench/random.h"
#include "src/core/error.h"

namespace vivace::bench {

namespace {

constexpr int64_t kUniformPrompt = 128, kUniformOutput = 64;
constexpr double kPromptMedian = 96, kPromptSigma = 1.2;
constexpr double kOutputMedian = 48, kOutputSigma = 0.8;
constexpr int64_t kSharedPrefix = 192, kTurns = 4;
constexpr double kUserMedian = 48, kUserSigma = 0.8;
constexpr std::string_view kNames[] = {"uniform", "mixed", "multi-turn"};  // in the order of Workload

/// Text and ids that prompts are cut out of. A piece is a number of tokens.
class PromptSource {
 public:
  explicit PromptSource(const WorkloadOptions& options) : options_(options), text_(prompt_text()) {}

  void append(Prompt& prompt, int64_t tokens, Random& random) const {
    if (options_.bytes_per_token > 0) {
      const auto bytes =
          std::max<int64_t>(1, std::llround(static_cast<double>(tokens) * options_.bytes_per_token));
      cut(text_, bytes, random, prompt.text);
    } else if (options_.text_ids.empty()) {
      for (int64_t i = 0; i < tokens; ++i)
        prompt.ids.push_back(static_cast<int32_t>(random.below(options_.vocab)));
    } else {
      cut(options_.text_ids, tokens, random, prompt.ids);
    }
  }
  /// The prompt as it is sent.
  Prompt finished(const Prompt& prompt) const {
    if (options_.bytes_per_token <= 0 || !options_.chat) return prompt;
    return user_message(prompt.text);
  }

 private:
  template <class From, class To>
  static void cut(const From& from, int64_t length, Random& random, To& to) {
    size_t position = static_cast<size_t>(random.below(static_cast<int64_t>(from.size())));
    for (int64_t i = 0; i < length; ++i) {
      to.push_back(from[position]);
      if (++position == from.size()) position = 0;
    }
  }

  const WorkloadOptions& options_;
  std::string_view text_;
};

std::vector<PlannedRequest> plan_single(const WorkloadOptions& options, const PromptSource& source) {
  Random random(options.seed);
  Arrivals arrivals(options.rate);
  const int64_t room = options.max_model_len - options.template_tokens;
  std::vector<PlannedRequest> plan;
  for (int64_t i = 0; i < options.requests; ++i) {
    int64_t length = kUniformPrompt;
    PlannedRequest request;
    request.output_tokens = kUniformOutput;
    if (options.workload == Workload::mixed) {
      const int64_t output = random.log_normal(kOutputMedian, kOutputSigma);
      const int64_t drawn = random.log_normal(kPromptMedian, kPromptSigma);
      request.output_tokens = std::min(output, room - 1);
      length = std::min(drawn, room - request.output_tokens);
      request.cut = length < drawn || request.output_tokens < output;
    }
    Prompt prompt;
    source.append(prompt, length, random);
    request.prompt = source.finished(prompt);
    request.seed = sampling_seed(random);
    request.arrival_s = arrivals.next(random);
    plan.push_back(std::move(request));
  }
  return plan;
}

/// Conversations one after the other in the plan; those that run side by side are for the load to choose.
std::vector<PlannedRequest> plan_conversations(const WorkloadOptions& options, const PromptSource& source) {
  Random random(options.seed);
  Arrivals arrivals(options.rate);
  Prompt shared;
  source.append(shared, kSharedPrefix, random);
  std::vector<PlannedRequest> plan;
  const int64_t room = options.max_model_len - options.template_tokens;
  Prompt said;
  int64_t tokens = 0, turn = kTurns;  // of `said`; a new conversation comes first
  while (static_cast<int64_t>(plan.size()) < options.requests) {
    const int64_t user = random.log_normal(kUserMedian, kUserSigma);
    const int64_t output = random.log_normal(kOutputMedian, kOutputSigma);
    const bool begins = turn == kTurns || tokens + user + output > room;
    if (begins) {
      said = shared;
      tokens = kSharedPrefix;
      turn = 0;
    }
    PlannedRequest request;
    request.output_tokens = std::min(output, room - tokens - 1);
    const int64_t length = std::min(user, room - tokens - request.output_tokens);
    request.cut = length < user || request.output_tokens < output;
    source.append(said, length, random);
    request.prompt = source.finished(said);
    request.seed = sampling_seed(random);
    if (begins) {
      request.arrival_s = arrivals.next(random);
    } else {
      request.after = static_cast<int64_t>(plan.size()) - 1;
    }
    source.append(said, request.output_tokens, random);  // the reply
    tokens += length + request.output_tokens;
    ++turn;
    plan.push_back(std::move(request));
  }
  return plan;
}

int64_t shortest_context(Workload workload) {
  switch (workload) {
    case Workload::uniform:
      return kUniformPrompt + kUniformOutput;
    case Workload::mixed:
      return 2;
    case Workload::multi_turn:
      return kSharedPrefix + 2;
  }
  return 0;
}

}  // namespace

std::string_view name_of(Workload workload) {
  return kNames[static_cast<size_t>(workload)];
}

Prompt user_message(const std::string& text) {
  const auto messages = nlohmann::ordered_json::array({{{"role", "user"}, {"content", text}}});
  Prompt prompt;
  prompt.messages = messages.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  return prompt;
}

Result<Workload> workload_from_name(std::string_view name) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<Workload>(i);
  }
  return invalid_argument("is '{}', needs uniform, mixed or multi-turn", name);
}

Result<std::vector<PlannedRequest>> plan_workload(const WorkloadOptions& options) {
  if (options.requests < 1) return invalid_argument("--requests is {}, needs at least 1", options.requests);
  if (options.text_ids.empty() && options.vocab < 1 && options.bytes_per_token <= 0) {
    return invalid_argument("workload: neither a tokenised text nor a vocabulary to draw prompts from");
  }
  const int64_t shortest = shortest_context(options.workload) + options.template_tokens;
  if (options.max_model_len < shortest) {
    return invalid_argument(
        "workload: max_model_len is {}, needs at least {}: the tokens of a request of '{}'",
        options.max_model_len, shortest, name_of(options.workload));
  }
  const PromptSource source(options);
  return options.workload == Workload::multi_turn ? plan_conversations(options, source)
                                                  : plan_single(options, source);
}

std::string fingerprint(const std::vector<PlannedRequest>& plan) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  const auto add = [&](const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  };
  for (const PlannedRequest& request : plan) {
    const uint64_t numbers[] = {static_cast<uint64_t>(request.output_tokens), request.seed,
                                request.prompt.ids.size(), request.prompt.text.size(),
                                request.prompt.messages.size()};
    add(numbers, sizeof(numbers));
    add(request.prompt.ids.data(), request.prompt.ids.size() * sizeof(int32_t));
    add(request.prompt.text.data(), request.prompt.text.size());
    add(request.prompt.messages.data(), request.prompt.messages.size());
  }
  return fmt::format("{:016x}", hash);
}

}  // namespace vivace::bench
