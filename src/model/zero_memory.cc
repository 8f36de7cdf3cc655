#include "src/model/zero_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "src/core/error.h"

namespace vivace::model {

Result<ZeroMemory> ZeroMemory::reserve(int64_t bytes, const char* what) {
  ZeroMemory memory;
  if (bytes < 0) return invalid_argument("{}: {} bytes, needs a number >= 0", what, bytes);
  if (bytes == 0) return memory;
  void* address = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    return error(Code::out_of_memory,
                 "{}: the system refuses {} bytes ({}); fewer or shorter requests need less", what, bytes,
                 std::strerror(errno));
  }
  // A huge page would make 2 MiB resident for the first token of every layer.
  madvise(address, static_cast<size_t>(bytes), MADV_NOHUGEPAGE);
  memory.data_ = static_cast<uint8_t*>(address);
  memory.bytes_ = bytes;
  return memory;
}

ZeroMemory::~ZeroMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

ZeroMemory::ZeroMemory(ZeroMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

ZeroMemory& ZeroMemory::operator=(ZeroMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace vivace::model
