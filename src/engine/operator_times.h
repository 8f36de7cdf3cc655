#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "src/core/dispatch.h"
#include "src/device/runtime.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::engine {

/// The calls of a step in one row of an operator that compute as much: of `linear`, as a rule, those of one projection.
struct OperatorTime {
  std::string_view op, row;
  int64_t flops = 0;  ///< of a call
  int64_t calls = 0;
  double us = 0;     ///< of all of them together, the median over steps
  double bytes = 0;  ///< what their costs count, the mean over steps
};

/// Times each operator call of steps that all make the same calls: by the clock on a CPU, on a GPU by an event before and one
/// after the call. A captured step records its events at every replay, without another look at the calls. Events keep a call
/// from overlapping its neighbours, and change nothing that it computes.
///
/// The order is begin_step(), the calls, end_step(); begin_step() again voids the calls since. A step that replays calls
/// which were captured has end_step() alone.
class OperatorTimes final : public OperatorObserver {
 public:
  /// For steps of at most `calls` calls; on a GPU it makes all events now, since a capture is no place for it.
  static Result<std::unique_ptr<OperatorTimes>> create(int64_t calls, const Stream& stream);

  void begin_step() { calls_.clear(); }
  /// internal: the step has more calls.
  Status before(int op, int row, const Cost& cost, const Stream& stream) override;
  Status after(const Stream& stream) override;
  /// Takes the times of a step that is over, on a GPU to its end. A step without it is not counted.
  Status end_step();

  /// In the order of operators(), rows and operations. Empty before the first end_step().
  std::vector<OperatorTime> medians() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Kind {
    int op, row;
    int64_t flops;
    auto operator<=>(const Kind&) const = default;
  };
  struct Call {
    Kind kind;
    int64_t bytes;
    double us = 0;
  };
  struct Pair {
    std::unique_ptr<device::Event> before, after;
  };
  struct Sums {
    std::vector<double> us;  ///< a step each
    int64_t calls = 0, bytes = 0;
  };

  OperatorTimes() = default;

  size_t most_calls_ = 0;
  std::vector<Pair> events_;  ///< one a call; none on a CPU
  std::vector<Call> calls_;   ///< of the last step that made its calls
  Clock::time_point began_;
  std::map<Kind, Sums> sums_;
};

}  // namespace vivace::engine
