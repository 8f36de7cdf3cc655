#include "src/model/memory.h"

#include <string>

#include "src/core/error.h"

namespace vivace::model {

Result<Memory> Memory::reserve(int64_t bytes, const char* what, const Stream& stream) {
  Memory memory;
  if (stream.device == Device::cpu) {
    VIVACE_TRY_ASSIGN(memory.host_, ZeroMemory::reserve(bytes, what));
    return memory;
  }
  if (bytes < 0) return invalid_argument("{}: {} bytes, needs a number >= 0", what, bytes);
  if (bytes == 0 || only_shapes(stream)) return memory;
  Result<device::Buffer> buffer = device::Buffer::on_device(stream.ordinal, bytes);
  if (!buffer.ok()) return buffer.status().at(what);
  memory.device_ = std::move(*buffer);
  VIVACE_TRY(device::fill(memory.device_.data(), 0, bytes, stream));
  return memory;
}

}  // namespace vivace::model
