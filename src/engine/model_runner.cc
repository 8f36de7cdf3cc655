#include "src/engine/model_runner.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "src/core/dispatch.h"
#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/core/log.h"
#include "src/cpu/machine.h"
#include "src/engine/check_options.h"
#include "src/engine/compute.h"
#include "src/engine/decode_bucket.h"
#include "src/engine/sample_batch.h"
#include "src/model/memory.h"
#include "vivace/sampler.h"

namespace vivace::engine {

namespace {

constexpr int64_t kDefaultFullRequests = 8;
constexpr int64_t kCachedRequests = 64;

/// How often a captured step calls one row of a table.
struct Calls {
  int op = 0, row = 0;  ///< positions in operators() and its rows
  int64_t count = 0;
};

struct Replay {
  std::unique_ptr<device::Graph> graph;
  std::vector<Calls> calls;
  int64_t last_use = 0;
};

std::vector<Calls> calls_between(const std::vector<RowCount>& before, const std::vector<RowCount>& after) {
  const std::vector<OpInfo>& ops = operators();
  std::vector<Calls> calls;
  for (const RowCount& now : after) {
    int64_t count = now.calls;
    for (const RowCount& then : before) {
      if (then.op == now.op && then.row == now.row) count -= then.calls;
    }
    const auto op = std::ranges::find(ops, now.op, &OpInfo::name);
    const auto row = std::ranges::find(op->rows, now.row, &RowInfo::name);
    calls.push_back({static_cast<int>(op - ops.begin()), static_cast<int>(row - op->rows.begin()), count});
  }
  return calls;
}

/// Whether each request has one token and gets one, in order.
bool decodes_alone(const StepInput& input) {
  if (input.samples.empty() || input.decode_requests != input.requests()) return false;
  if (std::ssize(input.samples) != input.requests()) return false;
  for (int64_t i = 0; i < input.requests(); ++i)
    if (input.samples[i].row != i) return false;
  return true;
}

class DecoderRunner final : public ModelRunner {
 public:
  DecoderRunner(std::shared_ptr<const model::Checkpoint> checkpoint, std::unique_ptr<Compute> compute)
      : checkpoint_(std::move(checkpoint)), compute_(std::move(compute)) {}
  ~DecoderRunner() override {
    // Nothing may still read what is about to be freed.
    if (on_gpu()) (void)device::synchronize(stream());
  }

  Status prepare(const EngineOptions& options, int64_t pages);

  Status enqueue(const StepInput& input) override;
  Status finish(std::vector<Sampled>& sampled) override;
  bool overlaps() const override { return on_gpu(); }  // a CPU would compute both on the same cores
  int64_t vocab() const override { return model_->config().vocab; }
  int64_t max_model_len() const override { return model_->max_model_len(); }
  int64_t pages() const override { return pages_; }
  int64_t page_tokens() const override { return model_->options().page_tokens; }
  std::span<const int32_t> eos_ids() const override { return model_->config().eos_ids; }
  Dispatch& dispatch() override { return dispatch_; }
  model::Model& model() override { return *model_; }
  Stream stream() override { return compute_->stream(&dispatch_); }
  ExpertCount experts() const override { return experts_; }
  void count_experts(bool on) override { counts_experts_ = on && model_->config().is_moe(); }
  void time_operators(OperatorTimes* times) override;
  void pad_decodes() override { pads_ = true; }

 private:
  bool on_gpu() const { return compute_->device().device == Device::cuda; }
  Result<int64_t> available_bytes() const;
  void log_fallbacks(const std::function<void(const std::string&)>& log);
  void drop_graphs(const SampleBatch::Shape& key);
  Status run_staged(bool in_bucket, const Tensor& logits, const Stream& stream);
  Status compute_and_sample(const Tensor& logits, const Stream& stream);
  Status count_experts(const StepInput& input, const Stream& stream);
  ExpertCount* experts_here(int64_t step) const;

  std::shared_ptr<const model::Checkpoint> checkpoint_;
  std::unique_ptr<Compute> compute_;
  Dispatch dispatch_;
  OperatorTimes* times_ = nullptr;  // sees what dispatch_ counts
  std::unique_ptr<model::Model> model_;
  int64_t pages_ = 0;
  bool pads_ = false, counts_experts_ = false;
  model::Memory logits_, sampler_scratch_;  // [max_requests, vocab] f32; u8
  std::unique_ptr<SampleBatch> samples_;
  std::map<SampleBatch::Shape, Replay> replays_;  // of decode steps in buckets
  int64_t uses_ = 0;
  std::set<SampleBatch::Shape> seen_;       // shapes of decode steps that came before
  std::set<SampleBatch::Shape> ungraphed_;  // those whose capture failed
  std::vector<int64_t> logit_rows_;         // of the step that runs

  // The sums where steps run, and on a GPU what the host has of them: two steps take turns.
  model::Memory expert_count_;
  device::Buffer experts_here_;
  int64_t enqueued_ = 0, finished_ = 0;  // steps
  ExpertCount experts_;
};

Result<int64_t> DecoderRunner::available_bytes() const {
  if (!on_gpu()) return cpu::available_memory_bytes();
  // Activations, scratch and the sampler's arrays come after the pages; they are small beside a GPU's memory.
  constexpr int64_t kMostReserve = int64_t{4} << 30;
  VIVACE_TRY_ASSIGN(const auto memory, device::memory_info(compute_->device().ordinal));
  return memory.first - std::min(kMostReserve, memory.first / 8);
}

Status DecoderRunner::prepare(const EngineOptions& options, int64_t pages) {
  if (!options.prefer.empty()) VIVACE_TRY(dispatch_.prefer(options.prefer));
  model::ModelOptions model_options = model_options_of(options);
  model_options.device = compute_->device().device;
  model_options.ordinal = compute_->device().ordinal;
  VIVACE_TRY_ASSIGN(model_, model::Model::load(*checkpoint_, model_options));
  pages_ = pages;
  pads_ = on_gpu();
  VIVACE_TRY_ASSIGN(const int64_t available, available_bytes());
  if (pages > 0 && available > 0 && pages > available / model_->page_bytes()) {
    return error(Code::out_of_memory,
                 "{} KV pages of {} bytes are asked for, {} bytes are available; fewer or shorter requests "
                 "need less",
                 pages, model_->page_bytes(), available);
  }
  if (pages == 0) {
    const int64_t page_tokens = model_->options().page_tokens;
    VIVACE_TRY_ASSIGN(pages_,
                      pages_of({.page_bytes = model_->page_bytes(),
                                .pages_per_request = (max_model_len() + page_tokens - 1) / page_tokens,
                                .kv_memory_bytes = options.kv_memory_bytes,
                                .max_batch = options.max_batch,
                                .available_bytes = available}));
  }
  VIVACE_TRY(model_->allocate_pages(pages_, stream()));

  const int64_t rows = model_->options().max_requests;
  VIVACE_TRY_ASSIGN(logits_, model::Memory::reserve(rows * vocab() * 4, "logits", stream()));
  VIVACE_TRY_ASSIGN(samples_, SampleBatch::create(rows, vocab(), stream()));
  // The most rows with every optional part need the most scratch.
  const SamplerArgs largest = samples_->args({.rows = rows, .penalties = true, .biases = true, .logprobs = 0},
                                             logits_.tensor(DType::f32, {rows, vocab()}), {});
  VIVACE_TRY_ASSIGN(const int64_t scratch, sampler_workspace_bytes(largest, stream()));
  VIVACE_TRY_ASSIGN(sampler_scratch_, model::Memory::reserve(scratch, "sampler scratch", stream()));
  VIVACE_TRY_ASSIGN(expert_count_,
                    model::Memory::reserve(sizeof(ExpertCount), "a count of experts", stream()));
  if (on_gpu()) {
    VIVACE_TRY_ASSIGN(experts_here_,
                      device::Buffer::pinned(compute_->device().ordinal, 2 * sizeof(ExpertCount)));
  }
  count_experts(options.count_experts);
  if (options.log) log_fallbacks(options.log);
  return {};
}

void DecoderRunner::log_fallbacks(const std::function<void(const std::string&)>& log) {
  std::vector<model::OpUse> uses =
      model_->explain(model::Phase::decode, model_->options().max_requests, stream());
  const int64_t chunk = std::min(model_->options().max_tokens, max_model_len());
  std::ranges::move(model_->explain(model::Phase::prefill, chunk, stream()), std::back_inserter(uses));
  for (const std::string& line : fallback_lines(uses)) log(line);
}

void DecoderRunner::time_operators(OperatorTimes* times) {
  times_ = times;
  OperatorObserver::set(dispatch_, times);
  replays_.clear();  // they have the events of the times before, or none
  ungraphed_.clear();
}

Status DecoderRunner::compute_and_sample(const Tensor& logits, const Stream& stream) {
  if (times_ != nullptr) times_->begin_step();
  VIVACE_TRY(model_->enqueue(stream));
  if (logits.shape[0] == 0) return {};
  Tensor scratch;
  if (sampler_scratch_.bytes() > 0) scratch = sampler_scratch_.tensor(DType::u8, {sampler_scratch_.bytes()});
  return sampler(samples_->args(samples_->shape(), logits, scratch), stream);
}

/// Makes room for the graph of `key`: those of arrays that moved go, and the one that was not used for longest when there
/// are many, since each holds memory of the device.
void DecoderRunner::drop_graphs(const SampleBatch::Shape& key) {
  constexpr size_t kMostGraphs = 128;
  if (replays_.contains(key)) return;
  std::erase_if(replays_, [&](const auto& entry) { return entry.first.generation != key.generation; });
  std::erase_if(seen_, [&](const SampleBatch::Shape& shape) { return shape.generation != key.generation; });
  std::erase_if(ungraphed_,
                [&](const SampleBatch::Shape& shape) { return shape.generation != key.generation; });
  if (replays_.size() < kMostGraphs) return;
  replays_.erase(
      std::ranges::min_element(replays_, {}, [](const auto& entry) { return entry.second.last_use; }));
}

/// Runs the staged step. Steps in a bucket on a GPU are replays of a graph that was captured when their shape came for the
/// second time: in the first, libraries may allocate or choose an algorithm, which no capture allows.
Status DecoderRunner::run_staged(bool in_bucket, const Tensor& logits, const Stream& stream) {
  if (!on_gpu() || !in_bucket) return compute_and_sample(logits, stream);
  const SampleBatch::Shape key = samples_->shape();
  if (ungraphed_.contains(key) || seen_.insert(key).second) return compute_and_sample(logits, stream);
  drop_graphs(key);
  Replay& replay = replays_[key];
  replay.last_use = ++uses_;
  if (replay.graph == nullptr) {
    const std::vector<RowCount> before = dispatch_.counts();
    Result<std::unique_ptr<device::Graph>> graph =
        device::Graph::capture(stream, [&](const Stream& s) { return compute_and_sample(logits, s); });
    if (!graph.ok() && times_ != nullptr) {  // without a graph the times would be the host's
      return graph.status().at(
          fmt::format("decode steps of up to {} requests have no graph to be timed in", key.rows));
    }
    if (!graph.ok()) {  // memory for one more, say: the step runs without, and so do those like it
      log_line(fmt::format("decode steps of up to {} requests run without a graph: {}", key.rows,
                           graph.status().message()));
      replays_.erase(key);
      ungraphed_.insert(key);
      return compute_and_sample(logits, stream);
    }
    replay.graph = std::move(*graph);
    replay.calls = calls_between(before, dispatch_.counts());  // these are counted
  } else {
    for (const Calls& calls : replay.calls)
      for (int64_t i = 0; i < calls.count; ++i) dispatch_.count(calls.op, calls.row);
  }
  return replay.graph->launch(stream);
}

Status DecoderRunner::enqueue(const StepInput& input) {
  const auto rows = static_cast<int64_t>(input.samples.size());
  if (rows > model_->options().max_requests) {
    return invalid_argument("step: {} samples, needs at most {}", rows, model_->options().max_requests);
  }
  logit_rows_.clear();
  for (const SampleSlot& slot : input.samples) logit_rows_.push_back(slot.row);
  const int64_t bucket =
      pads_ && decodes_alone(input) ? decode_bucket(rows, model_->options().max_requests) : 0;
  const int64_t padded = std::max(rows, bucket);
  const Tensor logits = logits_.tensor(DType::f32, {padded, vocab()});
  const Stream stream = this->stream();
  VIVACE_TRY(model_->stage({.token_ids = input.token_ids,
                            .positions = input.positions,
                            .slots = input.slots,
                            .query_start = input.query_start,
                            .kv_lengths = input.kv_lengths,
                            .page_table = input.page_table,
                            .max_pages = input.max_pages,
                            .decode_requests = input.decode_requests,
                            .logit_rows = logit_rows_,
                            .previous_ids = on_gpu() ? samples_->last_ids() : Tensor(),
                            .bucket = bucket},
                           logits, stream));
  VIVACE_TRY(samples_->stage(input.samples, padded, stream));
  VIVACE_TRY(run_staged(bucket > 0, logits, stream));
  if (counts_experts_) VIVACE_TRY(count_experts(input, stream));
  VIVACE_TRY(samples_->fetch(stream));  // its event comes behind the sums too
  ++enqueued_;
  return {};
}

Status DecoderRunner::finish(std::vector<Sampled>& sampled) {
  const int64_t step = finished_++;
  VIVACE_TRY(samples_->collect(sampled));
  if (counts_experts_) experts_ = *experts_here(step);
  return {};
}

ExpertCount* DecoderRunner::experts_here(int64_t step) const {
  if (!on_gpu()) return reinterpret_cast<ExpertCount*>(expert_count_.data());
  return static_cast<ExpertCount*>(experts_here_.data()) + step % 2;
}

/// Behind the graph of a step, so that one that counts is the same.
Status DecoderRunner::count_experts(const StepInput& input, const Stream& stream) {
  if (decodes_alone(input)) VIVACE_TRY(model_->count_experts(expert_count_.tensor(DType::i64, {2}), stream));
  if (!on_gpu()) return {};
  return device::copy_to_host(experts_here(enqueued_), expert_count_.data(), sizeof(ExpertCount), stream);
}

}  // namespace

std::vector<std::string> fallback_lines(const std::vector<model::OpUse>& uses) {
  const auto on_gpu = [](std::string_view row) {
    return row.starts_with("cuda.") || row.starts_with("sm90.");
  };
  // Rows of one kind for several types: "cuda.cublaslt" and "cuda.cublaslt.fp8".
  const auto variants = [](std::string_view a, std::string_view b) {
    return a != b && (internal::names_row(a, b) || internal::names_row(b, a));
  };
  std::vector<std::string> lines;
  for (const model::OpUse& use : uses) {
    if (!on_gpu(use.choice.row)) continue;
    for (const Refusal& refusal : use.choice.refused) {
      // A row for another type is no loss where the one for this type runs, or says itself why not.
      const bool other_type = refusal.reason.find(" of type ") != std::string::npos &&
                              std::ranges::any_of(use.choice.refused, [&](const Refusal& other) {
                                return variants(refusal.row, other.row);
                              });
      if (!on_gpu(refusal.row) || variants(refusal.row, use.choice.row) || other_type) continue;
      std::string line = fmt::format("{}: {} runs instead of {}, which {}", use.op, use.choice.row,
                                     refusal.row, refusal.reason);
      if (std::ranges::find(lines, line) == lines.end()) lines.push_back(std::move(line));
    }
  }
  return lines;
}

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

Result<std::unique_ptr<ModelRunner>> make_model_runner(std::shared_ptr<const model::Checkpoint> checkpoint,
                                                       const EngineOptions& options, int64_t pages) {
  VIVACE_TRY(check_options(options));
  VIVACE_TRY_ASSIGN(std::unique_ptr<Compute> compute, Compute::create(options.device, options.threads));
  auto runner = std::make_unique<DecoderRunner>(std::move(checkpoint), std::move(compute));
  VIVACE_TRY(runner->prepare(options, pages));
  return std::unique_ptr<ModelRunner>(std::move(runner));
}

}  // namespace vivace::engine
