#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace vivace::server {

/// A few threads for what takes longer than an I/O thread may: JSON, templates, tokenising, whole answers.
class WorkerPool {
 public:
  WorkerPool(int threads, size_t most_queued);
  /// Runs what is queued, then ends.
  ~WorkerPool();

  /// False when too many jobs wait. `job` must not throw.
  bool post(std::function<void()> job);
  /// For what follows a job that was accepted: not subject to the limit.
  void follow(std::function<void()> job);

 private:
  void loop();

  const size_t most_queued_;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> jobs_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace vivace::server
