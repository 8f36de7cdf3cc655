#pragma once

#include <cstdint>
#include <memory>

#include "src/engine/operator_times.h"
#include "src/engine/runner.h"
#include "src/model/checkpoint.h"
#include "src/model/model.h"
#include "vivace/engine.h"
#include "vivace/status.h"

namespace vivace::engine {

/// The model's part of the engine's options: a step holds at most token_budget tokens and max_batch requests.
model::ModelOptions model_options_of(const EngineOptions& options);

/// How many KV pages a runner makes.
struct PoolSize {
  int64_t page_bytes = 0;         ///< of one page over all layers
  int64_t pages_per_request = 0;  ///< for max_model_len tokens
  int64_t kv_memory_bytes = 0;    ///< as asked for; 0: choose
  int64_t max_batch = 1;
  int64_t available_bytes = 0;  ///< of this machine; 0: unknown
};
/// As many pages as kv_memory_bytes holds; without it, enough for a few requests of full length, at most a quarter of
/// the machine's available memory, and at least one request. Never more than max_batch + 64 requests of full length
/// use: beyond what runs at once, pages only serve the prefix cache, and each costs a record on the host. The pool
/// itself costs resident memory only where it is used.
/// invalid_argument: kv_memory_bytes cannot hold one request of full length. out_of_memory: kv_memory_bytes is more than
/// the memory available; without it, not even one request fits. The messages state both numbers and the options to
/// change.
Result<int64_t> pages_of(const PoolSize& size);

/// What is worth a line in a log: each GPU row that calls of these steps fell back to, the rows before it on the same
/// device and why they refused, once each.
std::vector<std::string> fallback_lines(const std::vector<model::OpUse>& uses);

/// A runner over a model, with what measurements ask of it beside its steps.
class ModelRunner : public Runner {
 public:
  virtual model::Model& model() = 0;
  virtual Stream stream() = 0;
  /// Turns the count of touched experts on or off, as EngineOptions::count_experts does; while nothing is in flight.
  virtual void count_experts(bool on) = 0;
  /// The steps that follow show their calls to `times`, those in buckets on a GPU when they are captured anew; null: no more.
  /// While nothing is in flight.
  virtual void time_operators(OperatorTimes* times) = 0;
  /// Decode steps run in the rows of their bucket on a CPU too, which has no graphs and gains nothing by it: for tests.
  virtual void pad_decodes() = 0;
};

/// A runner of this model on the device that the options name: binds or places its weights, makes threads or a stream, KV
/// pages (`pages` of them, or as many as pages_of() chooses) and scratch.
/// Fails  invalid_argument, unsupported: an option is out of range; also as Model::load() and pages_of() do.
Result<std::unique_ptr<ModelRunner>> make_model_runner(std::shared_ptr<const model::Checkpoint> checkpoint,
                                                       const EngineOptions& options, int64_t pages = 0);

}  // namespace vivace::engine
