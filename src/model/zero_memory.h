#pragma once

#include <cstdint>

#include "vivace/status.h"

namespace vivace::model {

/// Memory that reads as zero and is resident only where it was written: a pool or a scratch area may be sized for the
/// worst case and costs what is used of it. Page-aligned.
class ZeroMemory {
 public:
  ZeroMemory() = default;
  ~ZeroMemory();
  ZeroMemory(ZeroMemory&& other) noexcept;
  ZeroMemory& operator=(ZeroMemory&& other) noexcept;

  /// out_of_memory: the address space or the system's limits do not allow it; `what` names it in the message.
  static Result<ZeroMemory> reserve(int64_t bytes, const char* what);

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace vivace::model
