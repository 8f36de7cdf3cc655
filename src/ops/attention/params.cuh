#pragma once

// What the GPU rows of attention_prefill and attention_decode have in common whatever their products: the call as a kernel
// gets it, the rows and keys of a request, how sums over disjoint keys become one, and how a row ends.
//
// Sums and products are spelled __fadd_rn and so on: what the compiler fuses on its own, it may fuse in one kernel and not in
// another.

#include <cuda_runtime.h>

#include <algorithm>

#include "src/device/number.h"
#include "src/ops/attention/args.h"

namespace vivace::attention_cuda {

using device::exp2_of;

constexpr float kNoKeys = -INFINITY;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

/// k or v. Steps count 16 bytes, so that an offset is a product of 32-bit numbers; the stride of heads counts bytes.
struct Cache {
  const char* data;
  uint32_t page_step, token_step;
  int64_t head_stride;
};

struct Params {
  const void* q;
  int64_t q_stride[2];
  Cache k, v;
  const int32_t* page_table;
  int64_t page_table_stride;
  const int32_t* kv_lengths;
  int64_t kv_length_stride;
  const int32_t* query_start;
  int64_t query_start_stride;
  void* output;
  int64_t output_stride[2];
  const float *q_scale, *k_scale, *v_scale, *sinks;
  int64_t q_scale_stride[2], k_scale_stride[3], v_scale_stride;
  float* lse;
  int64_t lse_stride[2];
  int64_t tokens;
  int requests, heads_kv, group, head_dim, page_tokens, max_pages, pages, window;
  DType q_type, output_type;
  bool q_vectors;     ///< eight elements of q are one aligned access
  bool output_pairs;  ///< two elements of the output are
  bool scaled_keys;   ///< a scale per key and head
  float factor;       ///< of a product of q and k: units of log2, or of the cap
  float cap_log2;     ///< 0: none
};

/// The rows and keys of a request. Whatever memory says, rows lie inside q and keys inside the page table.
struct Request {
  int begin, rows, keys;
  const int32_t* table;

  __device__ Request(const Params& p, int request) {
    const int64_t first = p.query_start[request * p.query_start_stride];
    const int64_t last = p.query_start[(request + 1) * p.query_start_stride];
    const bool sound = first >= 0 && last >= first && last <= p.tokens;
    begin = sound ? static_cast<int>(first) : 0;
    rows = sound ? static_cast<int>(last - first) : 0;
    const int64_t length = p.kv_lengths[request * p.kv_length_stride];
    const int64_t room = int64_t{p.max_pages} * p.page_tokens;
    keys = static_cast<int>(length < 0 ? 0 : length < room ? length : room);
    table = p.page_table + request * p.page_table_stride;
  }
  /// Keys [first, last) that token `i` of the request sees.
  __device__ int last_key(int i) const { return max(0, keys - rows + i + 1); }
  __device__ int first_key(int i, int window) const { return window > 0 ? max(0, last_key(i) - window) : 0; }
};

/// cap * tanh(x) by 2^(2 x log2 e); from 16 on the quotient is 1 in fp32. A NaN stays.
__device__ __forceinline__ float capped(float x, float cap) {
  const float e = exp2_of(__fmul_rn(x > 16.f ? 16.f : x, 2.f * kLog2E));
  return __fmul_rn(cap, __fdividef(__fadd_rn(e, -1.f), __fadd_rn(e, 1.f)));
}

/// Factors on two sums over disjoint keys that become one. A part without weight changes no bit of a total, and onto
/// nothing a part is copied.
struct Blend {
  float total, part, maximum;

  __device__ Blend(float total_maximum, float total_weight, float part_maximum, float part_weight) {
    const bool nothing = part_maximum == kNoKeys && part_weight == 0.f;
    const bool onto_nothing = total_maximum == kNoKeys && total_weight == 0.f;
    maximum = fmaxf(total_maximum, part_maximum);
    total = nothing ? 1.f : onto_nothing ? 0.f : exp2_of(__fsub_rn(total_maximum, maximum));
    part = nothing ? 0.f : exp2_of(__fsub_rn(part_maximum, maximum));
  }
  __device__ float operator()(float total_value, float part_value) const {
    return __fmaf_rn(part_value, part, __fmul_rn(total_value, total));
  }
};

/// What a row's sums are multiplied by, and its lse.
struct RowEnd {
  float scale, lse;

  __device__ RowEnd(const Params& p, bool sees_keys, float maximum, float weight, int head) {
    scale = 0.f;
    lse = kNoKeys;
    if (!sees_keys) return;
    scale = 1.f;
    if (p.sinks != nullptr) {
      const float sink = __fmul_rn(p.sinks[head], kLog2E), most = fmaxf(maximum, sink);
      scale = exp2_of(__fsub_rn(maximum, most));
      weight = __fmaf_rn(weight, scale, exp2_of(__fsub_rn(sink, most)));
      maximum = most;
    }
    scale = __fdiv_rn(scale, weight);
    if (p.v_scale != nullptr) scale *= p.v_scale[head / p.group * p.v_scale_stride];
    lse = __fmul_rn(__fadd_rn(maximum, log2f(weight)), kLn2);
  }
};

// ---- Host

/// The table of rows asks for strides of whole 16 bytes.
inline Cache cache_of(const Tensor& t) {
  const int64_t element = info_of(t.dtype).block_bytes;
  return {static_cast<const char*>(t.data), static_cast<uint32_t>(t.stride[0] * element / 16),
          static_cast<uint32_t>(t.stride[1] * element / 16), t.stride[2] * element};
}

inline Params params_of(const AttentionArgs& args) {
  Params p{};
  p.q = args.q.data;
  p.output = args.output.data;
  for (int i = 0; i < 2; ++i) {
    p.q_stride[i] = args.q.stride[i];
    p.output_stride[i] = args.output.stride[i];
    p.q_scale_stride[i] = args.q_scale.stride[i];
    p.lse_stride[i] = args.lse.stride[i];
  }
  p.k = cache_of(args.k);
  p.v = cache_of(args.v);
  p.page_table = args.page_table.as<const int32_t>();
  p.page_table_stride = args.page_table.stride[0];
  p.kv_lengths = args.kv_lengths.as<const int32_t>();
  p.kv_length_stride = args.kv_lengths.stride[0];
  p.query_start = args.query_start.as<const int32_t>();
  p.query_start_stride = args.query_start.stride[0];
  p.q_scale = args.q_scale.as<const float>();
  p.k_scale = args.k_scale.as<const float>();
  p.v_scale = args.v_scale.as<const float>();
  p.sinks = args.sinks.as<const float>();
  p.lse = args.lse.as<float>();
  p.scaled_keys = args.k_scale.rank == 3;
  for (int i = 0; i < 3; ++i) p.k_scale_stride[i] = p.scaled_keys ? args.k_scale.stride[i] : 0;
  p.v_scale_stride = args.v_scale.shape[0] > 1 ? args.v_scale.stride[0] : 0;
  p.tokens = args.q.shape[0];
  p.requests = static_cast<int>(args.page_table.shape[0]);
  p.heads_kv = static_cast<int>(args.k.shape[2]);
  p.group = static_cast<int>(args.q.shape[1] / args.k.shape[2]);
  p.head_dim = static_cast<int>(args.q.shape[2]);
  p.page_tokens = static_cast<int>(args.k.shape[1]);
  p.max_pages = static_cast<int>(args.page_table.shape[1]);
  p.pages = static_cast<int>(args.k.shape[0]);
  p.window = static_cast<int>(std::min<int64_t>(args.window, 0x7fffffff));
  p.q_type = args.q.dtype;
  p.output_type = args.output.dtype;
  const int64_t q_bytes = 8 * info_of(args.q.dtype).block_bytes,
                out_bytes = 2 * info_of(args.output.dtype).block_bytes;
  p.q_vectors = p.head_dim % 8 == 0 && alignment_of(args.q) % q_bytes == 0;
  p.output_pairs = p.head_dim % 2 == 0 && alignment_of(args.output) % out_bytes == 0;
  const double scale = softmax_scale_of(args);
  p.factor = static_cast<float>(args.soft_cap > 0 ? scale / args.soft_cap : scale * 1.4426950408889634);
  p.cap_log2 = static_cast<float>(args.soft_cap * 1.4426950408889634);
  return p;
}

}  // namespace vivace::attention_cuda
