#include "src/engine/model_runner.h"

#include <algorithm>
#include <limits>
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

template <class T>
Tensor list_tensor(std::vector<T>& list, DType dtype) {
  return Tensor(list.data(), dtype, {static_cast<int64_t>(list.size())});
}

/// The sampler's fp32; what was above 0 stays so.
float positive(double value) {
  return std::max(static_cast<float>(value), std::numeric_limits<float>::min());
}

bool has_penalties(const SamplingParams& p) {
  return p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0;
}

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
  int64_t words() const { return (vocab() + 31) / 32; }
  Stream stream() { return {.threads = &threads_, .dispatch = &dispatch_}; }
  Status sample(const StepInput& input, const Tensor& logits, std::vector<Sampled>& sampled);
  void find_states(std::span<const SampleSlot> samples);
  void fill_state(int64_t state, const SampleSlot& slot);

  std::shared_ptr<const model::Checkpoint> checkpoint_;
  cpu::ThreadPool threads_;
  Dispatch dispatch_;
  std::unique_ptr<model::Model> model_;
  int64_t pages_ = 0;
  model::ZeroMemory logits_, sampler_scratch_;  // [max_requests, vocab] f32; u8

  /// What penalties look at, a state per request that has penalties: SamplerArgs::prompt_bits and output_counts.
  model::ZeroMemory prompt_bits_, output_counts_;  // [max_requests, words] i32; [max_requests, vocab] i32
  struct StateOwner {
    RequestId request = 0;
    int64_t counted = -1;  ///< of its output tokens; -1: nobody's state
    bool in_step = false;
  };
  std::vector<StateOwner> owners_;

  // Of the step that runs, kept for their memory.
  std::vector<int64_t> logit_rows_;
  struct SampleArrays {
    std::vector<float> temperature, top_p, min_p, repetition, presence, frequency, bias_values;
    std::vector<int32_t> top_k, state, bias_start, bias_ids;
    std::vector<int64_t> seed, position;
    void clear() {
      for (auto* list : {&temperature, &top_p, &min_p, &repetition, &presence, &frequency, &bias_values})
        list->clear();
      for (auto* list : {&top_k, &state, &bias_start, &bias_ids}) list->clear();
      for (auto* list : {&seed, &position}) list->clear();
    }
  } arrays_;
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
  VIVACE_TRY_ASSIGN(prompt_bits_, model::ZeroMemory::reserve(rows * words() * 4, "sampler prompts"));
  VIVACE_TRY_ASSIGN(output_counts_, model::ZeroMemory::reserve(rows * vocab() * 4, "sampler counts"));
  owners_.resize(static_cast<size_t>(rows));
  const SamplerArgs shape{.logits = Tensor(nullptr, DType::f32, {1, vocab()}),
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

void ModelRunner::fill_state(int64_t state, const SampleSlot& slot) {
  auto* bits = reinterpret_cast<uint32_t*>(prompt_bits_.data()) + state * words();
  auto* counts = reinterpret_cast<int32_t*>(output_counts_.data()) + state * vocab();
  std::fill(bits, bits + words(), 0);
  std::fill(counts, counts + vocab(), 0);
  for (int32_t id : slot.prompt_ids) bits[id / 32] |= 1u << (id % 32);
  for (int32_t id : slot.output_ids) ++counts[id];
}

/// Gives each row with penalties the state of its request. A request that starts, or comes back after it lost its state to
/// another, gets one that no row of this step has, filled from its tokens.
void ModelRunner::find_states(std::span<const SampleSlot> samples) {
  arrays_.state.assign(samples.size(), -1);
  for (StateOwner& owner : owners_) owner.in_step = false;
  const auto take = [&](size_t i, int64_t state) {
    arrays_.state[i] = static_cast<int32_t>(state);
    owners_[static_cast<size_t>(state)].in_step = true;
  };
  for (size_t i = 0; i < samples.size(); ++i) {
    if (!has_penalties(*samples[i].params)) continue;
    const auto found = std::ranges::find_if(owners_, [&](const StateOwner& owner) {
      return owner.request == samples[i].request && owner.counted == std::ssize(samples[i].output_ids);
    });
    if (found != owners_.end() && !found->in_step) take(i, found - owners_.begin());
  }
  for (size_t i = 0; i < samples.size(); ++i) {
    if (!has_penalties(*samples[i].params) || arrays_.state[i] >= 0) continue;
    const auto unused = std::ranges::find(owners_, false, &StateOwner::in_step);
    const int64_t state = unused - owners_.begin();  // there is one: a step has at most one row per state
    take(i, state);
    fill_state(state, samples[i]);
    *unused = {.request = samples[i].request, .counted = std::ssize(samples[i].output_ids), .in_step = true};
  }
}

Status ModelRunner::sample(const StepInput& input, const Tensor& logits, std::vector<Sampled>& sampled) {
  const size_t rows = input.samples.size();
  const auto count = static_cast<int64_t>(rows);
  arrays_.clear();
  find_states(input.samples);
  int best = -1;  // -1: nobody wants log-probabilities
  bool penalties = false;
  arrays_.bias_start.push_back(0);
  for (const SampleSlot& slot : input.samples) {
    const SamplingParams& params = *slot.params;
    best = std::max(best, params.logprobs);
    penalties = penalties || has_penalties(params);
    arrays_.temperature.push_back(static_cast<float>(params.temperature));
    arrays_.top_k.push_back(static_cast<int32_t>(std::min<int64_t>(params.top_k, INT32_MAX)));
    arrays_.top_p.push_back(positive(params.top_p));
    arrays_.min_p.push_back(static_cast<float>(params.min_p));
    arrays_.repetition.push_back(positive(params.repetition_penalty));
    arrays_.presence.push_back(static_cast<float>(params.presence_penalty));
    arrays_.frequency.push_back(static_cast<float>(params.frequency_penalty));
    arrays_.seed.push_back(static_cast<int64_t>(slot.seed));
    arrays_.position.push_back(slot.position);
    for (const auto& [id, bias] : params.logit_bias) {
      arrays_.bias_ids.push_back(id);
      arrays_.bias_values.push_back(bias);
    }
    for (int32_t id : slot.banned_ids) {
      arrays_.bias_ids.push_back(id);
      arrays_.bias_values.push_back(-std::numeric_limits<float>::infinity());
    }
    arrays_.bias_start.push_back(static_cast<int32_t>(arrays_.bias_ids.size()));
  }
  ids_.resize(rows);
  valid_.resize(rows);
  SamplerArgs args{.logits = logits,
                   .temperature = list_tensor(arrays_.temperature, DType::f32),
                   .top_p = list_tensor(arrays_.top_p, DType::f32),
                   .min_p = list_tensor(arrays_.min_p, DType::f32),
                   .top_k = list_tensor(arrays_.top_k, DType::i32),
                   .seed = list_tensor(arrays_.seed, DType::i64),
                   .position = list_tensor(arrays_.position, DType::i64),
                   .ids = Tensor(ids_.data(), DType::i32, {count}),
                   .valid = Tensor(valid_.data(), DType::u8, {count})};
  if (penalties) {
    const auto states_held = static_cast<int64_t>(owners_.size());
    args.repetition_penalty = list_tensor(arrays_.repetition, DType::f32);
    args.presence_penalty = list_tensor(arrays_.presence, DType::f32);
    args.frequency_penalty = list_tensor(arrays_.frequency, DType::f32);
    args.prompt_bits = Tensor(prompt_bits_.data(), DType::i32, {states_held, words()});
    args.output_counts = Tensor(output_counts_.data(), DType::i32, {states_held, vocab()});
    args.state = list_tensor(arrays_.state, DType::i32);
    args.count_ids = true;
  }
  if (!arrays_.bias_ids.empty()) {
    args.bias_start = list_tensor(arrays_.bias_start, DType::i32);
    args.bias_ids = list_tensor(arrays_.bias_ids, DType::i32);
    args.bias_values = list_tensor(arrays_.bias_values, DType::f32);
  }
  if (sampler_scratch_.bytes() > 0) {
    args.workspace = Tensor(sampler_scratch_.data(), DType::u8, {sampler_scratch_.bytes()});
  }
  if (best >= 0) {
    logprobs_.resize(rows);
    args.logprobs = Tensor(logprobs_.data(), DType::f32, {count});
  }
  const size_t top = static_cast<size_t>(std::max(0, best));
  if (top > 0) {
    top_ids_.resize(rows * top);
    top_logprobs_.resize(rows * top);
    args.top_ids = Tensor(top_ids_.data(), DType::i32, {count, best});
    args.top_logprobs = Tensor(top_logprobs_.data(), DType::f32, {count, best});
  }
  // A call that fails leaves states behind that count for nobody.
  const Status status = sampler(args, stream());
  for (size_t i = 0; i < rows; ++i) {
    if (arrays_.state[i] < 0) continue;
    StateOwner& owner = owners_[static_cast<size_t>(arrays_.state[i])];
    owner.counted = status.ok() && valid_[i] != 0 ? owner.counted + 1 : -1;
  }
  VIVACE_TRY(status);

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
