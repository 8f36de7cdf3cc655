#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/model/checkpoint.h"
#include "src/model/config.h"
#include "src/model/memory.h"
#include "vivace/fused_moe.h"
#include "vivace/quantize_fp8.h"
#include "vivace/router_gemm.h"
#include "vivace/status.h"
#include "vivace/tensor.h"

namespace vivace::model {

/// A matrix and, when its values are fp8, what they are multiplied by.
struct Matrix {
  Tensor weight;  ///< [rows, columns]
  Tensor scale;   ///< with fp8: f32 [1], or [ceil(rows / 128), ceil(columns / 128)]

  bool present() const { return weight.present(); }
};

/// How activations become the input of matrices that share it.
struct BlockInputFormat {
  bool fp8 = false;  ///< the matrices are; nothing below counts otherwise
  Fp8Scaling scaling = Fp8Scaling::tensor;
  Tensor scale;  ///< f32 [1], given with Fp8Scaling::tensor; where the matrices' files disagree, the largest
};

/// The weights of one decoder layer: views of the checkpoint, or of Weights::owned where a copy is needed.
struct LayerWeights {
  Tensor input_norm, post_attention_norm;  ///< [hidden]
  Matrix q, k, v;                          ///< [heads * head_dim, hidden]
  Matrix qkv;                              ///< q, k and v as one matrix, where they lie so; else absent
  Matrix o;                                ///< [hidden, heads_q * head_dim]
  Tensor q_norm, k_norm;                   ///< [head_dim]; absent without qk_norm
  Tensor k_scale, v_scale;  ///< f32 [1], of fp8 keys and values; absent when the checkpoint has none
  ExpertWeights dense;                     ///< the MLP of a dense layer; absent in a sparse one
  Matrix dense_gate_up;                    ///< its gate and up as one matrix, where they lie so
  BlockInputFormat qkv_input, o_input;
  BlockInputFormat mlp_input;   ///< of gate and up, of all experts in a sparse layer
  BlockInputFormat down_input;  ///< of a dense layer; experts have their act_scale

  RouterWeight router;                 ///< sparse layers alone, like all below
  Tensor expert_bias;                  ///< f32 [experts], absent when the architecture has none
  std::vector<ExpertWeights> experts;  ///< one entry per expert, whichever layout the file has; empty when stacked
  Tensor experts_gate_up, experts_down;  ///< [experts, 2 intermediate, hidden], [experts, hidden, intermediate]
  Tensor experts_gate_up_scale, experts_down_scale,
      experts_act_scale;               ///< of stacked fp8 experts, as in FusedMoeArgs
  ExpertWeights shared;                ///< absent without a shared expert

  bool sparse() const { return !experts.empty() || experts_gate_up.present(); }
};

/// All weights of a model.
struct Weights {
  Tensor embedding;  ///< [vocab, hidden]
  Tensor norm;       ///< [hidden]
  Tensor lm_head;    ///< [vocab, hidden]; the embedding when they are tied
  std::vector<LayerWeights> layers;
  std::vector<double> rope_factors;               ///< of rope_freqs.weight; empty when the file has none
  std::vector<std::unique_ptr<uint8_t[]>> owned;  ///< router terms, converted biases, scales
  std::vector<Memory> placed;                     ///< what place_weights() made
};

/// Finds every tensor that the configuration asks for and checks shape and type; nothing is copied but biases that are
/// not f32, the low terms of router weights and fp8 scales (as f32).
/// Fails  not_found: a tensor is missing, a scale of fp8 weights included. invalid_argument: a shape disagrees; the
///        message names the tensor, its shape and the shape needed, with the meaning of each extent; or a scale is
///        not a finite number > 0. unsupported: no operator takes its element type or scale, matrices that share an
///        input are quantised in different ways, or the checkpoint has tensors that the configuration has no use for
///        (a stored head beside tied embeddings is ignored).
Result<Weights> bind_weights(const Checkpoint& checkpoint, RouterMode router_mode);

/// Gives scale 1 to the keys and values of layers without scales; how many layers that were.
int64_t complete_kv_scales(Weights& weights);

}  // namespace vivace::model
