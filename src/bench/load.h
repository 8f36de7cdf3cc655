#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "src/bench/target.h"
#include "src/bench/workload.h"
#include "vivace/status.h"

namespace vivace::bench {

/// What happened to one request. Times are seconds from the start of the run.
struct RequestRecord {
  int64_t prompt_tokens = 0;
  int64_t wanted_tokens = 0;
  int64_t completion_tokens = 0;  ///< as the target says; its chunks when it does not
  int64_t cached_tokens = 0;
  double start_s = 0;           ///< just before it was sent
  double end_s = 0;             ///< its last chunk, or when it failed
  std::vector<double> chunk_s;  ///< one per counted chunk
  std::string text;             ///< all of it, as far as it came
  std::string error;            ///< empty: it succeeded
  std::string error_kind;       ///< with `error`: what failures are counted by
  bool usage_known = false;     ///< the target said how many tokens there were
  int64_t round = 0;            ///< of runs that were put together
};

struct LoadProgress {
  int64_t requests = 0, finished = 0, running = 0, failed = 0;
  int64_t tokens = 0;  ///< generated so far
  double elapsed_s = 0;
};

struct LoadOptions {
  int64_t concurrency = 8;  ///< closed loop: requests that are open at once
  bool open_loop = false;   ///< send at the planned arrival times, however many are open
  double temperature = 0;
  bool ignore_eos = true;
  double progress_interval_s = 0.2;
  /// Called on the calling thread; may be empty.
  std::function<void(const LoadProgress&)> progress;
  /// Text of one open request at a time, as it streams; when that one ends, of the next that begins. Called on
  /// the calling thread; may be empty. `begin` is true with the first piece of a request.
  std::function<void(const std::string& text, bool begin)> watch;
};

struct LoadResult {
  std::vector<RequestRecord> requests;  ///< in the order of the plan
  double duration_s = 0;                ///< first send to last finish
};

/// Sends the plan to the target and waits for all of it. A request that the target refuses or fails is a record
/// with an error, not an error of the run. Time that a request waits for its turn in a closed loop is not in
/// its TTFT. A request with `after` is sent when that one has ended, well or not, and before those that wait for
/// nothing.
LoadResult run_load(Target& target, const std::vector<PlannedRequest>& plan, const LoadOptions& options);

/// Puts a later run behind the earlier ones: its times follow theirs, and its requests have the next `round`.
void append_round(LoadResult& all, LoadResult round);

}  // namespace vivace::bench
