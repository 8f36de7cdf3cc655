#pragma once

#include <cstdint>

#include "src/device/runtime.h"
#include "src/model/zero_memory.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace::model {

/// Memory where a stream's operators run: host memory as ZeroMemory gives it, or device memory, filled with zeros.
class Memory {
 public:
  Memory() = default;

  /// out_of_memory: `what` names it in the message.
  static Result<Memory> reserve(int64_t bytes, const char* what, const Stream& stream);

  uint8_t* data() const { return host_.bytes() > 0 ? host_.data() : static_cast<uint8_t*>(device_.data()); }
  int64_t bytes() const { return host_.bytes() + device_.bytes(); }
  /// A contiguous tensor at `offset` bytes.
  Tensor tensor(DType dtype, std::initializer_list<int64_t> shape, int64_t offset = 0) const {
    return Tensor(data() + offset, dtype, shape, host_.bytes() > 0 ? Device::cpu : Device::cuda);
  }

 private:
  ZeroMemory host_;
  device::Buffer device_;
};

}  // namespace vivace::model
