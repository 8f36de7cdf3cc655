#pragma once

#include <cstdint>
#include <span>

#include "src/model/config.h"
#include "src/model/weights.h"
#include "src/ops/quantize_fp8/quantize.h"
#include "vivace/attention_decode.h"
#include "vivace/attention_prefill.h"
#include "vivace/attention_prologue.h"
#include "vivace/choose_experts.h"
#include "vivace/decode_schedule.h"
#include "vivace/embedding.h"
#include "vivace/fused_moe.h"
#include "vivace/linear.h"
#include "vivace/quantize_fp8.h"
#include "vivace/rms_norm.h"
#include "vivace/silu_mul.h"
#include "vivace/status.h"
#include "vivace/tensor.h"

namespace vivace::model {

/// Some of the requests of a step: those with one token each, or the prompt chunks. `starts` are rows of the whole
/// step.
struct RequestGroup {
  Tensor kv_lengths;  ///< i32 [requests]
  Tensor starts;      ///< i32 [requests + 1]
  Tensor page_table;  ///< i32 [requests, max_pages]

  int64_t requests() const { return kv_lengths.present() ? kv_lengths.shape[0] : 0; }
};

/// One step as tensors. Pointers may be null when nothing runs (ops explain, workspace sizes).
struct Step {
  Tensor token_ids;  ///< i32 [tokens]
  Tensor positions;  ///< i32 [tokens]
  Tensor slots;      ///< i64 [tokens]
  RequestGroup decodes, chunks;
  int64_t max_chunk_tokens = 0;  ///< no chunk has more
  Tensor logit_rows;             ///< i32 [rows]: the tokens whose logits are wanted
  bool all_rows = false;         ///< they are 0, 1, ..., tokens - 1
  Tensor logits;                 ///< f32 [rows, vocab]
  Tensor live_tokens;  ///< of a step in a bucket, i32 [1]: the tokens from this number on are padding

  int64_t tokens() const { return token_ids.shape[0]; }
};

/// The activations between the operators of a step, [max_tokens, ...] each, f32 on the CPU and bf16 on a GPU unless it
/// says otherwise. A step uses the first rows.
struct Activations {
  Tensor residual;                            ///< f32 [hidden]: the residual stream
  Tensor picked;                              ///< f32 [hidden]: its rows whose logits are wanted
  Tensor normed, delta;                       ///< [hidden]: input and output of a block
  Tensor qkv, q, attended;  ///< [(heads_q + 2 heads_kv) * head_dim], [heads_q * head_dim]; q fp8 with
                            ///< an fp8 cache
  Tensor q_scale;           ///< f32 [heads_q] of an fp8 q
  Tensor fp8, fp8_scales;   ///< fp8 [widest], f32 [ceil(widest / 128)]: the input of the fp8 matrices
                            ///< that run next; absent without any
  Tensor gate_up;                             ///< [2 * intermediate]; absent without dense layers
  Tensor scores, expert_weights;              ///< f32 [experts], [top_k]; absent in a dense model
  Tensor expert_ids;                          ///< i32 [sparse layers, max_tokens * top_k]: all stay until the next step
  Tensor schedule;                            ///< i32, one map for all layers
  Tensor linear_scratch, attention_scratch, moe_scratch;  ///< u8
};

/// Everything that the calls of a step are made of.
struct LayerGraph {
  ModelConfig config;
  Weights weights;
  Activations buffers;
  Tensor cos_sin;            ///< f32 [max_model_len, rotary_dim]
  std::vector<Tensor> k,
      v;  ///< per layer [pages, page_tokens, heads_kv, head_dim]; fp8 with the layers' scales
  DecodeScheduleParams schedule;
  bool exact = false, deterministic = false;
};

namespace internal {

/// Columns [begin, begin + count) of a matrix.
inline Tensor columns(Tensor matrix, int64_t begin, int64_t count) {
  if (matrix.data != nullptr) matrix.data = matrix.as<char>() + begin * info_of(matrix.dtype).block_bytes;
  matrix.shape[1] = count;
  return matrix;
}

/// [tokens, heads * head_dim] as [tokens, heads, head_dim].
inline Tensor as_heads(const Tensor& matrix, int64_t heads, int64_t head_dim) {
  Tensor view = matrix;
  view.rank = 3;
  view.shape = {matrix.shape[0], heads, head_dim};
  view.stride = {matrix.stride[0], head_dim, 1};
  return view;
}

/// The first tokens * width elements of a buffer as [tokens, width].
inline Tensor reshaped(const Tensor& buffer, int64_t tokens, int64_t width) {
  return Tensor(buffer.data, buffer.dtype, {tokens, width}, buffer.device);
}

inline LinearPart part(const Matrix& matrix, const Tensor& y) {
  return {.weight = matrix.weight, .weight_scale = matrix.scale, .y = y};
}

/// What the matrices of a block are multiplied by: activations, or what fp8 keeps of them.
struct BlockInput {
  Tensor x, scale;
  Fp8Scaling scaling = Fp8Scaling::tensor;
};

/// A place for the input of fp8 matrices, [tokens, width].
inline BlockInput fp8_input(const Activations& buffers, const BlockInputFormat& format, int64_t tokens,
                            int64_t width) {
  BlockInput input{reshaped(buffers.fp8, tokens, width), format.scale, format.scaling};
  if (format.scaling == Fp8Scaling::block)
    input.scale = reshaped(buffers.fp8_scales, tokens, scale_blocks(width));
  if (format.scaling == Fp8Scaling::token) {
    input.scale = Tensor(buffers.fp8_scales.data, DType::f32, {tokens}, buffers.fp8_scales.device);
  }
  return input;
}

}  // namespace internal

/// Walks one step: calls run(layer, args) for every operator in the order of the data flow. One walk serves running,
/// explaining and sizing, so they cannot disagree.
///
/// The residual stream is updated by the norm that follows a block: rms_norm adds the block's output to it and
/// normalises the sum in one pass. Matrices of fp8 get their input quantised by what makes it: rms_norm, also beside what others
/// need as it is (the router), and silu_mul; or, where nobody can (attention), by quantize_fp8 behind it. After
/// attention in the last layer only rows whose logits are wanted go on; a step without any ends at that layer's keys
/// and values.
template <class Run>
Status walk(const LayerGraph& graph, const Step& step, Run&& run) {
  const ModelConfig& config = graph.config;
  const Activations& buffers = graph.buffers;
  const int64_t width_q = config.heads_q * config.head_dim, width_kv = config.heads_kv * config.head_dim;
  int64_t tokens = step.tokens();
  Tensor residual = buffers.residual.rows(0, tokens), normed = buffers.normed.rows(0, tokens);
  Tensor delta;  // what the block before left to be added

  VIVACE_TRY(run(-1, EmbeddingArgs{.ids = step.token_ids, .table = graph.weights.embedding, .y = residual}));
  if (step.decodes.requests() > 0) {
    VIVACE_TRY(run(-1, DecodeScheduleArgs{.kv_lengths = step.decodes.kv_lengths,
                                          .query_start = step.decodes.starts,
                                          .params = graph.schedule,
                                          .schedule = buffers.schedule}));
  }
  using internal::BlockInput;
  /// Into to.x; where that is fp8 and others need it as it is, into `plain`, too.
  const auto norm = [&](int64_t layer, const Tensor& weight, const BlockInput& to, const Tensor& plain = {}) {
    const bool both = plain.present() && to.x.dtype == DType::fp8_e4m3;
    RmsNormArgs args{.x = residual,
                     .weight = weight,
                     .y = both ? plain : to.x,
                     .y_scale = to.scale,
                     .y_scaling = to.scaling,
                     .eps = config.rms_eps,
                     .y_fp8 = both ? to.x : Tensor()};
    if (delta.present()) {
      args.x = delta;
      args.residual = residual;
    }
    return run(layer, args);
  };
  const auto fp8_input = [&](const BlockInputFormat& format, int64_t width) {
    return internal::fp8_input(buffers, format, tokens, width);
  };
  /// What a norm makes for matrices of this format.
  const auto normed_input = [&](const BlockInputFormat& format) {
    return format.fp8 ? fp8_input(format, config.hidden) : BlockInput{.x = normed};
  };
  const auto project = [&](int64_t layer, const BlockInput& input, std::initializer_list<LinearPart> parts) {
    LinearArgs args{.x = input.x,
                    .x_scale = input.scale,
                    .x_scaling = input.scaling,
                    .exact = graph.exact,
                    .batch_invariant = graph.deterministic,
                    .weight_ready = true,
                    .workspace = buffers.linear_scratch};
    args.part_count = 0;
    for (const LinearPart& part : parts) args.parts[args.part_count++] = part;
    return run(layer, args);
  };

  int64_t sparse_layers = 0;  // before this one
  for (int64_t l = 0; l < config.layers; ++l) {
    const LayerWeights& weights = graph.weights.layers[l];
    const bool last = l + 1 == config.layers;

    const BlockInput x = normed_input(weights.qkv_input);
    VIVACE_TRY(norm(l, weights.input_norm, x));
    const Tensor qkv = buffers.qkv.rows(0, tokens);
    if (weights.qkv.present()) {
      VIVACE_TRY(project(l, x, {internal::part(weights.qkv, qkv)}));
    } else {
      VIVACE_TRY(project(l, x,
                         {internal::part(weights.q, internal::columns(qkv, 0, width_q)),
                          internal::part(weights.k, internal::columns(qkv, width_q, width_kv)),
                          internal::part(weights.v, internal::columns(qkv, width_q + width_kv, width_kv))}));
    }
    const bool fp8_cache = graph.k[l].dtype == DType::fp8_e4m3;
    const Tensor q_scale = fp8_cache ? buffers.q_scale.rows(0, tokens) : Tensor();
    const Tensor k_scale = fp8_cache ? weights.k_scale : Tensor(),
                 v_scale = fp8_cache ? weights.v_scale : Tensor();
    const Tensor q = internal::as_heads(buffers.q.rows(0, tokens), config.heads_q, config.head_dim);
    VIVACE_TRY(run(l, AttentionPrologueArgs{.qkv = qkv,
                                            .q_norm_weight = weights.q_norm,
                                            .k_norm_weight = weights.k_norm,
                                            .cos_sin = graph.cos_sin,
                                            .positions = step.positions,
                                            .slots = step.slots,
                                            .q = q,
                                            .k = graph.k[l],
                                            .v = graph.v[l],
                                            .q_scale = q_scale,
                                            .k_scale = k_scale,
                                            .v_scale = v_scale,
                                            .qk_norm = config.qk_norm ? QkNorm::norm_then_rope : QkNorm::none,
                                            .rope_style = config.rope_style == RopeStyle::neox
                                                              ? vivace::RopeStyle::neox
                                                              : vivace::RopeStyle::interleaved,
                                            .eps = config.rms_eps}));
    if (last && step.logit_rows.elements() == 0) return {};

    Tensor attended = buffers.attended.rows(0, tokens);
    AttentionArgs attention{.q = q,
                            .k = graph.k[l],
                            .v = graph.v[l],
                            .output = internal::as_heads(attended, config.heads_q, config.head_dim),
                            .q_scale = q_scale,
                            .k_scale = k_scale,
                            .v_scale = v_scale,
                            .window = config.sliding_window};
    const auto of_group = [&](const RequestGroup& group) {
      attention.page_table = group.page_table;
      attention.kv_lengths = group.kv_lengths;
      attention.query_start = group.starts;
      return attention;
    };
    if (step.decodes.requests() > 0) {
      VIVACE_TRY(run(l, AttentionDecodeArgs{.attention = of_group(step.decodes),
                                            .params = graph.schedule,
                                            .schedule = buffers.schedule,
                                            .old_keys_ready = true,  // attention_prologue precedes
                                            .workspace = buffers.attention_scratch}));
    }
    if (step.chunks.requests() > 0) {
      VIVACE_TRY(run(
          l, AttentionPrefillArgs{.attention = of_group(step.chunks),
                                  .max_query_tokens = step.max_chunk_tokens,
                                  .split_tokens = graph.schedule.piece_tiles * graph.schedule.tile_tokens}));
    }
    if (last && !step.all_rows) {
      // Rows are picked as an embedding is: by their numbers.
      tokens = step.logit_rows.shape[0];
      const Tensor picked = buffers.picked.rows(0, tokens);
      // Q, K and V were read: their buffer is free.
      const Tensor picked_attended = internal::reshaped(buffers.qkv, tokens, width_q);
      VIVACE_TRY(run(l, EmbeddingArgs{.ids = step.logit_rows, .table = residual, .y = picked}));
      VIVACE_TRY(run(l, EmbeddingArgs{.ids = step.logit_rows, .table = attended, .y = picked_attended}));
      residual = picked;
      attended = picked_attended;
      normed = buffers.normed.rows(0, tokens);
    }
    delta = buffers.delta.rows(0, tokens);
    BlockInput o_input{.x = attended};
    if (weights.o_input.fp8) {
      o_input = fp8_input(weights.o_input, width_q);
      VIVACE_TRY(
          run(l, QuantizeFp8Args{
                     .x = attended, .y = o_input.x, .scale = o_input.scale, .scaling = o_input.scaling}));
    }
    VIVACE_TRY(project(l, o_input, {internal::part(weights.o, delta)}));

    const BlockInput mlp_input = normed_input(weights.mlp_input);
    if (!weights.sparse()) {
      VIVACE_TRY(norm(l, weights.post_attention_norm, mlp_input));
      const Tensor both = buffers.gate_up.rows(0, tokens);
      const Tensor gate = internal::columns(both, 0, config.intermediate);
      const Tensor up = internal::columns(both, config.intermediate, config.intermediate);
      const ExpertWeights& dense = weights.dense;
      if (weights.dense_gate_up.present()) {
        VIVACE_TRY(project(l, mlp_input, {internal::part(weights.dense_gate_up, both)}));
      } else {
        VIVACE_TRY(project(l, mlp_input,
                           {internal::part({dense.gate, dense.gate_scale}, gate),
                            internal::part({dense.up, dense.up_scale}, up)}));
      }
      const BlockInput down_input =
          weights.down_input.fp8 ? fp8_input(weights.down_input, config.intermediate) : BlockInput{.x = gate};
      VIVACE_TRY(run(l, SiluMulArgs{.gate = gate,
                                    .up = up,
                                    .y = down_input.x,
                                    .y_scale = down_input.scale,
                                    .y_scaling = down_input.scaling}));
      VIVACE_TRY(project(l, down_input, {internal::part({dense.down, dense.down_scale}, delta)}));
    } else {
      VIVACE_TRY(norm(l, weights.post_attention_norm, mlp_input, normed));  // which the router takes
      const Tensor ids =
          internal::reshaped(buffers.expert_ids.rows(sparse_layers++, 1), tokens, config.top_k);
      const Tensor expert_weights = buffers.expert_weights.rows(0, tokens);
      VIVACE_TRY(
          run(l, ChooseExpertsArgs{
                     .logits = {.x = normed,
                                .weight = weights.router,
                                .weight_version = weights.router.version,
                                .scores = buffers.scores.rows(0, tokens),
                                .batch_invariant = graph.deterministic,
                                .weight_ready = true},
                     .choice = {.correction_bias = weights.expert_bias,
                                .expert_ids = ids,
                                .expert_weights = expert_weights,
                                .live_tokens = step.live_tokens,
                                .scoring = config.router_score == RouterScore::softmax ? RouteScoring::softmax
                                                                                       : RouteScoring::sigmoid,
                                .renormalise = config.router_renormalise,
                                .scale = config.router_scale}}));
      VIVACE_TRY(run(l, FusedMoeArgs{.x = mlp_input.x,
                                     .x_scale = mlp_input.scale,
                                     .gate_up = weights.experts_gate_up,
                                     .down = weights.experts_down,
                                     .gate_up_scale = weights.experts_gate_up_scale,
                                     .down_scale = weights.experts_down_scale,
                                     .act_scale = weights.experts_act_scale,
                                     .experts = weights.experts,
                                     .shared = weights.shared,
                                     .expert_ids = ids,
                                     .expert_weights = expert_weights,
                                     .batch_invariant = graph.deterministic,
                                     .y = delta,
                                     .workspace = buffers.moe_scratch}));
    }
  }
  VIVACE_TRY(norm(-1, graph.weights.norm, {.x = normed}));
  return project(-1, {.x = normed}, {{.weight = graph.weights.lm_head, .y = step.logits}});
}

}  // namespace vivace::model
