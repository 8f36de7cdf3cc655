#pragma once

#include <cstdint>

#include "src/device/runtime.h"
#include "src/model/zero_memory.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace::model {

/// Whether the stream is of a GPU that is not here (ordinal < 0): calls can be described for it, and nothing runs.
inline bool only_shapes(const Stream& stream) {
  return stream.device == Device::cuda && stream.ordinal < 0;
}

/// Memory where a stream's operators run: host memory as ZeroMemory gives it, or device memory, filled with zeros. None
/// where the stream has only shapes; tensors of it must not be read or written.
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

/// Hands out arrays of one piece of memory, each on lines of its own; with a null base it only counts. An array without
/// elements is absent.
class Layout {
 public:
  Layout(uint8_t* base, Device device) : base_(base), device_(device) {}
  Tensor matrix(DType dtype, int64_t rows, int64_t columns) {
    return take(Tensor(nullptr, dtype, {rows, columns}, device_));
  }
  Tensor vector(DType dtype, int64_t count) { return take(Tensor(nullptr, dtype, {count}, device_)); }
  int64_t bytes() const { return bytes_; }

 private:
  Tensor take(Tensor array) {
    constexpr int64_t kLine = 256;  // what wide accesses of any device want
    if (array.elements() == 0) return {};
    if (base_ != nullptr) array.data = base_ + bytes_;
    bytes_ += (array.bytes() + kLine - 1) / kLine * kLine;
    return array;
  }

  uint8_t* base_;
  Device device_;
  int64_t bytes_ = 0;
};

}  // namespace vivace::model
