#include "vivace/sampler.h"

#include <cmath>
#include <limits>

#include "src/core/checks.h"
#include "src/core/dispatch_in_workspace.h"
#include "src/ops/sampler/table.h"

namespace vivace {

namespace {

Status out_of_range(std::string_view field, double value, std::string_view needs) {
  return invalid_argument("{} is {}, needs {}", field, value, needs);
}

}  // namespace

Status check_sample_params(const SampleParams& p) {
  if (!std::isfinite(p.temperature) || p.temperature < 0) {
    return out_of_range("temperature", p.temperature, "a finite number >= 0");
  }
  if (p.top_k < 0) return out_of_range("top_k", static_cast<double>(p.top_k), "0 (all) or more");
  if (!(p.top_p > 0 && p.top_p <= 1)) return out_of_range("top_p", p.top_p, "a number above 0 and at most 1");
  if (!(p.min_p >= 0 && p.min_p <= 1)) return out_of_range("min_p", p.min_p, "a number from 0 to 1");
  if (!std::isfinite(p.repetition_penalty) || p.repetition_penalty <= 0) {
    return out_of_range("repetition_penalty", p.repetition_penalty, "a finite number above 0");
  }
  if (!std::isfinite(p.presence_penalty)) {
    return out_of_range("presence_penalty", p.presence_penalty, "a finite number");
  }
  if (!std::isfinite(p.frequency_penalty)) {
    return out_of_range("frequency_penalty", p.frequency_penalty, "a finite number");
  }
  return {};
}

Facts sampler_facts(const SamplerArgs& args) {
  Facts facts;
  facts.add("rows", args.logits.shape[0]).add("vocab", args.logits.shape[1]).add("logits", args.logits.dtype);
  return facts;
}

namespace {

Status both_or_neither(std::string_view a_name, const Tensor& a, std::string_view b_name, const Tensor& b) {
  if (a.present() == b.present()) return {};
  return invalid_argument("sampler: {} is {} and {} is {}, needs both or neither", a_name, to_string(a),
                          b_name, to_string(b));
}

/// Parameters, states and biases, which only memory knows.
Status check_contents(const SamplerArgs& args) {
  const int64_t rows = args.logits.shape[0];
  const bool history = args.prompt_bits.present() || args.output_counts.present();
  const int64_t states = args.prompt_bits.present() ? args.prompt_bits.shape[0] : args.output_counts.shape[0];
  for (int64_t r = 0; r < rows; ++r) {
    if (history && args.state.present()) {
      const int32_t state = args.state.as<const int32_t>()[r];
      if (state < -1 || state >= states) {
        return invalid_argument("sampler: state[{}] is {}, needs -1 (none) to {} (states - 1)", r, state,
                                states - 1);
      }
    }
    if (args.bias_start.present()) {
      const int32_t* start = args.bias_start.as<const int32_t>() + r;
      if (start[0] < 0 || start[1] < start[0] || start[1] > args.bias_ids.shape[0]) {
        return invalid_argument(
            "sampler: bias_start[{}] is {} and the next {}, needs 0 to entries = {}, not falling", r,
            start[0], start[1], args.bias_ids.shape[0]);
      }
    }
    const SampleRow row = sample_row_of(args, r);
    if (const Status status = check_sample_params(row.params); !status.ok()) {
      return status.at(fmt::format("sampler: rows[{}]", r));
    }
    for (size_t i = 0; i < row.bias_ids.size(); ++i) {
      if (std::isnan(row.bias_values[i])) {
        return invalid_argument("sampler: rows[{}]: the bias of id {} is nan, needs a number", r,
                                row.bias_ids[i]);
      }
    }
  }
  return {};
}

}  // namespace

Status sampler(const SamplerArgs& args, const Stream& stream) {
  constexpr int64_t kF32 = dtypes_mask(DType::f32), kI32 = dtypes_mask(DType::i32),
                    kI64 = dtypes_mask(DType::i64);
  const int64_t vocab = args.logits.shape[1], rows = args.logits.shape[0];
  Checker check("sampler", stream);
  check.tensor("logits", args.logits, {"rows", "vocab"})
      .define("words", vocab / 32 + (vocab % 32 != 0), "ceil(vocab / 32)")
      .define("rows + 1", rows + 1, "logits.shape[0] + 1")
      .dtype("logits", args.logits, dtypes_mask(DType::f32, DType::bf16));
  const auto per_row = [&](std::string_view name, const Tensor& t, int64_t type) {
    check.optional(name, t, {"rows"}).dtype(name, t, type);
  };
  per_row("temperature", args.temperature, kF32);
  per_row("top_p", args.top_p, kF32);
  per_row("min_p", args.min_p, kF32);
  per_row("top_k", args.top_k, kI32);
  per_row("repetition_penalty", args.repetition_penalty, kF32);
  per_row("presence_penalty", args.presence_penalty, kF32);
  per_row("frequency_penalty", args.frequency_penalty, kF32);
  per_row("seed", args.seed, kI64);
  per_row("position", args.position, kI64);
  per_row("state", args.state, kI32);
  per_row("logprobs", args.logprobs, kF32);
  check.optional("prompt_bits", args.prompt_bits, {"states", "words"})
      .optional("output_counts", args.output_counts, {"states", "vocab"})
      .optional("bias_start", args.bias_start, {"rows + 1"})
      .optional("bias_ids", args.bias_ids, {"entries"})
      .optional("bias_values", args.bias_values, {"entries"})
      .optional("allowed_bits", args.allowed_bits, {"rows", "words"})
      .tensor("ids", args.ids, {"rows"})
      .tensor("valid", args.valid, {"rows"})
      .optional("top_ids", args.top_ids, {"rows", "top_logprobs"})
      .optional("top_logprobs", args.top_logprobs, {"rows", "top_logprobs"})
      .dtype("prompt_bits", args.prompt_bits, kI32)
      .dtype("output_counts", args.output_counts, kI32)
      .dtype("bias_start", args.bias_start, kI32)
      .dtype("bias_ids", args.bias_ids, kI32)
      .dtype("bias_values", args.bias_values, kF32)
      .dtype("allowed_bits", args.allowed_bits, kI32)
      .dtype("ids", args.ids, kI32)
      .dtype("valid", args.valid, dtypes_mask(DType::u8))
      .dtype("top_ids", args.top_ids, kI32)
      .dtype("top_logprobs", args.top_logprobs, kF32)
      .written("top_ids", args.top_ids)
      .written("top_logprobs", args.top_logprobs);
  if (args.count_ids) check.written("output_counts", args.output_counts);
  VIVACE_TRY(check.status());
  VIVACE_TRY(both_or_neither("top_ids", args.top_ids, "top_logprobs", args.top_logprobs));
  VIVACE_TRY(both_or_neither("seed", args.seed, "position", args.position));
  VIVACE_TRY(both_or_neither("bias_start", args.bias_start, "bias_ids", args.bias_ids));
  VIVACE_TRY(both_or_neither("bias_start", args.bias_start, "bias_values", args.bias_values));
  if (args.count_ids && !args.output_counts.present()) {
    return invalid_argument(
        "sampler: count_ids is true and output_counts is absent, needs a tensor to count into");
  }
  if (rows == 0) return {};
  check.that(vocab >= 1 && vocab <= std::numeric_limits<int32_t>::max(), "logits.shape[1]",
             static_cast<double>(vocab), "1 to 2^31 - 1");
  VIVACE_TRY(check.status());
  if ((args.prompt_bits.present() || args.output_counts.present()) && !args.state.present() &&
      check["states"] < rows) {
    return invalid_argument(
        "sampler: state is absent with {} states for {} rows, needs a state for each row or the tensor",
        check["states"], rows);
  }
  if (stream.readable()) VIVACE_TRY(check_contents(args));  // a GPU's memory is not readable here
  return dispatch_in_workspace(kSampler, args, stream);
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
