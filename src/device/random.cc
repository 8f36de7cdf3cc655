#include "src/device/random.h"

#include "src/core/error.h"

#if !VIVACE_CUDA

namespace vivace::device {

Status fill_normal(const Tensor&, float, uint64_t, const Stream&) {
  return unsupported("this build has no CUDA support; build it where nvcc is installed");
}
Status read_all(const void*, int64_t, float*, const Stream&) {
  return unsupported("this build has no CUDA support; build it where nvcc is installed");
}

}  // namespace vivace::device

#endif
