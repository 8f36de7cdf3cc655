#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "vivace/status.h"

namespace vivace::bench {

/// One call that a suite times: its suite, the name of its case, and the fields that define its shapes.
struct OpWorkload {
  struct Field {
    std::string name;
    std::variant<int64_t, std::string> value;
    bool operator==(const Field&) const = default;
  };
  std::string suite, name;
  std::vector<Field> fields;

  OpWorkload& with(std::string_view field, int64_t value);
  OpWorkload& with(std::string_view field, std::string value);
  /// 0, or "", when there is no such field.
  int64_t number(std::string_view field) const;
  std::string text(std::string_view field) const;
};

/// "hy3,tokens=64,tp=8": a case's name and fields that it must have. Either part may be missing.
struct OpFilter {
  std::string name;
  std::vector<OpWorkload::Field> fields;

  /// invalid_argument: not of that form.
  static Result<OpFilter> parse(std::string_view text);
  bool accepts(const OpWorkload& workload) const;
};

/// The lengths of "64x4K" or "1x16K+15x64": so many requests of so many tokens; K is 1024.
/// invalid_argument: not of that form.
Result<std::vector<int64_t>> parse_lengths(std::string_view text);

}  // namespace vivace::bench
