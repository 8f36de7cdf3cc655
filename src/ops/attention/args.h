#pragma once

#include <cmath>

#include "src/core/checks.h"
#include "src/core/dispatch.h"
#include "vivace/attention.h"
#include "vivace/cost.h"
#include "vivace/stream.h"

// What attention_prefill and attention_decode check, ask and read in the same way.

namespace vivace {

void check_query_start(Checker& check, const Tensor& query_start, int64_t requests);

/// Scale tensors: present exactly with fp8, f32, of the shapes that AttentionArgs names. "tokens", "heads_q", "pages",
/// "page_tokens" and "heads_kv" are defined.
void check_fp8_scales(Checker& check, const Tensor& q, const Tensor& k, const Tensor& q_scale,
                      const Tensor& k_scale, const Tensor& v_scale);

/// Shapes, types and options. Defines "tokens", "requests", "heads_q", "heads_kv", "head_dim", "pages",
/// "page_tokens" and "max_pages".
void check_attention(Checker& check, const AttentionArgs& args);

/// What only memory knows, on the CPU: row ranges, lengths and the page ids that will be read.
/// `max_query_tokens` 0: no limit.
Status check_attention_contents(std::string_view op, const AttentionArgs& args, int64_t max_query_tokens);

Facts attention_facts(const AttentionArgs& args);

/// What rows need that keep a head on the stack.
inline constexpr Need kHeadOnStack[] = {{"head_dim", Need::at_most, kMaxHeadDim}};

/// What cuda.mma needs of both operators: 16-byte copies bring K and V.
inline constexpr Need kAttentionMmaNeeds[] = {
    {"head_dim", Need::at_most, 256},
    {"q", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"kv", Need::dtype_in, dtypes_mask(DType::bf16, DType::fp8_e4m3)},
    {"k_alignment", Need::multiple_of, 16},
    {"v_alignment", Need::multiple_of, 16},
    {"compute_capability", Need::at_least, 80}};

/// Bytes of q, output, lse and of all keys and values that the page table has room for; flops of all rows
/// over all of them.
Cost attention_cost(const AttentionArgs& args);

/// What a stored element of k or v is multiplied by: 1 without fp8. On the CPU.
inline float k_scale_of(const Tensor& k_scale, int64_t page, int64_t slot, int64_t head) {
  if (!k_scale.present()) return 1.f;
  if (k_scale.rank == 1) return *k_scale.as<const float>();
  return k_scale
      .as<const float>()[page * k_scale.stride[0] + slot * k_scale.stride[1] + head * k_scale.stride[2]];
}
inline float v_scale_of(const Tensor& v_scale, int64_t head) {
  if (!v_scale.present()) return 1.f;
  return v_scale.as<const float>()[v_scale.shape[0] == 1 ? 0 : head * v_scale.stride[0]];
}
inline float q_scale_of(const Tensor& q_scale, int64_t token, int64_t head) {
  return q_scale.present() ? q_scale.as<const float>()[token * q_scale.stride[0] + head * q_scale.stride[1]]
                           : 1.f;
}

inline double softmax_scale_of(const AttentionArgs& args) {
  return args.softmax_scale != 0 ? args.softmax_scale : 1 / std::sqrt(static_cast<double>(args.q.shape[2]));
}

/// The query rows and the keys of one request, on the CPU.
struct RequestRange {
  int64_t row_begin, rows, keys;
  /// Keys [first, last) that row `i` of this request sees.
  int64_t last_key(int64_t i) const { return keys - rows + i + 1 < 0 ? 0 : keys - rows + i + 1; }
  int64_t first_key(int64_t i, int64_t window) const {
    const int64_t last = last_key(i);
    return window > 0 && last > window ? last - window : 0;
  }
};

inline RequestRange request_range(const AttentionArgs& args, int64_t request) {
  const int32_t* start = args.query_start.as<const int32_t>();
  const int64_t begin = start[request];
  return {begin, start[request + 1] - begin,
          args.kv_lengths.as<const int32_t>()[request * args.kv_lengths.stride[0]]};
}

}  // namespace vivace
