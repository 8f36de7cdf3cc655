#include "src/bench/sse.h"

#include "src/core/error.h"

namespace vivace::bench {

/// Takes the finished `line_`. False: the caller wants no more.
bool SseParser::end_line(const std::function<bool(std::string_view)>& on_data) {
  std::string_view line = line_;
  bool go_on = true;
  if (line.empty()) {
    if (has_data_) go_on = on_data(data_);
    data_.clear();
    has_data_ = false;
  } else if (line == "data" || line.starts_with("data:")) {
    line.remove_prefix(std::min<size_t>(line.size(), 5));
    if (line.starts_with(' ')) line.remove_prefix(1);
    if (has_data_) data_ += '\n';
    data_ += line;
    has_data_ = true;
  }
  line_.clear();
  return go_on;
}

Status SseParser::push(std::string_view bytes, const std::function<bool(std::string_view)>& on_data) {
  while (!bytes.empty()) {
    if (after_cr_ && bytes.front() == '\n') bytes.remove_prefix(1);
    after_cr_ = false;
    const size_t end = bytes.find_first_of("\r\n");
    const std::string_view part = bytes.substr(0, end);
    if (line_.size() + data_.size() + part.size() > kMaxEventBytes) {
      return error(Code::resource_exhausted, "an event is longer than {} bytes", kMaxEventBytes);
    }
    line_ += part;
    if (end == std::string_view::npos) break;
    after_cr_ = bytes[end] == '\r';
    bytes.remove_prefix(end + 1);
    if (!end_line(on_data)) break;
  }
  return {};
}

void SseParser::finish(const std::function<bool(std::string_view)>& on_data) {
  if (!line_.empty() && !end_line(on_data)) return;
  end_line(on_data);
}

}  // namespace vivace::bench
