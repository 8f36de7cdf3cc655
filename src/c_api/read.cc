#include "src/c_api/read.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "src/core/error.h"
#include "src/core/overlap.h"

namespace vivace::c_api {

static_assert(Tensor::kMaxRank == VIVACE_MAX_RANK);
static_assert(LinearArgs::kMaxParts == VIVACE_LINEAR_PARTS);
static_assert(RouterWeight::kMaxTerms == VIVACE_ROUTER_TERMS);
static_assert(static_cast<int>(Code::internal) == VIVACE_INTERNAL);
static_assert(static_cast<int>(DType::q6_k) == VIVACE_Q6_K);
static_assert(static_cast<int>(Device::cuda) == VIVACE_DEVICE_CUDA);
static_assert(static_cast<int>(Fp8Scaling::block) == VIVACE_FP8_BLOCK);
static_assert(static_cast<int>(QkNorm::rope_then_norm) == VIVACE_QK_ROPE_THEN_NORM);
static_assert(static_cast<int>(RopeStyle::interleaved) == VIVACE_ROPE_INTERLEAVED);
static_assert(static_cast<int>(RouterMode::exact) == VIVACE_ROUTER_EXACT);
static_assert(static_cast<int>(RouteScoring::sigmoid) == VIVACE_ROUTE_SIGMOID);

namespace {

/// a * b, or nothing where 62 bits do not hold it; both not negative.
bool multiply(int64_t& a, int64_t b) {
  constexpr int64_t kMost = int64_t{1} << 62;
  return !__builtin_mul_overflow(a, b, &a) && a <= kMost;
}

/// The strides of dimensions along which nothing steps say nothing, and other libraries put anything there: they become those of
/// a dense tensor.
void mend_strides(Tensor& tensor) {
  const bool empty = tensor.elements() == 0;
  int64_t dense = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    if (empty || tensor.shape[i] == 1) tensor.stride[i] = dense;
    if (__builtin_mul_overflow(tensor.stride[i], tensor.shape[i], &dense)) dense = 1;  // of an empty one
  }
}

/// Whether every address of the tensor, and its number of bytes, is a number that arithmetic on it can hold.
bool measurable(const vivace_tensor& t) {
  constexpr int64_t kLargestElement = 256;  // of any type, in bytes per block
  int64_t bytes = kLargestElement, reach = 0;
  for (int i = 0; i < t.rank; ++i) {
    if (!multiply(bytes, t.shape[i])) return false;
    if (t.shape[i] <= 1) continue;
    int64_t step = kLargestElement;
    if (!multiply(step, t.stride[i]) || !multiply(step, t.shape[i])) return false;
    if (step > (int64_t{1} << 62) - reach) return false;
    reach += step;
  }
  return true;
}

/// The dimensions of most tensors, of which one look says that they are good: none is empty, and no number is near the end of 64 bits.
/// Of others, where this is false, measurable() and mend_strides() say the same.
bool copy_dimensions(const vivace_tensor& from, Tensor& tensor) {
  constexpr int kFactorBits = 31, kProductBits = 50;
  uint64_t factors = 0, products = 0, dense = 1, elements = 1;
  bool overflows = false;
  for (int i = from.rank - 1; i >= 0; --i) {
    const auto extent = static_cast<uint64_t>(from.shape[i]);
    const uint64_t stride = extent == 1 ? dense : static_cast<uint64_t>(from.stride[i]);
    dense = extent * stride;
    overflows |= __builtin_mul_overflow(elements, extent, &elements);
    factors |= (extent - 1) | stride;  // where the extent is 0, all bits
    products |= dense | elements;
    tensor.shape[i] = static_cast<int64_t>(extent);
    tensor.stride[i] = static_cast<int64_t>(stride);
  }
  return factors >> kFactorBits == 0 && products >> kProductBits == 0 && !overflows;
}

/// Everything but the dimensions.
void copy_kind(const vivace_tensor& from, Tensor& tensor) {
  tensor.data = from.data;
  tensor.dtype = static_cast<DType>(from.dtype);
  tensor.device = static_cast<Device>(from.device);
  tensor.rank = from.rank;
}

/// A tensor that was found good.
void copy_tensor(const vivace_tensor& from, Tensor& tensor) {
  copy_kind(from, tensor);
  std::copy_n(from.shape, from.rank, tensor.shape.begin());
  std::copy_n(from.stride, from.rank, tensor.stride.begin());
  mend_strides(tensor);
}

AttentionArgs read_attention(Reader& reader, const vivace_attention& from) {
  return {.q = reader.tensor("q", from.q),
          .k = reader.tensor("k", from.k),
          .v = reader.tensor("v", from.v),
          .page_table = reader.tensor("page_table", from.page_table),
          .kv_lengths = reader.tensor("kv_lengths", from.kv_lengths),
          .query_start = reader.tensor("query_start", from.query_start),
          .output = reader.output("output", from.output),
          .q_scale = reader.tensor("q_scale", from.q_scale),
          .k_scale = reader.tensor("k_scale", from.k_scale),
          .v_scale = reader.tensor("v_scale", from.v_scale),
          .sinks = reader.tensor("sinks", from.sinks),
          .lse = reader.output("lse", from.lse),
          .softmax_scale = from.softmax_scale,
          .window = from.window,
          .soft_cap = from.soft_cap};
}

DecodeScheduleParams read_params(const vivace_decode_schedule_params& from) {
  const DecodeScheduleParams defaults;
  const auto or_default = [](int64_t value, int64_t otherwise) { return value == 0 ? otherwise : value; };
  return {.heads_kv = or_default(from.heads_kv, defaults.heads_kv),
          .tile_tokens = or_default(from.tile_tokens, defaults.tile_tokens),
          .workers = or_default(from.workers, defaults.workers),
          .min_tiles = or_default(from.min_tiles, defaults.min_tiles),
          .request_cost = from.request_cost,
          .window = from.window,
          .piece_tiles = from.piece_tiles};
}

/// Whether both are the same elements.
bool same_view(const Tensor& a, const Tensor& b) {
  return a.data == b.data && a.dtype == b.dtype && a.shape == b.shape && a.stride == b.stride;
}

}  // namespace

Tensor Reader::tensor(std::string_view name, const vivace_tensor& from) {
  Tensor tensor;
  if (read(name, from, tensor)) remember(name, from, tensor);
  return tensor;
}

Tensor Reader::output(std::string_view name, const vivace_tensor& from, std::string_view itself,
                      std::string_view or_itself) {
  Tensor tensor;
  if (!read(name, from, tensor)) return tensor;
  if (Seen* seen = remember(name, from, tensor)) {
    seen->written = true;
    seen->itself = itself;
    seen->or_itself = or_itself;
  }
  return tensor;
}

Reader::Seen* Reader::remember(std::string_view name, const vivace_tensor& from, const Tensor& tensor) {
  if (count_ == places_.size()) return nullptr;
  int64_t last = 0;
  for (int i = 0; i < tensor.rank; ++i) last += (tensor.shape[i] - 1) * tensor.stride[i];
  const DTypeInfo type = info_of(tensor.dtype);
  if (type.block_elements > 1) last /= type.block_elements;
  Seen* seen = std::construct_at(&places_[count_++].seen);
  seen->name = name;
  seen->from = &from;
  seen->begin = reinterpret_cast<uintptr_t>(tensor.data);
  seen->end = seen->begin + static_cast<uintptr_t>((last + 1) * type.block_bytes);
  return seen;
}

Status Reader::apart() const {
  for (size_t i = 0; i < count_; ++i) {
    const Seen& out = places_[i].seen;
    if (!out.written) continue;
    for (size_t j = 0; j < count_; ++j) {
      const Seen& other = places_[j].seen;
      if (i == j || (other.written && j < i) || out.begin >= other.end || other.begin >= out.end) continue;
      Tensor a, b;
      copy_tensor(*out.from, a);
      copy_tensor(*other.from, b);
      if (!overlap(a, b)) continue;
      if ((other.name == out.itself || other.name == out.or_itself) && same_view(a, b)) continue;
      return invalid_argument("{}: {} overlaps {} in memory, needs memory of its own", place_, out.name,
                              other.name);
    }
  }
  return {};
}

void Reader::check_kind(std::string_view name, const vivace_tensor& from) {
  if (from.dtype < 0 || from.dtype > std::numeric_limits<uint8_t>::max() ||
      info_of(static_cast<DType>(from.dtype)).block_bytes == 0) {
    fail(invalid_argument("{}: {}.dtype is {}, which is no type", place_, name, from.dtype));
  } else if (from.rank < 0 || from.rank > VIVACE_MAX_RANK) {
    fail(invalid_argument("{}: {}.rank is {}, needs 0 to {}", place_, name, from.rank, int{VIVACE_MAX_RANK}));
  } else if (from.device != VIVACE_DEVICE_CPU && from.device != VIVACE_DEVICE_CUDA) {
    fail(invalid_argument("{}: {}.device is {}, needs 0 (cpu) or 1 (cuda)", place_, name, from.device));
  } else if (from.device == VIVACE_DEVICE_CUDA && ordinal_ >= 0 && from.ordinal != ordinal_) {
    fail(invalid_argument("{}: {} is on cuda:{}, needs cuda:{}, where the call runs", place_, name,
                          from.ordinal, ordinal_));
  }
}

void Reader::check_dimensions(std::string_view name, const vivace_tensor& from) {
  for (int i = 0; i < from.rank; ++i) {
    if (from.shape[i] < 0 || (from.shape[i] > 1 && from.stride[i] < 0)) {
      fail(invalid_argument("{}: {}.{}[{}] is {}, needs at least 0", place_, name,
                            from.shape[i] < 0 ? "shape" : "stride", i,
                            from.shape[i] < 0 ? from.shape[i] : from.stride[i]));
    }
  }
  if (status_.ok() && !measurable(from)) {
    fail(invalid_argument("{}: {} has more bytes than 62 bits can count", place_, name));
  }
}

bool Reader::read(std::string_view name, const vivace_tensor& from, Tensor& tensor) {
  if (from.dtype == 0 || !status_.ok()) return false;
  check_kind(name, from);
  if (!status_.ok()) return false;
  copy_kind(from, tensor);
  if (copy_dimensions(from, tensor)) return true;
  check_dimensions(name, from);
  tensor = Tensor();
  if (status_.ok()) copy_tensor(from, tensor);
  return status_.ok();
}

int64_t Reader::number(std::string_view name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return value;
  fail(invalid_argument("{}: {} is {}, needs {} to {}", place_, name, value, low, high));
  return low;
}

ExpertWeights Reader::expert(std::string_view name, const vivace_expert_weights& from) {
  const auto part = [&](std::string_view which, const vivace_tensor& t) {
    Tensor tensor;
    if (t.dtype != 0) read(fmt::format("{}.{}", name, which), t, tensor);
    return tensor;
  };
  return {.gate = part("gate", from.gate),
          .up = part("up", from.up),
          .down = part("down", from.down),
          .gate_scale = part("gate_scale", from.gate_scale),
          .up_scale = part("up_scale", from.up_scale),
          .down_scale = part("down_scale", from.down_scale),
          .act_scale = part("act_scale", from.act_scale)};
}

std::span<const ExpertWeights> Reader::experts(const vivace_expert_weights* from, int64_t count) {
  constexpr int64_t kMostExperts = 1 << 16;
  count = number("expert_count", count, 0, kMostExperts);
  if (count > 0 && from == nullptr) {
    fail(invalid_argument("{}: experts is null, needs expert_count = {} of them", place_, count));
  }
  if (!status_.ok()) return {};
  experts_.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) experts_.push_back(expert(fmt::format("experts[{}]", i), from[i]));
  return experts_;
}

RmsNormArgs read(Reader& reader, const vivace_rms_norm_args& from) {
  return {.x = reader.tensor("x", from.x),
          .residual = reader.output("residual", from.residual),
          .weight = reader.tensor("weight", from.weight),
          .y = reader.output("y", from.y, "x"),
          .y_scale = reader.output("y_scale", from.y_scale),
          .y_scaling = reader.one_of("y_scaling", from.y_scaling, Fp8Scaling::block),
          .eps = from.eps,
          .y_fp8 = reader.output("y_fp8", from.y_fp8)};
}

LinearArgs read(Reader& reader, const vivace_linear_args& from) {
  struct Names {
    std::string_view weight, weight_scale, bias, y;
  };
  static constexpr std::array<Names, LinearArgs::kMaxParts> kNames{
      {{"parts[0].weight", "parts[0].weight_scale", "parts[0].bias", "parts[0].y"},
       {"parts[1].weight", "parts[1].weight_scale", "parts[1].bias", "parts[1].y"},
       {"parts[2].weight", "parts[2].weight_scale", "parts[2].bias", "parts[2].y"}}};
  LinearArgs args{
      .x = reader.tensor("x", from.x),
      .x_scale = reader.tensor("x_scale", from.x_scale),
      .x_scaling = reader.one_of("x_scaling", from.x_scaling, Fp8Scaling::block),
      .part_count = static_cast<int>(reader.number("part_count", from.part_count, 1, LinearArgs::kMaxParts)),
      .exact = from.exact != 0,
      .batch_invariant = from.batch_invariant != 0,
      .weight_ready = from.weight_ready != 0,
      .workspace = reader.output("workspace", from.workspace)};
  for (int p = 0; p < args.part_count; ++p) {
    const vivace_linear_part& part = from.parts[p];
    const Names& name = kNames[static_cast<size_t>(p)];
    args.parts[static_cast<size_t>(p)] = {.weight = reader.tensor(name.weight, part.weight),
                                          .weight_scale = reader.tensor(name.weight_scale, part.weight_scale),
                                          .bias = reader.tensor(name.bias, part.bias),
                                          .y = reader.output(name.y, part.y)};
  }
  return args;
}

EmbeddingArgs read(Reader& reader, const vivace_embedding_args& from) {
  return {.ids = reader.tensor("ids", from.ids),
          .table = reader.tensor("table", from.table),
          .y = reader.output("y", from.y)};
}

AttentionPrologueArgs read(Reader& reader, const vivace_attention_prologue_args& from) {
  return {.qkv = reader.tensor("qkv", from.qkv),
          .q_norm_weight = reader.tensor("q_norm_weight", from.q_norm_weight),
          .k_norm_weight = reader.tensor("k_norm_weight", from.k_norm_weight),
          .cos_sin = reader.tensor("cos_sin", from.cos_sin),
          .positions = reader.tensor("positions", from.positions),
          .slots = reader.tensor("slots", from.slots),
          .q = reader.output("q", from.q),
          .k = reader.output("k", from.k),
          .v = reader.output("v", from.v),
          .q_scale = reader.output("q_scale", from.q_scale),
          .k_scale = from.k_scale.rank == 3 ? reader.output("k_scale", from.k_scale)  // made
                                            : reader.tensor("k_scale", from.k_scale),
          .v_scale = reader.tensor("v_scale", from.v_scale),
          .qk_norm = reader.one_of("qk_norm", from.qk_norm, QkNorm::rope_then_norm),
          .rope_style = reader.one_of("rope_style", from.rope_style, RopeStyle::interleaved),
          .eps = from.eps};
}

AttentionPrefillArgs read(Reader& reader, const vivace_attention_prefill_args& from) {
  return {.attention = read_attention(reader, from.attention),
          .max_query_tokens = from.max_query_tokens,
          .split_tokens = from.split_tokens};
}

AttentionDecodeArgs read(Reader& reader, const vivace_attention_decode_args& from) {
  return {.attention = read_attention(reader, from.attention),
          .max_query_tokens = from.max_query_tokens,
          .params = read_params(from.params),
          .schedule = reader.output("schedule", from.schedule),
          .old_keys_ready = from.old_keys_ready != 0,
          .workspace = reader.output("workspace", from.workspace)};
}

DecodeScheduleArgs read(Reader& reader, const vivace_decode_schedule_args& from) {
  return {.kv_lengths = reader.tensor("kv_lengths", from.kv_lengths),
          .query_start = reader.tensor("query_start", from.query_start),
          .params = read_params(from.params),
          .schedule = reader.output("schedule", from.schedule)};
}

RouterWeightSource read(Reader& reader, const vivace_router_weight_source& from) {
  return {.weight = reader.tensor("weight", from.weight),
          .mode = reader.one_of("mode", from.mode, RouterMode::exact),
          .version = from.version,
          .storage = reader.tensor("storage", from.storage)};
}

namespace {

RouterWeight read_weight(Reader& reader, const vivace_router_weight& from) {
  RouterWeight weight;
  weight.scaled = from.scaled != 0;
  weight.term_count =
      static_cast<int>(reader.number("weight.term_count", from.term_count, 1, RouterWeight::kMaxTerms));
  weight.mode = reader.one_of("weight.mode", from.mode, RouterMode::exact);
  weight.version = from.version;
  for (int i = 0; i < weight.term_count; ++i) weight.terms[i] = reader.tensor("weight.terms", from.terms[i]);
  return weight;
}

/// What router_gemm and choose_experts have in common, and route_top_k and it.
template <class From>
RouterGemmArgs read_logits(Reader& reader, const From& from) {
  RouterGemmArgs args{.x = reader.tensor("x", from.x),
                      .weight_version = from.current_version,
                      .bias = reader.tensor("bias", from.bias),
                      .scores = reader.output("scores", from.scores),
                      .batch_invariant = from.batch_invariant != 0,
                      .weight_ready = from.weight_ready != 0};
  args.weight = read_weight(reader, from.weight);
  return args;
}
template <class From>
RouteTopKArgs read_choice(Reader& reader, const From& from) {
  return {.correction_bias = reader.tensor("correction_bias", from.correction_bias),
          .expert_ids = reader.output("expert_ids", from.expert_ids),
          .expert_weights = reader.output("expert_weights", from.expert_weights),
          .zero_weight = reader.output("zero_weight", from.zero_weight),
          .live_tokens = reader.tensor("live_tokens", from.live_tokens),
          .scoring = reader.one_of("scoring", from.scoring, RouteScoring::sigmoid),
          .renormalise = from.renormalise != 0,
          .scale = from.scale,
          .groups = from.groups == 0 ? 1 : from.groups,
          .top_groups = from.top_groups == 0 ? 1 : from.top_groups,
          .zero_experts = from.zero_experts};
}

}  // namespace

RouterGemmArgs read(Reader& reader, const vivace_router_gemm_args& from) {
  return read_logits(reader, from);
}

RouteTopKArgs read(Reader& reader, const vivace_route_top_k_args& from) {
  const Tensor scores = reader.tensor("scores", from.scores);
  RouteTopKArgs args = read_choice(reader, from);
  args.scores = scores;
  return args;
}

ChooseExpertsArgs read(Reader& reader, const vivace_choose_experts_args& from) {
  const RouterGemmArgs logits = read_logits(reader, from);
  const RouteTopKArgs choice = read_choice(reader, from);
  return {.logits = logits, .choice = choice, .workspace = reader.output("workspace", from.workspace)};
}

FusedMoeArgs read(Reader& reader, const vivace_fused_moe_args& from) {
  const vivace_expert_weights& shared = from.shared;
  const auto part = [&](std::string_view name, const vivace_tensor& t) {
    return t.dtype == 0 ? Tensor() : reader.tensor(name, t);
  };
  const int32_t weights =
      from.expert_count > 0 && from.experts != nullptr ? from.experts[0].gate.dtype : from.gate_up.dtype;
  const bool quantises =
      from.x.dtype != VIVACE_FP8_E4M3 && weights == VIVACE_FP8_E4M3;  // before y is written
  return {.x = reader.tensor("x", from.x),
          .x_scale = reader.tensor("x_scale", from.x_scale),
          .gate_up = reader.tensor("gate_up", from.gate_up),
          .down = reader.tensor("down", from.down),
          .gate_up_scale = reader.tensor("gate_up_scale", from.gate_up_scale),
          .down_scale = reader.tensor("down_scale", from.down_scale),
          .act_scale = reader.tensor("act_scale", from.act_scale),
          .block_offset = from.block_offset,
          .experts = reader.experts(from.experts, from.expert_count),
          .shared = {.gate = part("shared.gate", shared.gate),
                     .up = part("shared.up", shared.up),
                     .down = part("shared.down", shared.down),
                     .gate_scale = part("shared.gate_scale", shared.gate_scale),
                     .up_scale = part("shared.up_scale", shared.up_scale),
                     .down_scale = part("shared.down_scale", shared.down_scale),
                     .act_scale = part("shared.act_scale", shared.act_scale)},
          .expert_ids = reader.tensor("expert_ids", from.expert_ids),
          .expert_weights = reader.tensor("expert_weights", from.expert_weights),
          .first_expert = from.first_expert,
          .total_experts = from.total_experts,
          .expert_map = reader.tensor("expert_map", from.expert_map),
          .swiglu = {.alpha = from.swiglu_alpha == 0 ? 1 : from.swiglu_alpha,
                     .limit = from.swiglu_limit == 0 ? INFINITY : from.swiglu_limit,
                     .beta = from.swiglu_beta},
          .batch_invariant = from.batch_invariant != 0,
          .y = reader.output("y", from.y, quantises ? "x" : ""),
          .workspace = reader.output("workspace", from.workspace)};
}

GroupedGemmArgs read(Reader& reader, const vivace_grouped_gemm_args& from) {
  return {.x = reader.tensor("x", from.x),
          .weight = reader.tensor("weight", from.weight),
          .group_start = reader.tensor("group_start", from.group_start),
          .group_rows = reader.tensor("group_rows", from.group_rows),
          .x_scale = reader.tensor("x_scale", from.x_scale),
          .weight_scale = reader.tensor("weight_scale", from.weight_scale),
          .batch_invariant = from.batch_invariant != 0,
          .y = reader.output("y", from.y)};
}

SiluMulArgs read(Reader& reader, const vivace_silu_mul_args& from) {
  return {.gate = reader.tensor("gate", from.gate),
          .up = reader.tensor("up", from.up),
          .y = reader.output("y", from.y, "gate", "up"),
          .y_scale = reader.output("y_scale", from.y_scale),
          .y_scaling = reader.one_of("y_scaling", from.y_scaling, Fp8Scaling::block)};
}

QuantizeFp8Args read(Reader& reader, const vivace_quantize_fp8_args& from) {
  return {.x = reader.tensor("x", from.x),
          .y = reader.output("y", from.y),
          .scale = reader.output("scale", from.scale),
          .scaling = reader.one_of("scaling", from.scaling, Fp8Scaling::block)};
}

SamplerArgs read(Reader& reader, const vivace_sampler_args& from) {
  return {.logits = reader.tensor("logits", from.logits),
          .temperature = reader.tensor("temperature", from.temperature),
          .top_p = reader.tensor("top_p", from.top_p),
          .min_p = reader.tensor("min_p", from.min_p),
          .top_k = reader.tensor("top_k", from.top_k),
          .repetition_penalty = reader.tensor("repetition_penalty", from.repetition_penalty),
          .presence_penalty = reader.tensor("presence_penalty", from.presence_penalty),
          .frequency_penalty = reader.tensor("frequency_penalty", from.frequency_penalty),
          .seed = reader.tensor("seed", from.seed),
          .position = reader.tensor("position", from.position),
          .prompt_bits = reader.tensor("prompt_bits", from.prompt_bits),
          .output_counts = from.count_ids != 0 ? reader.output("output_counts", from.output_counts)
                                               : reader.tensor("output_counts", from.output_counts),
          .state = reader.tensor("state", from.state),
          .count_ids = from.count_ids != 0,
          .bias_start = reader.tensor("bias_start", from.bias_start),
          .bias_ids = reader.tensor("bias_ids", from.bias_ids),
          .bias_values = reader.tensor("bias_values", from.bias_values),
          .allowed_bits = reader.tensor("allowed_bits", from.allowed_bits),
          .ids = reader.output("ids", from.ids),
          .valid = reader.output("valid", from.valid),
          .logprobs = reader.output("logprobs", from.logprobs),
          .top_ids = reader.output("top_ids", from.top_ids),
          .top_logprobs = reader.output("top_logprobs", from.top_logprobs),
          .workspace = reader.output("workspace", from.workspace)};
}

vivace_tensor written(const Tensor& tensor, int ordinal) {
  vivace_tensor out{};
  out.data = tensor.data;
  out.dtype = static_cast<int32_t>(tensor.dtype);
  out.rank = tensor.rank;
  out.device = static_cast<int32_t>(tensor.device);
  out.ordinal = ordinal;
  std::copy_n(tensor.shape.begin(), tensor.rank, out.shape);
  std::copy_n(tensor.stride.begin(), tensor.rank, out.stride);
  return out;
}

Status same_struct(std::string_view place, const void* given, void* copy, size_t bytes,
                   const void*& current) {
  if (given == nullptr) return invalid_argument("{}: the arguments are null", place);
  size_t theirs = 0;
  std::memcpy(&theirs, given, sizeof(theirs));  // struct_bytes stands first in all of them
  current = given;
  if (theirs == bytes) return {};
  constexpr size_t kMost = 1 << 16;
  if (theirs < sizeof(theirs) || theirs > kMost) {
    return invalid_argument("{}: struct_bytes is {}, needs the sizeof of the arguments, which is {} here",
                            place, theirs, bytes);
  }
  const auto* from = static_cast<const unsigned char*>(given);
  if (std::any_of(from + std::min(theirs, bytes), from + theirs,
                  [](unsigned char byte) { return byte != 0; })) {
    return error(Code::unsupported,
                 "{}: struct_bytes is {}, this library knows {} bytes of it, and something is set beyond "
                 "them; it is older "
                 "than its caller",
                 place, theirs, bytes);
  }
  std::memset(copy, 0, bytes);
  std::memcpy(copy, given, std::min(theirs, bytes));
  current = copy;
  return {};
}

}  // namespace vivace::c_api
