#pragma once

#include "src/ops/attention/problem.h"
#include "vivace/attention_prefill.h"

namespace vivace {

struct AttentionPrefillCase {
  AttentionCase attention;
  int64_t split_tokens = 0;
  const char* name = attention.name;
};

/// Requests of mixed lengths, more than a warp has lanes, some without rows.
inline std::vector<AttentionRequest> many_short_requests() {
  std::vector<AttentionRequest> requests;
  for (int64_t i = 0; i < 70; ++i) {
    const int64_t rows = i % 9 == 4 ? 0 : i * 29 % 75 + 1;
    requests.push_back({rows + i * 7 % 40, rows});
  }
  return requests;
}

inline std::span<const AttentionPrefillCase> attention_prefill_cases(CaseSize size) {
  static const std::vector<AttentionPrefillCase> serving = {
      {{.name = "SmolLM2 512", .requests = {{512, 512}}, .lse = false}},
      {{.name = "SmolLM2 chunk 128 after 1920", .requests = {{2048, 128}}, .lse = false}},
      {{.name = "Qwen3-30B 512, bf16",
        .requests = {{512, 512}},
        .heads_q = 32,
        .heads_kv = 4,
        .head_dim = 128,
        .q = DType::bf16,
        .kv = DType::bf16,
        .lse = false}},
  };
  constexpr DType kF32 = DType::f32, kF16 = DType::f16, kBf16 = DType::bf16, kFp8 = DType::fp8_e4m3;
  static const std::vector<AttentionPrefillCase> test = with_bf16<AttentionPrefillCase>({
      {{.name = "no requests", .requests = {}}},
      {{.name = "one key",
        .requests = {{1, 1}},
        .heads_q = 1,
        .heads_kv = 1,
        .head_dim = 1,
        .page_tokens = 1}},
      {{.name = "SmolLM2", .requests = {{130, 130}, {64, 64}, {65, 65}}}},
      {{.name = "chunks after prefixes", .requests = {{200, 7}, {129, 64}, {64, 1}, {333, 100}}}},
      {{.name = "empty ones", .requests = {{0, 0}, {5, 5}, {0, 2}, {77, 0}, {3, 3}}}},
      {{.name = "seventy requests", .requests = many_short_requests(), .heads_q = 8, .heads_kv = 2}},
      {{.name = "more rows than keys", .requests = {{3, 9}}}},
      {{.name = "page 1", .requests = {{70, 40}}, .page_tokens = 1}},
      {{.name = "page 256, head_token",
        .requests = {{300, 300}},
        .page_tokens = 256,
        .layout = KvLayout::head_token}},
      {{.name = "page 33, interleaved",
        .requests = {{100, 100}},
        .page_tokens = 33,
        .layout = KvLayout::interleaved}},
      {{.name = "strided rows", .requests = {{40, 40}, {9, 4}}, .q_row_stride = 9 * 64 + 24}},
      {{.name = "head 80", .requests = {{90, 90}}, .heads_q = 4, .heads_kv = 4, .head_dim = 80}},
      {{.name = "head 256", .requests = {{90, 33}}, .heads_q = 2, .heads_kv = 1, .head_dim = 256}},
      {{.name = "head 7", .requests = {{90, 33}}, .heads_q = 3, .heads_kv = 1, .head_dim = 7}},
      {{.name = "head 129, f16",
        .requests = {{70, 70}},
        .heads_q = 2,
        .heads_kv = 2,
        .head_dim = 129,
        .kv = kF16}},
      {{.name = "bf16",
        .requests = {{150, 150}, {20, 3}},
        .heads_q = 8,
        .heads_kv = 2,
        .head_dim = 128,
        .q = kBf16,
        .kv = kBf16}},
      {{.name = "f32 over bf16",
        .requests = {{150, 40}},
        .heads_q = 5,
        .heads_kv = 1,
        .q = kF32,
        .kv = kBf16}},
      {{.name = "70 query heads share one",
        .requests = {{66, 5}},
        .heads_q = 70,
        .heads_kv = 1,
        .head_dim = 16}},
      {{.name = "window", .requests = {{200, 200}, {300, 20}, {10, 10}}, .window = 37}},
      {{.name = "window 1", .requests = {{70, 70}}, .window = 1}},
      {{.name = "soft cap", .requests = {{100, 100}}, .soft_cap = 5, .score_deviation = 10}},
      {{.name = "sinks", .requests = {{100, 100}, {0, 1}}, .sinks = true}},
      {{.name = "everything",
        .requests = {{190, 90}, {64, 64}},
        .heads_q = 14,
        .heads_kv = 2,
        .head_dim = 96,
        .q = kBf16,
        .kv = kBf16,
        .window = 50,
        .soft_cap = 20,
        .softmax_scale = 0.3,
        .sinks = true}},
      {{.name = "large scores", .requests = {{100, 100}}, .score_deviation = 60}},
      {{.name = "groups of 48", .requests = {{200, 200}, {48, 5}, {49, 49}}}, 48},
      {{.name = "groups of 64 with window", .requests = {{300, 150}}, .window = 100, .sinks = true}, 64},
      {{.name = "fp8",
        .requests = {{150, 150}, {20, 3}, {333, 40}},
        .heads_q = 8,
        .heads_kv = 2,
        .head_dim = 128,
        .page_tokens = 64,
        .q = kFp8,
        .kv = kFp8}},
      {{.name = "fp8, everything",
        .requests = {{190, 90}, {64, 64}, {0, 1}},
        .heads_q = 14,
        .heads_kv = 2,
        .head_dim = 96,
        .page_tokens = 1,
        .q = kFp8,
        .kv = kFp8,
        .window = 50,
        .soft_cap = 20,
        .softmax_scale = 0.3,
        .sinks = true,
        .layout = KvLayout::head_token,
        .scale_per_key = true,
        .scale_per_head = true},
       48},
      {{.name = "bf16 over fp8, head 256",
        .requests = {{90, 33}},
        .heads_q = 4,
        .heads_kv = 1,
        .head_dim = 256,
        .q = kBf16,
        .kv = kFp8,
        .layout = KvLayout::interleaved,
        .scale_per_key = true}},
      {{.name = "head 256, groups",
        .requests = {{300, 70}},
        .heads_q = 2,
        .heads_kv = 1,
        .head_dim = 256,
        .q = kBf16,
        .kv = kBf16},
       64},
      {{.name = "fp8, f32 out, odd rows",
        .requests = {{90, 33}},
        .heads_q = 3,
        .heads_kv = 1,
        .q = kFp8,
        .kv = kFp8,
        .q_row_stride = 3 * 64 + 7,
        .output = DType::f32}},
      {{.name = "bf16 over f16",
        .requests = {{150, 40}},
        .heads_q = 5,
        .heads_kv = 1,
        .page_tokens = 128,
        .q = kBf16,
        .kv = kF16}},
  });
  return size == CaseSize::serving ? serving : test;
}

struct AttentionPrefillProblem : AttentionProblem {
  AttentionPrefillArgs args;

  AttentionPrefillProblem(const AttentionPrefillCase& c, uint32_t seed)
      : AttentionProblem(c.attention, seed),
        args{.attention = AttentionProblem::args, .split_tokens = c.split_tokens} {}
};

}  // namespace vivace
