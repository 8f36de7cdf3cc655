#include "src/model/place_weights.h"

#include <algorithm>
#include <utility>

#include "src/core/error.h"
#include "src/core/number.h"
#include "src/cpu/machine.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/linear/block_formats.h"

namespace vivace::model {

namespace {

/// Moves matrices row by row: converts into one pinned buffer while the other one is copied.
class Mover {
 public:
  Mover(Weights& weights, const Stream& stream)
      : weights_(weights), stream_(stream), threads_(std::min(cpu::usable_cores(), 16)) {}

  Status prepare() {
    for (Slot& slot : slots_) {
      VIVACE_TRY_ASSIGN(slot.memory, device::Buffer::pinned(kStagingBytes));
      VIVACE_TRY_ASSIGN(slot.done, device::Event::create(stream_.ordinal));
    }
    return {};
  }

  /// The rows of `parts`, matrices of one width, one below the other as one matrix of `dtype`.
  Result<Tensor> join(std::initializer_list<const Tensor*> parts, DType dtype, const char* what) {
    int64_t rows = 0, width = 0;
    for (const Tensor* part : parts) {
      rows += part->shape[0];
      width = part->shape[1];
    }
    VIVACE_TRY_ASSIGN(const Tensor target, make(dtype, {rows, width}, what));
    int64_t row = 0;
    for (const Tensor* part : parts) {
      VIVACE_TRY(move(*part, target.rows(row, part->shape[0])));
      row += part->shape[0];
    }
    return target;
  }
  Status replace(Tensor& tensor, DType dtype, const char* what) {
    if (!tensor.present()) return {};
    if (tensor.rank == 1) {
      const Tensor as_row(tensor.data, tensor.dtype, {1, tensor.shape[0]});
      VIVACE_TRY_ASSIGN(const Tensor target, join({&as_row}, dtype, what));
      tensor = Tensor(target.data, dtype, {tensor.shape[0]}, target.device);
      return {};
    }
    VIVACE_TRY_ASSIGN(tensor, join({&tensor}, dtype, what));
    return {};
  }
  Result<Tensor> make(DType dtype, std::initializer_list<int64_t> shape, const char* what) {
    const int64_t bytes = Tensor(nullptr, dtype, shape).bytes();
    VIVACE_TRY_ASSIGN(Memory memory, Memory::reserve(bytes, what, stream_));
    weights_.placed.push_back(std::move(memory));
    return weights_.placed.back().tensor(dtype, shape);
  }
  /// `source` on the host into `target` on the device, both [rows, width].
  Status move(const Tensor& source, const Tensor& target) {
    const int64_t rows = source.shape[0], width = source.shape[1];
    const int64_t row_bytes = width * info_of(target.dtype).block_bytes;
    if (row_bytes > kStagingBytes) {
      return unsupported("a weight has rows of {} bytes, needs at most {}", row_bytes, kStagingBytes);
    }
    const int64_t step = std::max<int64_t>(1, kStagingBytes / std::max<int64_t>(1, row_bytes));
    for (int64_t begin = 0; begin < rows; begin += step) {
      const int64_t count = std::min(step, rows - begin);
      Slot& slot = slots_[next_ ^= 1];
      if (slot.used) VIVACE_TRY(slot.done->synchronize());
      const Tensor staged(slot.memory.data(), target.dtype, {count, width});
      cpu::parallel_for(&threads_, count, [&](int64_t i, int) { convert(source.at(begin + i), staged.at(i)); });
      VIVACE_TRY(device::copy_to_device(target.at(begin).data, staged.data, count * row_bytes, stream_));
      VIVACE_TRY(slot.done->record(stream_));
      slot.used = true;
    }
    return {};
  }
  Status finish() { return device::synchronize(stream_); }

 private:
  static constexpr int64_t kStagingBytes = int64_t{32} << 20;
  struct Slot {
    device::Buffer memory;
    std::unique_ptr<device::Event> done;
    bool used = false;
  };

  static void convert(const Tensor& source, const Tensor& target) {
    const int64_t width = source.shape[0];
    if (source.dtype == target.dtype) {
      std::memcpy(target.data, source.data, static_cast<size_t>(target.bytes()));
      return;
    }
    constexpr int64_t kPiece = 256;  // a multiple of every block
    float values[kPiece];
    const DTypeInfo info = info_of(source.dtype);
    for (int64_t i = 0; i < width; i += kPiece) {
      const int64_t count = std::min(kPiece, width - i);
      dequantize_row(source.dtype, source.as<char>() + i / info.block_elements * info.block_bytes, count, values);
      for (int64_t j = 0; j < count; ++j) store(target.dtype, target.data, i + j, values[j]);
    }
  }

  Weights& weights_;
  const Stream& stream_;
  cpu::ThreadPool threads_;
  Slot slots_[2];
  int next_ = 0;
};

Status place_mlp(Mover& mover, ExpertWeights& mlp, Tensor* gate_up) {
  if (!mlp.present()) return {};
  VIVACE_TRY_ASSIGN(const Tensor both, mover.join({&mlp.gate, &mlp.up}, DType::bf16, "gate and up projection"));
  const int64_t rows = mlp.gate.shape[0];
  mlp.gate = both.rows(0, rows);
  mlp.up = both.rows(rows, rows);
  if (gate_up != nullptr) *gate_up = both;
  return mover.replace(mlp.down, DType::bf16, "down projection");
}

Status place_experts(Mover& mover, LayerWeights& layer) {
  if (layer.experts.empty()) return {};
  const auto experts = static_cast<int64_t>(layer.experts.size());
  const int64_t intermediate = layer.experts[0].gate.shape[0], hidden = layer.experts[0].gate.shape[1];
  VIVACE_TRY_ASSIGN(layer.experts_gate_up,
                    mover.make(DType::bf16, {experts, 2 * intermediate, hidden}, "experts' gate and up projections"));
  VIVACE_TRY_ASSIGN(layer.experts_down,
                    mover.make(DType::bf16, {experts, hidden, intermediate}, "experts' down projections"));
  for (int64_t e = 0; e < experts; ++e) {
    const ExpertWeights& expert = layer.experts[e];
    const Tensor gate_up = layer.experts_gate_up.at(e);
    VIVACE_TRY(mover.move(expert.gate, gate_up.rows(0, intermediate)));
    VIVACE_TRY(mover.move(expert.up, gate_up.rows(intermediate, intermediate)));
    VIVACE_TRY(mover.move(expert.down, layer.experts_down.at(e)));
  }
  layer.experts.clear();
  return {};
}

Status place_layer(Mover& mover, LayerWeights& layer) {
  for (Tensor* norm : {&layer.input_norm, &layer.post_attention_norm, &layer.q_norm, &layer.k_norm}) {
    VIVACE_TRY(mover.replace(*norm, DType::f32, "norm weight"));
  }
  const int64_t rows_q = layer.q.shape[0], rows_kv = layer.k.shape[0];
  VIVACE_TRY_ASSIGN(layer.qkv, mover.join({&layer.q, &layer.k, &layer.v}, DType::bf16, "q, k and v projection"));
  layer.q = layer.qkv.rows(0, rows_q);
  layer.k = layer.qkv.rows(rows_q, rows_kv);
  layer.v = layer.qkv.rows(rows_q + rows_kv, rows_kv);
  VIVACE_TRY(mover.replace(layer.o, DType::bf16, "output projection"));
  VIVACE_TRY(place_mlp(mover, layer.dense, &layer.dense_gate_up));
  for (int i = 0; i < layer.router.term_count; ++i) {
    VIVACE_TRY(mover.replace(layer.router.terms[i], DType::bf16, "router weight"));
  }
  VIVACE_TRY(mover.replace(layer.expert_bias, DType::f32, "expert bias"));
  VIVACE_TRY(place_experts(mover, layer));
  return place_mlp(mover, layer.shared, nullptr);
}

}  // namespace

Status place_weights(Weights& weights, const Stream& stream) {
  Mover mover(weights, stream);
  VIVACE_TRY(mover.prepare());
  const bool tied = weights.lm_head.data == weights.embedding.data;
  VIVACE_TRY(mover.replace(weights.embedding, DType::bf16, "embedding"));
  if (tied) {
    weights.lm_head = weights.embedding;
  } else {
    VIVACE_TRY(mover.replace(weights.lm_head, DType::bf16, "output head"));
  }
  VIVACE_TRY(mover.replace(weights.norm, DType::f32, "norm weight"));
  for (size_t l = 0; l < weights.layers.size(); ++l) {
    const Status status = place_layer(mover, weights.layers[l]);
    if (!status.ok()) return status.at(fmt::format("layer {}", l));
  }
  VIVACE_TRY(mover.finish());
  weights.owned.clear();
  return {};
}

}  // namespace vivace::model
