#pragma once

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
class SampleBatch {
 public:
  /// For at most `max_rows` rows of `vocab` logits.
  static Result<std::unique_ptr<SampleBatch>> create(int64_t max_rows, int64_t vocab, const Stream& stream);

  /// Brings the parameters of these rows to their places. A request with penalties that starts, or comes back after it
  /// lost its state to another, gets a state filled from its tokens.
  Status stage(std::span<const SampleSlot> samples, const Stream& stream);
  /// The call over the staged rows; `workspace` and `logits` are the caller's.
  SamplerArgs args(const Tensor& logits, const Tensor& workspace) const;
  /// Which of the call's optional parts are present. Calls of as many rows with equal shapes may share a captured graph.
  struct Shape {
    int64_t rows = 0;
    bool penalties = false, biases = false;
    int64_t logprobs = -1;  ///< -1: none; n: the drawn token's and the n best
    int64_t generation = 0; ///< changes when an array had to move
    auto operator<=>(const Shape&) const = default;
  };
  const Shape& shape() const { return shape_; }
  /// Enqueues the copy of the results to the host; nothing to do on the CPU.
  Status fetch(const Stream& stream);
  /// After fetch() has ended: one result per staged row, and the states count what was drawn.
  void collect(std::vector<Sampled>& sampled);
  /// After a call that failed: its states count for nobody.
  void forget();

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
    int64_t counted = -1;  ///< of its output tokens; -1: nobody's state
    bool in_step = false;
  };

  SampleBatch(int64_t max_rows, int64_t vocab) : max_rows_(max_rows), vocab_(vocab) {}
  Status reserve(int64_t biases, const Stream& stream);
  static std::pair<Parameters, int64_t> lay_out(uint8_t* memory, Device device, int64_t rows, int64_t biases);
  static std::pair<Results, int64_t> lay_out_results(uint8_t* memory, Device device, int64_t rows);
  Status find_states(std::span<const SampleSlot> samples, const Stream& stream);
  Status fill_state(int64_t state, const SampleSlot& slot, const Stream& stream);
  int64_t words() const { return (vocab_ + 31) / 32; }

  int64_t max_rows_, vocab_, bias_capacity_ = 0, bias_count_ = 0;
  Shape shape_;
  std::vector<int> wanted_;  ///< alternatives per staged row; -1: no log-probability

  // On the CPU `there` is `here`. On a GPU `here` is pinned.
  model::Memory there_memory_, results_memory_, prompt_bits_, output_counts_;
  device::Buffer here_memory_, fetched_memory_;
  Parameters here_, there_;
  Results results_, fetched_;
  std::vector<StateOwner> owners_;
  std::vector<uint8_t> state_row_;  ///< a state while it is filled
};

}  // namespace vivace::engine
