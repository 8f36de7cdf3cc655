#pragma once

#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "src/bench/target.h"

namespace vivace::bench {

/// A target that answers from threads of its own without a model: one chunk per output token, at once. Requests
/// whose prompt begins with `refused_id` are refused, those with `failing_id` fail after their first chunk.
class FakeTarget : public Target {
 public:
  static constexpr int32_t kRefusedId = 7, kFailingId = 8;

  ~FakeTarget() override {
    for (std::thread& thread : threads_) thread.join();
  }

  Status start(const LoadRequest& request, Sink sink) override {
    const int32_t first = request.prompt.ids.front();
    if (first == kRefusedId) return Status(Code::resource_exhausted, "the queue is full");
    {
      const std::lock_guard lock(mutex_);
      most_open_ = std::max(most_open_, ++open_);
    }
    threads_.emplace_back([this, request, first, sink = std::move(sink)] {
      for (int64_t i = 0; i < request.output_tokens; ++i) {
        LoadEvent event;
        event.chunk = true;
        event.text = "word ";
        event.time = std::chrono::steady_clock::now();
        event.last = i + 1 == request.output_tokens || first == kFailingId;
        event.completion_tokens = i + 1;
        if (first == kFailingId) event.error = "it broke";
        if (event.last) {
          const std::lock_guard lock(mutex_);
          --open_;
        }
        sink(event);
        if (event.last) return;
      }
    });
    return {};
  }

  int64_t most_open() const { return most_open_; }

 private:
  std::mutex mutex_;
  int64_t open_ = 0, most_open_ = 0;
  std::deque<std::thread> threads_;
};

}  // namespace vivace::bench
