#pragma once

#include "src/ops/attention/problem.h"
#include "src/ops/decode_schedule/table.h"
#include "vivace/attention_decode.h"

namespace vivace {

struct AttentionDecodeCase {
  AttentionCase attention;
  /// heads_kv and window are those of `attention`.
  DecodeScheduleParams params = {};
  const char* name = attention.name;
};

inline std::vector<AttentionRequest> requests_of(int64_t count, int64_t keys, int64_t rows = 1) {
  return std::vector<AttentionRequest>(count, AttentionRequest{keys, rows});
}

inline std::span<const AttentionDecodeCase> attention_decode_cases(CaseSize size) {
  static const std::vector<AttentionDecodeCase> serving = {
      {{.name = "SmolLM2 1 x 512", .requests = requests_of(1, 512), .lse = false}, {.workers = 2}},
      {{.name = "SmolLM2 8 x 512", .requests = requests_of(8, 512), .lse = false}, {.workers = 2}},
      {{.name = "SmolLM2 1 x 2048", .requests = requests_of(1, 2048), .lse = false}, {.workers = 2}},
      {{.name = "Qwen3-30B 8 x 1024, bf16",
        .requests = requests_of(8, 1024),
        .heads_q = 32,
        .heads_kv = 4,
        .head_dim = 128,
        .kv = DType::bf16,
        .lse = false},
       {.workers = 2}},
      {{.name = "64 x 4096, 8/1 heads, bf16",
        .requests = requests_of(64, 4096),
        .heads_q = 8,
        .heads_kv = 1,
        .head_dim = 128,
        .page_tokens = 64,
        .q = DType::bf16,
        .kv = DType::bf16,
        .lse = false},
       {.workers = 264, .request_cost = 2}},
      {{.name = "64 x 4096, 8/1 heads, fp8",
        .requests = requests_of(64, 4096),
        .heads_q = 8,
        .heads_kv = 1,
        .head_dim = 128,
        .page_tokens = 64,
        .q = DType::fp8_e4m3,
        .kv = DType::fp8_e4m3,
        .lse = false},
       {.workers = 264, .request_cost = 2}},
  };
  constexpr DType kF16 = DType::f16, kBf16 = DType::bf16, kFp8 = DType::fp8_e4m3;
  static const std::vector<AttentionDecodeCase> test = with_bf16<AttentionDecodeCase>({
      {{.name = "no requests", .requests = {}}},
      {{.name = "one key",
        .requests = {{1, 1}},
        .heads_q = 1,
        .heads_kv = 1,
        .head_dim = 1,
        .page_tokens = 1}},
      {{.name = "unsplit", .requests = {{130, 1}, {64, 1}, {65, 1}}}},
      {{.name = "split", .requests = {{1000, 1}, {64, 1}, {0, 1}, {65, 1}}}, {.workers = 7}},
      {{.name = "split everywhere", .requests = {{300, 1}, {17, 1}}}, {.tile_tokens = 16, .workers = 64}},
      {{.name = "tiles of 5", .requests = {{300, 2}, {17, 1}}}, {.tile_tokens = 5, .workers = 9}},
      {{.name = "1 to 8 tokens",
        .requests = {{130, 1}, {131, 2}, {64, 3}, {65, 4}, {66, 5}, {200, 6}, {7, 7}, {8, 8}}},
       {.tile_tokens = 32, .workers = 5}},
      {{.name = "a piece without keys for the first tokens", .requests = {{66, 8}}}, {.workers = 2}},
      {{.name = "empty ones", .requests = {{0, 0}, {5, 1}, {0, 2}, {77, 0}, {3, 3}}}, {.workers = 3}},
      {{.name = "more rows than keys", .requests = {{3, 8}}}, {.workers = 3}},
      {{.name = "at least 4 tiles, cost 2", .requests = {{900, 1}, {20, 1}, {30, 1}, {500, 1}}},
       {.tile_tokens = 16, .workers = 11, .min_tiles = 4, .request_cost = 2}},
      {{.name = "page 64, head_token, bf16",
        .requests = {{500, 1}, {64, 1}},
        .heads_q = 32,
        .heads_kv = 4,
        .head_dim = 128,
        .page_tokens = 64,
        .q = kBf16,
        .kv = kBf16,
        .layout = KvLayout::head_token},
       {.workers = 6}},
      {{.name = "page 256, interleaved, f16",
        .requests = {{500, 2}, {1, 1}},
        .heads_q = 7,
        .heads_kv = 1,
        .head_dim = 80,
        .page_tokens = 256,
        .kv = kF16,
        .layout = KvLayout::interleaved},
       {.workers = 3}},
      {{.name = "head 33, strided",
        .requests = {{200, 1}, {90, 1}},
        .heads_q = 6,
        .heads_kv = 2,
        .head_dim = 33,
        .q_row_stride = 6 * 33 + 5},
       {.workers = 4}},
      {{.name = "head 256", .requests = {{200, 3}}, .heads_q = 16, .heads_kv = 1, .head_dim = 256},
       {.workers = 2}},
      {{.name = "160 query heads share one",
        .requests = {{200, 2}},
        .heads_q = 160,
        .heads_kv = 1,
        .head_dim = 16},
       {.workers = 2}},
      {{.name = "window", .requests = {{1000, 1}, {300, 4}, {10, 2}}, .window = 100},
       {.tile_tokens = 16, .workers = 5}},
      {{.name = "soft cap and sinks",
        .requests = {{300, 1}, {0, 1}},
        .soft_cap = 5,
        .sinks = true,
        .score_deviation = 10},
       {.workers = 3}},
      {{.name = "pieces", .requests = {{1000, 1}, {64, 1}, {128, 2}, {129, 3}, {0, 1}}},
       {.workers = 4, .piece_tiles = 2}},
      {{.name = "pieces and window", .requests = {{1000, 3}, {64, 1}}, .window = 200, .sinks = true},
       {.tile_tokens = 16, .workers = 4, .piece_tiles = 3}},
      {{.name = "fp8, page 64",
        .requests = {{500, 1}, {64, 1}, {1000, 3}, {0, 1}},
        .heads_q = 8,
        .heads_kv = 1,
        .head_dim = 128,
        .page_tokens = 64,
        .q = kFp8,
        .kv = kFp8},
       {.workers = 5}},
      {{.name = "fp8, a scale per key",
        .requests = {{300, 8}, {65, 1}},
        .heads_q = 16,
        .heads_kv = 2,
        .head_dim = 128,
        .page_tokens = 32,
        .q = kFp8,
        .kv = kFp8,
        .layout = KvLayout::head_token,
        .scale_per_key = true,
        .scale_per_head = true},
       {.workers = 5}},
      {{.name = "bf16 over fp8, everything",
        .requests = {{600, 2}, {70, 1}},
        .heads_q = 6,
        .heads_kv = 2,
        .head_dim = 96,
        .page_tokens = 1,
        .q = kBf16,
        .kv = kFp8,
        .window = 150,
        .soft_cap = 20,
        .sinks = true,
        .scale_per_key = true},
       {.tile_tokens = 32, .workers = 4, .piece_tiles = 3}},
      {{.name = "fp8, head 256, f32 out",
        .requests = {{200, 2}, {100, 1}},
        .heads_q = 4,
        .heads_kv = 2,
        .head_dim = 256,
        .q = kFp8,
        .kv = kFp8,
        .scale_per_head = true,
        .output = DType::f32},
       {.workers = 3}},
      {{.name = "fp8, odd rows of q",
        .requests = {{200, 1}},
        .heads_q = 3,
        .heads_kv = 1,
        .head_dim = 64,
        .q = kFp8,
        .kv = kFp8,
        .q_row_stride = 3 * 64 + 7},
       {.workers = 2}},
      {{.name = "bf16 over f16, page 256",
        .requests = {{500, 2}, {1, 1}},
        .heads_q = 7,
        .heads_kv = 1,
        .head_dim = 80,
        .page_tokens = 256,
        .q = kBf16,
        .kv = kF16,
        .layout = KvLayout::interleaved},
       {.workers = 3}},
  });
  return size == CaseSize::serving ? serving : test;
}

/// A case with its schedule and a workspace of exactly the size that was asked for.
struct AttentionDecodeProblem : AttentionProblem {
  Guarded schedule, workspace;
  AttentionDecodeArgs args;

  AttentionDecodeProblem(const AttentionDecodeCase& c, uint32_t seed) : AttentionProblem(c.attention, seed) {
    args.attention = AttentionProblem::args;
    args.max_query_tokens = max_rows;
    args.params = c.params;
    args.params.heads_kv = c.attention.heads_kv;
    args.params.window = c.attention.window;
    schedule =
        Guarded(DType::i32, {decode_schedule_ints(args.attention.page_table.shape[0], c.params.workers)});
    args.schedule = schedule;
    reschedule();
    workspace = Guarded(DType::u8, {*attention_decode_workspace_bytes(args, Stream{})});
    args.workspace = workspace;
  }
  /// After a change of lengths or row ranges.
  Status reschedule() {
    return decode_schedule_reference(
        {.kv_lengths = kv_lengths, .query_start = query_start, .params = args.params, .schedule = schedule},
        Stream{});
  }
};

}  // namespace vivace
