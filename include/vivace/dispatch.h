#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "vivace/status.h"
#include "vivace/tensor.h"

namespace vivace {

/// A condition of a table row, as data: it can be tested, printed and listed.
struct Need {
  enum Kind : uint8_t { equals, multiple_of, at_most, at_least, power_of_two, dtype_in };
  std::string_view fact;  ///< a name that the operator's facts give, such as "head_dim"
  Kind kind;
  int64_t value;  ///< unused for power_of_two; for dtype_in: the dtypes_mask of the types that fit
};

/// For Need::dtype_in: {"weight", Need::dtype_in, dtypes_mask(DType::f32, DType::bf16)}.
template <class... T>
constexpr int64_t dtypes_mask(T... dtypes) {
  return ((int64_t{1} << static_cast<int>(dtypes)) | ...);
}

/// "needs hidden a multiple of 8, got 2881" - why a row refuses, or what it needs when `got` is null.
std::string describe(const Need& need, const int64_t* got);

/// One row of an operator's table, without its function.
struct RowInfo {
  std::string_view name;  ///< "<backend>.<variant>"
  Device device;
  std::vector<Need> needs;
  std::string_view summary;  ///< one line: how it computes
};

struct OpInfo {
  std::string_view name;
  std::string_view summary;
  std::vector<RowInfo> rows;  ///< in order of preference; the first row that fits wins
};

/// Every operator with its table, in the order of the documentation.
const std::vector<OpInfo>& operators();

/// Why a row was not taken.
struct Refusal {
  std::string row;
  std::string reason;
};

/// Which row would run, and why those before it would not.
struct Choice {
  std::string row;  ///< empty when no row fits
  std::vector<Refusal> refused;
};

struct RowCount {
  std::string_view op;
  std::string_view row;
  int64_t calls;
};

class OperatorObserver;

/// What a caller prefers, and how often each row ran. One object per engine; any thread may count.
class Dispatch {
 public:
  Dispatch();

  /// `text` is "OP=ROW[,OP=ROW...]": ROW is a row's name or a prefix of it up to a dot ("cuda"). Only the rows
  /// it names are tried, and a call that all of them refuse is an error with their reasons, not a fallback.
  ///
  /// Fails    invalid_argument: not of that form. not_found: no such operator or row; the message lists those
  ///          there are.
  Status prefer(std::string_view text);
  /// The preference for `op`, or "".
  std::string_view preferred(std::string_view op) const;
  const std::map<std::string, std::string, std::less<>>& preferences() const { return preferences_; }

  void count(int op_index, int row_index) {
    counts_[op_index][row_index].fetch_add(1, std::memory_order_relaxed);
  }
  /// Rows that ran at least once, in table order.
  std::vector<RowCount> counts() const;

  static constexpr int kMaxOps = 32, kMaxRows = 16;

 private:
  friend OperatorObserver;  // of the library's own measurements: it sets and reads observer_

  std::map<std::string, std::string, std::less<>> preferences_;
  std::array<std::array<std::atomic<int64_t>, kMaxRows>, kMaxOps> counts_{};
  OperatorObserver* observer_ = nullptr;
};

}  // namespace vivace
