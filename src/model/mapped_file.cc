#include "src/model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <system_error>

#include "src/core/error.h"

namespace vivace::model {

namespace {

std::string reason(int code) {
  return std::generic_category().message(code);
}

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

Result<std::shared_ptr<MappedFile>> MappedFile::open(const std::string& path) {
  // Without O_NONBLOCK the open of a named pipe would wait for a writer.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return not_found("{}: there is no such file", path);
    return io_error("{}: cannot be opened: {}", path, reason(errno));
  }
  struct stat info {};
  if (::fstat(file.fd, &info) != 0) return io_error("{}: cannot be examined: {}", path, reason(errno));
  if (S_ISDIR(info.st_mode)) return invalid_argument("{}: is a folder, needs a file", path);
  if (!S_ISREG(info.st_mode)) return invalid_argument("{}: is not a regular file", path);
  if (info.st_size <= 0) return invalid_argument("{}: is empty (0 bytes)", path);
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size > static_cast<uint64_t>(std::numeric_limits<ptrdiff_t>::max()))
    return io_error("{}: {} bytes are more than can be mapped", path, size);

  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (data == MAP_FAILED) return io_error("{}: {} bytes cannot be mapped: {}", path, size, reason(errno));
  std::shared_ptr<MappedFile> mapped(new MappedFile);
  mapped->path_ = path;
  mapped->data_ = static_cast<const uint8_t*>(data);
  mapped->size_ = size;
  return mapped;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), size_);
}

void MappedFile::drop_pages(std::span<const uint8_t> part) const {
  const auto base = reinterpret_cast<uintptr_t>(data_);
  const auto begin = reinterpret_cast<uintptr_t>(part.data());
  if (begin < base || begin - base > size_ || part.size() > size_ - (begin - base)) return;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + part.size()) / page * page;
  // A refusal leaves the pages resident, which costs memory and nothing else.
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

Result<std::string> read_text_file(const std::string& path, size_t max_bytes) {
  VIVACE_TRY_ASSIGN(const std::shared_ptr<MappedFile> file, MappedFile::open(path));
  const std::span<const uint8_t> bytes = file->bytes();
  if (bytes.size() > max_bytes)
    return invalid_argument("{}: is {} bytes long, at most {} fit", path, bytes.size(), max_bytes);
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

bool is_regular_file(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

}  // namespace vivace::model
