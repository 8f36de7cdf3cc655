#pragma once

#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

namespace vivace {

/// RMSNorm of each query and key head, before or after the rotation. The numbers are part of the C ABI.
enum class QkNorm : uint8_t { none = 0, norm_then_rope = 1, rope_then_norm = 2 };

/// Which dimensions form a rotated pair: (i, i + rotary_dim / 2), or (2 i, 2 i + 1).
enum class RopeStyle : uint8_t { neox = 0, interleaved = 1 };

struct AttentionPrologueArgs {
  Tensor qkv;  ///< [tokens, (heads_q + 2 heads_kv) * head_dim], f32 or bf16: Q heads, K heads, V heads
  Tensor q_norm_weight;  ///< [head_dim], f32, bf16 or f16; absent exactly when qk_norm is none
  Tensor k_norm_weight;  ///< the same
  Tensor cos_sin;  ///< f32 [max_position, rotary_dim]: rotary_dim / 2 cosines, then as many sines; absent: no
                   ///< RoPE
  Tensor positions;  ///< i32 [tokens]; needed with cos_sin
  Tensor slots;      ///< i64 [tokens]: page * page_tokens + offset where K and V go; -1: nowhere
  Tensor q;          ///< out, [tokens, heads_q, head_dim], f32, bf16 or fp8
  Tensor k;          ///< out, [pages, page_tokens, heads_kv, head_dim], f32, bf16, f16 or fp8
  Tensor v;          ///< like k, of the same type, with strides of its own
  Tensor q_scale;    ///< with fp8 q: out, f32 [tokens, heads_q], made from the head as in quantize_fp8
  Tensor k_scale;    ///< with fp8 k: in, f32 [1]; or out, [pages, page_tokens, heads_kv], made from the head
  Tensor v_scale;    ///< with fp8 v: in, f32 [1] or [heads_kv]
  QkNorm qk_norm = QkNorm::none;
  RopeStyle rope_style = RopeStyle::neox;
  double eps = 1e-6;
};

/// Between the QKV projection and attention: splits qkv, normalises and rotates Q and K, writes Q densely and
/// K and V into their slots of the paged cache.
///
///   norm(x) = x / sqrt(mean(x * x) + eps) * weight    over one head
///   rope: (a, b) -> (a cos - b sin, b cos + a sin)    over the first rotary_dim dimensions; the rest pass
///
/// Shapes   see the arguments. rotary_dim is even and at most head_dim.
/// Types    arithmetic in fp32 from the unrounded input; one rounding at each store.
/// Writes   q, and of k, v and a made k_scale exactly the given slots: never the rest of a page, which another request may
///          share. Two tokens with one slot leave either value. q may not overlap qkv.
/// Cost     attention_prologue_cost().
/// Runs     on `stream`; allocates nothing.
/// Repeats  bit for bit; a token does not depend on the tokens beside it.
/// Fails    invalid_argument: a shape, stride, type or option disagrees; on the CPU also, before anything is
///          written, when a position or a slot is out of range. unsupported: no row fits.
/// Source   src/ops/attention_prologue/
Status attention_prologue(const AttentionPrologueArgs& args, const Stream& stream);
Cost attention_prologue_cost(const AttentionPrologueArgs& args);
/// Which row would run this call. Shapes and types count, pointers do not.
Choice attention_prologue_explain(const AttentionPrologueArgs& args, const Stream& stream);

}  // namespace vivace
