#include "src/bench/ops/timing.h"

#include <algorithm>
#include <vector>

#include "src/device/runtime.h"

namespace vivace::bench {

Result<Timing> time_graph(PreparedOp& op, int64_t replays, const Stream& stream) {
  constexpr int kWarmUps = 3;
  VIVACE_TRY_ASSIGN(const auto graph, device::Graph::capture(stream, [&](const Stream& s) -> Status {
                      for (int64_t set = 0; set < op.sets(); ++set) VIVACE_TRY(op.call(set, s));
                      return {};
                    }));
  VIVACE_TRY_ASSIGN(const auto begin, device::Event::create(stream.ordinal));
  VIVACE_TRY_ASSIGN(const auto end, device::Event::create(stream.ordinal));
  std::vector<double> times;
  for (int64_t i = -kWarmUps; i < replays; ++i) {
    VIVACE_TRY(begin->record(stream));
    VIVACE_TRY(graph->launch(stream));
    VIVACE_TRY(end->record(stream));
    VIVACE_TRY(end->synchronize());
    VIVACE_TRY_ASSIGN(const double ms, end->since(*begin));
    if (i >= 0) times.push_back(1e3 * ms / static_cast<double>(op.sets()));
  }
  std::sort(times.begin(), times.end());
  const auto quantile = [&](double q) { return times[static_cast<size_t>(q * static_cast<double>(times.size() - 1))]; };
  return Timing{quantile(0.5), quantile(0.1), quantile(0.9)};
}

}  // namespace vivace::bench
