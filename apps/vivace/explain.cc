#include "apps/vivace/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "src/engine/compute.h"
#include "src/engine/model_runner.h"
#include "vivace/sampler.h"

namespace vivace::cli {

namespace {

Choice explain_sampler(int64_t rows, int64_t vocab, const Stream& stream) {
  return sampler_explain({.logits = Tensor(nullptr, DType::f32, {rows, vocab}),
                          .ids = Tensor(nullptr, DType::i32, {rows}),
                          .valid = Tensor(nullptr, DType::u8, {rows})},
                         stream);
}

}  // namespace

Result<std::vector<model::OpUse>> explain_model(const EngineOptions& options,
                                                const std::vector<int64_t>& batches) {
  VIVACE_TRY_ASSIGN(const auto checkpoint, model::Checkpoint::open(options.model));
  Dispatch dispatch;
  if (!options.prefer.empty()) VIVACE_TRY(dispatch.prefer(options.prefer));
  const int64_t largest = *std::max_element(batches.begin(), batches.end());
  model::ModelOptions model_options = engine::model_options_of(options);
  model_options.max_tokens = std::max(model_options.max_tokens, largest);
  model_options.max_requests = std::max(model_options.max_requests, largest);
  VIVACE_TRY_ASSIGN(const auto compute, engine::Compute::create(options.device, 1));
  model_options.device = compute->device().device;
  model_options.ordinal = compute->device().ordinal;
  VIVACE_TRY_ASSIGN(const auto model, model::Model::load(*checkpoint, model_options));
  const Stream stream = compute->stream(&dispatch);
  std::vector<model::OpUse> uses;
  const auto add_step = [&](model::Phase phase, int64_t tokens, int64_t sampled) {
    std::vector<model::OpUse> step = model->explain(phase, tokens, stream);
    std::move(step.begin(), step.end(), std::back_inserter(uses));
    uses.push_back({-1, "sampler", phase, tokens, explain_sampler(sampled, model->config().vocab, stream)});
  };
  for (const int64_t batch : batches) add_step(model::Phase::decode, batch, batch);
  add_step(model::Phase::prefill, std::min(options.token_budget, model->max_model_len()), 1);
  return uses;
}

std::vector<Refusal> table_reasons(const Dispatch& dispatch, std::string_view op, std::string_view row) {
  std::vector<Refusal> reasons;
  const std::string_view preferred = dispatch.preferred(op);
  for (const OpInfo& info : operators()) {
    if (info.name != op) continue;
    const auto ran =
        std::find_if(info.rows.begin(), info.rows.end(), [&](const RowInfo& r) { return r.name == row; });
    if (ran == info.rows.end()) return reasons;
    for (auto before = info.rows.begin(); before != ran; ++before) {
      std::string reason;
      if (!preferred.empty()) {
        reason = fmt::format("--prefer asks for {}", preferred);
      } else if (before->device != ran->device) {
        reason = fmt::format("runs on {}", name_of(before->device));
      } else {
        for (const Need& need : before->needs)
          reason += (reason.empty() ? "" : ", ") + describe(need, nullptr);
      }
      reasons.push_back({std::string(before->name), reason});
    }
  }
  return reasons;
}

}  // namespace vivace::cli
