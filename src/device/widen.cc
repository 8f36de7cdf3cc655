#include "src/device/widen.h"

#include "src/core/error.h"

#if !VIVACE_CUDA

namespace vivace::device {

Status widen(const Tensor&, const Tensor&, const Stream&) {
  return unsupported("this build has no CUDA support; build it where nvcc is installed");
}

}  // namespace vivace::device

#endif
