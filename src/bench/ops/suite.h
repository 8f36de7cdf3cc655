#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/bench/ops/workload.h"
#include "vivace/cost.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::bench {

/// What one H200 reaches in microbenchmarks of one thing: the rates that floors are made of. `bench ops --suite roof`
/// times a read, a copy and cuBLASLt's products beside them; products stay below.
inline constexpr double kReadRate = 4.5e12, kBf16Rate = 890e12, kFp8Rate = 1700e12;

/// The least time that bytes and operations allow.
struct Floor {
  double bytes = 0, flops = 0;
  double flop_rate = kBf16Rate;
  double us() const { return 1e6 * std::max(bytes / kReadRate, flops / flop_rate); }
};

/// A workload with its memory on a device, ready to be timed. Calls of different sets read different inputs.
class PreparedOp {
 public:
  virtual ~PreparedOp() = default;
  virtual int64_t sets() const = 0;
  /// Enqueues the call of one set.
  virtual Status call(int64_t set, const Stream& stream) = 0;
  virtual Floor floor() const = 0;
  /// What the formula of the suite's targets gives for the bytes and operations of this very case; absent where there is none.
  virtual std::optional<double> formula_us() const { return std::nullopt; }
  /// The row that ran, or a library's name.
  virtual std::string row() const = 0;
  /// Largest difference of set 0's outputs from float64 on the same inputs, over all or a sample of them; absent where
  /// there is nothing to compare. After call(0) has ended.
  virtual Result<std::optional<double>> max_abs_error(const Stream& stream) = 0;
  /// The same case through a library, on the same inputs: `row` is one that the suite's libraries() names. The result
  /// reads this object's memory and must not outlive it. not_found: there is no such library.
  virtual Result<std::unique_ptr<PreparedOp>> through_library(std::string_view row, const Stream& stream);
};

/// A list of workloads of one operator.
struct OpSuite {
  std::string_view name, summary;
  std::vector<OpWorkload> (*workloads)();
  /// invalid_argument unless every field fits alone and beside the others; the message has the field, its value and what
  /// fits. Needs no GPU.
  Status (*check)(const OpWorkload& workload);
  /// Of a workload that check() lets pass. unsupported: no row takes it. out_of_memory: this GPU is too small.
  Result<std::unique_ptr<PreparedOp>> (*prepare)(const OpWorkload& workload, const Stream& stream);
  /// Rows of libraries, or of other operators, that a case is timed beside; null: none for any case. Those of cuBLASLt begin with
  /// "cublas".
  std::vector<std::string> (*libraries)(const OpWorkload& workload) = nullptr;
  /// After fields of a listed case were changed to `named`: brings the fields along that follow from those; null: none do.
  Status (*follow)(OpWorkload& changed, const OpWorkload& listed,
                   const std::vector<OpWorkload::Field>& named) = nullptr;
  /// Fields whose listed values the name of a case stands for.
  std::vector<std::string_view> name_fields = {};
  /// What a field of a case is where its entry in the targets does not have it. Without a default here, any value agrees.
  std::vector<OpWorkload::Field> target_defaults = {};
};

std::span<const OpSuite> op_suites();

}  // namespace vivace::bench
