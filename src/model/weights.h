#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/model/checkpoint.h"
#include "src/model/config.h"
#include "src/model/memory.h"
#include "vivace/fused_moe.h"
#include "vivace/router_gemm.h"
#include "vivace/status.h"
#include "vivace/tensor.h"

namespace vivace::model {

/// The weights of one decoder layer: views of the checkpoint, or of Weights::owned where a copy is needed.
struct LayerWeights {
  Tensor input_norm, post_attention_norm;  ///< [hidden]
  Tensor q, k, v;                          ///< [heads * head_dim, hidden]
  Tensor qkv;                              ///< q, k and v as one matrix, where they lie so; else absent
  Tensor o;                                ///< [hidden, heads_q * head_dim]
  Tensor q_norm, k_norm;                   ///< [head_dim]; absent without qk_norm
  ExpertWeights dense;                     ///< the MLP of a dense layer; absent in a sparse one
  Tensor dense_gate_up;                    ///< its gate and up as one matrix, where they lie so

  RouterWeight router;                 ///< sparse layers alone, like all below
  Tensor expert_bias;                  ///< f32 [experts], absent when the architecture has none
  std::vector<ExpertWeights> experts;  ///< one entry per expert, whichever layout the file has; empty when stacked
  Tensor experts_gate_up, experts_down;  ///< [experts, 2 intermediate, hidden], [experts, hidden, intermediate]
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
  std::vector<std::unique_ptr<uint8_t[]>> owned;  ///< router terms and converted biases
  std::vector<Memory> placed;                     ///< what place_weights() made
};

/// Finds every tensor that the configuration asks for and checks shape and type; nothing is copied but biases that are
/// not f32 and the low terms of router weights.
/// Fails  not_found: a tensor is missing. invalid_argument: a shape disagrees; the message names the tensor, its shape
///        and the shape needed, with the meaning of each extent. unsupported: no operator takes its element type, or the checkpoint has
///        tensors that the configuration has no use for (a stored head beside tied embeddings is ignored).
Result<Weights> bind_weights(const Checkpoint& checkpoint, RouterMode router_mode);

}  // namespace vivace::model
