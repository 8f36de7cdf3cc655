#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "src/engine/model_runner.h"
#include "tests/engine/model_traffic.h"

// Decode steps of a few requests whose operator calls are timed or not, on any device.

namespace vivace::engine {

/// Three requests that decode token after token, each from a token of its own, without a prompt.
class DecodingRequests {
 public:
  static constexpr int64_t kRequests = 3, kTokens = 32;

  static EngineOptions options(const std::string& path, const std::string& device) {
    return {.model = path,
            .device = device,
            .threads = 2,
            .max_model_len = kTokens,
            .max_batch = kRequests,
            .token_budget = kRequests};
  }
  static int64_t pages(const EngineOptions& options) {
    return kRequests * pages_for(kTokens, options.page_tokens);
  }

  explicit DecodingRequests(ModelRunner& runner) : runner_(runner), ids_{1, 2, 3} {}

  /// The ids that one step of all requests draws; none where it fails.
  std::vector<int32_t> step() {
    const int64_t page_tokens = runner_.page_tokens(), max_pages = pages_for(kTokens, page_tokens);
    std::vector<int32_t> positions, lengths, starts{0}, page_table;
    std::vector<int64_t> slots;
    std::vector<SampleSlot> samples;
    for (int64_t i = 0; i < kRequests; ++i) {
      for (int64_t page = 0; page < max_pages; ++page)
        page_table.push_back(static_cast<int32_t>(i * max_pages + page));
      positions.push_back(static_cast<int32_t>(length_));
      slots.push_back(i * max_pages * page_tokens + length_);
      lengths.push_back(static_cast<int32_t>(length_ + 1));
      starts.push_back(static_cast<int32_t>(i + 1));
      samples.push_back({.row = i,
                         .params = &params_,
                         .seed = static_cast<uint64_t>(i),
                         .position = length_,
                         .prompt_ids = {},
                         .output_ids = {},
                         .banned_ids = {},
                         .request = static_cast<RequestId>(i + 1)});
    }
    ++length_;
    std::vector<Sampled> sampled;
    Status status = runner_.enqueue({.token_ids = ids_,
                                     .positions = positions,
                                     .slots = slots,
                                     .query_start = starts,
                                     .kv_lengths = lengths,
                                     .page_table = page_table,
                                     .max_pages = max_pages,
                                     .decode_requests = kRequests,
                                     .samples = samples});
    if (status.ok()) status = runner_.finish(sampled);
    failure_ = status;
    if (!status.ok()) return {};
    ids_.clear();
    for (const Sampled& s : sampled) ids_.push_back(s.id);
    return ids_;
  }
  const Status& failure() const { return failure_; }

 private:
  ModelRunner& runner_;
  const SamplingParams params_;  // drawn at temperature 1
  std::vector<int32_t> ids_;
  int64_t length_ = 0;
  Status failure_;
};

inline std::unique_ptr<ModelRunner> decoding_runner(const std::string& path, const std::string& device) {
  const EngineOptions options = DecodingRequests::options(path, device);
  auto runner = make_model_runner(open_model(path), options, DecodingRequests::pages(options));
  EXPECT_TRUE(runner.ok()) << runner.status().message();
  return runner.ok() ? std::move(*runner) : nullptr;
}

inline double sum_us(const std::vector<OperatorTime>& times) {
  return std::accumulate(times.begin(), times.end(), 0.0,
                         [](double sum, const OperatorTime& time) { return sum + time.us; });
}

/// Steps whose calls are timed draw what others draw, count the same calls, and take no longer than they take. In the middle
/// of a run, so that on a GPU steps with a graph come before and after.
inline void expect_timing_changes_nothing(const std::string& path, const std::string& device) {
  constexpr int kBefore = 4, kTimed = 6, kAfter = 4;
  const std::unique_ptr<ModelRunner> plain = decoding_runner(path, device),
                                     timed = decoding_runner(path, device);
  ASSERT_TRUE(plain != nullptr && timed != nullptr);
  DecodingRequests plain_requests(*plain), timed_requests(*timed);
  double last_us = 0;  // of `timed`, by the clock
  const auto expect_same_step = [&] {
    const std::vector<int32_t> ids = plain_requests.step();
    ASSERT_TRUE(plain_requests.failure().ok()) << plain_requests.failure().message();
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(timed_requests.step(), ids) << timed_requests.failure().message();
    last_us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  };
  for (int i = 0; i < kBefore; ++i) expect_same_step();

  std::map<std::pair<std::string_view, std::string_view>, int64_t> counted;
  int64_t calls = 0;
  for (const RowCount& row : plain->dispatch().counts()) {
    counted[{row.op, row.row}] = row.calls / kBefore;
    calls += row.calls / kBefore;
  }
  const auto times = OperatorTimes::create(calls, timed->stream());
  ASSERT_TRUE(times.ok()) << times.status().message();
  timed->time_operators(times->get());
  for (int i = 0; i < kTimed; ++i) expect_same_step();
  ASSERT_TRUE((*times)->medians().empty());
  const Status ended = (*times)->end_step();  // the last of them: a replay on a GPU
  ASSERT_TRUE(ended.ok()) << ended.message();
  timed->time_operators(nullptr);

  const std::vector<OperatorTime> medians = (*times)->medians();
  for (const OperatorTime& time : medians) {
    SCOPED_TRACE(std::string(time.op) + " " + std::string(time.row));
    EXPECT_GT(time.us, 0);
    EXPECT_GT(time.bytes, 0);
    counted[{time.op, time.row}] -= time.calls;
  }
  for (const auto& [row, left] : counted) EXPECT_EQ(left, 0) << row.first << " " << row.second;
  EXPECT_GT(sum_us(medians), 0);
  EXPECT_LE(sum_us(medians), last_us);
  for (int i = 0; i < kAfter; ++i) expect_same_step();
  EXPECT_EQ(sum_us((*times)->medians()), sum_us(medians)) << "nobody looks any more";
  const std::vector<RowCount> plain_counts = plain->dispatch().counts(),
                              timed_counts = timed->dispatch().counts();
  ASSERT_EQ(plain_counts.size(), timed_counts.size());
  for (size_t i = 0; i < plain_counts.size(); ++i) EXPECT_EQ(plain_counts[i].calls, timed_counts[i].calls);
}

}  // namespace vivace::engine
