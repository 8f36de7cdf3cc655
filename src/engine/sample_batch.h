#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/engine/runner.h"
#include "src/model/memory.h"
#include "vivace/sampler.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::engine {

/// What the sampler of an engine reads and writes, in memory where it runs: the parameters of a step's rows, the states
/// that penalties look at, and the results. Every array has one place, whatever the step.
///
/// The order of calls for a step is stage(), the sampler over args(), fetch(), collect(). The first three of a step may
/// come before the collect() of the step before; what they share on the host exists twice.
class SampleBatch {
 public:
  /// For at most `max_rows` rows of `vocab` logits.
  static Result<std::unique_ptr<SampleBatch>> create(int64_t max_rows, int64_t vocab, const Stream& stream);

  /// Brings the parameters of these rows to their places. A request with penalties that starts, or comes back
  /// after it lost its state to another, gets a state filled from its tokens. From then on the sampler itself
  /// counts what it draws into the state, so a request whose step failed must not come back. Rows behind the samples up
  /// to `rows` are padding: greedy, without a state, and what is drawn for them does not exist.
  Status stage(std::span<const SampleSlot> samples, int64_t rows, const Stream& stream);
  /// Which of the call's optional parts are present. Calls of as many rows with equal shapes may share a captured graph.
  struct Shape {
    int64_t rows = 0;
    bool penalties = false, biases = false;
    int64_t logprobs = -1;  ///< -1: none; n: the drawn token's and the n best
    int64_t generation = 0; ///< changes when an array had to move
    auto operator<=>(const Shape&) const = default;
  };
  const Shape& shape() const { return shape_; }
  /// The call of a shape over the staged rows; `workspace` and `logits` are the caller's.
  SamplerArgs args(const Shape& shape, const Tensor& logits, const Tensor& workspace) const;
  /// The ids of the step that fetch() saw last, i32 [its rows]; they stay until the next sampler writes them.
  Tensor last_ids() const { return results_.ids.rows(0, turns_[(fetched_ + 1) % 2].rows); }
  /// Enqueues the copy of the results to the host.
  Status fetch(const Stream& stream);
  /// Waits for the oldest fetch() that was not collected: one result per row of its step.
  Status collect(std::vector<Sampled>& sampled);

 private:
  /// The arrays of all rows over one piece of memory.
  struct Parameters {
    Tensor temperature, top_p, min_p, repetition, presence, frequency;  // f32
    Tensor top_k, state, bias_start;                                    // i32
    Tensor seed, position;                                              // i64
    Tensor bias_ids, bias_values;                                       // i32, f32; last, so that a copy may end early
  };
  struct Results {
    Tensor ids, top_ids;            // i32
    Tensor logprobs, top_logprobs;  // f32
    Tensor valid;                   // u8
  };
  struct StateOwner {
    RequestId request = 0;
    int64_t counted = -1;  ///< output tokens in the state when what is enqueued is over; -1: nobody's state
    bool in_step = false;
  };
  /// What the host has of a step. Two steps take turns.
  struct Turn {
    int64_t rows = 0, logprobs = -1;
    std::vector<int> wanted;  ///< alternatives per row; -1: no log-probability
    Parameters here;
    Results results;
    // On a GPU: both are pinned memory.
    device::Buffer here_memory, results_memory;
    std::unique_ptr<device::Event> staged, fetched;
  };

  SampleBatch(int64_t max_rows, int64_t vocab) : max_rows_(max_rows), vocab_(vocab) {}
  Status reserve(int64_t biases, const Stream& stream);
  static std::pair<Parameters, int64_t> lay_out(uint8_t* memory, Device device, int64_t rows, int64_t biases);
  static std::pair<Results, int64_t> lay_out_results(uint8_t* memory, Device device, int64_t rows);
  Status find_states(std::span<const SampleSlot> samples, int32_t* states, const Stream& stream);
  Status fill_state(int64_t state, const SampleSlot& slot, const Stream& stream);
  void fill_state(uint32_t* bits, int32_t* counts, const SampleSlot& slot) const;
  Turn& turn() { return turns_[fetched_ % 2]; }
  int64_t words() const { return (vocab_ + 31) / 32; }
  int64_t state_bytes() const { return (words() + vocab_) * 4; }

  int64_t max_rows_, vocab_, bias_capacity_ = 0, bias_count_ = 0;
  Shape shape_;
  int64_t fetched_ = 0, collected_ = 0;  ///< steps

  // On the CPU the turns' arrays are these.
  model::Memory there_memory_, results_memory_, prompt_bits_, output_counts_;
  Parameters there_;
  Results results_;
  std::array<Turn, 2> turns_;
  std::vector<StateOwner> owners_;
  // States on their way to a GPU: a row of pinned memory for each, and when it was copied.
  device::Buffer states_here_;
  std::vector<std::unique_ptr<device::Event>> state_copied_;
};

}  // namespace vivace::engine
