#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "vivace/status.h"

namespace vivace::model {

/// A tensor that a safetensors file will have.
struct SafetensorsSlot {
  std::string name, type_name;  ///< "F8_E4M3"
  std::vector<int64_t> shape;
  int64_t bytes = 0;
  int64_t element_bytes = 1;
};

/// Writes a safetensors file whose tensors become known one after the other, in any order: the header comes first, then
/// each tensor goes to its place. Without a close() that succeeded, the file that it made goes with the writer.
class SafetensorsWriter {
 public:
  SafetensorsWriter() = default;
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// Makes the file and writes its header. Tensors of larger elements come first, so that each is aligned.
  /// Fails  invalid_argument: the file exists. io_error: it cannot be made or written.
  Status open(const std::string& path, const std::vector<SafetensorsSlot>& slots);
  /// The contents of slot `index`: exactly its bytes.
  Status write(size_t index, const void* data);
  /// Everything is on its way to the disk; a full disk is reported here at the latest.
  Status close();

 private:
  Status write_at(int64_t offset, const void* data, int64_t bytes);

  int file_ = -1;
  bool unfinished_ = false;  ///< the file is made, and not all of it is written
  std::string path_;
  std::vector<int64_t> offsets_, bytes_;
};

}  // namespace vivace::model
