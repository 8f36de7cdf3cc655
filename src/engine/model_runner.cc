#include "src/engine/model_runner.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/cpu/machine.h"
#include "src/engine/check_options.h"
#include "src/engine/compute.h"
#include "src/engine/sample_batch.h"
#include "src/model/memory.h"
#include "vivace/sampler.h"

namespace vivace::engine {

namespace {

constexpr int64_t kDefaultFullRequests = 8;
constexpr int64_t kCachedRequests = 64;

class ModelRunner final : public Runner {
 public:
  ModelRunner(std::shared_ptr<const model::Checkpoint> checkpoint, std::unique_ptr<Compute> compute)
      : checkpoint_(std::move(checkpoint)), compute_(std::move(compute)) {}
  ~ModelRunner() override {
    // Nothing may still read what is about to be freed.
    if (on_gpu()) (void)device::synchronize(stream());
  }

  Status prepare(const EngineOptions& options);

  Status step(const StepInput& input, std::vector<Sampled>& sampled) override;
  int64_t vocab() const override { return model_->config().vocab; }
  int64_t max_model_len() const override { return model_->max_model_len(); }
  int64_t pages() const override { return pages_; }
  int64_t page_tokens() const override { return model_->options().page_tokens; }
  std::span<const int32_t> eos_ids() const override { return model_->config().eos_ids; }
  Dispatch& dispatch() override { return dispatch_; }

 private:
  bool on_gpu() const { return compute_->device().device == Device::cuda; }
  Stream stream() { return compute_->stream(&dispatch_); }
  Result<int64_t> available_bytes() const;
  Status enqueue(const StepInput& input, const Tensor& logits, const Stream& stream);
  Status compute_and_sample(const Tensor& logits, const Stream& stream);

  std::shared_ptr<const model::Checkpoint> checkpoint_;
  std::unique_ptr<Compute> compute_;
  Dispatch dispatch_;
  std::unique_ptr<model::Model> model_;
  int64_t pages_ = 0;
  model::Memory logits_, sampler_scratch_;  // [max_requests, vocab] f32; u8
  std::unique_ptr<SampleBatch> samples_;
  std::map<SampleBatch::Shape, std::unique_ptr<device::Graph>> graphs_;  // of decode steps on a GPU
  std::set<SampleBatch::Shape> seen_;  // shapes of decode steps that came before
  std::vector<int64_t> logit_rows_;  // of the step that runs
};

Result<int64_t> ModelRunner::available_bytes() const {
  if (!on_gpu()) return cpu::available_memory_bytes();
  // Activations, scratch and the sampler's arrays come after the pages; they are small beside a GPU's memory.
  constexpr int64_t kReserve = int64_t{4} << 30;
  VIVACE_TRY_ASSIGN(const auto memory, device::memory_info(compute_->device().ordinal));
  return std::max<int64_t>(1, memory.first - kReserve);
}

Status ModelRunner::prepare(const EngineOptions& options) {
  if (!options.prefer.empty()) VIVACE_TRY(dispatch_.prefer(options.prefer));
  model::ModelOptions model_options = model_options_of(options);
  model_options.device = compute_->device().device;
  model_options.ordinal = compute_->device().ordinal;
  VIVACE_TRY_ASSIGN(model_, model::Model::load(*checkpoint_, model_options));
  const int64_t page_tokens = model_->options().page_tokens;
  VIVACE_TRY_ASSIGN(const int64_t available, available_bytes());
  VIVACE_TRY_ASSIGN(pages_, pages_of({.page_bytes = model_->page_bytes(),
                                      .pages_per_request = (max_model_len() + page_tokens - 1) / page_tokens,
                                      .kv_memory_bytes = options.kv_memory_bytes,
                                      .max_batch = options.max_batch,
                                      .available_bytes = available}));
  VIVACE_TRY(model_->allocate_pages(pages_, stream()));

  const int64_t rows = model_->options().max_requests;
  VIVACE_TRY_ASSIGN(logits_, model::Memory::reserve(rows * vocab() * 4, "logits", stream()));
  VIVACE_TRY_ASSIGN(samples_, SampleBatch::create(rows, vocab(), stream()));
  // Scratch depends on the rows alone, so that of the most will do.
  const Device device = compute_->device().device;
  const SamplerArgs shape{.logits = Tensor(nullptr, DType::f32, {rows, vocab()}, device),
                          .ids = Tensor(nullptr, DType::i32, {rows}, device),
                          .valid = Tensor(nullptr, DType::u8, {rows}, device)};
  VIVACE_TRY_ASSIGN(const int64_t scratch, sampler_workspace_bytes(shape, stream()));
  VIVACE_TRY_ASSIGN(sampler_scratch_, model::Memory::reserve(scratch, "sampler scratch", stream()));
  return {};
}

Status ModelRunner::compute_and_sample(const Tensor& logits, const Stream& stream) {
  VIVACE_TRY(model_->enqueue(stream));
  if (logits.shape[0] == 0) return {};
  Tensor scratch;
  if (sampler_scratch_.bytes() > 0) scratch = sampler_scratch_.tensor(DType::u8, {sampler_scratch_.bytes()});
  VIVACE_TRY(sampler(samples_->args(logits, scratch), stream));
  return samples_->fetch(stream);
}

/// Runs the staged step. Decode steps on a GPU are replays of a graph that was captured when their shape first came.
Status ModelRunner::enqueue(const StepInput& input, const Tensor& logits, const Stream& stream) {
  const bool decodes_alone = input.decode_requests == input.requests() && input.requests() > 0 &&
                             std::ssize(input.samples) == input.requests();
  if (!on_gpu() || !decodes_alone) return compute_and_sample(logits, stream);
  const SampleBatch::Shape key = samples_->shape();
  std::unique_ptr<device::Graph>& graph = graphs_[key];
  if (graph == nullptr) {
    // The first of a shape runs without a graph: libraries may allocate or choose an algorithm, which no capture allows.
    if (!seen_.insert(key).second) {
      VIVACE_TRY_ASSIGN(graph, device::Graph::capture(stream, [&](const Stream& s) { return compute_and_sample(logits, s); }));
    } else {
      return compute_and_sample(logits, stream);
    }
  }
  return graph->launch(stream);
}

Status ModelRunner::step(const StepInput& input, std::vector<Sampled>& sampled) {
  sampled.clear();
  const auto rows = static_cast<int64_t>(input.samples.size());
  if (rows > model_->options().max_requests) {
    return invalid_argument("step: {} samples, needs at most {}", rows, model_->options().max_requests);
  }
  logit_rows_.clear();
  for (const SampleSlot& slot : input.samples) logit_rows_.push_back(slot.row);
  const Tensor logits = logits_.tensor(DType::f32, {rows, vocab()});
  const Stream stream = this->stream();
  VIVACE_TRY(model_->stage({.token_ids = input.token_ids,
                            .positions = input.positions,
                            .slots = input.slots,
                            .query_start = input.query_start,
                            .kv_lengths = input.kv_lengths,
                            .page_table = input.page_table,
                            .max_pages = input.max_pages,
                            .decode_requests = input.decode_requests,
                            .logit_rows = logit_rows_},
                           logits, stream));
  VIVACE_TRY(samples_->stage(input.samples, stream));
  Status status = enqueue(input, logits, stream);
  if (status.ok() && on_gpu()) status = device::synchronize(stream);
  if (!status.ok()) {
    samples_->forget();
    return status;
  }
  samples_->collect(sampled);
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
  VIVACE_TRY_ASSIGN(std::unique_ptr<Compute> compute, Compute::create(options.device, options.threads));
  auto runner = std::make_unique<ModelRunner>(std::move(checkpoint), std::move(compute));
  VIVACE_TRY(runner->prepare(options));
  return std::unique_ptr<Runner>(std::move(runner));
}

}  // namespace vivace::engine
