#include "src/cpu/thread_pool.h"

#include <chrono>

namespace vivace::cpu {

namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Long enough to cover the serial code between two loops of a decode step, short enough not to burn an idle
// core.
constexpr int kSpins = 4000;

}  // namespace

ThreadPool::ThreadPool(int threads) {
  try {
    for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { work(worker); });
  } catch (...) {  // the system refuses one more thread: those that run must end before they are destroyed
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  stop();
}

void ThreadPool::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t tasks, Call call, void* context) {
  if (tasks <= 0) return;
  call_ = call;
  context_ = context;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  running_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  // Sequentially consistent with the sleeper's own increment: either it sees the new epoch, or we see it
  // asleep.
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  drain(0);
  for (int spin = 0; running_.load(std::memory_order_acquire) > 0; ++spin) {
    if (spin < kSpins) {
      relax();
    } else {
      std::this_thread::yield();  // fewer cores than threads: let the worker finish
    }
  }
}

void ThreadPool::drain(int worker) {
  for (int64_t task = next_.fetch_add(1, std::memory_order_relaxed); task < tasks_;
       task = next_.fetch_add(1, std::memory_order_relaxed)) {
    call_(context_, task, worker);
  }
}

void ThreadPool::work(int worker) {
  uint64_t seen = 0;
  while (true) {
    for (int spin = 0; spin < kSpins && epoch_.load(std::memory_order_acquire) == seen && !stop_; ++spin)
      relax();
    if (epoch_.load(std::memory_order_acquire) == seen) {
      std::unique_lock lock(mutex_);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return stop_ || epoch_.load(std::memory_order_seq_cst) != seen; });
      sleeping_.fetch_sub(1, std::memory_order_relaxed);
    }
    if (epoch_.load(std::memory_order_acquire) == seen) return;  // stopped
    seen = epoch_.load(std::memory_order_acquire);
    drain(worker);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace vivace::cpu
