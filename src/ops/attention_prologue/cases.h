#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "src/ops/problem.h"
#include "vivace/attention_prologue.h"

namespace vivace {

struct AttentionPrologueCase {
  const char* name;
  int64_t tokens, heads_q = 9, heads_kv = 3, head_dim = 64;
  QkNorm qk_norm = QkNorm::none;
  RopeStyle style = RopeStyle::neox;
  int64_t rotary_dim = -1;  ///< -1: head_dim, 0: no RoPE
  DType qkv = DType::f32, kv = DType::f32, weight = DType::f32;
  DType q = DType::none;  ///< none: that of qkv
  double eps = 1e-6;
  int64_t page_tokens = 16;
  bool head_token = false;  ///< pages as [head, token, dim]
  int64_t qkv_padding = 0;  ///< elements between rows of qkv
  double deviation = 1;
  bool made_k_scale = false;  ///< with an fp8 cache: one per token and head instead of one
  bool v_scale_per_head = false;
};

inline std::span<const AttentionPrologueCase> attention_prologue_cases(CaseSize size) {
  constexpr QkNorm kBefore = QkNorm::norm_then_rope, kAfter = QkNorm::rope_then_norm;
  constexpr RopeStyle kPairs = RopeStyle::interleaved;
  constexpr DType kF16 = DType::f16, kBf16 = DType::bf16, kF32 = DType::f32, kFp8 = DType::fp8_e4m3;
  static const std::vector<AttentionPrologueCase> serving = {
      {.name = "SmolLM2 decode 8", .tokens = 8, .style = kPairs},
      {.name = "SmolLM2 prefill 512", .tokens = 512, .style = kPairs},
      {.name = "Qwen3-30B decode 64",
       .tokens = 64,
       .heads_q = 32,
       .heads_kv = 4,
       .head_dim = 128,
       .qk_norm = kBefore,
       .qkv = kBf16,
       .kv = kBf16,
       .weight = kBf16},
      {.name = "Hy3 decode 64",
       .tokens = 64,
       .heads_q = 64,
       .heads_kv = 8,
       .head_dim = 128,
       .qk_norm = kAfter,
       .qkv = kBf16,
       .kv = kBf16,
       .weight = kBf16,
       .eps = 1e-5},
      {.name = "Hy3 decode 64, fp8",
       .tokens = 64,
       .heads_q = 64,
       .heads_kv = 8,
       .head_dim = 128,
       .qk_norm = kAfter,
       .qkv = kBf16,
       .kv = kFp8,
       .weight = kBf16,
       .q = kFp8,
       .eps = 1e-5},
  };
  static const std::vector<AttentionPrologueCase> test = [] {
    std::vector<AttentionPrologueCase> cases = {
        {.name = "no tokens", .tokens = 0},
        {.name = "plain", .tokens = 7},
        {.name = "interleaved", .tokens = 7, .style = kPairs},
        {.name = "no RoPE", .tokens = 3, .qk_norm = kBefore, .rotary_dim = 0},
        {.name = "partial", .tokens = 5, .qk_norm = kAfter, .rotary_dim = 32},
        {.name = "partial, interleaved, odd vectors",
         .tokens = 5,
         .qk_norm = kBefore,
         .style = kPairs,
         .rotary_dim = 22},
        {.name = "head 1", .tokens = 2, .heads_q = 2, .heads_kv = 1, .head_dim = 1, .rotary_dim = 0},
        {.name = "head 6", .tokens = 2, .heads_q = 2, .heads_kv = 1, .head_dim = 6, .qk_norm = kAfter},
        {.name = "strided qkv", .tokens = 5, .qkv_padding = 24},
        {.name = "head_token pages", .tokens = 40, .head_token = true},
        {.name = "odd rows",
         .tokens = 7,
         .qk_norm = kBefore,
         .qkv = kBf16,
         .kv = kBf16,
         .weight = kBf16,
         .qkv_padding = 1},
        {.name = "odd rows, head 256", .tokens = 5, .head_dim = 256, .kv = kF16, .qkv_padding = 1},
        {.name = "odd rows, fp8",
         .tokens = 40,
         .heads_q = 40,
         .heads_kv = 8,
         .head_dim = 128,
         .qk_norm = kAfter,
         .style = kPairs,
         .rotary_dim = 64,
         .qkv = kBf16,
         .kv = kFp8,
         .q = kFp8,
         .qkv_padding = 3,
         .made_k_scale = true},
        {.name = "f16 cache", .tokens = 5, .kv = kF16},
        {.name = "bf16 in, f32 out",
         .tokens = 5,
         .qk_norm = kBefore,
         .qkv = kBf16,
         .kv = kF32,
         .weight = kF16,
         .q = kF32},
        {.name = "fp8, given scales", .tokens = 7, .qk_norm = kBefore, .qkv = kBf16, .kv = kFp8, .q = kFp8},
        {.name = "fp8, made scales",
         .tokens = 7,
         .qk_norm = kAfter,
         .style = kPairs,
         .kv = kFp8,
         .q = kFp8,
         .made_k_scale = true,
         .v_scale_per_head = true},
        {.name = "fp8 cache, head 6",
         .tokens = 4,
         .heads_q = 2,
         .heads_kv = 2,
         .head_dim = 6,
         .kv = kFp8,
         .head_token = true,
         .made_k_scale = true},
        {.name = "fp8 q, bf16 cache",
         .tokens = 5,
         .head_dim = 80,
         .rotary_dim = 40,
         .qkv = kBf16,
         .kv = kBf16,
         .q = kFp8},
        {.name = "many tokens, several passes",
         .tokens = 2100,
         .heads_q = 20,
         .heads_kv = 2,
         .qk_norm = kBefore,
         .qkv = kBf16,
         .kv = kFp8,
         .q = kFp8,
         .made_k_scale = true},
        {.name = "tiny heads, eps 1e-5", .tokens = 3, .qk_norm = kBefore, .eps = 1e-5, .deviation = 1e-3},
        {.name = "tiny heads, eps 1e-6", .tokens = 3, .qk_norm = kAfter, .eps = 1e-6, .deviation = 1e-3},
    };
    const std::pair<int64_t, int64_t> heads[] = {{32, 8}, {40, 8}, {16, 2}, {28, 4}, {9, 3}};
    const int64_t dims[] = {64, 128, 256, 80};
    int i = 0;
    for (const auto& [heads_q, heads_kv] : heads) {
      for (const int64_t head_dim : dims) {
        cases.push_back({.name = "heads and dims",
                         .tokens = 3,
                         .heads_q = heads_q,
                         .heads_kv = heads_kv,
                         .head_dim = head_dim,
                         .qk_norm = static_cast<QkNorm>(i % 3),
                         .style = static_cast<RopeStyle>(i % 2),
                         .qkv = i % 4 < 2 ? kBf16 : kF32,
                         .kv = i % 4 < 2 ? kBf16 : kF32,
                         .weight = i % 5 < 2 ? kBf16 : kF32});
        ++i;
      }
    }
    return cases;
  }();
  return size == CaseSize::serving ? serving : test;
}

/// Every third token has slot -1; the others are scattered over the pool, its last slot in use.
struct AttentionPrologueProblem {
  Guarded qkv, q_norm_weight, k_norm_weight, cos_sin, positions, slots, q, k, v, q_scale, k_scale, v_scale;
  AttentionPrologueArgs args;

  AttentionPrologueProblem(const AttentionPrologueCase& c, uint32_t seed) {
    std::mt19937 rng(seed);
    const int64_t rotary = c.rotary_dim < 0 ? c.head_dim : c.rotary_dim, max_position = 1000;
    const int64_t width = (c.heads_q + 2 * c.heads_kv) * c.head_dim;
    const int64_t pages = c.tokens / c.page_tokens + 2, all_slots = pages * c.page_tokens;
    qkv = Guarded(c.qkv, {c.tokens, width}, c.qkv_padding > 0 ? width + c.qkv_padding : 0);
    qkv.random(rng, c.deviation);
    slots = Guarded(DType::i64, {c.tokens});
    q = Guarded(c.q == DType::none ? c.qkv : c.q, {c.tokens, c.heads_q, c.head_dim});
    k = Guarded(c.kv, {pages, c.page_tokens, c.heads_kv, c.head_dim});
    v = Guarded(c.kv, {pages, c.page_tokens, c.heads_kv, c.head_dim});
    if (c.qk_norm != QkNorm::none) {
      q_norm_weight = std::move(Guarded(c.weight, {c.head_dim}).random(rng, 0.3, 1));
      k_norm_weight = std::move(Guarded(c.weight, {c.head_dim}).random(rng, 0.3, 1));
    }
    if (rotary > 0) {
      cos_sin = Guarded(DType::f32, {max_position, rotary});
      positions = Guarded(DType::i32, {c.tokens});
      for (int64_t p = 0; p < max_position; ++p) {
        for (int64_t i = 0; i < rotary / 2; ++i) {
          const double angle = static_cast<double>(p) * std::pow(1e4, -2.0 * static_cast<double>(i) / rotary);
          cos_sin.as<float>()[p * rotary + i] = static_cast<float>(std::cos(angle));
          cos_sin.as<float>()[p * rotary + rotary / 2 + i] = static_cast<float>(std::sin(angle));
        }
      }
    }
    for (int64_t t = 0; t < c.tokens; ++t) {
      if (rotary > 0)
        positions.as<int32_t>()[t] = static_cast<int32_t>(t == 0 ? max_position - 1 : rng() % max_position);
      slots.as<int64_t>()[t] = t % 3 == 2 ? -1 : all_slots - 1 - t;
    }
    args = {.qkv = qkv,
            .q_norm_weight = q_norm_weight,
            .k_norm_weight = k_norm_weight,
            .cos_sin = cos_sin,
            .positions = positions,
            .slots = slots,
            .q = q,
            .k = k,
            .v = v,
            .qk_norm = c.qk_norm,
            .rope_style = c.style,
            .eps = c.eps};
    if (args.q.dtype == DType::fp8_e4m3) q_scale = Guarded(DType::f32, {c.tokens, c.heads_q});
    if (c.kv == DType::fp8_e4m3) {
      k_scale =
          c.made_k_scale ? Guarded(DType::f32, {pages, c.page_tokens, c.heads_kv}) : Guarded(DType::f32, {1});
      if (!c.made_k_scale) k_scale.as<float>()[0] = 0.013f;
      v_scale = Guarded(DType::f32, {c.v_scale_per_head ? c.heads_kv : 1});
      for (int64_t i = 0; i < v_scale.tensor().shape[0]; ++i)
        v_scale.as<float>()[i] = 0.01f + 0.003f * static_cast<float>(i);
    }
    args.q_scale = q_scale;
    args.k_scale = k_scale;
    args.v_scale = v_scale;
    if (c.head_token) {
      for (Tensor* t : {&args.k, &args.v}) {
        t->stride[1] = c.head_dim;
        t->stride[2] = c.page_tokens * c.head_dim;
      }
    }
  }
};

}  // namespace vivace
