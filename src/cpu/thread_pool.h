#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace vivace::cpu {

/// A fixed set of threads that share loops. The calling thread is worker 0, so `ThreadPool(1)` starts none.
/// One loop runs at a time; the pool is used by one caller at a time and loops do not nest.
/// Workers spin for a few tens of microseconds between loops (a decode step has hundreds) and then sleep.
class ThreadPool {
 public:
  /// `threads` >= 1. Throws std::system_error when the system refuses a thread; none is left running then.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls body(task, worker) once for each task in [0, tasks); tasks are handed out in order, one by one.
  /// Returns when all are done. `body` must not throw.
  template <class Body>
  void parallel_for(int64_t tasks, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(
        tasks, [](void* context, int64_t task, int worker) { (*static_cast<Plain*>(context))(task, worker); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Call = void (*)(void*, int64_t, int);
  void run(int64_t tasks, Call call, void* context);
  void stop();
  void work(int worker);
  void drain(int worker);

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> epoch_{0};  ///< raised once per loop; publishes call_, context_, tasks_
  std::atomic<int64_t> next_{0};    ///< next task
  std::atomic<int> running_{0};     ///< workers that have not left the current loop
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  Call call_ = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0;
};

/// parallel_for on `pool`, or on the calling thread alone when it is null.
template <class Body>
void parallel_for(ThreadPool* pool, int64_t tasks, Body&& body) {
  if (pool != nullptr && tasks > 1) {
    pool->parallel_for(tasks, body);
  } else {
    for (int64_t task = 0; task < tasks; ++task) body(task, 0);
  }
}

inline int threads_of(const ThreadPool* pool) {
  return pool ? pool->threads() : 1;
}

}  // namespace vivace::cpu
