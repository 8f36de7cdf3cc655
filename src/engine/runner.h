#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "vivace/dispatch.h"
#include "vivace/engine.h"
#include "vivace/status.h"

namespace vivace::engine {

/// One token to be sampled at the end of a step.
struct SampleSlot {
  int64_t row;  ///< index into StepInput::token_ids: whose logits
  const SamplingParams* params;
  uint64_t seed;
  int64_t position;  ///< of the token to be drawn: counts generated tokens from 0; the draw depends on (seed,
                     ///< position) only
  std::span<const int32_t> prompt_ids;  ///< for penalties
  std::span<const int32_t>
      output_ids;  ///< generated so far and known: while a step is in flight that draws a token of
                   ///< this request, `position` is one more than there are
  std::span<const int32_t> banned_ids;  ///< end tokens before min_tokens
  RequestId request = 0;  ///< the same in all steps of a request, and no other's; one of a failed step ends
};

/// What one step computes: the tokens of several requests, laid end to end, and where their keys and values
/// live. Request i owns tokens [query_start[i], query_start[i + 1]); `kv_lengths` counts its keys after this
/// step. The first `decode_requests` requests have one token each, the rest are prompt chunks.
struct StepInput {
  std::span<const int32_t>
      token_ids;  ///< -1 - i: what sample slot i of the step before draws, which is in flight
  std::span<const int32_t> positions;    ///< of each token in its request
  std::span<const int64_t> slots;        ///< page * page_tokens + offset for each token
  std::span<const int32_t> query_start;  ///< requests + 1
  std::span<const int32_t> kv_lengths;
  std::span<const int32_t> page_table;  ///< [requests, max_pages], row-major
  int64_t max_pages = 0;
  int64_t decode_requests = 0;
  std::span<const SampleSlot> samples;

  int64_t tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t requests() const { return static_cast<int64_t>(kv_lengths.size()); }
};

struct Sampled {
  int32_t id = -1;
  bool valid = true;  ///< false: the logits held NaN; the request ends with an error
  float logprob = 0;
  std::vector<TopLogprob> top;
};

/// Over steps of decodes alone: the distinct experts of each MoE layer, summed, and the number of those layers.
struct ExpertCount {
  int64_t touched = 0, layers = 0;
};

/// Executes steps: a model with its KV pages on a device. The engine thread alone calls it; tests use a
/// scripted one.
///
/// Steps take effect in the order in which they were enqueued: a step sees what all before it wrote into the pages, and
/// nothing of those after it. So a page may change hands while a step that uses it is in flight.
class Runner {
 public:
  /// Waits for what is in flight.
  virtual ~Runner() = default;
  /// Starts a step; keeps nothing of `input`. An error fails the requests of this step, and no finish() belongs to it.
  virtual Status enqueue(const StepInput& input) = 0;
  /// Waits for the oldest step in flight: one result per sample slot, in order. An error fails the requests of that
  /// step.
  virtual Status finish(std::vector<Sampled>& sampled) = 0;
  /// Whether a step may be enqueued while one is in flight. If not, each is finished before the next.
  virtual bool overlaps() const = 0;
  virtual int64_t vocab() const = 0;
  virtual int64_t max_model_len() const = 0;
  virtual int64_t pages() const = 0;
  virtual int64_t page_tokens() const = 0;
  virtual std::span<const int32_t> eos_ids() const = 0;
  virtual Dispatch& dispatch() = 0;
  /// Of the steps that were finished, where the runner counts them.
  virtual ExpertCount experts() const { return {}; }
};

}  // namespace vivace::engine
