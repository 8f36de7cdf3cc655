#include "apps/vivace/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "apps/vivace/output.h"
#include "src/core/dispatch.h"
#include "src/engine/check_options.h"
#include "src/engine/compute.h"
#include "src/engine/decode_bucket.h"
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

/// With the sampler after it.
std::vector<model::OpUse> explain_step(model::Model& model, model::Phase phase, int64_t tokens,
                                       int64_t sampled, const Stream& stream) {
  std::vector<model::OpUse> uses = model.explain(phase, tokens, stream);
  uses.push_back({-1, "sampler", phase, tokens, explain_sampler(sampled, model.config().vocab, stream)});
  return uses;
}

/// What calls are explained for.
struct Place {
  std::unique_ptr<engine::Compute> compute;  ///< null: a GPU that is not here
  Stream stream;
};

Result<Place> place_of(const std::string& device) {
  std::string why;
  VIVACE_TRY_ASSIGN(const engine::DeviceName name, engine::parse_device(device));
  if (name.device == Device::cuda && device::compiled_with_cuda() && device::device_count(&why) == 0) {
    note("rows are those of an H200 (compute capability 9.0), with this machine's libraries: " + why);
    return Place{.compute = nullptr,
                 .stream = {.device = Device::cuda, .ordinal = -1, .compute_capability = 90}};
  }
  Place place;
  VIVACE_TRY_ASSIGN(place.compute, engine::Compute::create(device, 1));
  place.stream = place.compute->stream(nullptr);
  return place;
}

}  // namespace

Result<std::vector<model::OpUse>> explain_model(const EngineOptions& options,
                                                const std::vector<int64_t>& batches) {
  VIVACE_TRY(engine::check_options(options));
  VIVACE_TRY_ASSIGN(const auto checkpoint, model::Checkpoint::open(options.model));
  Dispatch dispatch;
  if (!options.prefer.empty()) VIVACE_TRY(dispatch.prefer(options.prefer));
  model::ModelOptions model_options = engine::model_options_of(options);
  VIVACE_TRY_ASSIGN(const Place place, place_of(options.device));
  Stream stream = place.stream;
  stream.dispatch = &dispatch;
  model_options.device = stream.device;
  model_options.ordinal = stream.ordinal;
  VIVACE_TRY_ASSIGN(const auto model, model::Model::load(*checkpoint, model_options));
  std::vector<model::OpUse> uses = explain_decodes(*model, batches, stream);
  const int64_t chunk = std::min(options.token_budget, model->max_model_len());
  std::ranges::move(explain_step(*model, model::Phase::prefill, chunk, 1, stream), std::back_inserter(uses));
  return uses;
}

std::vector<model::OpUse> explain_decodes(model::Model& model, const std::vector<int64_t>& batches,
                                          const Stream& stream) {
  std::vector<model::OpUse> uses;
  for (const int64_t batch : batches) {
    const model::ModelOptions& options = model.options();
    const int64_t rows =
        options.device == Device::cuda ? engine::decode_bucket(batch, options.max_requests) : batch;
    for (model::OpUse& use : explain_step(model, model::Phase::decode, rows, rows, stream)) {
      use.batch = batch;  // what was asked for, whatever the rows that it runs in
      uses.push_back(std::move(use));
    }
  }
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
      if (!preferred.empty() && !internal::names_row(preferred, before->name)) {
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

std::vector<bench::RowUse> row_calls(const Dispatch& dispatch) {
  std::vector<bench::RowUse> uses;
  for (const RowCount& count : dispatch.counts())
    uses.push_back({std::string(count.op), std::string(count.row), count.calls, {}});
  return uses;
}

Status add_reasons(std::vector<bench::RowUse>& rows, const std::vector<model::OpUse>& explained,
                   const std::string& prefer) {
  Dispatch preferences;
  if (!prefer.empty()) VIVACE_TRY(preferences.prefer(prefer));
  for (bench::RowUse& use : rows) {
    bool covered = false;
    for (const model::OpUse& call : explained) {
      if (call.op != use.op || call.choice.row != use.row) continue;
      covered = true;
      for (const Refusal& r : call.choice.refused) {
        const bool known = std::any_of(use.refused.begin(), use.refused.end(), [&](const Refusal& other) {
          return other.row == r.row && other.reason == r.reason;
        });
        if (!known) use.refused.push_back(r);
      }
    }
    if (!covered || !preferences.preferred(use.op).empty()) {
      // A row that the preference names was tried (linear=cpu names two): its calls said why not.
      const std::vector<Refusal> tried = use.refused;
      for (Refusal& r : table_reasons(preferences, use.op, use.row)) {
        if (std::ranges::find(tried, r.row, &Refusal::row) == tried.end())
          use.refused.push_back(std::move(r));
      }
    }
  }
  return {};
}

std::vector<std::pair<std::string, std::string>> settings_of(const EngineOptions& o) {
  const auto yes = [](bool value) { return std::string(value ? "yes" : "no"); };
  const DType own = o.device == "cpu" ? DType::f32 : DType::bf16;
  const DType kv_dtype = o.kv_dtype == DType::none ? own : o.kv_dtype;
  return {{"device", o.device},
          {"kv-dtype", std::string(name_of(kv_dtype))},
          {"exact", yes(o.exact)},
          {"deterministic", yes(o.deterministic)},
          {"router-mode", o.router_mode},
          {"prefer", o.prefer.empty() ? "nothing" : o.prefer},
          {"max-model-len", fmt::format("{}", o.max_model_len)},
          {"max-batch", fmt::format("{}", o.max_batch)},
          {"token-budget", fmt::format("{}", o.token_budget)},
          {"page-tokens", fmt::format("{}", o.page_tokens)}};
}

}  // namespace vivace::cli
