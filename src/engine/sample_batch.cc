#include "src/engine/sample_batch.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "src/core/error.h"
#include "src/engine/check_request.h"

namespace vivace::engine {

namespace {

using model::Layout;

/// The sampler's fp32; what was above 0 stays so.
float positive(double value) {
  return std::max(static_cast<float>(value), std::numeric_limits<float>::min());
}

bool has_penalties(const SamplingParams& p) {
  return p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0;
}

/// The first elements of an array.
Tensor first(const Tensor& array, int64_t count) {
  return array.rows(0, count);
}

}  // namespace

std::pair<SampleBatch::Parameters, int64_t> SampleBatch::lay_out(uint8_t* memory, Device device, int64_t rows,
                                                                 int64_t biases) {
  Layout layout(memory, device);
  Parameters p;
  for (Tensor* array : {&p.temperature, &p.top_p, &p.min_p, &p.repetition, &p.presence, &p.frequency}) {
    *array = layout.vector(DType::f32, rows);
  }
  for (Tensor* array : {&p.top_k, &p.state}) *array = layout.vector(DType::i32, rows);
  p.bias_start = layout.vector(DType::i32, rows + 1);
  for (Tensor* array : {&p.seed, &p.position}) *array = layout.vector(DType::i64, rows);
  p.bias_ids = layout.vector(DType::i32, biases);
  p.bias_values = layout.vector(DType::f32, biases);
  return {p, layout.bytes()};
}

std::pair<SampleBatch::Results, int64_t> SampleBatch::lay_out_results(uint8_t* memory, Device device, int64_t rows) {
  Layout layout(memory, device);
  Results r;
  r.ids = layout.vector(DType::i32, rows);
  r.valid = layout.vector(DType::u8, rows);
  r.logprobs = layout.vector(DType::f32, rows);
  r.top_ids = layout.vector(DType::i32, rows * kMaxLogprobs);
  r.top_logprobs = layout.vector(DType::f32, rows * kMaxLogprobs);
  return {r, layout.bytes()};
}

Result<std::unique_ptr<SampleBatch>> SampleBatch::create(int64_t max_rows, int64_t vocab, const Stream& stream) {
  std::unique_ptr<SampleBatch> batch(new SampleBatch(max_rows, vocab));
  VIVACE_TRY_ASSIGN(batch->prompt_bits_,
                    model::Memory::reserve(max_rows * batch->words() * 4, "sampler prompts", stream));
  VIVACE_TRY_ASSIGN(batch->output_counts_, model::Memory::reserve(max_rows * vocab * 4, "sampler counts", stream));
  batch->owners_.resize(static_cast<size_t>(max_rows));
  const int64_t result_bytes = lay_out_results(nullptr, stream.device, max_rows).second;
  VIVACE_TRY_ASSIGN(batch->results_memory_, model::Memory::reserve(result_bytes, "sampler results", stream));
  batch->results_ = lay_out_results(batch->results_memory_.data(), stream.device, max_rows).first;
  for (Turn& turn : batch->turns_) {
    turn.results = batch->results_;
    if (stream.device == Device::cpu) continue;
    VIVACE_TRY_ASSIGN(turn.results_memory, device::Buffer::pinned(stream.ordinal, result_bytes));
    turn.results =
        lay_out_results(static_cast<uint8_t*>(turn.results_memory.data()), Device::cpu, max_rows).first;
    VIVACE_TRY_ASSIGN(turn.staged, device::Event::create(stream.ordinal));
    VIVACE_TRY_ASSIGN(turn.fetched, device::Event::create(stream.ordinal));
  }
  if (stream.device != Device::cpu) {
    VIVACE_TRY_ASSIGN(batch->states_here_,
                      device::Buffer::pinned(stream.ordinal, max_rows * batch->state_bytes()));
    for (int64_t state = 0; state < max_rows; ++state) {
      VIVACE_TRY_ASSIGN(std::unique_ptr<device::Event> copied, device::Event::create(stream.ordinal));
      batch->state_copied_.push_back(std::move(copied));
    }
  }
  constexpr int64_t kBiasesPerRow = 16;
  VIVACE_TRY(batch->reserve(max_rows * kBiasesPerRow, stream));
  return batch;
}

/// Room for so many biases. Waits for what is in flight where there was too little, which happens a few times in a run:
/// room at least doubles. After a failure all is as before.
Status SampleBatch::reserve(int64_t biases, const Stream& stream) {
  if (biases <= bias_capacity_) return {};
  biases = std::max(biases, 2 * bias_capacity_);
  const bool on_cpu = stream.device == Device::cpu;
  if (!on_cpu) VIVACE_TRY(device::synchronize(stream));
  const int64_t bytes = lay_out(nullptr, stream.device, max_rows_, biases).second;
  VIVACE_TRY_ASSIGN(model::Memory there, model::Memory::reserve(bytes, "sampler parameters", stream));
  std::array<device::Buffer, std::tuple_size_v<decltype(turns_)>> here;
  for (device::Buffer& buffer : here) {
    if (on_cpu) break;
    VIVACE_TRY_ASSIGN(buffer, device::Buffer::pinned(stream.ordinal, bytes));
  }
  there_memory_ = std::move(there);
  there_ = lay_out(there_memory_.data(), stream.device, max_rows_, biases).first;
  for (size_t i = 0; i < turns_.size(); ++i) {
    turns_[i].here_memory = std::move(here[i]);
    turns_[i].here = on_cpu ? there_
                            : lay_out(static_cast<uint8_t*>(turns_[i].here_memory.data()), Device::cpu, max_rows_, biases)
                                  .first;
  }
  bias_capacity_ = biases;
  ++shape_.generation;
  return {};
}

void SampleBatch::fill_state(uint32_t* bits, int32_t* counts, const SampleSlot& slot) const {
  std::fill(bits, bits + words(), 0);
  std::fill(counts, counts + vocab_, 0);
  for (int32_t id : slot.prompt_ids) bits[id / 32] |= 1u << (id % 32);
  for (int32_t id : slot.output_ids) ++counts[id];
}

Status SampleBatch::fill_state(int64_t state, const SampleSlot& slot, const Stream& stream) {
  const int64_t bits_bytes = words() * 4, counts_bytes = vocab_ * 4;
  uint8_t* bits = prompt_bits_.data() + state * bits_bytes;
  uint8_t* counts = output_counts_.data() + state * counts_bytes;
  if (stream.device == Device::cpu) {
    fill_state(reinterpret_cast<uint32_t*>(bits), reinterpret_cast<int32_t*>(counts), slot);
    return {};
  }
  // At worst the step in flight copied this row, as the first thing it did.
  device::Event& copied = *state_copied_[state];
  VIVACE_TRY(copied.synchronize());
  auto* bits_here = static_cast<uint8_t*>(states_here_.data()) + state * state_bytes();
  uint8_t* counts_here = bits_here + bits_bytes;
  fill_state(reinterpret_cast<uint32_t*>(bits_here), reinterpret_cast<int32_t*>(counts_here), slot);
  VIVACE_TRY(device::copy_to_device(bits, bits_here, bits_bytes, stream));
  VIVACE_TRY(device::copy_to_device(counts, counts_here, counts_bytes, stream));
  return copied.record(stream);
}

/// Gives each row with penalties the state of its request; the others have -1.
Status SampleBatch::find_states(std::span<const SampleSlot> samples, int32_t* states, const Stream& stream) {
  for (StateOwner& owner : owners_) owner.in_step = false;
  for (size_t i = 0; i < samples.size(); ++i) {
    if (!has_penalties(*samples[i].params)) continue;
    const auto found = std::ranges::find_if(owners_, [&](const StateOwner& owner) {
      return owner.request == samples[i].request && owner.counted == samples[i].position;
    });
    if (found == owners_.end() || found->in_step) continue;
    states[i] = static_cast<int32_t>(found - owners_.begin());
    found->in_step = true;
    ++found->counted;
  }
  for (size_t i = 0; i < samples.size(); ++i) {
    if (!has_penalties(*samples[i].params) || states[i] >= 0) continue;
    const auto unused = std::ranges::find(owners_, false, &StateOwner::in_step);  // a step has at most a row per state
    states[i] = static_cast<int32_t>(unused - owners_.begin());
    VIVACE_TRY(fill_state(states[i], samples[i], stream));
    *unused = {.request = samples[i].request, .counted = samples[i].position + 1, .in_step = true};
  }
  return {};
}

Status SampleBatch::stage(std::span<const SampleSlot> samples, int64_t rows, const Stream& stream) {
  const int64_t drawn = std::ssize(samples);
  if (rows < drawn || rows > max_rows_) {
    return invalid_argument("step: {} samples in {} rows, needs at least as many rows and at most {}", drawn,
                            rows, max_rows_);
  }
  int64_t biases = 0;
  for (const SampleSlot& slot : samples) biases += std::ssize(slot.params->logit_bias) + std::ssize(slot.banned_ids);
  VIVACE_TRY(reserve(biases, stream));
  Turn& turn = this->turn();
  if (turn.staged != nullptr) VIVACE_TRY(turn.staged->synchronize());  // of the step before the last
  const Parameters& here = turn.here;
  shape_.rows = rows;
  shape_.penalties = false;
  shape_.biases = biases > 0;
  shape_.logprobs = -1;
  turn.wanted.clear();
  int32_t bias = 0;
  bias_count_ = biases;
  here.bias_start.as<int32_t>()[0] = 0;
  const SamplingParams greedy{.temperature = 0};
  const SampleSlot padding{.row = -1,
                           .params = &greedy,
                           .seed = 0,
                           .position = 0,
                           .prompt_ids = {},
                           .output_ids = {},
                           .banned_ids = {}};
  for (int64_t i = 0; i < rows; ++i) {
    const SampleSlot& slot = i < drawn ? samples[i] : padding;
    const SamplingParams& params = *slot.params;
    shape_.penalties = shape_.penalties || has_penalties(params);
    shape_.logprobs = std::max<int64_t>(shape_.logprobs, params.logprobs);
    turn.wanted.push_back(params.logprobs);
    here.temperature.as<float>()[i] = static_cast<float>(params.temperature);
    here.top_k.as<int32_t>()[i] = static_cast<int32_t>(std::min<int64_t>(params.top_k, INT32_MAX));
    here.top_p.as<float>()[i] = positive(params.top_p);
    here.min_p.as<float>()[i] = static_cast<float>(params.min_p);
    here.repetition.as<float>()[i] = positive(params.repetition_penalty);
    here.presence.as<float>()[i] = static_cast<float>(params.presence_penalty);
    here.frequency.as<float>()[i] = static_cast<float>(params.frequency_penalty);
    here.state.as<int32_t>()[i] = -1;
    here.seed.as<int64_t>()[i] = static_cast<int64_t>(slot.seed);
    here.position.as<int64_t>()[i] = slot.position;
    const auto add = [&](int32_t id, float value) {
      here.bias_ids.as<int32_t>()[bias] = id;
      here.bias_values.as<float>()[bias++] = value;
    };
    for (const auto& [id, value] : params.logit_bias) add(id, value);
    for (const int32_t id : slot.banned_ids) add(id, -std::numeric_limits<float>::infinity());
    here.bias_start.as<int32_t>()[i + 1] = bias;
  }
  VIVACE_TRY(find_states(samples, here.state.as<int32_t>(), stream));
  if (stream.device == Device::cuda && shape_.logprobs > 0) {  // few shapes, so few graphs
    constexpr int64_t kCommon = 5;
    shape_.logprobs = shape_.logprobs <= kCommon ? kCommon : kMaxLogprobs;
  }
  turn.rows = drawn;
  turn.logprobs = shape_.logprobs;
  if (stream.device == Device::cpu) return {};
  const auto* begin = static_cast<const uint8_t*>(here.temperature.data);
  const auto* end =
      static_cast<const uint8_t*>(shape_.biases ? here.bias_values.at(0).data : here.bias_ids.data);
  const int64_t bytes = end - begin + (shape_.biases ? 4 * int64_t{bias} : 0);
  VIVACE_TRY(device::copy_to_device(there_.temperature.data, begin, bytes, stream));
  return turn.staged->record(stream);
}

SamplerArgs SampleBatch::args(const Shape& shape, const Tensor& logits, const Tensor& workspace) const {
  const int64_t rows = shape.rows;
  SamplerArgs args{.logits = logits,
                   .temperature = first(there_.temperature, rows),
                   .top_p = first(there_.top_p, rows),
                   .min_p = first(there_.min_p, rows),
                   .top_k = first(there_.top_k, rows),
                   .seed = first(there_.seed, rows),
                   .position = first(there_.position, rows),
                   .ids = first(results_.ids, rows),
                   .valid = first(results_.valid, rows),
                   .workspace = workspace};
  if (shape.penalties) {
    const auto states = static_cast<int64_t>(owners_.size());
    args.repetition_penalty = first(there_.repetition, rows);
    args.presence_penalty = first(there_.presence, rows);
    args.frequency_penalty = first(there_.frequency, rows);
    args.prompt_bits = prompt_bits_.tensor(DType::i32, {states, words()});
    args.output_counts = output_counts_.tensor(DType::i32, {states, vocab_});
    args.state = first(there_.state, rows);
    args.count_ids = true;
  }
  if (shape.biases) {
    args.bias_start = first(there_.bias_start, rows + 1);
    // A captured call must fit any number of biases.
    const int64_t count = logits.device == Device::cpu ? bias_count_ : bias_capacity_;
    args.bias_ids = first(there_.bias_ids, count);
    args.bias_values = first(there_.bias_values, count);
  }
  if (shape.logprobs >= 0) args.logprobs = first(results_.logprobs, rows);
  if (shape.logprobs > 0) {
    args.top_ids = Tensor(results_.top_ids.data, DType::i32, {rows, shape.logprobs}, results_.top_ids.device);
    args.top_logprobs = Tensor(results_.top_logprobs.data, DType::f32, {rows, shape.logprobs}, results_.top_ids.device);
  }
  return args;
}

Status SampleBatch::fetch(const Stream& stream) {
  Turn& turn = this->turn();
  if (stream.device == Device::cuda) {
    VIVACE_TRY(device::copy_to_host(turn.results_memory.data(), results_memory_.data(),
                                    results_memory_.bytes(), stream));
    VIVACE_TRY(turn.fetched->record(stream));
  }
  ++fetched_;
  return {};
}

Status SampleBatch::collect(std::vector<Sampled>& sampled) {
  const Turn& turn = turns_[collected_++ % 2];
  if (turn.fetched != nullptr) VIVACE_TRY(turn.fetched->synchronize());
  const Results& results = turn.results;
  sampled.resize(static_cast<size_t>(turn.rows));
  for (int64_t i = 0; i < turn.rows; ++i) {
    Sampled& out = sampled[i];
    out = {.id = results.ids.as<int32_t>()[i],
           .valid = results.valid.as<uint8_t>()[i] != 0,
           .logprob = 0,
           .top = {}};
    if (turn.wanted[i] >= 0) out.logprob = results.logprobs.as<float>()[i];
    for (int j = 0; j < turn.wanted[i]; ++j) {
      const int64_t at = i * turn.logprobs + j;
      if (results.top_ids.as<int32_t>()[at] < 0) break;
      out.top.push_back({results.top_ids.as<int32_t>()[at], results.top_logprobs.as<float>()[at]});
    }
  }
  return {};
}

}  // namespace vivace::engine
