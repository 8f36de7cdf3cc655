#include "src/engine/model_runner.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/cpu/machine.h"
#include "src/cpu/thread_pool.h"
#include "src/engine/check_options.h"
#include "src/model/zero_memory.h"
#include "vivace/sampler.h"

namespace vivace::engine {

namespace {

constexpr int64_t kDefaultFullRequests = 8;
constexpr int64_t kCachedRequests = 64;

class ModelRunner final : public Runner {
 public:
  ModelRunner(std::shared_ptr<const model::Checkpoint> checkpoint, int threads)
      : checkpoint_(std::move(checkpoint)), threads_(threads) {}

  Status prepare(const EngineOptions& options);

  Status step(const StepInput& input, std::vector<Sampled>& sampled) override;
  int64_t vocab() const override { return model_->config().vocab; }
  int64_t max_model_len() const override { return model_->max_model_len(); }
  int64_t pages() const override { return pages_; }
  int64_t page_tokens() const override { return model_->options().page_tokens; }
  std::span<const int32_t> eos_ids() const override { return model_->config().eos_ids; }
  Dispatch& dispatch() override { return dispatch_; }

 private:
  Stream stream() { return {.threads = &threads_, .dispatch = &dispatch_}; }
  Status sample(const StepInput& input, const Tensor& logits, std::vector<Sampled>& sampled);

  std::shared_ptr<const model::Checkpoint> checkpoint_;
  cpu::ThreadPool threads_;
  Dispatch dispatch_;
  std::unique_ptr<model::Model> model_;
  int64_t pages_ = 0;
  model::ZeroMemory logits_, sampler_scratch_;  // [max_requests, vocab] f32; u8

  // Of the step that runs, kept for their memory.
  std::vector<int64_t> logit_rows_;
  std::vector<SampleRow> sample_rows_;
  std::vector<std::vector<LogitBias>> biases_;
  std::vector<int32_t> ids_, top_ids_;
  std::vector<uint8_t> valid_;
  std::vector<float> logprobs_, top_logprobs_;
};

Status ModelRunner::prepare(const EngineOptions& options) {
  if (!options.prefer.empty()) VIVACE_TRY(dispatch_.prefer(options.prefer));
  VIVACE_TRY_ASSIGN(model_, model::Model::load(*checkpoint_, model_options_of(options)));
  const int64_t page_tokens = model_->options().page_tokens;
  VIVACE_TRY_ASSIGN(pages_, pages_of({.page_bytes = model_->page_bytes(),
                                      .pages_per_request = (max_model_len() + page_tokens - 1) / page_tokens,
                                      .kv_memory_bytes = options.kv_memory_bytes,
                                      .max_batch = options.max_batch,
                                      .available_bytes = cpu::available_memory_bytes()}));
  VIVACE_TRY(model_->allocate_pages(pages_, stream()));

  const int64_t rows = model_->options().max_requests;
  VIVACE_TRY_ASSIGN(logits_, model::ZeroMemory::reserve(rows * vocab() * 4, "logits"));
  const SampleRow greedy{.temperature = 0};
  const SamplerArgs shape{.logits = Tensor(nullptr, DType::f32, {1, vocab()}),
                          .rows = {&greedy, 1},
                          .ids = Tensor(nullptr, DType::i32, {1}),
                          .valid = Tensor(nullptr, DType::u8, {1})};
  VIVACE_TRY_ASSIGN(const int64_t scratch, sampler_workspace_bytes(shape, stream()));
  VIVACE_TRY_ASSIGN(sampler_scratch_, model::ZeroMemory::reserve(scratch, "sampler scratch"));
  return {};
}

Status ModelRunner::step(const StepInput& input, std::vector<Sampled>& sampled) {
  sampled.clear();
  const auto rows = static_cast<int64_t>(input.samples.size());
  if (rows > model_->options().max_requests) {
    return invalid_argument("step: {} samples, needs at most {}", rows, model_->options().max_requests);
  }
  logit_rows_.clear();
  for (const SampleSlot& slot : input.samples) logit_rows_.push_back(slot.row);
  const Tensor logits(logits_.data(), DType::f32, {rows, vocab()});
  VIVACE_TRY(model_->forward({.token_ids = input.token_ids,
                              .positions = input.positions,
                              .slots = input.slots,
                              .query_start = input.query_start,
                              .kv_lengths = input.kv_lengths,
                              .page_table = input.page_table,
                              .max_pages = input.max_pages,
                              .decode_requests = input.decode_requests,
                              .logit_rows = logit_rows_},
                             logits, stream()));
  return rows == 0 ? Status() : sample(input, logits, sampled);
}

Status ModelRunner::sample(const StepInput& input, const Tensor& logits, std::vector<Sampled>& sampled) {
  const size_t rows = input.samples.size();
  const auto count = static_cast<int64_t>(rows);
  biases_.resize(std::max(biases_.size(), rows));
  sample_rows_.clear();
  int best = -1;  // -1: nobody wants log-probabilities
  for (size_t i = 0; i < rows; ++i) {
    const SampleSlot& slot = input.samples[i];
    const SamplingParams& params = *slot.params;
    biases_[i].clear();
    for (const auto& [id, bias] : params.logit_bias) biases_[i].push_back({id, bias});
    best = std::max(best, params.logprobs);
    sample_rows_.push_back({.temperature = params.temperature,
                            .top_k = static_cast<int32_t>(std::min<int64_t>(params.top_k, INT32_MAX)),
                            .top_p = params.top_p,
                            .min_p = params.min_p,
                            .repetition_penalty = params.repetition_penalty,
                            .presence_penalty = params.presence_penalty,
                            .frequency_penalty = params.frequency_penalty,
                            .top_logprobs = std::max(0, params.logprobs),
                            .seed = slot.seed,
                            .position = slot.position,
                            .prompt_ids = slot.prompt_ids,
                            .output_ids = slot.output_ids,
                            .logit_bias = biases_[i],
                            .banned_ids = slot.banned_ids});
  }
  ids_.resize(rows);
  valid_.resize(rows);
  SamplerArgs args{.logits = logits,
                   .rows = sample_rows_,
                   .ids = Tensor(ids_.data(), DType::i32, {count}),
                   .valid = Tensor(valid_.data(), DType::u8, {count})};
  if (sampler_scratch_.bytes() > 0) {
    args.workspace = Tensor(sampler_scratch_.data(), DType::u8, {sampler_scratch_.bytes()});
  }
  const size_t top = static_cast<size_t>(std::max(0, best));
  if (best >= 0) {
    logprobs_.resize(rows);
    args.logprobs = Tensor(logprobs_.data(), DType::f32, {count});
  }
  if (top > 0) {
    top_ids_.resize(rows * top);
    top_logprobs_.resize(rows * top);
    args.top_ids = Tensor(top_ids_.data(), DType::i32, {count, best});
    args.top_logprobs = Tensor(top_logprobs_.data(), DType::f32, {count, best});
  }
  VIVACE_TRY(sampler(args, stream()));

  sampled.resize(rows);
  for (size_t i = 0; i < rows; ++i) {
    Sampled& out = sampled[i];
    out = {.id = ids_[i], .valid = valid_[i] != 0, .logprob = 0, .top = {}};
    const int wanted = input.samples[i].params->logprobs;
    if (wanted >= 0) out.logprob = logprobs_[i];
    for (int j = 0; j < wanted && top_ids_[i * top + j] >= 0; ++j) {
      out.top.push_back({top_ids_[i * top + j], top_logprobs_[i * top + j]});
    }
  }
  return {};
}

}  // namespace

model::ModelOptions model_options_of(const EngineOptions& options) {
  return {.kv_dtype = options.kv_dtype,
          .exact = options.exact,
          .deterministic = options.deterministic,
          .router_mode = options.router_mode,
          .page_tokens = options.page_tokens,
          .max_tokens = std::max(options.token_budget, options.max_batch),
          .max_requests = options.max_batch,
          .max_model_len = options.max_model_len};
}

Result<int64_t> pages_of(const PoolSize& size) {
  const int64_t asked = size.kv_memory_bytes, available = size.available_bytes;
  if (asked < 0) return invalid_argument("kv_memory_bytes is {}, needs a number >= 0 (0 chooses)", asked);
  int64_t needed = 0, useful = 0;
  if (__builtin_mul_overflow(size.pages_per_request, size.page_bytes, &needed)) {
    return error(Code::out_of_memory,
                 "one request of the full context needs {} KV pages of {} bytes, more than 2^63 bytes; lower "
                 "--max-model-len",
                 size.pages_per_request, size.page_bytes);
  }
  if (__builtin_mul_overflow(size.max_batch + kCachedRequests, size.pages_per_request, &useful)) {
    useful = INT32_MAX;
  }
  int64_t pages = asked / size.page_bytes;
  if (asked > 0 && pages < size.pages_per_request) {
    return invalid_argument(
        "kv_memory_bytes is {}, needs at least {} for one request of the full context; raise --kv-memory or "
        "lower --max-model-len",
        asked, needed);
  }
  if (available > 0 && asked > available) {
    return error(Code::out_of_memory, "kv_memory_bytes is {}, {} bytes are available; lower --kv-memory",
                 asked, available);
  }
  if (asked == 0) {
    if (available > 0 && needed > available) {
      return error(Code::out_of_memory,
                   "one request of the full context needs {} bytes of KV pages and {} are available; lower "
                   "--max-model-len or choose a smaller --kv-dtype",
                   needed, available);
    }
    // No more than `useful`, so no overflow that was not seen above.
    pages = std::min(useful, size.pages_per_request * std::min(size.max_batch, kDefaultFullRequests));
    if (available > 0) pages = std::min(pages, available / 4 / size.page_bytes);
    pages = std::max(pages, size.pages_per_request);
  }
  return std::min<int64_t>({pages, useful, INT32_MAX});
}

Result<std::unique_ptr<Runner>> make_model_runner(std::shared_ptr<const model::Checkpoint> checkpoint,
                                                  const EngineOptions& options) {
  VIVACE_TRY(check_options(options));
  if (options.device.starts_with("cuda")) {
    return unsupported("device is '{}', needs cpu: this program has no CUDA rows", options.device);
  }
  if (options.device != "cpu")
    return invalid_argument("device is '{}', needs cpu, cuda or cuda:N", options.device);
  const int threads = options.threads > 0 ? options.threads : std::min(cpu::usable_cores(), kMaxThreads);
  std::unique_ptr<ModelRunner> runner;
  VIVACE_TRY(guarded(fmt::format("engine: threads is {}", threads), [&] {
    runner = std::make_unique<ModelRunner>(std::move(checkpoint), threads);
    return Status();
  }));
  VIVACE_TRY(runner->prepare(options));
  return std::unique_ptr<Runner>(std::move(runner));
}

}  // namespace vivace::engine
