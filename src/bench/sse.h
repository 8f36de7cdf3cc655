#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "vivace/status.h"

namespace vivace::bench {

/// Server-sent events out of bytes that may be cut anywhere. Lines end with LF, CR or CR LF; an empty line ends an
/// event; its `data` lines are joined with LF. Comments (lines that begin with ':') and other fields are dropped.
class SseParser {
 public:
  static constexpr size_t kMaxEventBytes = size_t{4} << 20;

  /// Calls `on_data` for each event that `bytes` complete, until it returns false.
  /// Fails  resource_exhausted: an event or a line is longer than kMaxEventBytes.
  Status push(std::string_view bytes, const std::function<bool(std::string_view data)>& on_data);
  /// The stream ended: an event without its empty line is complete too.
  void finish(const std::function<bool(std::string_view data)>& on_data);

 private:
  bool end_line(const std::function<bool(std::string_view)>& on_data);

  std::string line_, data_;
  bool has_data_ = false;
  bool after_cr_ = false;  ///< a LF that follows belongs to the line end before it
};

}  // namespace vivace::bench
