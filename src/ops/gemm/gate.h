#pragma once

#include <cmath>

#include "src/core/host_device.h"

namespace vivace::gemm {

/// How a gated product joins its two sums: g · sigmoid(alpha · g) · (u + beta), g at most `limit`, u within it. A NaN stays.
template <class T>
struct Gate {
  T alpha = 1, limit = INFINITY, beta = 0;

  VIVACE_HOST_DEVICE T operator()(T gate, T up) const {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1 + std::exp(-alpha * gate)) * (up + beta);
  }
};

}  // namespace vivace::gemm
