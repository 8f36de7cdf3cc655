#include "src/bench/load.h"

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

namespace vivace::bench {

namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

/// State that sinks share with the calling thread. Sinks may outlive nothing: run_load waits for all of them.
struct Run {
  std::mutex mutex;
  std::condition_variable changed;
  Clock::time_point start;
  std::vector<RequestRecord> records;
  LoadProgress progress;
  double last_end_s = 0;
  bool watching = false;
  int64_t watched = -1;      ///< the request whose text is shown
  bool watched_new = false;  ///< no piece of it was shown yet
  std::string watched_text;  ///< what was not shown yet
  bool watched_done = false;

  void on_event(int64_t index, const LoadEvent& event) {
    const std::lock_guard lock(mutex);
    RequestRecord& record = records[static_cast<size_t>(index)];
    const double now = seconds(event.time - start);
    if (event.chunk) {
      record.chunk_s.push_back(now);
      ++progress.tokens;
    }
    if (watching) watch(index, event);
    if (event.last) {
      record.completion_tokens = event.completion_tokens;
      record.cached_tokens = event.cached_tokens;
      finish(record, now, event.error);
    }
    if (event.last || index == watched) changed.notify_one();
  }

  void watch(int64_t index, const LoadEvent& event) {
    if (watched < 0 && event.chunk && records[static_cast<size_t>(index)].chunk_s.size() == 1) {
      watched = index;
      watched_new = true;
      watched_done = false;
    }
    if (index != watched || watched_done) return;
    watched_text += event.text;
    watched_done = event.last;
  }

  void finish(RequestRecord& record, double now, const std::string& error) {
    record.end_s = now;
    record.error = error;
    --progress.running;
    ++progress.finished;
    if (!error.empty()) ++progress.failed;
    last_end_s = std::max(last_end_s, now);
  }
};

/// Hands pending text to the caller, without the lock while it prints.
void show_watched(Run& run, std::unique_lock<std::mutex>& lock, const LoadOptions& options) {
  if (!options.watch || run.watched < 0 || (run.watched_text.empty() && !run.watched_done)) return;
  const std::string text = std::exchange(run.watched_text, {});
  const bool begin = std::exchange(run.watched_new, false);
  if (run.watched_done) run.watched = -1;
  lock.unlock();
  options.watch(text, begin);
  lock.lock();
}

}  // namespace

LoadResult run_load(Target& target, const std::vector<PlannedRequest>& plan, const LoadOptions& options) {
  Run run;
  const int64_t total = static_cast<int64_t>(plan.size());
  run.records.resize(plan.size());
  run.progress.requests = total;
  run.watching = static_cast<bool>(options.watch);
  run.start = Clock::now();
  const auto interval = std::chrono::duration<double>(options.progress_interval_s);
  auto next_progress = run.start;
  int64_t next = 0;

  std::unique_lock lock(run.mutex);
  while (run.progress.finished < total) {
    const auto now = Clock::now();
    if (options.progress && now >= next_progress) {
      LoadProgress progress = run.progress;
      progress.elapsed_s = seconds(now - run.start);
      lock.unlock();
      options.progress(progress);
      lock.lock();
      next_progress = now + std::chrono::duration_cast<Clock::duration>(interval);
    }
    show_watched(run, lock, options);
    auto wake = next_progress;
    if (!options.progress) wake = now + std::chrono::seconds(1);
    bool may_send = next < total;
    if (may_send && options.open_loop) {
      const auto arrival = run.start + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(plan[next].arrival_s));
      may_send = arrival <= now;
      wake = std::min(wake, arrival);
    } else if (may_send) {
      may_send = run.progress.running < options.concurrency;
    }
    if (!may_send) {
      run.changed.wait_until(lock, wake);
      continue;
    }
    const int64_t index = next++;
    const PlannedRequest& planned = plan[static_cast<size_t>(index)];
    RequestRecord& record = run.records[static_cast<size_t>(index)];
    record.prompt_tokens = static_cast<int64_t>(planned.prompt_ids.size());
    record.wanted_tokens = planned.output_tokens;
    record.chunk_s.reserve(static_cast<size_t>(planned.output_tokens));
    ++run.progress.running;
    lock.unlock();
    LoadRequest request{planned.prompt_ids, planned.output_tokens, options.temperature, planned.seed};
    record.start_s = seconds(Clock::now() - run.start);
    const Status status =
        target.start(request, [&run, index](const LoadEvent& event) { run.on_event(index, event); });
    lock.lock();
    if (!status.ok()) run.finish(record, seconds(Clock::now() - run.start), status.message());
  }
  show_watched(run, lock, options);
  LoadResult result;
  result.requests = std::move(run.records);
  result.duration_s = run.last_end_s - (total > 0 ? result.requests.front().start_s : 0);
  return result;
}

}  // namespace vivace::bench
