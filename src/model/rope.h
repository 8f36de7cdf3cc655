#pragma once

#include <cstdint>
#include <vector>

#include "src/model/config.h"
#include "src/model/zero_memory.h"
#include "vivace/status.h"
#include "vivace/tensor.h"

namespace vivace::model {

/// The angle per position of each rotated pair: theta^(-2 i / rotary_dim), scaled as the configuration says, divided by
/// `factors[i]` when there are any (a GGUF file's rope_freqs, which stand in for the configuration's llama3 scaling).
/// unsupported: a scaling type that is not "default", "linear" or "llama3".
Result<std::vector<double>> rope_frequencies(const ModelConfig& config, const std::vector<double>& factors);

/// Cosines and sines of every position, f32 [positions, rotary_dim] as attention_prologue reads them, computed in
/// double. Address space is reserved for all positions; a row is computed when fill() first reaches it, so a context of
/// a million tokens costs nothing until it is used.
class RopeTable {
 public:
  static Result<RopeTable> create(std::vector<double> frequencies, int64_t positions);

  /// Makes the rows [0, positions) valid.
  void fill(int64_t positions);
  const Tensor& tensor() const { return tensor_; }

 private:
  std::vector<double> frequencies_;
  ZeroMemory memory_;
  Tensor tensor_;
  int64_t filled_ = 0;
};

}  // namespace vivace::model
