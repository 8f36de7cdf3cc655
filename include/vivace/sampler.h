#pragma once

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

/// The parameters of one row as plain values: what the door checks. SamplerArgs holds them as one tensor each.
struct SampleParams {
  double temperature = 1;         ///< 0: greedy; finite, >= 0
  int64_t top_k = 0;              ///< keep exactly so many; 0: all
  double top_p = 1;               ///< keep the smallest set of this probability; in (0, 1]
  double min_p = 0;               ///< keep what has this share of the largest probability; in [0, 1]
  double repetition_penalty = 1;  ///< > 0; over prompt and output, each distinct id once
  double presence_penalty = 0;    ///< over output ids alone, once per distinct id
  double frequency_penalty = 0;   ///< over output ids alone, once per occurrence
};

/// Every tensor lies where the call runs. An absent parameter has its default in all rows.
struct SamplerArgs {
  Tensor logits;  ///< f32 or bf16 [rows, vocab], rows may be strided; not modified

  Tensor temperature, top_p, min_p;                                ///< f32 [rows]
  Tensor top_k;                                                    ///< i32 [rows]
  Tensor repetition_penalty, presence_penalty, frequency_penalty;  ///< f32 [rows]
  Tensor seed, position;  ///< i64 [rows]: of the request, and of the token to be drawn in it; both or neither (0)

  /// What a penalty looks at: one state per request, kept between steps.
  Tensor prompt_bits;     ///< i32 [states, ceil(vocab / 32)]: bit id % 32 of word id / 32, the ids of the prompt
  Tensor output_counts;   ///< i32 [states, vocab]: how often an id was drawn
  Tensor state;           ///< i32 [rows]: the row's state, -1 none; absent: row i has state i
  bool count_ids = false; ///< the drawn id of a valid row is counted into output_counts

  /// Sparse additions to the logits, row i's are entries bias_start[i] .. bias_start[i + 1]; values add up if an id
  /// stands twice, -inf bans an id, ids outside the vocabulary are ignored. All three or none.
  Tensor bias_start;   ///< i32 [rows + 1]
  Tensor bias_ids;     ///< i32 [entries]
  Tensor bias_values;  ///< f32 [entries], no NaN
  Tensor allowed_bits; ///< optional i32 [rows, ceil(vocab / 32)]: ids whose bit is 0 are never drawn

  Tensor ids;           ///< out, i32 [rows]
  Tensor valid;         ///< out, u8 [rows]
  Tensor logprobs;      ///< optional out, f32 [rows]: of the drawn token
  Tensor top_ids;       ///< optional out, i32 [rows, n], together with top_logprobs
  Tensor top_logprobs;  ///< optional out, f32 [rows, n]
  Tensor workspace;     ///< u8 [>= sampler_workspace_bytes()]
};

/// Draws one token per row. The order, each step on the result of the one before:
///
///   1. the row's biases are added; tokens that are not allowed become -inf
///   2. repetition: l > 0 ? l / r : l * r, then frequency * count, then presence are subtracted
///   3. temperature 0: the largest logit, ties to the lower id; no later step runs
///   4. weight w = exp((l - largest l) / temperature)
///   5. top_k: the k largest logits, exactly k, ties to the lower id
///   6. top_p: from the largest down (ties to the lower id), keep a token while the weights before it sum to
///      less than top_p of those that step 5 left; the largest is always kept
///   7. min_p: keep w >= min_p
///   8. draw: the first token, by ascending id, whose running sum of weights exceeds u * their total
///
/// u is a uniform number of (seed, position) alone (Philox4x32-10), so a request draws the same tokens in any
/// batch, slot and after any preemption; a row's result does not depend on the rows beside it.
///
/// Log-probabilities are the natural log-softmax of the logits as given: before bias, penalties, temperature
/// and filters. top_ids are the n most likely tokens by them, ties to the lower id; entries past the vocabulary
/// are id -1 and -inf.
///
/// Valid    1, or 0 for a row with NaN, without a finite or +inf logit, or with no token left: its id is 0
///          and its log-probabilities are -inf. Other rows are not affected. Tokens at +inf share the
///          probability.
///
/// Shapes   see SamplerArgs. vocab in 1 .. 2^31 - 1.
/// Writes   the outputs, workspace, and with count_ids one element of output_counts per valid row.
/// Cost     sampler_cost().
/// Runs     on `stream`; allocates nothing.
/// Fails    invalid_argument: a shape, stride or type disagrees, or the workspace is too small; on the CPU also when a
///          parameter is outside its range (the message names row and field) or a state does not exist. A GPU row
///          gives such a row valid 0. unsupported: no row fits.
/// Source   src/ops/sampler/
Status sampler(const SamplerArgs& args, const Stream& stream);
/// Scratch for this call on this stream: on the CPU it depends on vocab and the number of threads, on a GPU on rows, vocab and
/// whether there are biases.
Result<int64_t> sampler_workspace_bytes(const SamplerArgs& args, const Stream& stream);
/// The checks of one row's parameters alone, for the door.
Status check_sample_params(const SampleParams& params);
Cost sampler_cost(const SamplerArgs& args);
Choice sampler_explain(const SamplerArgs& args, const Stream& stream);

}  // namespace vivace
