#pragma once

#include <cstdint>

#include "vivace/tensor.h"

// The passes over a whole vocabulary, vectorised. A row lives in fp32, padded with -inf to whole chunks.

namespace vivace {

/// A chunk is what one pass sums or bounds at a time.
inline constexpr int64_t kSampleChunk = 256;
/// Each chunk leaves this many maxima, each of every eighth element.
inline constexpr int64_t kMaximaPerChunk = 8;

inline int64_t sample_chunks(int64_t vocab) {
  return (vocab + kSampleChunk - 1) / kSampleChunk;
}

struct Candidate {
  float logit;
  float weight;  ///< exp((logit - max) * inverse_temperature)
  int32_t id;
};

/// What turns a logit into a weight.
struct Softmax {
  float max;
  float inverse_temperature;
};

struct RowBounds {
  float max;
  bool has_nan;
};

namespace sample {

/// Copies f32 or bf16 logits to fp32 and pads.
void load_row(DType dtype, const void* source, int64_t vocab, float* row);
/// The largest logit, and for each chunk its maxima [chunks * kMaximaPerChunk].
RowBounds bound_row(const float* row, int64_t chunks, float* maxima);
/// The sum of weights of each chunk; returns the sum of all.
double sum_row(const float* row, int64_t chunks, Softmax softmax, double* sums);
/// The weights of one chunk.
void weigh_chunk(const float* row, Softmax softmax, float* weights);
/// Candidates with logit >= threshold and id < vocab, by ascending id; returns how many.
int64_t collect(const float* row, int64_t vocab, float threshold, Softmax softmax, Candidate* out);

}  // namespace sample

}  // namespace vivace
