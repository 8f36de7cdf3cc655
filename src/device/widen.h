#pragma once

#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace::device {

/// Copies a contiguous bf16 tensor into a contiguous f32 one of its shape: what a product in fp32 costs first where
/// activations are bf16. Both start at a multiple of 16 bytes.
Status widen(const Tensor& from, const Tensor& to, const Stream& stream);

}  // namespace vivace::device
