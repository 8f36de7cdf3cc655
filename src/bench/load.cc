#include "src/bench/load.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

namespace vivace::bench {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostText = size_t{1} << 20;  ///< of a request, about

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
  std::vector<std::vector<int64_t>> followers;  ///< of each request, those that are sent when it has ended
  std::deque<int64_t> ready;                    ///< followers whose time has come

  void on_event(int64_t index, const LoadEvent& event) {
    const std::lock_guard lock(mutex);
    RequestRecord& record = records[static_cast<size_t>(index)];
    const double now = seconds(event.time - start);
    if (event.chunk) {
      record.chunk_s.push_back(now);
      if (record.text.size() < kMostText) record.text += event.text;
      ++progress.tokens;
    }
    if (watching) watch(index, event);
    if (event.last) {
      record.usage_known = event.completion_tokens >= 0;
      record.completion_tokens =
          record.usage_known ? event.completion_tokens : static_cast<int64_t>(record.chunk_s.size());
      if (event.prompt_tokens >= 0) record.prompt_tokens = event.prompt_tokens;
      record.cached_tokens = event.cached_tokens;
      finish(index, now, event.error, event.error_kind);
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

  void finish(int64_t index, double now, const std::string& error, const std::string& kind) {
    RequestRecord& record = records[static_cast<size_t>(index)];
    record.end_s = now;
    record.error = error;
    record.error_kind = kind;
    --progress.running;
    ++progress.finished;
    if (!error.empty()) ++progress.failed;
    last_end_s = std::max(last_end_s, now);
    for (const int64_t follower : followers[static_cast<size_t>(index)]) ready.push_back(follower);
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
  run.followers.resize(plan.size());
  for (int64_t i = 0; i < total; ++i) {
    const int64_t after = plan[static_cast<size_t>(i)].after;
    if (after >= 0) run.followers[static_cast<size_t>(after)].push_back(i);
  }
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
    while (next < total && plan[static_cast<size_t>(next)].after >= 0) ++next;
    const bool follows = !run.ready.empty();
    bool may_send = follows || next < total;
    if (may_send && options.open_loop && !follows) {
      const auto arrival = run.start + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(plan[next].arrival_s));
      may_send = arrival <= now;
      wake = std::min(wake, arrival);
    } else if (may_send && !options.open_loop) {
      may_send = run.progress.running < options.concurrency;
    }
    if (!may_send) {
      run.changed.wait_until(lock, wake);
      continue;
    }
    const int64_t index = follows ? run.ready.front() : next++;
    if (follows) run.ready.pop_front();
    const PlannedRequest& planned = plan[static_cast<size_t>(index)];
    RequestRecord& record = run.records[static_cast<size_t>(index)];
    record.prompt_tokens = static_cast<int64_t>(planned.prompt.ids.size());
    record.wanted_tokens = planned.output_tokens;
    record.chunk_s.reserve(static_cast<size_t>(std::min<int64_t>(planned.output_tokens, 4096)));
    ++run.progress.running;
    lock.unlock();
    const LoadRequest request{planned.prompt, planned.output_tokens, options.temperature, planned.seed,
                              options.ignore_eos};
    record.start_s = seconds(Clock::now() - run.start);
    const Status status =
        target.start(request, [&run, index](const LoadEvent& event) { run.on_event(index, event); });
    lock.lock();
    if (!status.ok()) {
      run.finish(index, seconds(Clock::now() - run.start), status.message(),
                 std::string(name_of(status.code())));
    }
  }
  show_watched(run, lock, options);
  LoadResult result;
  result.requests = std::move(run.records);
  result.duration_s = run.last_end_s - (total > 0 ? result.requests.front().start_s : 0);
  return result;
}

void append_round(LoadResult& all, LoadResult round) {
  const int64_t number = all.requests.empty() ? 0 : all.requests.back().round + 1;
  for (RequestRecord& record : round.requests) {
    record.round = number;
    record.start_s += all.duration_s;
    record.end_s += all.duration_s;
    for (double& time : record.chunk_s) time += all.duration_s;
  }
  std::ranges::move(round.requests, std::back_inserter(all.requests));
  all.duration_s += round.duration_s;
}

}  // namespace vivace::bench
