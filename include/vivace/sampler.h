#pragma once

#include <span>

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

struct LogitBias {
  int32_t id;
  float bias;
};

/// How one row is sampled. Plain data; the spans are host memory for now, where the CPU rows read
/// them, and the caller keeps them for the call. Ids outside the vocabulary, in any list, are ignored.
struct SampleRow {
  double temperature = 1;         ///< 0: greedy; finite, >= 0
  int32_t top_k = 0;              ///< keep exactly so many; 0: all
  double top_p = 1;               ///< keep the smallest set of this probability; in (0, 1]
  double min_p = 0;               ///< keep what has this share of the largest probability; in [0, 1]
  double repetition_penalty = 1;  ///< > 0; over prompt and output, each distinct id once
  double presence_penalty = 0;    ///< over output ids alone, once per distinct id
  double frequency_penalty = 0;   ///< over output ids alone, once per occurrence
  int32_t top_logprobs = 0;       ///< how many entries of top_ids and top_logprobs this row wants
  uint64_t seed = 0;
  int64_t position = 0;                             ///< of the token to be drawn, in its request
  std::span<const int32_t> prompt_ids, output_ids;  ///< history; needed by penalties only
  std::span<const LogitBias> logit_bias;            ///< values add up if an id stands twice; no NaN
  std::span<const int32_t> banned_ids;              ///< never drawn, such as end tokens before min_tokens
  std::span<const uint32_t> allowed_bits;  ///< empty, or ceil(vocab / 32) words: bit id % 32 of word id / 32
};

struct SamplerArgs {
  Tensor logits;
  std::span<const SampleRow> rows;
  Tensor ids;
  Tensor valid;
  Tensor logprobs;      ///< optional
  Tensor top_ids;       ///< optional, together with top_logprobs
  Tensor top_logprobs;  ///< optional
  Tensor workspace;     ///< u8 [>= sampler_workspace_bytes()]
};

/// Draws one token per row. The order, each step on the result of the one before:
///
///   1. banned and not allowed tokens become -inf; logit_bias is added
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
/// and filters. top_ids are the most likely tokens by them, ties to the lower id; entries past
/// rows[i].top_logprobs are id -1 and -inf.
///
/// Valid    1, or 0 for a row with NaN, without a finite or +inf logit, or with no token left: its id is 0
///          and its log-probabilities are -inf. Other rows are not affected. Tokens at +inf share the
///          probability.
///
/// Shapes   logits [rows, vocab], rows may be strided; ids, valid, logprobs [rows]; top_ids, top_logprobs
///          [rows, n]. vocab in 1 .. 2^31 - 1.
/// Types    logits f32 or bf16, not modified; ids, top_ids i32; valid u8; logprobs, top_logprobs f32.
/// Cost     sampler_cost().
/// Runs     on `stream`; allocates nothing.
/// Fails    invalid_argument: a shape, stride or type disagrees, a parameter is outside its range (the
///          message names row and field), or the workspace is too small. unsupported: no row fits.
/// Source   src/ops/sampler/
Status sampler(const SamplerArgs& args, const Stream& stream);
/// Scratch for this call on this stream; depends on vocab and the number of threads.
Result<int64_t> sampler_workspace_bytes(const SamplerArgs& args, const Stream& stream);
/// The checks of one row's parameters alone, for the door: `top_logprobs` is not bounded here.
Status check_sample_row(const SampleRow& row);
Cost sampler_cost(const SamplerArgs& args);
Choice sampler_explain(const SamplerArgs& args, const Stream& stream);

}  // namespace vivace
