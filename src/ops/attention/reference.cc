#include "src/ops/attention/reference.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "src/core/number.h"

namespace vivace {

namespace {

int64_t page_of(const AttentionArgs& args, int64_t request, int64_t j) {
  return args.page_table.as<const int32_t>()[request * args.page_table.stride[0] + j / args.k.shape[1]];
}

/// Element offset of key `j` of a request in k or v.
int64_t key_offset(const AttentionArgs& args, const Tensor& cache, int64_t request, int64_t j, int64_t head) {
  return page_of(args, request, j) * cache.stride[0] + j % cache.shape[1] * cache.stride[1] +
         head * cache.stride[2];
}

void reference_row(const AttentionArgs& args, int64_t request, int64_t i, int64_t head) {
  const RequestRange range = request_range(args, request);
  const int64_t head_dim = args.q.shape[2], head_kv = head / (args.q.shape[1] / args.k.shape[2]);
  const int64_t row = range.row_begin + i;
  const int64_t first = range.first_key(i, args.window), last = range.last_key(i);
  const Tensor q = args.q.at(row).at(head), output = args.output.at(row).at(head);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();

  std::vector<double> scores;
  for (int64_t j = first; j < last; ++j) {
    const int64_t offset = key_offset(args, args.k, request, j, head_kv);
    double score = 0;
    for (int64_t d = 0; d < head_dim; ++d)
      score += double{load(q.dtype, q.data, d)} * load(args.k.dtype, args.k.data, offset + d);
    score *= softmax_scale_of(args) * q_scale_of(args.q_scale, row, head) *
             k_scale_of(args.k_scale, page_of(args, request, j), j % args.k.shape[1], head_kv);
    if (args.soft_cap > 0) score = args.soft_cap * std::tanh(score / args.soft_cap);
    scores.push_back(score);
  }

  const double v_scale = v_scale_of(args.v_scale, head_kv);
  std::vector<double> sum(head_dim, 0.0);
  double denominator = 0, lse = -kInfinity;
  if (!scores.empty()) {
    double maximum = *std::max_element(scores.begin(), scores.end());
    const double sink = args.sinks.present() ? args.sinks.as<const float>()[head] : -kInfinity;
    maximum = std::max(maximum, sink);
    if (maximum == -kInfinity) maximum = 0;  // so that such scores weigh 0, and only a NaN is NaN here
    denominator = std::exp(sink - maximum);
    for (int64_t j = first; j < last; ++j) {
      const double p = std::exp(scores[j - first] - maximum);
      const int64_t offset = key_offset(args, args.v, request, j, head_kv);
      denominator += p;
      for (int64_t d = 0; d < head_dim; ++d) sum[d] += p * load(args.v.dtype, args.v.data, offset + d);
    }
    lse = maximum + std::log(denominator);
  }
  for (int64_t d = 0; d < head_dim; ++d)
    store(output.dtype, output.data, d, scores.empty() ? 0.0 : sum[d] / denominator * v_scale);
  if (args.lse.present()) store(DType::f32, args.lse.at(row).data, head, lse);
}

}  // namespace

void attention_reference(const AttentionArgs& args) {
  for (int64_t request = 0; request < args.page_table.shape[0]; ++request) {
    for (int64_t i = 0; i < request_range(args, request).rows; ++i)
      for (int64_t head = 0; head < args.q.shape[1]; ++head) reference_row(args, request, i, head);
  }
}

}  // namespace vivace
