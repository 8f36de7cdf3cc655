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
  using Value = std::variant<int64_t, std::string>;
  struct Field {
    std::string name;
    Value value;
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

/// A number, or a text in quotes: as messages show it.
std::string describe(const OpWorkload::Value& value);
/// "fused_moe hy3 tp=8 tokens=64": suite, name and fields.
std::string describe(const OpWorkload& workload);
/// "tp=8 tokens=64".
std::string fields_text(const OpWorkload& workload, std::string_view separator);

/// "hy3,tokens=64,tp=8": a case's name and fields that it must have. Either part may be missing.
struct OpFilter {
  std::string text;  ///< as it was given
  std::string name;
  std::vector<OpWorkload::Field> fields;

  /// invalid_argument: not of that form, a field twice, or a number that no 64 bits hold.
  static Result<OpFilter> parse(std::string_view text);
  bool accepts(const OpWorkload& workload) const;
};

struct LengthLimits {
  int64_t most_requests = 4096;
  int64_t least_tokens = 1, most_tokens = int64_t{1} << 24;
};

/// The lengths of "64x4K" or "1x16K+15x64": so many requests of so many tokens; K is 1024.
/// invalid_argument: not of that form, or outside the limits. The message begins "is '64x4K', needs"; the caller
/// says what is.
Result<std::vector<int64_t>> parse_lengths(std::string_view text, const LengthLimits& limits);
/// Those that name a case: in that form, or "random:7", which a seed draws: 1 to 256 requests of 1 to 200K tokens, both so that
/// their logarithms are evenly spread.
Result<std::vector<int64_t>> parse_case_lengths(std::string_view name);

}  // namespace vivace::bench
