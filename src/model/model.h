#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/model/checkpoint.h"
#include "vivace/attention_prologue.h"
#include "vivace/dispatch.h"
#include "vivace/fused_moe.h"
#include "vivace/linear.h"
#include "vivace/router_gemm.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace::model {

/// Choices of a loaded model that do not come from its files.
struct ModelOptions {
  Device device = Device::cpu;  ///< where the weights go and steps run
  int ordinal = 0;              ///< which CUDA device; -1: one that is not here, for explain() alone
  DType kv_dtype =
      DType::none;  ///< none: f32 on the CPU, bf16 on a GPU; fp8 takes the checkpoint's scales, else 1
  bool exact = false;          ///< no activation quantisation inside linear
  bool deterministic = false;  ///< batch-invariant attention schedule
  std::string router_mode = "exact";
  int64_t page_tokens = 16;   ///< a power of two, 1..256
  int64_t max_tokens = 512;   ///< tokens per step that scratch is sized for
  int64_t max_requests = 64;  ///< requests per step
  int64_t max_model_len = 0;  ///< 0: the model's own
};

/// The tokens of one step; fields as in engine::StepInput. `logit_rows` are the tokens whose logits are
/// wanted, in any order.
///
/// A step of decodes alone, with the logits of every token in order, may run in the shape of a larger one, its bucket: as
/// many rows in every call, so that one captured graph serves all steps of the bucket. Rows behind the tokens are
/// padding. They attend nothing, write no page and choose no expert, and no bit of another row depends on them; their logits
/// mean nothing.
struct ForwardInput {
  std::span<const int32_t> token_ids, positions;
  std::span<const int64_t> slots;
  std::span<const int32_t> query_start, kv_lengths, page_table;
  int64_t max_pages = 0;
  int64_t decode_requests = 0;
  std::span<const int64_t> logit_rows;
  Tensor
      previous_ids;  ///< on a GPU, optional, i32 [rows]: a token id of -1 - i stands for its row i when the step runs
  int64_t bucket = 0;  ///< 0: none; else rows of the step and of its logits, at least as many as tokens
};

/// What a step serves: requests with one token each, or a chunk of one request's prompt.
enum class Phase { decode, prefill };
std::string_view name_of(Phase phase);

/// One operator call of a layer, for `ops explain`.
struct OpUse {
  int64_t layer;  ///< -1 outside the layers
  std::string op;
  Phase phase;
  int64_t batch;  ///< tokens of the step
  Choice choice;
  std::string note;  ///< what the call is for, where its operator and place do not say
};

/// What one decode step reads of the weights, whatever the batch. A few rows of the embedding are not counted.
struct WeightBytes {
  int64_t dense = 0;   ///< in every step: projections, router, shared experts, norms, output head
  int64_t expert = 0;  ///< for each expert that a sparse layer touches
};

/// The layer graph of a decoder over a checkpoint: Llama family, Qwen3-MoE, Hy3. One graph serves all: an
/// architecture is which tensors exist and a few fields of the configuration.
class Model {
 public:
  virtual ~Model() = default;

  /// Binds the weights (views of the mapped files; nothing is copied that can be used in place) and checks
  /// every shape. The checkpoint must outlive the model.
  /// Fails  not_found, invalid_argument, unsupported: as bind_weights() says, or an option out of range.
  static Result<std::unique_ptr<Model>> load(const Checkpoint& checkpoint, const ModelOptions& options);

  virtual const ModelConfig& config() const = 0;
  virtual const ModelOptions& options() const = 0;
  virtual int64_t max_model_len() const = 0;
  /// Bytes that one KV page takes over all layers.
  virtual int64_t page_bytes() const = 0;
  /// Makes a pool of `pages` KV pages and the scratch that steps on `stream` need; replaces what there was. Memory is
  /// resident only where a step wrote it.
  virtual Status allocate_pages(int64_t pages, const Stream& stream) = 0;
  /// Fills all pages with random keys and values of deviation 1, for speed runs; asynchronous on a GPU.
  virtual Status fill_pages(uint64_t seed, const Stream& stream) = 0;
  virtual WeightBytes weight_bytes() const = 0;
  /// Runs one step: keys and values into their slots, logits [logit_rows or bucket, vocab] f32 to `logits`. Allocates
  /// nothing, but for the first step in a bucket on a CPU. It is stage() and enqueue().
  /// Fails  invalid_argument: sizes disagree with each other, with the options or with the pool, or a token id,
  /// position, slot, length or page is out of range; the message names the entry and its value.
  virtual Status forward(const ForwardInput& input, const Tensor& logits, const Stream& stream) = 0;
  /// Checks a step and brings it to where enqueue() reads it. On a GPU the arrays are copied by `stream`, each kind to
  /// one place, whatever the step: a captured enqueue() may be replayed after another stage() of the same shape.
  virtual Status stage(const ForwardInput& input, const Tensor& logits, const Stream& stream) = 0;
  /// Runs the operators of the staged step.
  virtual Status enqueue(const Stream& stream) = 0;
  /// Behind a step with the logits of all its tokens: adds to count[0] the distinct experts of each MoE layer, and to
  /// count[1] the number of those layers. i64 [2] where steps run. On a GPU one small kernel, asynchronous; nothing in a
  /// dense model.
  virtual Status count_experts(const Tensor& count, const Stream& stream) = 0;
  /// The operator calls of one step, layer by layer, and which row each would take: `tokens` requests that
  /// decode, or one prompt chunk of `tokens` tokens, the last of which has its logits computed.
  virtual std::vector<OpUse> explain(Phase phase, int64_t tokens, const Stream& stream) = 0;
  /// Sees the chosen experts of each MoE layer (tests compare them with references), -1 in rows of padding; null turns it
  /// off.
  using RouteObserver = std::function<void(int64_t layer, const Tensor& expert_ids)>;
  virtual void observe_routes(RouteObserver observer) = 0;
  /// Sees calls after they ran, with what they were given: how calibration measures activations and RouterInputs gets
  /// its own. An error ends the step. Empty functions see nothing. On a GPU the tensors are the device's, and not yet
  /// computed.
  struct CallObserver {
    std::function<Status(int64_t layer, const LinearArgs& args)> linear;
    std::function<Status(int64_t layer, const AttentionPrologueArgs& args)> attention_prologue;
    std::function<Status(int64_t layer, const RouterGemmArgs& args)> router_gemm;
    std::function<Status(int64_t layer, const FusedMoeArgs& args)> fused_moe;
  };
  virtual void observe_calls(CallObserver observer) = 0;
};

}  // namespace vivace::model
