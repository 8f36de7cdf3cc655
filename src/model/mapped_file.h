#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "vivace/status.h"

namespace vivace::model {

/// A whole file mapped read-only. The bytes stay valid while the object lives; a file that another program
/// truncates meanwhile ends the process at the next access (SIGBUS), as with any mapping.
class MappedFile {
 public:
  /// not_found: no such file. invalid_argument: a folder, something that is not a regular file, or empty.
  /// io_error: it cannot be read, or does not fit into the address space.
  static Result<std::shared_ptr<MappedFile>> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const uint8_t> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

  /// Takes the whole pages inside `part` out of this process's resident memory. They stay valid: the next
  /// access reads them again. A part of another file is ignored.
  void drop_pages(std::span<const uint8_t> part) const;

 private:
  MappedFile() = default;
  std::string path_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

/// The text of a small file. invalid_argument: it is longer than `max_bytes`; otherwise fails as
/// MappedFile::open does.
Result<std::string> read_text_file(const std::string& path, size_t max_bytes);

/// Whether something of that name exists that open() may read: a regular file.
bool is_regular_file(const std::string& path);

}  // namespace vivace::model
