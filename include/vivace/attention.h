#pragma once

#include <cstdint>

#include "vivace/tensor.h"

namespace vivace {

/// The largest head of the rows that keep one on the stack (attention_prologue: of all); models with larger ones are
/// refused when they are read.
inline constexpr int64_t kMaxHeadDim = 512;

/// What attention_prefill and attention_decode have in common: causal attention of ragged query rows over a
/// paged KV cache.
///
/// Request b owns the rows query_start[b] .. query_start[b + 1] of q; they are its last query tokens, so that
/// row i of n stands at position p = kv_lengths[b] - n + i and sees the keys j <= p, with a window only those
/// with j > p - window. Key j lies in page page_table[b, j / page_tokens] at offset j % page_tokens.
///
///   s_j = soft_cap ? soft_cap * tanh(scale * q.k_j / soft_cap) : scale * q.k_j
///   output = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j)),   lse = log(exp(sink) + sum_j exp(s_j))
///
/// A row that sees no key (a request of length 0, or more query rows than keys) gives output 0 and lse -inf,
/// sink or not. fp8 values mean stored * scale. A request without query rows is legal. Rows of q outside every request are left alone.
struct AttentionArgs {
  Tensor q;                  ///< [tokens, heads_q, head_dim], f32, bf16 or fp8; heads_q a multiple of heads_kv
  Tensor k;                  ///< [pages, page_tokens, heads_kv, head_dim], f32, bf16, f16 or fp8
  Tensor v;                  ///< like k, of the same type, with strides of its own
  Tensor page_table;         ///< i32 [requests, max_pages]; only entries of pages with a visible key are read
  Tensor kv_lengths;         ///< i32 [requests]: keys of the request, those of this call's tokens included
  Tensor query_start;        ///< i32 [requests + 1], not descending
  Tensor output;             ///< like q; f32 or bf16 when q is fp8
  Tensor q_scale;            ///< with fp8 q: f32 [tokens, heads_q]
  Tensor k_scale;            ///< with fp8 k: f32 [1], or [pages, page_tokens, heads_kv]
  Tensor v_scale;            ///< with fp8 v: f32 [1], or [heads_kv]
  Tensor sinks;              ///< optional f32 [heads_q]: a logit that joins the denominator and has no value
  Tensor lse;                ///< optional f32 [tokens, heads_q], natural logarithm
  double softmax_scale = 0;  ///< 0: 1 / sqrt(head_dim)
  int64_t window = 0;        ///< 0: none
  double soft_cap = 0;       ///< 0: none
};

}  // namespace vivace
