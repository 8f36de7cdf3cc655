#include "src/engine/operator_times.h"

#include <algorithm>

#include "src/core/error.h"

namespace vivace::engine {

Result<std::unique_ptr<OperatorTimes>> OperatorTimes::create(int64_t calls, const Stream& stream) {
  std::unique_ptr<OperatorTimes> times(new OperatorTimes);
  times->most_calls_ = static_cast<size_t>(calls);
  times->calls_.reserve(times->most_calls_);
  if (stream.device == Device::cpu) return times;
  for (int64_t i = 0; i < calls; ++i) {
    Pair pair;
    VIVACE_TRY_ASSIGN(pair.before, device::Event::create(stream.ordinal));
    VIVACE_TRY_ASSIGN(pair.after, device::Event::create(stream.ordinal));
    times->events_.push_back(std::move(pair));
  }
  return times;
}

Status OperatorTimes::before(int op, int row, const Cost& cost, const Stream& stream) {
  if (calls_.size() == most_calls_) {
    return error(Code::internal, "operator times: a step has more than the {} calls that were expected",
                 most_calls_);
  }
  calls_.push_back({.kind = {op, row, cost.flops}, .bytes = cost.bytes});
  if (!events_.empty()) return events_[calls_.size() - 1].before->record_in_replays(stream);
  began_ = Clock::now();
  return {};
}

Status OperatorTimes::after(const Stream& stream) {
  if (!events_.empty()) return events_[calls_.size() - 1].after->record_in_replays(stream);
  calls_.back().us = std::chrono::duration<double, std::micro>(Clock::now() - began_).count();
  return {};
}

Status OperatorTimes::end_step() {
  std::map<Kind, double> us;
  for (size_t i = 0; i < calls_.size(); ++i) {
    Call& call = calls_[i];
    if (!events_.empty()) {
      VIVACE_TRY_ASSIGN(const double ms, events_[i].after->since(*events_[i].before));
      call.us = 1e3 * ms;
    }
    us[call.kind] += call.us;
    Sums& sums = sums_[call.kind];
    ++sums.calls;
    sums.bytes += call.bytes;
  }
  for (const auto& [kind, step_us] : us) sums_[kind].us.push_back(step_us);
  return {};
}

std::vector<OperatorTime> OperatorTimes::medians() const {
  std::vector<OperatorTime> times;
  for (const auto& [kind, sums] : sums_) {
    std::vector<double> us = sums.us;
    const auto middle = us.begin() + std::ssize(us) / 2;
    std::nth_element(us.begin(), middle, us.end());
    const OpInfo& op = operators()[kind.op];
    const auto steps = std::ssize(us);
    times.push_back({.op = op.name,
                     .row = op.rows[kind.row].name,
                     .flops = kind.flops,
                     .calls = sums.calls / steps,
                     .us = *middle,
                     .bytes = static_cast<double>(sums.bytes) / static_cast<double>(steps)});
  }
  return times;
}

}  // namespace vivace::engine
