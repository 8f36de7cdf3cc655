#include "vivace/sampler.h"

#include <cmath>
#include <limits>

#include "src/core/checks.h"
#include "src/core/workspace.h"
#include "src/ops/sampler/table.h"

namespace vivace {

namespace {

Status out_of_range(std::string_view field, double value, std::string_view needs) {
  return invalid_argument("{} is {}, needs {}", field, value, needs);
}

}  // namespace

Status check_sample_row(const SampleRow& row) {
  if (!std::isfinite(row.temperature) || row.temperature < 0) {
    return out_of_range("temperature", row.temperature, "a finite number >= 0");
  }
  if (row.top_k < 0) return out_of_range("top_k", row.top_k, "0 (all) or more");
  if (!(row.top_p > 0 && row.top_p <= 1)) {
    return out_of_range("top_p", row.top_p, "a number above 0 and at most 1");
  }
  if (!(row.min_p >= 0 && row.min_p <= 1)) return out_of_range("min_p", row.min_p, "a number from 0 to 1");
  if (!std::isfinite(row.repetition_penalty) || row.repetition_penalty <= 0) {
    return out_of_range("repetition_penalty", row.repetition_penalty, "a finite number above 0");
  }
  if (!std::isfinite(row.presence_penalty)) {
    return out_of_range("presence_penalty", row.presence_penalty, "a finite number");
  }
  if (!std::isfinite(row.frequency_penalty)) {
    return out_of_range("frequency_penalty", row.frequency_penalty, "a finite number");
  }
  if (row.top_logprobs < 0) return out_of_range("top_logprobs", row.top_logprobs, "0 or more");
  for (const LogitBias& bias : row.logit_bias) {
    if (std::isnan(bias.bias)) {
      return invalid_argument("logit_bias of id {} is nan, needs a number", bias.id);
    }
  }
  return {};
}

Facts sampler_facts(const SamplerArgs& args) {
  return Facts()
      .add("rows", args.logits.shape[0])
      .add("vocab", args.logits.shape[1])
      .add("logits", args.logits.dtype);
}

Status sampler(const SamplerArgs& args, const Stream& stream) {
  Checker check("sampler", stream.device);
  check.tensor("logits", args.logits, {"rows", "vocab"})
      .define("rows", static_cast<int64_t>(args.rows.size()), "rows.size()")
      .tensor("ids", args.ids, {"rows"})
      .tensor("valid", args.valid, {"rows"})
      .optional("logprobs", args.logprobs, {"rows"})
      .optional("top_ids", args.top_ids, {"rows", "top_logprobs"})
      .optional("top_logprobs", args.top_logprobs, {"rows", "top_logprobs"})
      .dtype("logits", args.logits, dtypes_mask(DType::f32, DType::bf16))
      .dtype("ids", args.ids, dtypes_mask(DType::i32))
      .dtype("valid", args.valid, dtypes_mask(DType::u8))
      .dtype("logprobs", args.logprobs, dtypes_mask(DType::f32))
      .dtype("top_ids", args.top_ids, dtypes_mask(DType::i32))
      .dtype("top_logprobs", args.top_logprobs, dtypes_mask(DType::f32));
  VIVACE_TRY(check.status());
  if (args.top_ids.present() != args.top_logprobs.present()) {
    return invalid_argument("sampler: top_ids is {} and top_logprobs is {}, needs both or neither",
                            to_string(args.top_ids), to_string(args.top_logprobs));
  }
  if (args.rows.empty()) return {};
  const int64_t vocab = args.logits.shape[1];
  check.that(vocab >= 1 && vocab <= std::numeric_limits<int32_t>::max(), "logits.shape[1]",
             static_cast<double>(vocab), "1 to 2^31 - 1");
  VIVACE_TRY(check.status());
  const int64_t width = args.top_ids.present() ? args.top_ids.shape[1] : 0;
  for (size_t i = 0; i < args.rows.size(); ++i) {
    const SampleRow& row = args.rows[i];
    if (const Status status = check_sample_row(row); !status.ok()) {
      return status.at(fmt::format("sampler: rows[{}]", i));
    }
    if (row.top_logprobs > width) {
      return invalid_argument("sampler: rows[{}].top_logprobs is {}, needs at most {} (top_ids.shape[1])", i,
                              row.top_logprobs, width);
    }
    const int64_t words = (vocab + 31) / 32;
    if (!row.allowed_bits.empty() && static_cast<int64_t>(row.allowed_bits.size()) < words) {
      return invalid_argument("sampler: rows[{}].allowed_bits has {} words, needs {} for vocab = {}", i,
                              row.allowed_bits.size(), words, vocab);
    }
  }
  VIVACE_TRY_ASSIGN(const int64_t needed, sampler_workspace_bytes(args, stream));
  VIVACE_TRY(check_workspace("sampler", args.workspace, needed, stream.device));
  return dispatch(kSampler, args, stream);
}

Result<int64_t> sampler_workspace_bytes(const SamplerArgs& args, const Stream& stream) {
  return workspace_bytes(kSampler, args, stream);
}

Cost sampler_cost(const SamplerArgs& args) {
  // Per logit: comparison, difference, scaling, exponential, sum.
  return {args.logits.bytes(), 5 * args.logits.elements()};
}

Choice sampler_explain(const SamplerArgs& args, const Stream& stream) {
  return explain(kSampler, args, stream);
}

}  // namespace vivace
