#pragma once

#include <span>

#include "src/ops/problem.h"
#include "vivace/decode_schedule.h"

namespace vivace {

struct DecodeScheduleCase {
  const char* name;
  std::vector<int32_t> lengths;
  DecodeScheduleParams params;
  std::vector<int32_t> rows = {};  ///< query tokens per request; empty: 1 each
};

inline std::vector<int32_t> lengths_of(int64_t head, int32_t head_length, int64_t rest, int32_t rest_length) {
  std::vector<int32_t> lengths(head, head_length);
  lengths.insert(lengths.end(), rest, rest_length);
  return lengths;
}

inline std::span<const DecodeScheduleCase> decode_schedule_cases(CaseSize size) {
  static const std::vector<DecodeScheduleCase> serving = {
      {"8 x 512", lengths_of(8, 512, 0, 0), {.heads_kv = 3, .workers = 2}},
      {"1 x 16K + 15 x 64", lengths_of(1, 16384, 15, 64), {.heads_kv = 8, .workers = 132, .request_cost = 4}},
      {"1 x 128K + 31 x 4K",
       lengths_of(1, 131072, 31, 4096),
       {.heads_kv = 8, .workers = 132, .request_cost = 4}},
      {"64 x 4K", lengths_of(64, 4096, 0, 0), {.heads_kv = 8, .workers = 132, .request_cost = 4}},
      {"4096 x 1K", lengths_of(4096, 1024, 0, 0), {.heads_kv = 8, .workers = 132, .request_cost = 4}},
  };
  static const std::vector<DecodeScheduleCase> test = [] {
    std::vector<DecodeScheduleCase> cases = {
        {"no requests", {}, {.workers = 4}},
        {"one key", {1}, {.workers = 4}},
        {"only empty ones", {0, 0, 0}, {.heads_kv = 2, .workers = 2}},
        {"none has rows", {5, 500}, {.heads_kv = 2, .workers = 2}, {0, 0}},
        {"empty among others", {0, 700, 0, 0, 65, 0}, {.heads_kv = 3, .workers = 4}, {1, 1, 0, 2, 8, 0}},
        {"one worker", {100, 200, 300}, {.heads_kv = 2}},
        {"more workers than tiles", {100, 64}, {.workers = 100}},
        {"at least 8 tiles each", {1000, 900}, {.workers = 16, .min_tiles = 8}},
        {"cost of a request", {64, 64, 64, 64, 10000}, {.heads_kv = 2, .workers = 7, .request_cost = 8}},
        {"window", {10000, 30, 64, 65, 300}, {.heads_kv = 2, .workers = 5, .window = 128}, {1, 2, 8, 3, 1}},
        {"pieces", {10000, 30, 0, 1024, 1025}, {.heads_kv = 2, .workers = 5, .piece_tiles = 16}},
        {"pieces and window",
         {10000, 30, 1200},
         {.heads_kv = 3, .workers = 9, .window = 1000, .piece_tiles = 4}},
        {"pieces and cost",
         {10000, 4096, 1, 1},
         {.heads_kv = 1, .workers = 9, .request_cost = 3, .piece_tiles = 16}},
        {"several blocks, records of their own", lengths_of(1, 900, 2999, 64), {.workers = 4096}},
        {"alike, over several chunks", lengths_of(600, 1000, 0, 0), {.workers = 1300}},
        {"alike but for the last", lengths_of(600, 1000, 1, 1001 + 63), {.workers = 1300}},
        {"a million tokens, page 16", {1 << 20, 16, 1}, {.heads_kv = 8, .tile_tokens = 16, .workers = 528}},
    };
    cases.insert(cases.end(), serving.begin(), serving.end());
    return cases;
  }();
  return size == CaseSize::serving ? serving : test;
}

struct DecodeScheduleProblem {
  Guarded kv_lengths, query_start, schedule;
  DecodeScheduleArgs args;

  explicit DecodeScheduleProblem(const DecodeScheduleCase& c, uint32_t /*seed*/ = 0) {
    const int64_t requests = static_cast<int64_t>(c.lengths.size());
    kv_lengths = Guarded(DType::i32, {requests});
    query_start = Guarded(DType::i32, {requests + 1});
    schedule = Guarded(DType::i32, {decode_schedule_ints(requests, c.params.workers)});
    int32_t* start = query_start.as<int32_t>();
    start[0] = 0;
    for (int64_t b = 0; b < requests; ++b) {
      kv_lengths.as<int32_t>()[b] = c.lengths[b];
      start[b + 1] = start[b] + (c.rows.empty() ? 1 : c.rows[b]);
    }
    args = {.kv_lengths = kv_lengths, .query_start = query_start, .params = c.params, .schedule = schedule};
  }
};

}  // namespace vivace
