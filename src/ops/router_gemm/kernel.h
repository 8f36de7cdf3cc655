#pragma once

// What the GPU rows share: the call as a kernel sees it, and how a score is stored.

#include "src/device/number.h"
#include "src/ops/router_gemm/table.h"

namespace vivace::router {

using device::bf16;

struct Params {
  const void* x;
  const bf16* terms[RouterWeight::kMaxTerms];
  const float* bias;
  void* scores;
  int64_t tokens, experts, hidden;
  int64_t x_stride, term_stride[RouterWeight::kMaxTerms], scores_stride;
  float term_scale[RouterWeight::kMaxTerms];
  int term_count;
  bool weight_ready;
  DType scores_type;
};

inline Params params_of(const RouterGemmArgs& args) {
  Params p = {};
  p.x = args.x.data;
  p.bias = args.bias.present() ? args.bias.as<const float>() : nullptr;
  p.scores = args.scores.data;
  p.tokens = args.x.shape[0];
  p.experts = args.scores.shape[1];
  p.hidden = args.x.shape[1];
  p.x_stride = args.x.stride[0];
  p.scores_stride = args.scores.stride[0];
  p.term_count = args.weight.term_count;
  p.weight_ready = args.weight_ready;
  p.scores_type = args.scores.dtype;
  for (int t = 0; t < p.term_count; ++t) {
    p.terms[t] = args.weight.terms[t].as<const bf16>();
    p.term_stride[t] = args.weight.terms[t].stride[0];
    p.term_scale[t] = router_term_scale(args.weight, t);
  }
  return p;
}

/// Adds the bias and stores the score.
__device__ __forceinline__ void store_score(const Params& p, int64_t token, int64_t expert, float score) {
  if (p.bias != nullptr) score += p.bias[expert];
  const int64_t at = token * p.scores_stride + expert;
  if (p.scores_type == DType::f32) {
    static_cast<float*>(p.scores)[at] = score;
  } else {
    static_cast<bf16*>(p.scores)[at] = device::from_float<bf16>(score);
  }
}

}  // namespace vivace::router
