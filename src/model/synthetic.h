#pragma once

#include <memory>
#include <string_view>

#include "src/model/checkpoint.h"
#include "src/model/weights.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::model {

/// "synthetic:NAME[,layers=N][,dtype=TYPE]": the shapes of a published model with random weights, for speed runs
/// where the model itself is not at hand. NAME is hy3, hy3@tp8, qwen3-30b-a3b, qwen3-235b@tp8 or llama3-8b; @tp8 is
/// one of eight ranks: its heads, its slice of every intermediate and of the vocabulary, and no communication. TYPE
/// is bf16, fp8 (a scale per tensor) or fp8-block128; without it hy3 and qwen3-235b have fp8, qwen3-30b-a3b has
/// fp8-block128 and llama3-8b bf16, as their usual releases.
inline bool is_synthetic(std::string_view path) {
  return path.starts_with("synthetic:");
}

/// A checkpoint without tensors and tokenizer, of that configuration.
/// not_found: no such name; the message lists them. invalid_argument: not of that form, or layers out of range.
Result<std::unique_ptr<Checkpoint>> open_synthetic(std::string_view path);

/// Random weights of a configuration, in its weight format and the forms that place_weights() makes, filled on the
/// stream's device. Each matrix keeps the scale of what it multiplies, so that activations, routing and logits stay
/// as diverse as a trained model's. unsupported: the stream is a CPU's. out_of_memory: the device is too small.
Result<Weights> synthetic_weights(const ModelConfig& config, const Stream& stream);

}  // namespace vivace::model
