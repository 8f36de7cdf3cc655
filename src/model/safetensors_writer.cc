#include "src/model/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <system_error>

#include "src/core/error.h"

namespace vivace::model {

namespace {

std::string reason(int code) {
  return std::generic_category().message(code);
}

}  // namespace

SafetensorsWriter::~SafetensorsWriter() {
  if (file_ >= 0) ::close(file_);
  if (unfinished_) ::unlink(path_.c_str());
}

Status SafetensorsWriter::open(const std::string& path, const std::vector<SafetensorsSlot>& slots) {
  path_ = path;
  std::vector<size_t> order(slots.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return slots[a].element_bytes > slots[b].element_bytes; });
  offsets_.assign(slots.size(), 0);
  bytes_.assign(slots.size(), 0);
  nlohmann::ordered_json header = {{"__metadata__", {{"format", "pt"}}}};
  int64_t end = 0;
  for (const size_t i : order) {
    const SafetensorsSlot& slot = slots[i];
    header[slot.name] = {
        {"dtype", slot.type_name}, {"shape", slot.shape}, {"data_offsets", {end, end + slot.bytes}}};
    offsets_[i] = end;
    bytes_[i] = slot.bytes;
    end += slot.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t header_bytes = text.size();
  for (int64_t& offset : offsets_) offset += static_cast<int64_t>(sizeof header_bytes + header_bytes);

  file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file_ < 0 && errno == EEXIST) return invalid_argument("{}: the file exists already", path);
  if (file_ < 0) return io_error("{}: cannot be made: {}", path, reason(errno));
  unfinished_ = true;
  VIVACE_TRY(write_at(0, &header_bytes, sizeof header_bytes));
  return write_at(sizeof header_bytes, text.data(), static_cast<int64_t>(text.size()));
}

Status SafetensorsWriter::write(size_t index, const void* data) {
  return write_at(offsets_[index], data, bytes_[index]);
}

Status SafetensorsWriter::close() {
  if (file_ < 0) return {};
  const int synced = ::fsync(file_), failure = errno;
  const int closed = ::close(std::exchange(file_, -1));
  if (synced != 0) return io_error("{}: cannot be written: {}", path_, reason(failure));
  if (closed != 0) return io_error("{}: cannot be written: {}", path_, reason(errno));
  unfinished_ = false;
  return {};
}

Status SafetensorsWriter::write_at(int64_t offset, const void* data, int64_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::pwrite(file_, from, static_cast<size_t>(bytes), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return io_error("{}: cannot be written: {}", path_, reason(errno));
    from += written;
    offset += written;
    bytes -= written;
  }
  return {};
}

}  // namespace vivace::model
