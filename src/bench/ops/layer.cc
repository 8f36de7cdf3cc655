// The small operators of a layer, around attention and the experts: one suite over one class. An operator says which
// tensors of its arguments tokens share and which have a row per token; from that follow the copies of a sample of tokens
// on the host, the float64 reference on them, and the comparison.

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "src/bench/ops/memory.h"
#include "src/bench/ops/suites.h"
#include "src/core/error.h"
#include "src/core/number.h"
#include "src/ops/attention_prologue/table.h"
#include "src/ops/decode_schedule/table.h"
#include "src/ops/embedding/table.h"
#include "src/ops/linear/table.h"
#include "src/ops/quantize_fp8/quantize.h"
#include "src/ops/quantize_fp8/table.h"
#include "src/ops/rms_norm/table.h"
#include "src/ops/route_top_k/table.h"
#include "src/ops/silu_mul/table.h"
#include "vivace/attention.h"

namespace vivace::bench {

namespace {

/// Sets together exceed the caches by far, unless kMostSets of them are still small. Such a call finds its inputs in L2,
/// where the operator before it leaves them in a step too.
constexpr int64_t kColdBytes = 300'000'000, kMostSets = 64;
constexpr int64_t kSampledTokens = 8;
constexpr uint64_t kSeedsPerSet = 16;
constexpr int64_t kMostTokens = 1 << 17, kMostWidth = 1 << 17;
/// Given scales of fp8 outputs: values of deviation 1 use the range, and those of 28 still fit.
constexpr float kGivenScale = 1.f / 16;

enum class Rows { shared, per_token };

/// One tensor of an operator's arguments, which may be absent.
template <class Args>
struct Operand {
  std::function<Tensor&(Args&)> of;
  Rows rows = Rows::shared;
};

template <class Args>
struct Output {
  Operand<Args> values;
  Operand<Args> scale = {};  ///< without a function: none
};

/// What is timed, and what it is compared with.
template <class Args>
struct Subject {
  Status (*call)(const Args&, const Stream&);
  Cost (*cost)(const Args&);
  Choice (*explain)(const Args&, const Stream&);
  Status (*reference)(const Args&, const Stream&);
  std::vector<Operand<Args>> inputs;
  std::vector<Output<Args>> outputs;  ///< what they held before the call counts as input
  int64_t step = 1;                   ///< the check takes the last of each `step` tokens
  double flop_rate = kBf16Rate;

  /// Calls visit(operand) until one fails.
  template <class Visit>
  Status each_operand(Visit&& visit) const {
    for (const Operand<Args>& input : inputs) VIVACE_TRY(visit(input));
    for (const Output<Args>& output : outputs) {
      VIVACE_TRY(visit(output.values));
      if (output.scale.of) VIVACE_TRY(visit(output.scale));
    }
    return {};
  }
};

int64_t step_of(int64_t tokens) {
  return (tokens + kSampledTokens - 1) / kSampledTokens;
}

/// Contiguous tensors on the host.
class HostCopies {
 public:
  /// The last of each `step` rows; an absent tensor stays absent.
  Result<Tensor> rows(const Tensor& tensor, int64_t step, const Stream& stream) {
    if (!tensor.present()) return Tensor();
    if (step == 1 && tensor.contiguous()) {
      VIVACE_TRY_ASSIGN(HostTensor host, download(tensor, stream));
      memory_.push_back(std::move(host.memory));
      return host.tensor;
    }
    const Tensor sample = make(tensor.dtype, tensor, tensor.shape[0] / step);
    for (int64_t i = 0; i < sample.shape[0]; ++i) {
      const Tensor to = sample.at(i);
      VIVACE_TRY(device::copy_to_host(to.data, tensor.at((i + 1) * step - 1).data, to.bytes(), stream));
    }
    VIVACE_TRY(device::synchronize(stream));
    return sample;
  }
  /// A copy to write into. bf16 becomes f32, so that what is written is not rounded again.
  Tensor writable(const Tensor& tensor) {
    const Tensor copy =
        make(tensor.dtype == DType::bf16 ? DType::f32 : tensor.dtype, tensor, tensor.shape[0]);
    if (copy.dtype == tensor.dtype) {
      std::copy_n(tensor.as<const char>(), tensor.bytes(), copy.as<char>());
    } else {
      for (int64_t i = 0; i < copy.elements(); ++i) copy.as<float>()[i] = load(tensor.dtype, tensor.data, i);
    }
    return copy;
  }

 private:
  Tensor make(DType dtype, const Tensor& like, int64_t rows) {
    Tensor tensor = like;
    tensor.dtype = dtype;
    tensor.device = Device::cpu;
    tensor.shape[0] = rows;
    for (int64_t d = like.rank - 1, step = 1; d >= 0; step *= tensor.shape[d--]) tensor.stride[d] = step;
    tensor.data = memory_.emplace_back(static_cast<size_t>(tensor.bytes())).data();
    return tensor;
  }
  std::vector<std::vector<uint8_t>> memory_;
};

/// Element `i` of contiguous values that have one scale, one per row, or one per block of a row.
double element(const Tensor& values, const Tensor& scale, int64_t i) {
  if (values.dtype == DType::i32) return values.as<const int32_t>()[i];
  const double stored = load(values.dtype, values.data, i);
  if (!scale.present()) return stored;
  if (scale.elements() == 1) return stored * scale.as<const float>()[0];
  const int64_t columns = values.shape[values.rank - 1],
                per_row = scale.elements() * columns / values.elements();
  const int64_t block = per_row == 1 ? 0 : i % columns / kFp8ScaleBlock;
  return stored * scale.as<const float>()[i / columns * per_row + block];
}

/// Compares the outputs of one call with the reference on the inputs as they were before it.
template <class Args>
class Check {
 public:
  Check(const Subject<Args>& subject, const Args& args)
      : subject_(subject), on_device_(args), before_(args) {}

  Status copy_inputs(const Stream& stream) {
    return subject_.each_operand([&](const Operand<Args>& operand) -> Status {
      VIVACE_TRY_ASSIGN(operand.of(before_), copy(operand, stream));
      return {};
    });
  }

  Result<double> max_abs_error(const Stream& stream) {
    Args got = before_, want = before_;
    for (const Output<Args>& output : subject_.outputs) {
      for (const Operand<Args>& operand : {output.values, output.scale}) {
        if (!operand.of || !operand.of(want).present()) continue;
        operand.of(want) = host_.writable(operand.of(before_));
        VIVACE_TRY_ASSIGN(operand.of(got), copy(operand, stream));
      }
    }
    VIVACE_TRY(run_reference(want));
    double worst = 0;
    for (const Output<Args>& output : subject_.outputs) {
      const auto scale_in = [&](Args& args) { return output.scale.of ? output.scale.of(args) : Tensor(); };
      const Tensor is = output.values.of(got), should = output.values.of(want);
      const Tensor is_scale = scale_in(got), should_scale = scale_in(want);
      for (int64_t i = 0; i < is.elements(); ++i) {
        worst = larger(worst, std::abs(element(is, is_scale, i) - element(should, should_scale, i)));
      }
    }
    return worst;
  }

 private:
  Result<Tensor> copy(const Operand<Args>& operand, const Stream& stream) {
    return host_.rows(operand.of(on_device_), operand.rows == Rows::per_token ? subject_.step : 1, stream);
  }

  /// Token by token, so that they are computed side by side; once, where none has a row of its own.
  Status run_reference(Args& want) {
    int64_t tokens = 1;
    VIVACE_TRY(subject_.each_operand([&](const Operand<Args>& operand) -> Status {
      if (operand.rows == Rows::per_token && operand.of(want).present()) tokens = operand.of(want).shape[0];
      return {};
    }));
    std::vector<Status> failures(static_cast<size_t>(tokens));
    check_threads().parallel_for(tokens, [&](int64_t t, int) {
      Args one = want;
      failures[t] = subject_.each_operand([&](const Operand<Args>& operand) -> Status {
        Tensor& tensor = operand.of(one);
        if (operand.rows == Rows::per_token && tensor.present()) tensor = tensor.rows(t, 1);
        return {};
      });
      if (failures[t].ok()) failures[t] = subject_.reference(one, Stream{});
    });
    for (const Status& failure : failures) VIVACE_TRY(failure);
    return {};
  }

  Subject<Args> subject_;
  Args on_device_, before_;
  HostCopies host_;
};

class PreparedCalls final : public PreparedOp {
 public:
  /// Memory of the sets, and of what they share.
  DeviceTensors& memory() { return memory_; }

  /// make(seed) gives the arguments of one set; a set takes the seeds up to seed + kSeedsPerSet.
  template <class Args, class Make>
  Status prepare(const Subject<Args>& subject, Make&& make, const Stream& stream) {
    int64_t count = 1;
    for (int64_t set = 0; set < count; ++set) {
      VIVACE_TRY_ASSIGN(const Args args, make(kSeedsPerSet * static_cast<uint64_t>(set + 1)));
      calls_.push_back([call = subject.call, args](const Stream& s) { return call(args, s); });
      if (set > 0) continue;
      const Cost cost = subject.cost(args);
      const int64_t bytes = std::max<int64_t>(1, cost.bytes);
      count = std::clamp<int64_t>((kColdBytes + bytes - 1) / bytes, 2, kMostSets);
      floor_ = {.bytes = static_cast<double>(cost.bytes),
                .flops = static_cast<double>(cost.flops),
                .flop_rate = subject.flop_rate};
      choice_ = subject.explain(args, stream);
      const auto check = std::make_shared<Check<Args>>(subject, args);
      VIVACE_TRY(check->copy_inputs(stream));
      check_ = [check](const Stream& s) { return check->max_abs_error(s); };
    }
    return {};
  }

  int64_t sets() const override { return std::ssize(calls_); }
  Status call(int64_t set, const Stream& stream) override { return calls_[set](stream); }
  Floor floor() const override { return floor_; }
  std::string row() const override { return choice_.row; }
  Result<std::optional<double>> max_abs_error(const Stream& stream) override {
    VIVACE_TRY_ASSIGN(const double error, check_(stream));
    return std::optional<double>(error);
  }

 private:
  DeviceTensors memory_;
  std::vector<std::function<Status(const Stream&)>> calls_;
  std::function<Result<double>(const Stream&)> check_;
  Floor floor_;
  Choice choice_;
};

/// What an activation is written as: field y.
struct OutputType {
  DType dtype;
  Fp8Scaling scaling;

  Rows scale_rows() const { return scaling == Fp8Scaling::tensor ? Rows::shared : Rows::per_token; }
  /// Of y [tokens, width]: given, or room for made ones; absent without fp8.
  Result<Tensor> scale(DeviceTensors& memory, int64_t tokens, int64_t width, const Stream& stream) const {
    if (dtype != DType::fp8_e4m3) return Tensor();
    if (scaling == Fp8Scaling::tensor)
      return memory.copy_of(std::vector<float>{kGivenScale}, DType::f32, {1}, stream);
    if (scaling == Fp8Scaling::token) return memory.make(DType::f32, {tokens}, stream);
    return memory.make(DType::f32, {tokens, scale_blocks(width)}, stream);
  }
};

Result<OutputType> output_type_of(const OpWorkload& w) {
  VIVACE_TRY_ASSIGN(const size_t i, choice_of(w, "y", {"bf16", "fp8_tensor", "fp8_token", "fp8_block"}));
  if (i == 0) return OutputType{DType::bf16, Fp8Scaling::tensor};
  return OutputType{DType::fp8_e4m3, static_cast<Fp8Scaling>(i - 1)};
}

/// f32 scales around a value, no two neighbours alike.
Result<Tensor> scales_around(double value, std::initializer_list<int64_t> shape, DeviceTensors& memory,
                             const Stream& stream) {
  std::vector<float> scales(static_cast<size_t>(Tensor(nullptr, DType::f32, shape).elements()));
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<float>(value * (0.75 + 0.125 * (i % 5)));
  return memory.copy_of(scales, DType::f32, shape, stream);
}

/// Elements of a tensor whose dimensions are these fields.
double elements(const OpWorkload& w, std::initializer_list<std::string_view> dimensions) {
  double product = 1;
  for (const std::string_view dimension : dimensions) product *= static_cast<double>(w.number(dimension));
  return product;
}

/// Of one set; there are at least two.
Status check_set(const OpWorkload& w, double bytes) {
  return check_memory(w, 2 * bytes);
}

/// What a row takes of a fact at most, if that is less.
int64_t least(int64_t most, std::span<const Need> needs, std::string_view fact) {
  for (const Need& need : needs) {
    if (need.fact == fact && need.kind == Need::at_most) most = std::min(most, need.value);
  }
  return most;
}

Status check_rms_norm(const OpWorkload& w) {
  VIVACE_TRY(check_field(w, "hidden", 1, least(kMostWidth, kRmsNormCudaNeeds, "hidden")));
  VIVACE_TRY(output_type_of(w).status());
  return check_set(w, elements(w, {"tokens", "hidden"}) * (2 + 4 + 2));
}

/// x bf16 is added to a residual stream in f32, as the engine keeps it.
Status prepare_rms_norm(const OpWorkload& w, PreparedCalls& calls, const Stream& stream) {
  VIVACE_TRY_ASSIGN(const OutputType y, output_type_of(w));
  const int64_t tokens = w.number("tokens"), hidden = w.number("hidden");
  using Args = RmsNormArgs;
  const Subject<Args> subject{.call = rms_norm,
                              .cost = rms_norm_cost,
                              .explain = rms_norm_explain,
                              .reference = rms_norm_reference,
                              .inputs = {{&Args::x, Rows::per_token}, {&Args::weight, Rows::shared}},
                              .outputs = {{{&Args::residual, Rows::per_token}},
                                          {{&Args::y, Rows::per_token}, {&Args::y_scale, y.scale_rows()}}},
                              .step = step_of(tokens)};
  const auto make = [&](uint64_t seed) -> Result<Args> {
    DeviceTensors& memory = calls.memory();
    Args args;
    VIVACE_TRY_ASSIGN(args.x, memory.random(DType::bf16, {tokens, hidden}, 1, seed, stream));
    VIVACE_TRY_ASSIGN(args.residual, memory.random(DType::f32, {tokens, hidden}, 1, seed + 1, stream));
    VIVACE_TRY_ASSIGN(args.weight, memory.random(DType::bf16, {hidden}, 1, seed + 2, stream));
    VIVACE_TRY_ASSIGN(args.y, memory.make(y.dtype, {tokens, hidden}, stream));
    VIVACE_TRY_ASSIGN(args.y_scale, y.scale(memory, tokens, hidden, stream));
    args.y_scaling = y.scaling;
    return args;
  };
  return calls.prepare(subject, make, stream);
}

Status check_silu_mul(const OpWorkload& w) {
  VIVACE_TRY_ASSIGN(const OutputType y, output_type_of(w));
  const bool quantised = y.dtype == DType::fp8_e4m3;
  VIVACE_TRY(check_field(w, "intermediate", 1,
                         quantised ? least(kMostWidth, kSiluMulCudaNeeds, "quantised_width") : kMostWidth));
  return check_set(w, elements(w, {"tokens", "intermediate"}) * (2 * 2 + 2));
}

/// Gate and up are halves of the rows that one product wrote.
Status prepare_silu_mul(const OpWorkload& w, PreparedCalls& calls, const Stream& stream) {
  VIVACE_TRY_ASSIGN(const OutputType y, output_type_of(w));
  const int64_t tokens = w.number("tokens"), intermediate = w.number("intermediate");
  using Args = SiluMulArgs;
  const Subject<Args> subject{.call = silu_mul,
                              .cost = silu_mul_cost,
                              .explain = silu_mul_explain,
                              .reference = silu_mul_reference,
                              .inputs = {{&Args::gate, Rows::per_token}, {&Args::up, Rows::per_token}},
                              .outputs = {{{&Args::y, Rows::per_token}, {&Args::y_scale, y.scale_rows()}}},
                              .step = step_of(tokens)};
  const auto make = [&](uint64_t seed) -> Result<Args> {
    DeviceTensors& memory = calls.memory();
    Args args;
    VIVACE_TRY_ASSIGN(args.gate, memory.random(DType::bf16, {tokens, 2 * intermediate}, 1, seed, stream));
    args.gate.shape[1] = intermediate;
    args.up = args.gate;
    args.up.data = args.gate.as<uint16_t>() + intermediate;
    VIVACE_TRY_ASSIGN(args.y, memory.make(y.dtype, {tokens, intermediate}, stream));
    VIVACE_TRY_ASSIGN(args.y_scale, y.scale(memory, tokens, intermediate, stream));
    args.y_scaling = y.scaling;
    return args;
  };
  return calls.prepare(subject, make, stream);
}

Status check_quantize_fp8(const OpWorkload& w) {
  VIVACE_TRY(check_field(w, "hidden", 1, kMostWidth));
  VIVACE_TRY(output_type_of(w).status());
  return check_set(w, elements(w, {"tokens", "hidden"}) * (2 + 1));
}

Status prepare_quantize_fp8(const OpWorkload& w, PreparedCalls& calls, const Stream& stream) {
  VIVACE_TRY_ASSIGN(const OutputType y, output_type_of(w));
  const int64_t tokens = w.number("tokens"), hidden = w.number("hidden");
  using Args = QuantizeFp8Args;
  const Subject<Args> subject{.call = quantize_fp8,
                              .cost = quantize_fp8_cost,
                              .explain = quantize_fp8_explain,
                              .reference = quantize_fp8_reference,
                              .inputs = {{&Args::x, Rows::per_token}},
                              .outputs = {{{&Args::y, Rows::per_token}, {&Args::scale, y.scale_rows()}}},
                              .step = step_of(tokens)};
  const auto make = [&](uint64_t seed) -> Result<Args> {
    DeviceTensors& memory = calls.memory();
    Args args;
    VIVACE_TRY_ASSIGN(args.x, memory.random(DType::bf16, {tokens, hidden}, 1, seed, stream));
    VIVACE_TRY_ASSIGN(args.y, memory.make(y.dtype, {tokens, hidden}, stream));
    VIVACE_TRY_ASSIGN(args.scale, y.scale(memory, tokens, hidden, stream));
    args.scaling = y.scaling;
    return args;
  };
  return calls.prepare(subject, make, stream);
}

Status check_embedding(const OpWorkload& w) {
  VIVACE_TRY(check_field(w, "hidden", 1, kMostWidth));
  VIVACE_TRY(check_field(w, "vocab", 1, 1 << 20));
  const double shared = elements(w, {"vocab", "hidden"}) * 2;
  return check_memory(w, shared + 2 * elements(w, {"tokens", "hidden"}) * 4);
}

/// Sets share the table and take rows of it that those before them did not touch, as long as there are any.
Status prepare_embedding(const OpWorkload& w, PreparedCalls& calls, const Stream& stream) {
  const int64_t tokens = w.number("tokens"), hidden = w.number("hidden"), vocab = w.number("vocab");
  using Args = EmbeddingArgs;
  const Subject<Args> subject{.call = embedding,
                              .cost = embedding_cost,
                              .explain = embedding_explain,
                              .reference = embedding_reference,
                              .inputs = {{&Args::ids, Rows::per_token}, {&Args::table, Rows::shared}},
                              .outputs = {{{&Args::y, Rows::per_token}}},
                              .step = step_of(tokens)};
  VIVACE_TRY_ASSIGN(const Tensor table, calls.memory().random(DType::bf16, {vocab, hidden}, 1, 1, stream));
  std::vector<int32_t> order(static_cast<size_t>(vocab));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
  int64_t next = 0;
  const auto make = [&](uint64_t) -> Result<Args> {
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < tokens; ++t) ids.push_back(order[next++ % vocab]);
    Args args{.ids = {}, .table = table, .y = {}};
    VIVACE_TRY_ASSIGN(args.ids, calls.memory().copy_of(ids, DType::i32, {tokens}, stream));
    VIVACE_TRY_ASSIGN(args.y, calls.memory().make(DType::f32, {tokens, hidden}, stream));
    return args;
  };
  return calls.prepare(subject, make, stream);
}

Status check_attention_prologue(const OpWorkload& w) {
  VIVACE_TRY(check_heads(w));
  VIVACE_TRY(choice_of(w, "kv", {"bf16", "fp8"}).status());
  const double q = elements(w, {"tokens", "heads_q", "head_dim"}),
               kv = 2 * elements(w, {"tokens", "heads_kv", "head_dim"});
  return check_set(w, (q + kv) * (2 + 2));
}

/// Norm, then RoPE; tokens go to shuffled slots of a cache with a page more than they need.
Status prepare_attention_prologue(const OpWorkload& w, PreparedCalls& calls, const Stream& stream) {
  constexpr int64_t kMaxPosition = 8192, kPageTokens = 64;
  VIVACE_TRY_ASSIGN(const bool fp8, choice_of(w, "kv", {"bf16", "fp8"}));
  const int64_t tokens = w.number("tokens"), heads_q = w.number("heads_q"), heads_kv = w.number("heads_kv");
  const int64_t head_dim = w.number("head_dim"), pages = (tokens + kPageTokens - 1) / kPageTokens + 1;
  const DType type = fp8 ? DType::fp8_e4m3 : DType::bf16;
  using Args = AttentionPrologueArgs;
  // All tokens are checked: the caches can only be compared whole.
  const Subject<Args> subject{.call = attention_prologue,
                              .cost = attention_prologue_cost,
                              .explain = attention_prologue_explain,
                              .reference = attention_prologue_reference,
                              .inputs = {{&Args::qkv, Rows::per_token},
                                         {&Args::positions, Rows::per_token},
                                         {&Args::slots, Rows::per_token},
                                         {&Args::q_norm_weight, Rows::shared},
                                         {&Args::k_norm_weight, Rows::shared},
                                         {&Args::cos_sin, Rows::shared}},
                              .outputs = {{{&Args::q, Rows::per_token}, {&Args::q_scale, Rows::per_token}},
                                          {{&Args::k, Rows::shared}, {&Args::k_scale, Rows::shared}},
                                          {{&Args::v, Rows::shared}, {&Args::v_scale, Rows::shared}}}};
  DeviceTensors& memory = calls.memory();
  Args base;
  base.qk_norm = QkNorm::norm_then_rope;
  VIVACE_TRY_ASSIGN(base.cos_sin,
                    memory.random(DType::f32, {kMaxPosition, head_dim / 2 * 2}, 0.7, 1, stream));
  const auto make = [&](uint64_t seed) -> Result<Args> {
    std::mt19937_64 rng(seed);
    std::vector<int64_t> slots(static_cast<size_t>(pages * kPageTokens));
    std::vector<int32_t> positions;
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), rng);
    slots.resize(static_cast<size_t>(tokens));
    for (int64_t t = 0; t < tokens; ++t) positions.push_back(static_cast<int32_t>(rng() % kMaxPosition));
    Args args = base;
    const int64_t width = (heads_q + 2 * heads_kv) * head_dim;
    VIVACE_TRY_ASSIGN(args.qkv, memory.random(DType::bf16, {tokens, width}, 1, seed, stream));
    VIVACE_TRY_ASSIGN(args.q_norm_weight, memory.random(DType::bf16, {head_dim}, 1, seed + 1, stream));
    VIVACE_TRY_ASSIGN(args.k_norm_weight, memory.random(DType::bf16, {head_dim}, 1, seed + 2, stream));
    VIVACE_TRY_ASSIGN(args.positions, memory.copy_of(positions, DType::i32, {tokens}, stream));
    VIVACE_TRY_ASSIGN(args.slots, memory.copy_of(slots, DType::i64, {tokens}, stream));
    VIVACE_TRY_ASSIGN(args.q, memory.make(type, {tokens, heads_q, head_dim}, stream));
    VIVACE_TRY_ASSIGN(args.k,
                      memory.random(type, {pages, kPageTokens, heads_kv, head_dim}, 1, seed + 3, stream));
    VIVACE_TRY_ASSIGN(args.v,
                      memory.random(type, {pages, kPageTokens, heads_kv, head_dim}, 1, seed + 4, stream));
    if (fp8) {
      VIVACE_TRY_ASSIGN(args.q_scale, memory.make(DType::f32, {tokens, heads_q}, stream));
      VIVACE_TRY_ASSIGN(args.k_scale,
                        memory.copy_of(std::vector<float>{kGivenScale}, DType::f32, {1}, stream));
      args.v_scale = args.k_scale;
    }
    return args;
  };
  return calls.prepare(subject, make, stream);
}

Status check_route_top_k(const OpWorkload& w) {
  VIVACE_TRY(check_field(w, "experts", 1, 4096));
  VIVACE_TRY(check_field(w, "top_k", 1, w.number("experts")));
  VIVACE_TRY(choice_of(w, "scoring", {"sigmoid", "softmax"}).status());
  return check_set(w, elements(w, {"tokens", "experts"}) * 4);
}

/// "sigmoid" chooses with a bias, "softmax" without.
Status prepare_route_top_k(const OpWorkload& w, PreparedCalls& calls, const Stream& stream) {
  VIVACE_TRY_ASSIGN(const bool softmax, choice_of(w, "scoring", {"sigmoid", "softmax"}));
  const int64_t tokens = w.number("tokens"), experts = w.number("experts"), top_k = w.number("top_k");
  using Args = RouteTopKArgs;
  const Subject<Args> subject{
      .call = route_top_k,
      .cost = route_top_k_cost,
      .explain = route_top_k_explain,
      .reference = route_top_k_reference,
      .inputs = {{&Args::scores, Rows::per_token}, {&Args::correction_bias, Rows::shared}},
      .outputs = {{{&Args::expert_ids, Rows::per_token}}, {{&Args::expert_weights, Rows::per_token}}},
      .step = step_of(tokens)};
  const auto make = [&](uint64_t seed) -> Result<Args> {
    DeviceTensors& memory = calls.memory();
    Args args;
    args.scoring = softmax ? RouteScoring::softmax : RouteScoring::sigmoid;
    VIVACE_TRY_ASSIGN(args.scores, memory.random(DType::f32, {tokens, experts}, 1, seed, stream));
    if (!softmax) {
      VIVACE_TRY_ASSIGN(args.correction_bias, memory.random(DType::f32, {experts}, 0.1, seed + 1, stream));
    }
    VIVACE_TRY_ASSIGN(args.expert_ids, memory.make(DType::i32, {tokens, top_k}, stream));
    VIVACE_TRY_ASSIGN(args.expert_weights, memory.make(DType::f32, {tokens, top_k}, stream));
    return args;
  };
  return calls.prepare(subject, make, stream);
}

Status check_decode_schedule(const OpWorkload& w) {
  VIVACE_TRY(check_field(w, "heads_kv", 1, 1024));
  return check_field(w, "workers", 1, 1 << 16);
}

/// A request per token, of 1 to 32K keys: every length of that range in proportion to its inverse.
Status prepare_decode_schedule(const OpWorkload& w, PreparedCalls& calls, const Stream& stream) {
  constexpr double kLogMostKeys = 15;
  const int64_t requests = w.number("tokens"), workers = w.number("workers");
  using Args = DecodeScheduleArgs;
  const Subject<Args> subject{
      .call = decode_schedule,
      .cost = decode_schedule_cost,
      .explain = decode_schedule_explain,
      .reference = decode_schedule_reference,
      .inputs = {{&Args::kv_lengths, Rows::shared}, {&Args::query_start, Rows::shared}},
      .outputs = {{{&Args::schedule, Rows::shared}}}};
  std::vector<int32_t> starts(static_cast<size_t>(requests + 1));
  std::iota(starts.begin(), starts.end(), 0);
  const auto make = [&](uint64_t seed) -> Result<Args> {
    DeviceTensors& memory = calls.memory();
    std::mt19937_64 rng(seed);
    std::uniform_real_distribution<double> log_keys(0, kLogMostKeys);
    std::vector<int32_t> lengths;
    for (int64_t r = 0; r < requests; ++r) lengths.push_back(static_cast<int32_t>(std::exp2(log_keys(rng))));
    Args args;
    args.params = {.heads_kv = w.number("heads_kv"), .workers = workers};
    VIVACE_TRY_ASSIGN(args.kv_lengths, memory.copy_of(lengths, DType::i32, {requests}, stream));
    VIVACE_TRY_ASSIGN(args.query_start, memory.copy_of(starts, DType::i32, {requests + 1}, stream));
    VIVACE_TRY_ASSIGN(args.schedule,
                      memory.make(DType::i32, {decode_schedule_ints(requests, workers)}, stream));
    return args;
  };
  return calls.prepare(subject, make, stream);
}

Status check_linear(const OpWorkload& w) {
  VIVACE_TRY(check_field(w, "n", 1, 1 << 20));
  VIVACE_TRY(check_field(w, "k", 1, kMostWidth));
  VIVACE_TRY(choice_of(w, "quant", {"bf16", "per_tensor", "blockwise"}).status());
  VIVACE_TRY(choice_of(w, "y", {"bf16", "f32"}).status());
  return check_set(
      w, 2 * elements(w, {"tokens", "k"}) + 2 * elements(w, {"n", "k"}) + 4 * elements(w, {"tokens", "n"}));
}

/// One weight. fp8 values are of deviation 1 and scaled, so that results are of order 1 in every form.
Status prepare_linear(const OpWorkload& w, PreparedCalls& calls, const Stream& stream) {
  VIVACE_TRY_ASSIGN(const size_t quant, choice_of(w, "quant", {"bf16", "per_tensor", "blockwise"}));
  VIVACE_TRY_ASSIGN(const bool to_f32, choice_of(w, "y", {"bf16", "f32"}));
  const int64_t tokens = w.number("tokens"), n = w.number("n"), k = w.number("k");
  const bool fp8 = quant != 0, blockwise = quant == 2;
  const DType type = fp8 ? DType::fp8_e4m3 : DType::bf16;
  const double deviation = 1 / std::sqrt(static_cast<double>(k));
  using Args = LinearArgs;
  const Subject<Args> subject{
      .call = linear,
      .cost = linear_cost,
      .explain = linear_explain,
      .reference = linear_reference,
      .inputs = {{&Args::x, Rows::per_token},
                 {&Args::x_scale, blockwise ? Rows::per_token : Rows::shared},
                 {[](Args& args) -> Tensor& { return args.parts[0].weight; }, Rows::shared},
                 {[](Args& args) -> Tensor& { return args.parts[0].weight_scale; }, Rows::shared}},
      .outputs = {{{[](Args& args) -> Tensor& { return args.parts[0].y; }, Rows::per_token}}},
      .step = step_of(tokens),
      .flop_rate = fp8 ? kFp8Rate : kBf16Rate};
  Tensor workspace;
  const auto make = [&](uint64_t seed) -> Result<Args> {
    DeviceTensors& memory = calls.memory();
    Args args;
    args.weight_ready = true;  // as in a step of a model
    LinearPart& part = args.parts[0];
    VIVACE_TRY_ASSIGN(args.x, memory.random(type, {tokens, k}, 1, seed, stream));
    VIVACE_TRY_ASSIGN(part.weight, memory.random(type, {n, k}, fp8 ? 1 : deviation, seed + 1, stream));
    VIVACE_TRY_ASSIGN(part.y, memory.make(to_f32 ? DType::f32 : DType::bf16, {tokens, n}, stream));
    if (blockwise) {
      const int64_t blocks_n = scale_blocks(n), blocks_k = scale_blocks(k);
      args.x_scaling = Fp8Scaling::block;
      VIVACE_TRY_ASSIGN(args.x_scale, scales_around(1, {tokens, blocks_k}, memory, stream));
      VIVACE_TRY_ASSIGN(part.weight_scale, scales_around(deviation, {blocks_n, blocks_k}, memory, stream));
    } else if (fp8) {
      VIVACE_TRY_ASSIGN(args.x_scale, scales_around(1, {1}, memory, stream));
      VIVACE_TRY_ASSIGN(part.weight_scale, scales_around(deviation, {1}, memory, stream));
    }
    VIVACE_TRY_ASSIGN(const int64_t scratch, linear_workspace_bytes(args, stream));
    if (scratch > 0 && !workspace.present()) {  // calls follow each other, one serves all
      VIVACE_TRY_ASSIGN(workspace, memory.make(DType::u8, {scratch}, stream));
    }
    args.workspace = workspace;
    return args;
  };
  return calls.prepare(subject, make, stream);
}

struct LayerOp {
  std::string_view name;
  Status (*check)(const OpWorkload& workload);
  Status (*prepare)(const OpWorkload& workload, PreparedCalls& calls, const Stream& stream);
};
constexpr LayerOp kLayerOps[] = {
    {"rms_norm", check_rms_norm, prepare_rms_norm},
    {"silu_mul", check_silu_mul, prepare_silu_mul},
    {"quantize_fp8", check_quantize_fp8, prepare_quantize_fp8},
    {"embedding", check_embedding, prepare_embedding},
    {"attention_prologue", check_attention_prologue, prepare_attention_prologue},
    {"route_top_k", check_route_top_k, prepare_route_top_k},
    {"decode_schedule", check_decode_schedule, prepare_decode_schedule},
    {"linear", check_linear, prepare_linear},
};

const LayerOp& op_of(const OpWorkload& w) {
  return *std::ranges::find(kLayerOps, w.text("op"), &LayerOp::name);
}

Status check(const OpWorkload& w) {
  VIVACE_TRY(check_field(w, "tokens", 1, kMostTokens));
  return op_of(w).check(w);
}

Result<std::unique_ptr<PreparedOp>> prepare(const OpWorkload& w, const Stream& stream) {
  auto prepared = std::make_unique<PreparedCalls>();
  VIVACE_TRY(op_of(w).prepare(w, *prepared, stream));
  return std::unique_ptr<PreparedOp>(std::move(prepared));
}

/// One of the eight shards of Hy3: 8 query heads and one KV head, 1/8 of the dense layer and of the vocabulary. The
/// plain form of a call at 1, 64 and 4096 tokens; other forms where their size makes a difference.
std::vector<OpWorkload> workloads() {
  constexpr int64_t kHidden = 4096, kIntermediate = 13312 / 8, kVocab = 120832 / 8, kHeadDim = 128,
                    kHeadsQ = 8;
  constexpr int64_t kQkv = (kHeadsQ + 2) * kHeadDim, kAttended = kHeadsQ * kHeadDim;
  constexpr int64_t kWorkers = 2 * 132;  // two CTAs on each SM
  using Counts = std::vector<int64_t>;
  std::vector<OpWorkload> all;
  const auto add = [&](const char* op, const Counts& tokens, const std::vector<OpWorkload::Field>& fields) {
    for (const int64_t count : tokens) {
      OpWorkload w{.suite = "layer", .name = "hy3", .fields = {{"op", op}, {"tokens", count}}};
      w.fields.insert(w.fields.end(), fields.begin(), fields.end());
      all.push_back(std::move(w));
    }
  };
  const Counts every = {1, 64, 4096}, batches = {64, 4096};
  add("rms_norm", every, {{"hidden", kHidden}, {"y", "bf16"}});
  add("rms_norm", batches, {{"hidden", kHidden}, {"y", "fp8_token"}});
  add("rms_norm", batches, {{"hidden", kHidden}, {"y", "fp8_block"}});
  add("silu_mul", every, {{"intermediate", kIntermediate}, {"y", "bf16"}});
  add("silu_mul", batches, {{"intermediate", kIntermediate}, {"y", "fp8_block"}});
  add("quantize_fp8", batches, {{"hidden", kHidden}, {"y", "fp8_tensor"}});
  add("quantize_fp8", {4096}, {{"hidden", kHidden}, {"y", "fp8_token"}});
  add("quantize_fp8", batches, {{"hidden", kHidden}, {"y", "fp8_block"}});
  add("embedding", batches, {{"hidden", kHidden}, {"vocab", kVocab}});
  for (const char* kv : {"bf16", "fp8"}) {
    add("attention_prologue", kv == std::string_view("bf16") ? every : batches,
        {{"heads_q", kHeadsQ}, {"heads_kv", 1}, {"head_dim", kHeadDim}, {"kv", kv}});
  }
  add("route_top_k", every, {{"experts", 192}, {"top_k", 8}, {"scoring", "sigmoid"}});
  add("route_top_k", {64}, {{"experts", 192}, {"top_k", 8}, {"scoring", "softmax"}});
  add("decode_schedule", {1, 64, 512}, {{"heads_kv", 1}, {"workers", kWorkers}});
  for (const char* quant : {"bf16", "per_tensor", "blockwise"}) {
    const bool plain = quant == std::string_view("bf16");
    add("linear", plain ? every : batches, {{"n", kQkv}, {"k", kHidden}, {"quant", quant}, {"y", "bf16"}});
    add("linear", plain ? every : Counts{64},
        {{"n", kHidden}, {"k", kAttended}, {"quant", quant}, {"y", "bf16"}});
  }
  add("linear", {1, 64}, {{"n", kVocab}, {"k", kHidden}, {"quant", "bf16"}, {"y", "f32"}});
  return all;
}

}  // namespace

const OpSuite kLayerSuite = {
    "layer",
    "norms, activations, routing and projections around attention and the experts",
    workloads,
    check,
    prepare,
    nullptr,
    nullptr,
    {"hidden", "intermediate", "vocab", "heads_q", "heads_kv", "head_dim", "experts", "top_k", "n", "k"}};

}  // namespace vivace::bench
