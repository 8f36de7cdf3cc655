#include "src/model/model.h"

#include <algorithm>
#include <bit>
#include <string_view>
#include <utility>

#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/core/log.h"
#include "src/cpu/thread_pool.h"
#include "src/device/count_distinct.h"
#include "src/device/resolve_ids.h"
#include "src/model/layer_graph.h"
#include "src/model/memory.h"
#include "src/model/place_weights.h"
#include "src/model/random_fill.h"
#include "src/model/rope.h"
#include "src/model/synthetic.h"
#include "src/model/weights.h"
#include "src/ops/quantize_fp8/quantize.h"

namespace vivace::model {

namespace {

// Keys per tile of the decode schedule on a CPU. In deterministic mode a request is cut at multiples of kPieceTiles
// tiles, so that the order of every sum follows from the request alone.
constexpr int64_t kTileTokens = 64;
constexpr int64_t kPieceTiles = 8;

/// Runs each call of the walk.
struct RunCalls {
  const Stream& stream;
  const Model::RouteObserver& observer;
  const Model::CallObserver& calls;

  Status operator()(int64_t, const EmbeddingArgs& args) const { return embedding(args, stream); }
  Status operator()(int64_t, const DecodeScheduleArgs& args) const { return decode_schedule(args, stream); }
  Status operator()(int64_t, const RmsNormArgs& args) const { return rms_norm(args, stream); }
  Status operator()(int64_t layer, const LinearArgs& args) const {
    VIVACE_TRY(linear(args, stream));
    return calls.linear ? calls.linear(layer, args) : Status();
  }
  Status operator()(int64_t layer, const AttentionPrologueArgs& args) const {
    VIVACE_TRY(attention_prologue(args, stream));
    return calls.attention_prologue ? calls.attention_prologue(layer, args) : Status();
  }
  Status operator()(int64_t, const AttentionDecodeArgs& args) const { return attention_decode(args, stream); }
  Status operator()(int64_t, const AttentionPrefillArgs& args) const {
    return attention_prefill(args, stream);
  }
  Status operator()(int64_t, const SiluMulArgs& args) const { return silu_mul(args, stream); }
  Status operator()(int64_t layer, const ChooseExpertsArgs& args) const {
    VIVACE_TRY(choose_experts(args, stream));
    if (calls.router_gemm) VIVACE_TRY(calls.router_gemm(layer, args.logits));
    if (!observer) return {};
    if (stream.device == Device::cpu) {
      observer(layer, args.choice.expert_ids);
      return {};
    }
    const Tensor& ids = args.choice.expert_ids;  // dense: a buffer of its own
    std::vector<int32_t> copy(static_cast<size_t>(ids.elements()));
    VIVACE_TRY(device::copy_to_host(copy.data(), ids.data, ids.bytes(), stream));
    VIVACE_TRY(device::synchronize(stream));
    observer(layer, Tensor(copy.data(), DType::i32, {ids.shape[0], ids.shape[1]}));
    return {};
  }
  Status operator()(int64_t, const QuantizeFp8Args& args) const { return quantize_fp8(args, stream); }
  Status operator()(int64_t layer, const FusedMoeArgs& args) const {
    VIVACE_TRY(fused_moe(args, stream));
    return calls.fused_moe ? calls.fused_moe(layer, args) : Status();
  }
};

/// Asks each call of the walk which row it would take.
struct ExplainCalls {
  const Stream& stream;
  Phase phase;
  int64_t batch;
  std::vector<OpUse>& uses;

  Status add(int64_t layer, std::string_view op, Choice choice, const char* note = "") const {
    uses.push_back({layer, std::string(op), phase, batch, std::move(choice), note});
    return {};
  }
  Status operator()(int64_t layer, const EmbeddingArgs& args) const {
    return add(layer, "embedding", embedding_explain(args, stream),
               layer < 0 ? "" : "picks the rows that go on: those whose logits are asked for");
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
  Status operator()(int64_t layer, const ChooseExpertsArgs& args) const {
    Choice choice = choose_experts_explain(args, stream);
    const bool two_calls = choice.row.ends_with("two_calls");
    VIVACE_TRY(add(layer, "choose_experts", std::move(choice)));
    if (!two_calls) return {};
    RouteTopKArgs second = args.choice;
    second.scores = args.logits.scores;
    VIVACE_TRY(add(layer, "router_gemm", router_gemm_explain(args.logits, stream)));
    return add(layer, "route_top_k", route_top_k_explain(second, stream));
  }
  Status operator()(int64_t layer, const QuantizeFp8Args& args) const {
    return add(layer, "quantize_fp8", quantize_fp8_explain(args, stream));
  }
  Status operator()(int64_t layer, const FusedMoeArgs& args) const {
    return add(layer, "fused_moe", fused_moe_explain(args, stream));
  }
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
};

/// The weights that the calls of one step read.
struct WeighCalls {
  WeightBytes& bytes;

  static int64_t of(const ExpertWeights& expert) {
    int64_t sum = 0;
    for (const Tensor& tensor :
         {expert.gate, expert.up, expert.down, expert.gate_scale, expert.up_scale, expert.down_scale})
      sum += tensor.bytes();
    return sum;
  }
  Status operator()(int64_t, const RmsNormArgs& args) const { return add(args.weight.bytes()); }
  Status operator()(int64_t, const LinearArgs& args) const {
    for (int i = 0; i < args.part_count; ++i)
      bytes.dense += args.parts[i].weight.bytes() + args.parts[i].weight_scale.bytes();
    return {};
  }
  Status operator()(int64_t, const ChooseExpertsArgs& args) const {
    for (const Tensor& term : args.logits.weight.terms) bytes.dense += term.bytes();
    return {};
  }
  Status operator()(int64_t, const FusedMoeArgs& args) const {
    bytes.expert = args.experts.empty() ? (args.gate_up.bytes() + args.down.bytes() +
                                           args.gate_up_scale.bytes() + args.down_scale.bytes()) /
                                              args.gate_up.shape[0]
                                        : of(args.experts.front());
    return add(of(args.shared));
  }
  template <class Args>
  Status operator()(int64_t, const Args&) const {
    return {};
  }

 private:
  Status add(int64_t dense) const {
    bytes.dense += dense;
    return {};
  }
};

/// Rows of a step's arrays of tokens, and of those of requests: what the input has, or its bucket.
int64_t tokens_of(const ForwardInput& input) {
  return std::max(std::ssize(input.token_ids), input.bucket);
}
int64_t requests_of(const ForwardInput& input) {
  return std::max(std::ssize(input.kv_lengths), input.bucket);
}

/// The arrays of a step as tensors: of the largest one, in the memory that a step reads or in the pinned memory that is
/// copied there; or of one step, in the caller's memory.
struct StepArrays {
  Tensor token_ids, positions, slots, logit_rows;  ///< i32, i32, i64, i32 [tokens]
  Tensor query_start, kv_lengths;                  ///< i32 [requests + 1], [requests]
  Tensor page_table;                               ///< i32 [requests, max_pages]

  /// The largest step over `memory`, and its bytes.
  static std::pair<StepArrays, int64_t> lay_out(uint8_t* memory, Device device, int64_t tokens,
                                                int64_t requests, int64_t max_pages) {
    Layout layout(memory, device);
    StepArrays arrays;
    arrays.token_ids = layout.vector(DType::i32, tokens);
    arrays.positions = layout.vector(DType::i32, tokens);
    arrays.slots = layout.vector(DType::i64, tokens);
    arrays.logit_rows = layout.vector(DType::i32, tokens);
    arrays.query_start = layout.vector(DType::i32, requests + 1);
    arrays.kv_lengths = layout.vector(DType::i32, requests);
    arrays.page_table = layout.matrix(DType::i32, requests, max_pages);
    return {arrays, layout.bytes()};
  }
  /// Writes a step into arrays of the largest one. What pads it to its bucket: a token that goes to no page, and a request
  /// without query rows, whose pages therefore nobody reads.
  void write(const ForwardInput& input) const {
    const int64_t tokens = tokens_of(input), requests = requests_of(input);
    const auto put = [](const auto& values, auto* to, int64_t count, int32_t padding) {
      const auto* end = std::ranges::copy(values, to).out;
      std::fill_n(to + (end - to), count - (end - to), padding);
    };
    put(input.token_ids, token_ids.as<int32_t>(), tokens, 0);
    put(input.positions, positions.as<int32_t>(), tokens, 0);
    put(input.slots, slots.as<int64_t>(), tokens, -1);
    put(input.logit_rows, logit_rows.as<int32_t>(), std::ssize(input.logit_rows), 0);
    put(input.query_start, query_start.as<int32_t>(), requests + 1, input.query_start.back());
    put(input.kv_lengths, kv_lengths.as<int32_t>(), requests, 0);
    for (int64_t i = 0; i < std::ssize(input.kv_lengths); ++i) {
      std::ranges::copy(input.page_table.subspan(static_cast<size_t>(i * input.max_pages),
                                                 static_cast<size_t>(input.max_pages)),
                        page_table.at(i).as<int32_t>());
    }
  }
  /// Requests [begin, begin + count); absent when there are none.
  RequestGroup group(int64_t begin, int64_t count) const {
    if (count == 0) return {};
    return {.kv_lengths = kv_lengths.rows(begin, count),
            .starts = query_start.rows(begin, count + 1),
            .page_table = page_table.rows(begin, count)};
  }
};

template <class T>
Tensor view_of(std::span<const T> values, DType dtype) {
  return Tensor(const_cast<T*>(values.data()), dtype, {static_cast<int64_t>(values.size())});
}

class Decoder final : public Model {
 public:
  Decoder(const ModelOptions& options, LayerGraph graph, RopeTable rope)
      : options_(options), graph_(std::move(graph)), rope_(std::move(rope)) {
    graph_.cos_sin = rope_.tensor();
    graph_.cos_sin.device = options_.device;
    describe_pool(nullptr, 1);
    graph_.buffers = lay_out(nullptr, {}).first;
  }

  const ModelConfig& config() const override { return graph_.config; }
  const ModelOptions& options() const override { return options_; }
  int64_t max_model_len() const override { return rope_.tensor().shape[0]; }
  int64_t page_bytes() const override { return 2 * graph_.config.layers * layer_page_bytes(); }
  Status allocate_pages(int64_t pages, const Stream& stream) override;
  Status fill_pages(uint64_t seed, const Stream& stream) override;
  WeightBytes weight_bytes() const override;
  Status forward(const ForwardInput& input, const Tensor& logits, const Stream& stream) override {
    VIVACE_TRY(stage(input, logits, stream));
    return enqueue(stream);
  }
  Status stage(const ForwardInput& input, const Tensor& logits, const Stream& stream) override;
  Status enqueue(const Stream& stream) override;
  Status count_experts(const Tensor& count, const Stream& stream) override;
  std::vector<OpUse> explain(Phase phase, int64_t tokens, const Stream& stream) override;
  void observe_routes(RouteObserver observer) override { observer_ = std::move(observer); }
  void observe_calls(CallObserver observer) override { calls_ = std::move(observer); }

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
  /// What attention_decode is asked how to cut a step: shapes and types alone.
  AttentionDecodeArgs decode_call() const;
  std::pair<Activations, int64_t> lay_out(uint8_t* memory, const ScratchBytes& scratch) const;
  Status check(const ForwardInput& input, const Tensor& logits) const;
  Status check_contents(const ForwardInput& input) const;
  std::pair<StepArrays, int64_t> lay_out_step(uint8_t* memory, Device device) const {
    return StepArrays::lay_out(memory, device, options_.max_tokens, options_.max_requests, max_pages());
  }
  Status reserve_step(const Stream& stream);
  Status allocate_staging(const Stream& stream);
  Status copy_to_device(const ForwardInput& input, const Stream& stream);
  Step shape_of_step(int64_t tokens, int64_t decodes, int64_t chunks) const;
  bool on_cpu() const { return options_.device == Device::cpu; }

  ModelOptions options_;
  LayerGraph graph_;
  RopeTable rope_;
  Memory pool_, scratch_, cos_sin_;
  int64_t pages_ = 0;
  Step step_;                        ///< the staged one
  std::vector<int32_t> logit_rows_;  ///< on a CPU, of a step in no bucket

  // Where a GPU reads a step's arrays, and a CPU those of a step in a bucket.
  Memory step_memory_;
  StepArrays step_arrays_;
  // Where they are copied to a GPU from: two, as one may still be read while the next is written.
  struct Staging {
    device::Buffer memory;
    StepArrays arrays;
    std::unique_ptr<device::Event> copied;
  };
  Staging staging_[2];
  int next_staging_ = 0;
  RouteObserver observer_;
  CallObserver calls_;
};

void Decoder::describe_pool(uint8_t* memory, int64_t pages) {
  const ModelConfig& config = graph_.config;
  const int64_t bytes = pages * layer_page_bytes();
  graph_.k.clear();
  graph_.v.clear();
  for (int64_t l = 0; l < config.layers; ++l) {
    for (std::vector<Tensor>* side : {&graph_.k, &graph_.v}) {
      side->push_back(Tensor(memory, options_.kv_dtype,
                             {pages, options_.page_tokens, config.heads_kv, config.head_dim},
                             options_.device));
      if (memory != nullptr) memory += bytes;
    }
  }
}

AttentionDecodeArgs Decoder::decode_call() const {
  const ModelConfig& config = graph_.config;
  const DType activation = on_cpu() ? DType::f32 : DType::bf16;
  const DType q = options_.kv_dtype == DType::fp8_e4m3 ? DType::fp8_e4m3 : activation;
  const auto heads = [&](DType type) {
    return Tensor(nullptr, type, {1, config.heads_q, config.head_dim}, options_.device);
  };
  const Tensor pages(nullptr, DType::i32, {1, 1}, options_.device);
  return {.attention = {.q = heads(q),
                        .k = graph_.k[0],
                        .v = graph_.v[0],
                        .page_table = pages,
                        .output = heads(activation),
                        .window = config.sliding_window},
          .params = graph_.schedule};
}

/// Columns of the widest input of fp8 matrices; 0 without any.
int64_t widest_fp8_input(const LayerGraph& graph) {
  const ModelConfig& config = graph.config;
  int64_t width = 0;
  for (const LayerWeights& layer : graph.weights.layers) {
    if (layer.qkv_input.fp8 || layer.mlp_input.fp8) width = std::max(width, config.hidden);
    if (layer.o_input.fp8) width = std::max(width, config.heads_q * config.head_dim);
    if (layer.down_input.fp8) width = std::max(width, config.intermediate);
  }
  return width;
}

/// The buffers of a step over `memory` (or shapes alone), and their bytes.
std::pair<Activations, int64_t> Decoder::lay_out(uint8_t* memory, const ScratchBytes& scratch) const {
  const ModelConfig& config = graph_.config;
  const int64_t tokens = options_.max_tokens;
  const int64_t width_q = config.heads_q * config.head_dim, width_kv = config.heads_kv * config.head_dim;
  const bool has_dense = std::any_of(graph_.weights.layers.begin(), graph_.weights.layers.end(),
                                     [](const LayerWeights& layer) { return layer.dense.present(); });
  const DType activation = on_cpu() ? DType::f32 : DType::bf16;
  const bool fp8_cache = options_.kv_dtype == DType::fp8_e4m3;
  const int64_t fp8_width = widest_fp8_input(graph_);
  Layout layout(memory, options_.device);
  Activations buffers;
  buffers.residual = layout.matrix(DType::f32, tokens, config.hidden);
  buffers.picked = layout.matrix(DType::f32, tokens, config.hidden);
  buffers.normed = layout.matrix(activation, tokens, config.hidden);
  buffers.delta = layout.matrix(activation, tokens, config.hidden);
  buffers.qkv = layout.matrix(activation, tokens, width_q + 2 * width_kv);
  buffers.q = layout.matrix(fp8_cache ? DType::fp8_e4m3 : activation, tokens, width_q);
  buffers.q_scale = layout.matrix(DType::f32, tokens, fp8_cache ? config.heads_q : 0);
  buffers.fp8 = layout.matrix(DType::fp8_e4m3, tokens, fp8_width);
  buffers.fp8_scales = layout.matrix(DType::f32, tokens, scale_blocks(fp8_width));
  buffers.attended = layout.matrix(activation, tokens, width_q);
  buffers.gate_up = layout.matrix(activation, tokens, has_dense ? 2 * config.intermediate : 0);
  buffers.scores = layout.matrix(DType::f32, tokens, config.experts);
  buffers.expert_ids = layout.matrix(DType::i32, config.sparse_layers(), tokens * config.top_k);
  buffers.expert_weights = layout.matrix(DType::f32, tokens, config.is_moe() ? config.top_k : 0);
  buffers.schedule = layout.vector(DType::i32, decode_schedule_ints(options_.max_requests, scratch.workers));
  buffers.linear_scratch = layout.vector(DType::u8, scratch.linear);
  buffers.attention_scratch = layout.vector(DType::u8, scratch.attention);
  buffers.moe_scratch = layout.vector(DType::u8, scratch.moe);
  return {buffers, layout.bytes()};
}

Step Decoder::shape_of_step(int64_t tokens, int64_t decodes, int64_t chunks) const {
  const StepArrays arrays =
      StepArrays::lay_out(nullptr, options_.device, tokens, decodes + chunks, max_pages()).first;
  Step step;
  step.token_ids = arrays.token_ids;
  step.positions = arrays.positions;
  step.slots = arrays.slots;
  step.decodes = arrays.group(0, decodes);
  step.chunks = arrays.group(decodes, chunks);
  step.max_chunk_tokens = tokens;
  step.logit_rows = arrays.logit_rows;
  step.all_rows = true;
  step.logits = Tensor(nullptr, DType::f32, {tokens, graph_.config.vocab}, options_.device);
  return step;
}

Status Decoder::allocate_pages(int64_t pages, const Stream& stream) {
  if (pages < 1 || pages > INT32_MAX) {
    return invalid_argument("pages is {}, needs a number from 1 to {}", pages, INT32_MAX);
  }
  if (stream.device != options_.device) {
    return invalid_argument("the stream is on {}, the model's weights are on {}", name_of(stream.device),
                            name_of(options_.device));
  }
  pages_ = 0;  // until all that a step needs is there
  describe_pool(nullptr, pages);
  VIVACE_TRY_ASSIGN(graph_.schedule, attention_decode_schedule_params(decode_call(), stream));
  const int64_t workers = graph_.schedule.workers;
  graph_.buffers = lay_out(nullptr, {.workers = workers}).first;

  MeasureCalls measure{stream};
  const int64_t requests = std::min(options_.max_requests, options_.max_tokens);
  // The most rows need the most of one row's scratch; one row of logits is aligned to more than many are, so another
  // row may run it.
  for (const int64_t tokens : {int64_t{1}, options_.max_tokens}) {
    VIVACE_TRY(walk(graph_, shape_of_step(tokens, std::min(requests, tokens), 0), measure));
  }
  const ScratchBytes scratch{measure.linear, measure.attention, measure.moe, workers};
  VIVACE_TRY_ASSIGN(scratch_, Memory::reserve(lay_out(nullptr, scratch).second, "activations", stream));
  graph_.buffers = lay_out(scratch_.data(), scratch).first;

  pool_ = Memory();  // before the new one: both at once may exceed what there is
  VIVACE_TRY_ASSIGN(pool_, Memory::reserve(pages * page_bytes(), "KV pages", stream));
  describe_pool(pool_.data(), pages);
  if (!on_cpu()) VIVACE_TRY(allocate_staging(stream));
  pages_ = pages;
  return {};
}

Status Decoder::fill_pages(uint64_t seed, const Stream& stream) {
  for (const std::vector<Tensor>* side : {&graph_.k, &graph_.v}) {
    for (const Tensor& tensor : *side) VIVACE_TRY(fill_normal(tensor, 1, ++seed, stream));
  }
  return {};
}

WeightBytes Decoder::weight_bytes() const {
  WeightBytes bytes;
  (void)walk(graph_, shape_of_step(1, 1, 0), WeighCalls{bytes});  // no call fails
  return bytes;
}

Status Decoder::reserve_step(const Stream& stream) {
  VIVACE_TRY_ASSIGN(step_memory_, Memory::reserve(lay_out_step(nullptr, options_.device).second,
                                                  "a step's arrays", stream));
  step_arrays_ = lay_out_step(step_memory_.data(), options_.device).first;
  return {};
}

/// The places of a step's arrays, and the RoPE table.
Status Decoder::allocate_staging(const Stream& stream) {
  VIVACE_TRY(reserve_step(stream));
  for (Staging& staging : staging_) {
    VIVACE_TRY_ASSIGN(staging.memory, device::Buffer::pinned(stream.ordinal, step_memory_.bytes()));
    VIVACE_TRY_ASSIGN(staging.copied, device::Event::create(stream.ordinal));
    VIVACE_TRY(staging.copied->record(stream));
    staging.arrays = lay_out_step(static_cast<uint8_t*>(staging.memory.data()), Device::cpu).first;
  }
  if (cos_sin_.bytes() > 0) return {};
  rope_.fill(max_model_len());
  const Tensor& table = rope_.tensor();
  VIVACE_TRY_ASSIGN(cos_sin_, Memory::reserve(table.bytes(), "RoPE table", stream));
  graph_.cos_sin = cos_sin_.tensor(DType::f32, {table.shape[0], table.shape[1]});
  VIVACE_TRY(device::copy_to_device(graph_.cos_sin.data, table.data, table.bytes(), stream));
  return device::synchronize(stream);
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
  if (input.bucket != 0) {
    VIVACE_TRY(bounded("bucket", input.bucket, 1, std::min(options_.max_tokens, options_.max_requests)));
    VIVACE_TRY(bounded("tokens of a step in a bucket", tokens, 1, input.bucket));
    VIVACE_TRY(bounded("decode_requests of a step in a bucket", input.decode_requests, requests, requests));
    VIVACE_TRY(bounded("logit rows of a step in a bucket", rows, tokens, tokens));
    for (int64_t i = 0; i < rows; ++i)
      VIVACE_TRY(bounded("logit row of a step in a bucket", input.logit_rows[i], i, i));
  }
  const int64_t logit_rows = std::max(rows, input.bucket);
  if (logit_rows > 0 && (logits.rank != 2 || logits.dtype != DType::f32 || logits.shape[0] != logit_rows ||
                         logits.shape[1] != graph_.config.vocab)) {
    return invalid_argument("forward: logits is {}, needs f32[{}, {}]", to_string(logits), logit_rows,
                            graph_.config.vocab);
  }
  return {};
}

/// What a GPU row would skip in silence is refused here, where the numbers are known.
Status Decoder::check_contents(const ForwardInput& input) const {
  const auto tokens = static_cast<int64_t>(input.token_ids.size());
  const auto bounded = [](const char* name, int64_t index, int64_t value, int64_t low, int64_t high) {
    return value >= low && value <= high
               ? Status()
               : invalid_argument("forward: {}[{}] is {}, needs {} to {}", name, index, value, low, high);
  };
  const int64_t page_tokens = options_.page_tokens;
  const int64_t previous = input.previous_ids.present() && !on_cpu() ? input.previous_ids.shape[0] : 0;
  for (int64_t t = 0; t < tokens; ++t) {
    VIVACE_TRY(bounded("token_ids", t, input.token_ids[t], -previous, graph_.config.vocab - 1));
    VIVACE_TRY(bounded("positions", t, input.positions[t], 0, max_model_len() - 1));
    VIVACE_TRY(bounded("slots", t, input.slots[t], -1, pages_ * page_tokens - 1));
  }
  for (int64_t i = 0; i < std::ssize(input.kv_lengths); ++i) {
    const int64_t rows = input.query_start[i + 1] - input.query_start[i];
    VIVACE_TRY(bounded("query_start", i + 1, input.query_start[i + 1], input.query_start[i], tokens));
    VIVACE_TRY(bounded("kv_lengths", i, input.kv_lengths[i], 0, input.max_pages * page_tokens));
    if (rows == 0 || input.kv_lengths[i] == 0) continue;
    const int64_t last = (input.kv_lengths[i] - 1) / page_tokens;
    const int64_t unseen =
        graph_.config.sliding_window > 0
            ? std::max<int64_t>(0, input.kv_lengths[i] - rows + 1 - graph_.config.sliding_window)
            : 0;
    for (int64_t page = unseen / page_tokens; page <= last; ++page) {
      const int64_t index = i * input.max_pages + page;
      VIVACE_TRY(bounded("page_table", index, input.page_table[index], 0, pages_ - 1));
    }
  }
  return {};
}

/// Copies a step's arrays to their places on the device.
Status Decoder::copy_to_device(const ForwardInput& input, const Stream& stream) {
  Staging& staging = staging_[next_staging_ ^= 1];
  VIVACE_TRY(staging.copied->synchronize());
  const StepArrays& here = staging.arrays;
  here.write(input);
  const auto send = [&](const Tensor& from, const Tensor& to, int64_t count) {
    return count == 0 ? Status()
                      : device::copy_to_device(to.data, from.data, from.rows(0, count).bytes(), stream);
  };
  const int64_t tokens = tokens_of(input), requests = requests_of(input);
  VIVACE_TRY(send(here.token_ids, step_arrays_.token_ids, tokens));
  VIVACE_TRY(send(here.positions, step_arrays_.positions, tokens));
  VIVACE_TRY(send(here.slots, step_arrays_.slots, tokens));
  VIVACE_TRY(send(here.logit_rows, step_arrays_.logit_rows, std::ssize(input.logit_rows)));
  VIVACE_TRY(send(here.query_start, step_arrays_.query_start, requests + 1));
  VIVACE_TRY(send(here.kv_lengths, step_arrays_.kv_lengths, requests));
  const int64_t stride = 4 * max_pages();
  VIVACE_TRY(device::copy_rows_to_device(step_arrays_.page_table.data, stride, here.page_table.data, stride,
                                         4 * input.max_pages, std::ssize(input.kv_lengths), stream));
  return staging.copied->record(stream);
}

Status Decoder::stage(const ForwardInput& input, const Tensor& logits, const Stream& stream) {
  VIVACE_TRY(check(input, logits));
  VIVACE_TRY(check_contents(input));
  const int64_t tokens = tokens_of(input), requests = requests_of(input);
  const int64_t rows = std::max(std::ssize(input.logit_rows), input.bucket);
  step_ = {};
  StepArrays arrays;
  if (on_cpu()) {
    if (cpu::threads_of(stream.threads) > graph_.schedule.workers) {
      return invalid_argument("forward: the stream has {} threads, scratch was made for {}",
                              cpu::threads_of(stream.threads), graph_.schedule.workers);
    }
    if (input.bucket > 0) {
      if (step_memory_.bytes() == 0) VIVACE_TRY(reserve_step(stream));
      step_arrays_.write(input);
      arrays = step_arrays_;
    } else {
      logit_rows_.assign(input.logit_rows.begin(), input.logit_rows.end());
      arrays = {.token_ids = view_of(input.token_ids, DType::i32),
                .positions = view_of(input.positions, DType::i32),
                .slots = view_of(input.slots, DType::i64),
                .logit_rows = view_of(std::span<const int32_t>(logit_rows_), DType::i32),
                .query_start = view_of(input.query_start, DType::i32),
                .kv_lengths = view_of(input.kv_lengths, DType::i32),
                .page_table = Tensor(const_cast<int32_t*>(input.page_table.data()), DType::i32,
                                     {requests, input.max_pages})};
    }
    if (tokens > 0) {
      const int32_t last = *std::max_element(input.positions.begin(), input.positions.end());
      rope_.fill(std::min<int64_t>(int64_t{last} + 1, max_model_len()));
    }
  } else {
    VIVACE_TRY(copy_to_device(input, stream));
    arrays = step_arrays_;
    if (std::ranges::any_of(input.token_ids, [](int32_t id) { return id < 0; })) {
      VIVACE_TRY(device::resolve_ids(arrays.token_ids.rows(0, tokens), input.previous_ids, stream));
    }
  }
  step_.token_ids = arrays.token_ids.rows(0, tokens);
  step_.positions = arrays.positions.rows(0, tokens);
  step_.slots = arrays.slots.rows(0, tokens);
  const int64_t decodes = input.bucket > 0 ? requests : input.decode_requests;
  step_.decodes = arrays.group(0, decodes);
  step_.chunks = arrays.group(decodes, requests - decodes);
  if (input.bucket > 0)
    step_.live_tokens = arrays.query_start.rows(requests, 1);  // the end of the last with rows
  for (int64_t i = decodes; i < requests; ++i) {
    step_.max_chunk_tokens =
        std::max<int64_t>(step_.max_chunk_tokens, input.query_start[i + 1] - input.query_start[i]);
  }
  step_.logit_rows = arrays.logit_rows.rows(0, rows);
  step_.all_rows = rows == tokens;
  for (int64_t i = 0; step_.all_rows && i < std::ssize(input.logit_rows); ++i)
    step_.all_rows = input.logit_rows[i] == i;
  step_.logits = logits;
  return {};
}

Status Decoder::enqueue(const Stream& stream) {
  if (step_.tokens() == 0) return {};
  return walk(graph_, step_, RunCalls{stream, observer_, calls_});
}

Status Decoder::count_experts(const Tensor& count, const Stream& stream) {
  const ModelConfig& config = graph_.config;
  Tensor ids = graph_.buffers.expert_ids;
  if (!ids.present() || step_.tokens() == 0) return {};
  ids.shape[1] = step_.tokens() * config.top_k;
  if (!on_cpu()) return device::count_distinct(ids, config.experts, count, stream);
  for (int64_t layer = 0; layer < ids.shape[0]; ++layer) {
    std::vector<bool> touched(static_cast<size_t>(config.experts));
    for (const int32_t id : std::span(ids.at(layer).as<const int32_t>(), static_cast<size_t>(ids.shape[1])))
      if (id >= 0) touched[id] = true;
    count.as<int64_t>()[0] += std::ranges::count(touched, true);
    ++count.as<int64_t>()[1];
  }
  return {};
}

std::vector<OpUse> Decoder::explain(Phase phase, int64_t tokens, const Stream& stream) {
  Step step = phase == Phase::decode ? shape_of_step(tokens, tokens, 0) : shape_of_step(tokens, 0, 1);
  if (phase == Phase::prefill) {
    step.all_rows = false;
    step.logit_rows = step.logit_rows.rows(0, 1);
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
  const int64_t kv_types = options.device == Device::cpu
                               ? dtypes_mask(DType::f32, DType::bf16, DType::f16, DType::fp8_e4m3)
                               : dtypes_mask(DType::bf16, DType::fp8_e4m3);
  if ((kv_types >> static_cast<int>(options.kv_dtype) & 1) == 0) {
    return invalid_argument("kv_dtype is {}, needs {} on {}", name_of(options.kv_dtype),
                            options.device == Device::cpu ? "f32, bf16, f16 or fp8" : "bf16 or fp8",
                            name_of(options.device));
  }
  return {};
}

Result<RouterMode> router_mode_of(std::string_view name) {
  if (name == "exact") return RouterMode::exact;
  if (name == "two_term") return RouterMode::two_term;
  return invalid_argument("router_mode is '{}', needs exact or two_term", name);
}

Result<std::unique_ptr<Model>> load_decoder(const Checkpoint& checkpoint, ModelOptions options) {
  if (options.kv_dtype == DType::none)
    options.kv_dtype = options.device == Device::cpu ? DType::f32 : DType::bf16;
  LayerGraph graph;
  graph.config = checkpoint.config();
  const ModelConfig& config = graph.config;
  VIVACE_TRY(validate(config));
  VIVACE_TRY(check_options(config, options));
  VIVACE_TRY_ASSIGN(const RouterMode router_mode, router_mode_of(options.router_mode));
  std::unique_ptr<device::OwnedStream> owned;
  Stream stream{.device = options.device, .ordinal = options.ordinal};
  if (options.device == Device::cuda && !only_shapes(stream)) {
    VIVACE_TRY_ASSIGN(owned, device::OwnedStream::create(options.ordinal));
    stream = owned->stream();
  }
  if (checkpoint.synthetic()) {
    VIVACE_TRY_ASSIGN(graph.weights, synthetic_weights(config, stream));
  } else {
    VIVACE_TRY_ASSIGN(graph.weights, bind_weights(checkpoint, router_mode));
    if (options.kv_dtype == DType::fp8_e4m3) {
      if (const int64_t layers = complete_kv_scales(graph.weights); layers > 0) {
        log_once(fmt::format("{} of {} layers have no scales for fp8 keys and values; their scale is 1",
                             layers, config.layers));
      }
    }
    if (options.device == Device::cuda) VIVACE_TRY(place_weights(graph.weights, stream));
  }
  graph.exact = options.exact;
  graph.deterministic = options.deterministic;
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
