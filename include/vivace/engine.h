#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/tensor.h"

namespace vivace {

/// How the next token is chosen; meanings and order as in vivace/sampler.h.
struct SamplingParams {
  double temperature = 1;         ///< >= 0; 0 is greedy
  int64_t top_k = 0;              ///< 0: off
  double top_p = 1;               ///< (0, 1]
  double min_p = 0;               ///< [0, 1]
  double repetition_penalty = 1;  ///< > 0; prompt and output tokens
  double presence_penalty = 0;    ///< [-2, 2]; output tokens
  double frequency_penalty = 0;   ///< [-2, 2]; output tokens
  std::optional<uint64_t> seed;   ///< absent: drawn from the engine's own generator
  std::vector<std::pair<int32_t, float>> logit_bias;
  int logprobs = -1;  ///< -1: none; n: the chosen token's and the n best alternatives' (<= 20)
};

struct Request {
  std::vector<int32_t> prompt_ids;  ///< at least one
  SamplingParams sampling;
  std::optional<int64_t> max_tokens;  ///< absent: what is left of the context. 0: one final event, no token
  int64_t min_tokens = 0;             ///< no end token, and no stop string, before this many
  std::vector<std::string> stop;      ///< the text ends before the earliest of them
  std::vector<int32_t> stop_ids;      ///< like an end token
  bool ignore_eos = false;
  bool skip_special = true;  ///< control tokens have no text
  std::string cache_salt;    ///< requests share cached prefixes only with the same salt
};

using RequestId = uint64_t;

enum class FinishReason : uint8_t { none, stop, length, cancelled, error };
/// "stop", "length", ...; "" for none.
std::string_view name_of(FinishReason reason);

struct TopLogprob {
  int32_t id;
  float logprob;
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;  ///< up to and including the one that ended the request
  int64_t cached_tokens = 0;      ///< prompt tokens whose keys and values were in the prefix cache
};

/// One generated token, or the end of a request without one (cancelled, error).
struct TokenEvent {
  RequestId request = 0;
  int32_t id = -1;    ///< -1: no token (the request was cancelled or failed)
  std::string text;   ///< text that became final with this token; may be empty
  float logprob = 0;  ///< of the chosen token, when asked for
  std::vector<TopLogprob> top;
  FinishReason finish = FinishReason::none;  ///< on the last event
  Usage usage;
  Status error;  ///< with FinishReason::error
  std::chrono::steady_clock::time_point time;
};

struct EngineOptions {
  std::string model;           ///< a .gguf file or a folder with config.json
  std::string device = "cpu";  ///< cpu, cuda, cuda:N
  int threads = 0;             ///< 0: every core this process may use
  DType kv_dtype = DType::none;  ///< none: f32 on the CPU, bf16 on a GPU
  bool exact = false;          ///< no activation quantisation inside linear
  bool deterministic = false;  ///< a request's bits do not depend on its company
  std::string router_mode = "exact";
  std::string prefer{};         ///< OP=ROW[,OP=ROW]
  int64_t max_model_len = 0;    ///< 0: the model's own context length
  int64_t max_batch = 64;       ///< requests that run at once
  int64_t token_budget = 512;   ///< tokens per step, prompt chunks and decodes together
  int64_t page_tokens = 16;     ///< tokens per KV page; a power of two, 1..256
  int64_t kv_memory_bytes = 0;  ///< 0: a default that fits the machine
  int64_t max_waiting = 4096;   ///< requests beyond max_batch; more are refused with resource_exhausted
  bool prefix_cache = true;
  bool count_experts = false;  ///< EngineStats has experts; costs a GPU a small kernel and copy a step
  uint64_t seed = 0;  ///< of the generator that seeds requests without a seed
  /// Gets lines about what may surprise, such as the rows that a GPU's calls fall back to; absent: nobody does. Called
  /// while the engine is made.
  std::function<void(const std::string&)> log{};
};

struct EngineStats {
  int64_t running = 0, waiting = 0;
  int64_t pages_total = 0, pages_free = 0, pages_cached = 0;
  int64_t steps = 0, prompt_tokens = 0, generated_tokens = 0, cached_tokens = 0, preemptions = 0;
  int64_t finished = 0, cancelled = 0, failed = 0;
  /// With count_experts, over steps of decodes alone: the MoE layers that ran, and their distinct experts, summed.
  int64_t moe_layers = 0, touched_experts = 0;
};

/// Continuous batching over one model. One engine thread plans and runs steps; any thread may
/// submit and cancel.
class Engine {
 public:
  /// Called on the engine thread, once per token in order, the last time with `finish` set. Must not block.
  /// It may submit and cancel. One that throws cancels its request.
  using Sink = std::function<void(const TokenEvent&)>;

  /// Cancels every request and delivers their final events.
  virtual ~Engine() = default;

  /// Loads the model and starts the engine thread.
  static Result<std::unique_ptr<Engine>> create(const EngineOptions& options);

  /// Queues a request.
  /// Fails  invalid_argument: empty prompt, an id outside the vocabulary, a sampling value out of range, or
  /// prompt plus max_tokens beyond the context (the message states both numbers). resource_exhausted: the
  /// queue is full. cancelled: the engine is shutting down.
  virtual Result<RequestId> submit(Request request, Sink sink) = 0;
  /// After it returns the sink delivers at most the final event (FinishReason::cancelled), from the engine
  /// thread; no token after that. Waits for a sink's call in progress (unless a sink is the caller), so hold
  /// no lock that a sink takes. Unknown or finished ids are ignored.
  virtual void cancel(RequestId request) = 0;
  /// Blocks until nothing is running or waiting; from a sink it returns at once.
  virtual void drain() = 0;
  /// Later requests find no prefix of earlier ones. Takes effect before the next step is planned.
  virtual void clear_prefix_cache() = 0;
  virtual EngineStats stats() const = 0;
  virtual const EngineOptions& options() const = 0;
  virtual int64_t max_model_len() const = 0;
  virtual int64_t vocab() const = 0;
  /// Preferences and calls per row.
  virtual const Dispatch& dispatch() const = 0;
};

}  // namespace vivace
