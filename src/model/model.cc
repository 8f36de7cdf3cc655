#include "src/model/model.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>
#include <utility>

#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/cpu/thread_pool.h"
#include "src/model/layer_graph.h"
#include "src/model/rope.h"
#include "src/model/weights.h"
#include "src/model/zero_memory.h"

namespace vivace::model {

namespace {

// Keys per tile of the decode schedule. In deterministic mode a request is cut at multiples of kPieceTiles tiles, so
// that the order of every sum follows from the request alone.
constexpr int64_t kTileTokens = 64;
constexpr int64_t kPieceTiles = 8;

/// Runs each call of the walk.
struct RunCalls {
  const Stream& stream;
  const Model::RouteObserver& observer;

  Status operator()(int64_t, const EmbeddingArgs& args) const { return embedding(args, stream); }
  Status operator()(int64_t, const DecodeScheduleArgs& args) const { return decode_schedule(args, stream); }
  Status operator()(int64_t, const RmsNormArgs& args) const { return rms_norm(args, stream); }
  Status operator()(int64_t, const LinearArgs& args) const { return linear(args, stream); }
  Status operator()(int64_t, const AttentionPrologueArgs& args) const {
    return attention_prologue(args, stream);
  }
  Status operator()(int64_t, const AttentionDecodeArgs& args) const { return attention_decode(args, stream); }
  Status operator()(int64_t, const AttentionPrefillArgs& args) const {
    return attention_prefill(args, stream);
  }
  Status operator()(int64_t, const SiluMulArgs& args) const { return silu_mul(args, stream); }
  Status operator()(int64_t, const RouterGemmArgs& args) const { return router_gemm(args, stream); }
  Status operator()(int64_t layer, const RouteTopKArgs& args) const {
    VIVACE_TRY(route_top_k(args, stream));
    if (observer) observer(layer, args.expert_ids);
    return {};
  }
  Status operator()(int64_t, const FusedMoeArgs& args) const { return fused_moe(args, stream); }
  void pick(const Tensor& from, const Tensor& to, std::span<const int64_t> rows) const {
    for (size_t i = 0; i < rows.size(); ++i) {
      std::memcpy(to.at(static_cast<int64_t>(i)).data, from.at(rows[i]).data, from.shape[1] * sizeof(float));
    }
  }
};

/// Asks each call of the walk which row it would take.
struct ExplainCalls {
  const Stream& stream;
  Phase phase;
  int64_t batch;
  std::vector<OpUse>& uses;

  Status add(int64_t layer, std::string_view op, Choice choice) const {
    uses.push_back({layer, std::string(op), phase, batch, std::move(choice)});
    return {};
  }
  Status operator()(int64_t layer, const EmbeddingArgs& args) const {
    return add(layer, "embedding", embedding_explain(args, stream));
  }
  Status operator()(int64_t layer, const DecodeScheduleArgs& args) const {
    return add(layer, "decode_schedule", decode_schedule_explain(args, stream));
  }
  Status operator()(int64_t layer, const RmsNormArgs& args) const {
    return add(layer, "rms_norm", rms_norm_explain(args, stream));
  }
  Status operator()(int64_t layer, const LinearArgs& args) const {
    return add(layer, "linear", linear_explain(args, stream));
  }
  Status operator()(int64_t layer, const AttentionPrologueArgs& args) const {
    return add(layer, "attention_prologue", attention_prologue_explain(args, stream));
  }
  Status operator()(int64_t layer, const AttentionDecodeArgs& args) const {
    return add(layer, "attention_decode", attention_decode_explain(args, stream));
  }
  Status operator()(int64_t layer, const AttentionPrefillArgs& args) const {
    return add(layer, "attention_prefill", attention_prefill_explain(args, stream));
  }
  Status operator()(int64_t layer, const SiluMulArgs& args) const {
    return add(layer, "silu_mul", silu_mul_explain(args, stream));
  }
  Status operator()(int64_t layer, const RouterGemmArgs& args) const {
    return add(layer, "router_gemm", router_gemm_explain(args, stream));
  }
  Status operator()(int64_t layer, const RouteTopKArgs& args) const {
    return add(layer, "route_top_k", route_top_k_explain(args, stream));
  }
  Status operator()(int64_t layer, const FusedMoeArgs& args) const {
    return add(layer, "fused_moe", fused_moe_explain(args, stream));
  }
  void pick(const Tensor&, const Tensor&, std::span<const int64_t>) const {}
};

/// The largest scratch that any call of the walk needs. Calls of one operator follow each other, so they share it.
struct MeasureCalls {
  const Stream& stream;
  int64_t linear = 0, attention = 0, moe = 0;

  static Status grow(int64_t& bytes, Result<int64_t> needed) {
    VIVACE_TRY_ASSIGN(const int64_t value, std::move(needed));
    bytes = std::max(bytes, value);
    return {};
  }
  Status operator()(int64_t, const LinearArgs& args) {
    return grow(linear, linear_workspace_bytes(args, stream));
  }
  Status operator()(int64_t, const AttentionDecodeArgs& args) {
    return grow(attention, attention_decode_workspace_bytes(args, stream));
  }
  Status operator()(int64_t, const FusedMoeArgs& args) {
    return grow(moe, fused_moe_workspace_bytes(args, stream));
  }
  template <class Args>
  Status operator()(int64_t, const Args&) {
    return {};
  }
  void pick(const Tensor&, const Tensor&, std::span<const int64_t>) const {}
};

/// Hands out pieces of one reservation; with a null base it only counts.
class Layout {
 public:
  explicit Layout(uint8_t* base) : base_(base) {}
  Tensor matrix(DType dtype, int64_t rows, int64_t columns) {
    return columns == 0 ? Tensor()
                        : Tensor(take(rows * columns * info_of(dtype).block_bytes), dtype, {rows, columns});
  }
  Tensor scratch(int64_t bytes) { return bytes == 0 ? Tensor() : Tensor(take(bytes), DType::u8, {bytes}); }
  Tensor ints(int64_t count) { return Tensor(take(4 * count), DType::i32, {count}); }
  int64_t bytes() const { return offset_; }

 private:
  void* take(int64_t bytes) {
    constexpr int64_t kLine = 64;
    void* at = base_ == nullptr ? nullptr : base_ + offset_;
    offset_ += (bytes + kLine - 1) / kLine * kLine;
    return at;
  }
  uint8_t* base_;
  int64_t offset_ = 0;
};

template <class T>
Tensor view_of(std::span<const T> values, DType dtype) {
  return Tensor(const_cast<T*>(values.data()), dtype, {static_cast<int64_t>(values.size())});
}

/// Requests [begin, begin + count) of a step's arrays; absent when there are none.
RequestGroup group_of(const ForwardInput& input, int64_t begin, int64_t count) {
  if (count == 0) return {};
  const auto table = input.page_table.subspan(begin * input.max_pages, count * input.max_pages);
  return {.kv_lengths = view_of(input.kv_lengths.subspan(begin, count), DType::i32),
          .starts = view_of(input.query_start.subspan(begin, count + 1), DType::i32),
          .page_table = Tensor(const_cast<int32_t*>(table.data()), DType::i32, {count, input.max_pages})};
}

RequestGroup shape_of_group(int64_t requests, int64_t max_pages) {
  if (requests == 0) return {};
  return {.kv_lengths = Tensor(nullptr, DType::i32, {requests}),
          .starts = Tensor(nullptr, DType::i32, {requests + 1}),
          .page_table = Tensor(nullptr, DType::i32, {requests, max_pages})};
}

class Decoder final : public Model {
 public:
  Decoder(const ModelOptions& options, LayerGraph graph, RopeTable rope)
      : options_(options), graph_(std::move(graph)), rope_(std::move(rope)) {
    graph_.cos_sin = rope_.tensor();
    describe_pool(nullptr, 1);
    graph_.buffers = lay_out(nullptr, {}).first;
  }

  const ModelConfig& config() const override { return graph_.config; }
  const ModelOptions& options() const override { return options_; }
  int64_t max_model_len() const override { return rope_.tensor().shape[0]; }
  int64_t page_bytes() const override { return 2 * graph_.config.layers * layer_page_bytes(); }
  Status allocate_pages(int64_t pages, const Stream& stream) override;
  Status forward(const ForwardInput& input, const Tensor& logits, const Stream& stream) override;
  std::vector<OpUse> explain(Phase phase, int64_t tokens, const Stream& stream) override;
  void observe_routes(RouteObserver observer) override { observer_ = std::move(observer); }

 private:
  struct ScratchBytes {
    int64_t linear = 0, attention = 0, moe = 0, workers = 1;
  };
  int64_t layer_page_bytes() const {
    const ModelConfig& config = graph_.config;
    return options_.page_tokens * config.heads_kv * config.head_dim * info_of(options_.kv_dtype).block_bytes;
  }
  int64_t max_pages() const { return (max_model_len() + options_.page_tokens - 1) / options_.page_tokens; }
  void describe_pool(uint8_t* memory, int64_t pages);
  std::pair<Activations, int64_t> lay_out(uint8_t* memory, const ScratchBytes& scratch) const;
  Status check(const ForwardInput& input, const Tensor& logits) const;
  Step shape_of_step(int64_t tokens, int64_t decodes, int64_t chunks) const;

  ModelOptions options_;
  LayerGraph graph_;
  RopeTable rope_;
  ZeroMemory pool_, scratch_;
  int64_t pages_ = 0;
  RouteObserver observer_;
};

void Decoder::describe_pool(uint8_t* memory, int64_t pages) {
  const ModelConfig& config = graph_.config;
  const int64_t bytes = pages * layer_page_bytes();
  graph_.k.clear();
  graph_.v.clear();
  for (int64_t l = 0; l < config.layers; ++l) {
    for (std::vector<Tensor>* side : {&graph_.k, &graph_.v}) {
      side->push_back(
          Tensor(memory, options_.kv_dtype, {pages, options_.page_tokens, config.heads_kv, config.head_dim}));
      if (memory != nullptr) memory += bytes;
    }
  }
}

/// The buffers of a step over `memory` (or shapes alone), and their bytes.
std::pair<Activations, int64_t> Decoder::lay_out(uint8_t* memory, const ScratchBytes& scratch) const {
  const ModelConfig& config = graph_.config;
  const int64_t tokens = options_.max_tokens;
  const int64_t width_q = config.heads_q * config.head_dim, width_kv = config.heads_kv * config.head_dim;
  const bool has_dense = std::any_of(graph_.weights.layers.begin(), graph_.weights.layers.end(),
                                     [](const LayerWeights& layer) { return layer.dense.present(); });
  Layout layout(memory);
  Activations buffers;
  buffers.residual = layout.matrix(DType::f32, tokens, config.hidden);
  buffers.picked = layout.matrix(DType::f32, tokens, config.hidden);
  buffers.normed = layout.matrix(DType::f32, tokens, config.hidden);
  buffers.delta = layout.matrix(DType::f32, tokens, config.hidden);
  buffers.qkv = layout.matrix(DType::f32, tokens, width_q + 2 * width_kv);
  buffers.q = layout.matrix(DType::f32, tokens, width_q);
  buffers.attended = layout.matrix(DType::f32, tokens, width_q);
  buffers.gate_up = layout.matrix(DType::f32, tokens, has_dense ? 2 * config.intermediate : 0);
  buffers.scores = layout.matrix(DType::f32, tokens, config.experts);
  buffers.expert_ids = layout.matrix(DType::i32, tokens, config.is_moe() ? config.top_k : 0);
  buffers.expert_weights = layout.matrix(DType::f32, tokens, config.is_moe() ? config.top_k : 0);
  buffers.schedule = layout.ints(decode_schedule_ints(options_.max_requests, scratch.workers));
  buffers.linear_scratch = layout.scratch(scratch.linear);
  buffers.attention_scratch = layout.scratch(scratch.attention);
  buffers.moe_scratch = layout.scratch(scratch.moe);
  return {buffers, layout.bytes()};
}

Step Decoder::shape_of_step(int64_t tokens, int64_t decodes, int64_t chunks) const {
  Step step;
  step.token_ids = Tensor(nullptr, DType::i32, {tokens});
  step.positions = Tensor(nullptr, DType::i32, {tokens});
  step.slots = Tensor(nullptr, DType::i64, {tokens});
  step.decodes = shape_of_group(decodes, max_pages());
  step.chunks = shape_of_group(chunks, max_pages());
  // Every row goes to the end. The walk asks for the list only where rows are left out.
  static constexpr int64_t kAnyRow[1] = {0};
  step.logit_rows = kAnyRow;
  step.all_rows = true;
  step.logits = Tensor(nullptr, DType::f32, {tokens, graph_.config.vocab});
  return step;
}

Status Decoder::allocate_pages(int64_t pages, const Stream& stream) {
  if (pages < 1 || pages > INT32_MAX) {
    return invalid_argument("pages is {}, needs a number from 1 to {}", pages, INT32_MAX);
  }
  pages_ = 0;  // until all that a step needs is there
  const int64_t workers = cpu::threads_of(stream.threads);
  graph_.schedule.workers = workers;
  describe_pool(nullptr, pages);
  graph_.buffers = lay_out(nullptr, {.workers = workers}).first;

  MeasureCalls measure{stream};
  const int64_t requests = std::min(options_.max_requests, options_.max_tokens);
  VIVACE_TRY(walk(graph_, shape_of_step(options_.max_tokens, requests, 0), measure));
  const ScratchBytes scratch{measure.linear, measure.attention, measure.moe, workers};
  VIVACE_TRY_ASSIGN(scratch_, ZeroMemory::reserve(lay_out(nullptr, scratch).second, "activations"));
  graph_.buffers = lay_out(scratch_.data(), scratch).first;

  pool_ = ZeroMemory();  // before the new one: both at once may exceed the limit of the address space
  VIVACE_TRY_ASSIGN(pool_, ZeroMemory::reserve(pages * page_bytes(), "KV pages"));
  describe_pool(pool_.data(), pages);
  pages_ = pages;
  return {};
}

Status Decoder::check(const ForwardInput& input, const Tensor& logits) const {
  const auto tokens = static_cast<int64_t>(input.token_ids.size());
  const auto requests = static_cast<int64_t>(input.kv_lengths.size());
  const auto rows = static_cast<int64_t>(input.logit_rows.size());
  if (pages_ == 0) return error(Code::internal, "forward: allocate_pages() was not called");
  const auto sized = [](const char* name, size_t got, int64_t needs) {
    return static_cast<int64_t>(got) == needs
               ? Status()
               : invalid_argument("forward: {} has {} entries, needs {}", name, got, needs);
  };
  const auto bounded = [](const char* name, int64_t value, int64_t low, int64_t high) {
    return value >= low && value <= high
               ? Status()
               : invalid_argument("forward: {} is {}, needs {} to {}", name, value, low, high);
  };
  VIVACE_TRY(bounded("tokens", tokens, 0, options_.max_tokens));
  VIVACE_TRY(bounded("requests", requests, 0, options_.max_requests));
  VIVACE_TRY(bounded("decode_requests", input.decode_requests, 0, requests));
  VIVACE_TRY(bounded("max_pages", input.max_pages, requests > 0 ? 1 : 0, max_pages()));
  VIVACE_TRY(sized("positions", input.positions.size(), tokens));
  VIVACE_TRY(sized("slots", input.slots.size(), tokens));
  VIVACE_TRY(sized("query_start", input.query_start.size(), requests + 1));
  VIVACE_TRY(sized("page_table", input.page_table.size(), requests * input.max_pages));
  VIVACE_TRY(bounded("query_start[0]", input.query_start.front(), 0, 0));
  VIVACE_TRY(bounded("query_start[requests]", input.query_start.back(), tokens, tokens));
  for (int64_t i = 0; i < input.decode_requests; ++i) {
    VIVACE_TRY(bounded("tokens of a decode request", input.query_start[i + 1] - input.query_start[i], 1, 1));
  }
  VIVACE_TRY(bounded("logit rows", rows, 0, tokens));
  for (const int64_t row : input.logit_rows) VIVACE_TRY(bounded("logit row", row, 0, tokens - 1));
  if (rows > 0 && (logits.rank != 2 || logits.dtype != DType::f32 || logits.shape[0] != rows ||
                   logits.shape[1] != graph_.config.vocab)) {
    return invalid_argument("forward: logits is {}, needs f32[{}, {}]", to_string(logits), rows,
                            graph_.config.vocab);
  }
  return {};
}

Status Decoder::forward(const ForwardInput& input, const Tensor& logits, const Stream& stream) {
  VIVACE_TRY(check(input, logits));
  const auto tokens = static_cast<int64_t>(input.token_ids.size());
  const auto requests = static_cast<int64_t>(input.kv_lengths.size());
  if (tokens == 0) return {};
  if (cpu::threads_of(stream.threads) > graph_.schedule.workers) {
    return invalid_argument("forward: the stream has {} threads, scratch was made for {}",
                            cpu::threads_of(stream.threads), graph_.schedule.workers);
  }
  Step step;
  step.token_ids = view_of(input.token_ids, DType::i32);
  step.positions = view_of(input.positions, DType::i32);
  step.slots = view_of(input.slots, DType::i64);
  step.decodes = group_of(input, 0, input.decode_requests);
  step.chunks = group_of(input, input.decode_requests, requests - input.decode_requests);
  step.logit_rows = input.logit_rows;
  step.all_rows = static_cast<int64_t>(input.logit_rows.size()) == tokens;
  for (int64_t i = 0; step.all_rows && i < tokens; ++i) step.all_rows = input.logit_rows[i] == i;
  step.logits = logits;

  const int32_t last = *std::max_element(input.positions.begin(), input.positions.end());
  rope_.fill(std::min<int64_t>(int64_t{last} + 1, max_model_len()));
  return walk(graph_, step, RunCalls{stream, observer_});
}

std::vector<OpUse> Decoder::explain(Phase phase, int64_t tokens, const Stream& stream) {
  Step step = phase == Phase::decode ? shape_of_step(tokens, tokens, 0) : shape_of_step(tokens, 0, 1);
  if (phase == Phase::prefill) {
    step.all_rows = false;
    step.logits = step.logits.rows(0, 1);
  }
  std::vector<OpUse> uses;
  (void)walk(graph_, step, ExplainCalls{stream, phase, tokens, uses});
  return uses;
}

Status check_options(const ModelConfig& config, const ModelOptions& options) {
  const auto bounded = [](const char* name, int64_t value, int64_t low, int64_t high) {
    return value >= low && value <= high
               ? Status()
               : invalid_argument("{} is {}, needs {} to {}", name, value, low, high);
  };
  constexpr int64_t kMaxStep = int64_t{1} << 20;
  VIVACE_TRY(bounded("page_tokens", options.page_tokens, 1, 256));
  if (!std::has_single_bit(static_cast<uint64_t>(options.page_tokens))) {
    return invalid_argument("page_tokens is {}, needs a power of two from 1 to 256", options.page_tokens);
  }
  VIVACE_TRY(bounded("max_tokens", options.max_tokens, 1, kMaxStep));
  VIVACE_TRY(bounded("max_requests", options.max_requests, 1, kMaxStep));
  if (options.max_model_len < 0 || options.max_model_len > config.max_position) {
    return invalid_argument("max_model_len is {}, needs at most the model's context of {} (0 takes it)",
                            options.max_model_len, config.max_position);
  }
  if (options.kv_dtype != DType::f32 && options.kv_dtype != DType::bf16 && options.kv_dtype != DType::f16) {
    return invalid_argument("kv_dtype is {}, needs f32, bf16 or f16", name_of(options.kv_dtype));
  }
  return {};
}

Result<RouterMode> router_mode_of(std::string_view name) {
  if (name == "exact") return RouterMode::exact;
  if (name == "two_term") return RouterMode::two_term;
  return invalid_argument("router_mode is '{}', needs exact or two_term", name);
}

Result<std::unique_ptr<Model>> load_decoder(const Checkpoint& checkpoint, const ModelOptions& options) {
  LayerGraph graph;
  graph.config = checkpoint.config();
  const ModelConfig& config = graph.config;
  VIVACE_TRY(validate(config));
  VIVACE_TRY(check_options(config, options));
  VIVACE_TRY_ASSIGN(const RouterMode router_mode, router_mode_of(options.router_mode));
  VIVACE_TRY_ASSIGN(graph.weights, bind_weights(checkpoint, router_mode));
  graph.exact = options.exact;
  graph.schedule = {.heads_kv = config.heads_kv,
                    .tile_tokens = kTileTokens,
                    .window = config.sliding_window,
                    .piece_tiles = options.deterministic ? kPieceTiles : 0};

  const int64_t positions = options.max_model_len > 0 ? options.max_model_len : config.max_position;
  VIVACE_TRY_ASSIGN(std::vector<double> frequencies, rope_frequencies(config, graph.weights.rope_factors));
  VIVACE_TRY_ASSIGN(RopeTable rope, RopeTable::create(std::move(frequencies), positions));
  return std::unique_ptr<Model>(std::make_unique<Decoder>(options, std::move(graph), std::move(rope)));
}

}  // namespace

std::string_view name_of(Phase phase) {
  return phase == Phase::decode ? "decode" : "prefill";
}

Result<std::unique_ptr<Model>> Model::load(const Checkpoint& checkpoint, const ModelOptions& options) {
  return guarded("model", [&] { return load_decoder(checkpoint, options); });
}

}  // namespace vivace::model
