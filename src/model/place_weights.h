#pragma once

#include "src/model/weights.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::model {

/// Replaces all weights by copies in the memory of the stream's device, in the types and forms that GPU rows take:
/// matrices in bf16 (GGUF blocks dequantised, rounded to nearest even) or fp8 as they are, norms, biases and scales
/// in f32; q, k and v, and gate and up, as one matrix each unless each has a scale of its own; experts stacked.
/// Layer by layer through pinned memory, so the host holds no second copy.
///
/// With a stream that has only shapes the weights have only shapes too.
///
/// Cost     one pass over the weights; synchronous; for load time.
/// Fails    out_of_memory: the device is too small; the message names the weight.
Status place_weights(Weights& weights, const Stream& stream);

}  // namespace vivace::model
