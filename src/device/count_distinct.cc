#include "src/device/count_distinct.h"

#include "src/core/error.h"

#if !VIVACE_CUDA

namespace vivace::device {

Status count_distinct(const Tensor&, int64_t, const Tensor&, const Stream&) {
  return unsupported("this build has no CUDA support; build it where nvcc is installed");
}

}  // namespace vivace::device

#endif
