#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "src/cpu/thread_pool.h"
#include "src/device/runtime.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace::bench {

/// Tensors of one prepared workload, freed with it.
class DeviceTensors {
 public:
  /// Uninitialised.
  Result<Tensor> make(DType dtype, std::initializer_list<int64_t> shape, const Stream& stream);
  /// Normal values.
  Result<Tensor> random(DType dtype, std::initializer_list<int64_t> shape, double deviation, uint64_t seed,
                        const Stream& stream);
  template <class T>
  Result<Tensor> copy_of(const std::vector<T>& values, DType dtype, std::initializer_list<int64_t> shape,
                         const Stream& stream) {
    return copy_of_bytes(values.data(), dtype, shape, stream);
  }

 private:
  Result<Tensor> copy_of_bytes(const void* values, DType dtype, std::initializer_list<int64_t> shape,
                               const Stream& stream);
  std::vector<device::Buffer> memory_;
};

/// A copy on the host.
struct HostTensor {
  std::vector<uint8_t> memory;
  Tensor tensor;
};
/// Of a contiguous tensor; waits for the stream.
Result<HostTensor> download(const Tensor& tensor, const Stream& stream);

/// The larger of two errors; a NaN stays.
inline double larger(double a, double b) {
  return a <= b || std::isnan(b) ? b : a;
}
inline double largest(const std::vector<double>& errors) {
  double worst = 0;
  for (const double error : errors) worst = larger(worst, error);
  return worst;
}

/// What float64 checks run on.
cpu::ThreadPool& check_threads();

}  // namespace vivace::bench
