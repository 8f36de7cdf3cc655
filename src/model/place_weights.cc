#include "src/model/place_weights.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "src/core/error.h"
#include "src/core/number.h"
#include "src/cpu/machine.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/linear/block_formats.h"
#include "src/ops/quantize_fp8/quantize.h"

namespace vivace::model {

namespace {

/// Moves matrices row by row: converts into one pinned buffer while the other one is copied.
class Mover {
 public:
  Mover(Weights& weights, const Stream& stream)
      : weights_(weights), stream_(stream), threads_(std::min(cpu::usable_cores(), 16)) {}

  Status prepare() {
    if (only_shapes(stream_)) return {};
    for (Slot& slot : slots_) {
      VIVACE_TRY_ASSIGN(slot.memory, device::Buffer::pinned(stream_.ordinal, kStagingBytes));
      VIVACE_TRY_ASSIGN(slot.done, device::Event::create(stream_.ordinal));
    }
    return {};
  }

  /// The rows of `parts`, matrices of one width, one below the other as one matrix of `dtype`.
  Result<Tensor> join(std::span<const Tensor* const> parts, DType dtype, const char* what) {
    int64_t rows = 0, width = 0;
    for (const Tensor* part : parts) {
      rows += part->shape[0];
      width = part->shape[1];
    }
    VIVACE_TRY_ASSIGN(const Tensor target, make(dtype, {rows, width}, what));
    int64_t row = 0;
    for (const Tensor* part : parts) {
      VIVACE_TRY(move(*part, target.rows(row, part->shape[0]), what));
      row += part->shape[0];
    }
    return target;
  }
  Status replace(Tensor& tensor, DType dtype, const char* what) {
    if (!tensor.present()) return {};
    if (tensor.rank == 1) {
      const Tensor as_row(tensor.data, tensor.dtype, {1, tensor.shape[0]});
      const Tensor* part = &as_row;
      VIVACE_TRY_ASSIGN(const Tensor target, join({&part, 1}, dtype, what));
      tensor = Tensor(target.data, dtype, {tensor.shape[0]}, target.device);
      return {};
    }
    const Tensor* part = &tensor;
    VIVACE_TRY_ASSIGN(tensor, join({&part, 1}, dtype, what));
    return {};
  }
  Result<Tensor> make(DType dtype, std::initializer_list<int64_t> shape, const char* what) {
    const int64_t bytes = Tensor(nullptr, dtype, shape).bytes();
    VIVACE_TRY_ASSIGN(Memory memory, Memory::reserve(bytes, what, stream_));
    weights_.placed.push_back(std::move(memory));
    return weights_.placed.back().tensor(dtype, shape);
  }
  /// Host memory that lives until the weights are placed.
  void* own(int64_t bytes) {
    weights_.owned.push_back(std::make_unique<uint8_t[]>(static_cast<size_t>(bytes)));
    return weights_.owned.back().get();
  }
  /// `source` on the host into `target` on the device, both [rows, width].
  Status move(const Tensor& source, const Tensor& target, const char* what) {
    if (only_shapes(stream_)) return {};
    const int64_t rows = source.shape[0], width = source.shape[1];
    const int64_t row_bytes = width * info_of(target.dtype).block_bytes;
    if (row_bytes > kStagingBytes) {
      return unsupported("{}: its rows take {} bytes, needs at most {}", what, row_bytes, kStagingBytes);
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
  Status finish() { return only_shapes(stream_) ? Status() : device::synchronize(stream_); }

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

/// fp8 stays as it is; everything else becomes bf16, which is what the operators of a GPU take.
DType placed_type(const Tensor& weight) {
  return weight.dtype == DType::fp8_e4m3 ? DType::fp8_e4m3 : DType::bf16;
}

Status place_matrix(Mover& mover, Matrix& matrix, const char* what) {
  VIVACE_TRY(mover.replace(matrix.weight, placed_type(matrix.weight), what));
  return mover.replace(matrix.scale, DType::f32, "scale");
}

/// `parts` as one matrix in `joined`, if one set of scales can serve it: without any, or where blocks of 128 rows do
/// not cross from one part to the next. Otherwise each part is placed by itself.
Status place_parts(Mover& mover, std::initializer_list<Matrix*> parts, Matrix& joined, const char* what) {
  std::vector<const Tensor*> weights, scales;
  bool together = true, fp8 = false;
  for (const Matrix* part : parts) {
    weights.push_back(&part->weight);
    scales.push_back(&part->scale);
    const bool blocks = part->scale.rank == 2 && part->weight.shape[0] % kFp8ScaleBlock == 0;
    together = together && (!part->scale.present() || blocks);
    fp8 = fp8 || part->scale.present();
  }
  if (!together) {
    for (Matrix* part : parts) VIVACE_TRY(place_matrix(mover, *part, what));
    return {};
  }
  VIVACE_TRY_ASSIGN(joined.weight, mover.join(weights, placed_type(*weights[0]), what));
  if (fp8) {
    VIVACE_TRY_ASSIGN(joined.scale, mover.join(scales, DType::f32, "scales"));
  }
  int64_t row = 0, scale_row = 0;
  for (Matrix* part : parts) {
    const int64_t rows = part->weight.shape[0], scale_rows = part->scale.shape[0];
    part->weight = joined.weight.rows(row, rows);
    if (fp8) part->scale = joined.scale.rows(scale_row, scale_rows);
    row += rows;
    scale_row += scale_rows;
  }
  return {};
}

/// `gate_up` null: the operator takes gate and up apart.
Status place_mlp(Mover& mover, ExpertWeights& mlp, Matrix* gate_up) {
  if (!mlp.present()) return {};
  Matrix gate{mlp.gate, mlp.gate_scale}, up{mlp.up, mlp.up_scale}, joined;
  VIVACE_TRY(place_parts(mover, {&gate, &up}, joined, "gate and up projection"));
  mlp.gate = gate.weight, mlp.gate_scale = gate.scale;
  mlp.up = up.weight, mlp.up_scale = up.scale;
  if (gate_up != nullptr) *gate_up = joined;
  VIVACE_TRY(mover.replace(mlp.down, placed_type(mlp.down), "down projection"));
  VIVACE_TRY(mover.replace(mlp.down_scale, DType::f32, "scale"));
  return mover.replace(mlp.act_scale, DType::f32, "scale");
}

/// The scales of all experts as the stacked form has them: gate's and up's of an expert behind each other.
Status place_expert_scales(Mover& mover, LayerWeights& layer) {
  const ExpertWeights& first = layer.experts[0];
  if (!first.gate_scale.present()) return {};
  const auto experts = static_cast<int64_t>(layer.experts.size());
  const auto gather = [&](std::initializer_list<Tensor ExpertWeights::*> members, Tensor& target) -> Status {
    int64_t width = 0;
    for (const auto member : members) width += (first.*member).elements();
    VIVACE_TRY_ASSIGN(target, mover.make(DType::f32, {experts, width}, "experts' scales"));
    const Tensor staged(mover.own(target.bytes()), DType::f32, {experts, width});
    for (int64_t e = 0; e < experts; ++e) {
      float* to = staged.at(e).as<float>();
      for (const auto member : members) {
        const Tensor& scale = layer.experts[e].*member;
        to = std::copy_n(scale.as<const float>(), scale.elements(), to);
      }
    }
    return mover.move(staged, target, "experts' scales");
  };
  VIVACE_TRY(gather({&ExpertWeights::gate_scale, &ExpertWeights::up_scale}, layer.experts_gate_up_scale));
  VIVACE_TRY(gather({&ExpertWeights::down_scale}, layer.experts_down_scale));
  if (first.act_scale.present()) VIVACE_TRY(gather({&ExpertWeights::act_scale}, layer.experts_act_scale));
  // The same memory with the shape of the operator.
  const auto shaped = [&](Tensor& scale, std::initializer_list<int64_t> shape) {
    scale = Tensor(scale.data, DType::f32, shape, scale.device);
  };
  const Tensor& gate = first.gate_scale;
  const Tensor& down = first.down_scale;
  if (gate.rank == 2) {
    shaped(layer.experts_gate_up_scale, {experts, 2, gate.shape[0], gate.shape[1]});
    shaped(layer.experts_down_scale, {experts, down.shape[0], down.shape[1]});
  } else {
    shaped(layer.experts_down_scale, {experts});
    shaped(layer.experts_act_scale, {experts});
  }
  return {};
}

Status place_experts(Mover& mover, LayerWeights& layer) {
  if (layer.experts.empty()) return {};
  const auto experts = static_cast<int64_t>(layer.experts.size());
  const ExpertWeights& first = layer.experts[0];
  const int64_t intermediate = first.gate.shape[0], hidden = first.gate.shape[1];
  VIVACE_TRY_ASSIGN(layer.experts_gate_up,
                    mover.make(placed_type(first.gate), {experts, 2 * intermediate, hidden},
                               "experts' gate and up projections"));
  VIVACE_TRY_ASSIGN(layer.experts_down, mover.make(placed_type(first.down), {experts, hidden, intermediate},
                                                   "experts' down projections"));
  for (int64_t e = 0; e < experts; ++e) {
    const ExpertWeights& expert = layer.experts[e];
    const Tensor gate_up = layer.experts_gate_up.at(e);
    VIVACE_TRY(mover.move(expert.gate, gate_up.rows(0, intermediate), "expert's gate projection"));
    VIVACE_TRY(mover.move(expert.up, gate_up.rows(intermediate, intermediate), "expert's up projection"));
    VIVACE_TRY(mover.move(expert.down, layer.experts_down.at(e), "expert's down projection"));
  }
  VIVACE_TRY(place_expert_scales(mover, layer));
  layer.experts.clear();
  return {};
}

Status place_layer(Mover& mover, LayerWeights& layer) {
  for (Tensor* vector : {&layer.input_norm, &layer.post_attention_norm, &layer.q_norm, &layer.k_norm}) {
    VIVACE_TRY(mover.replace(*vector, DType::f32, "norm weight"));
  }
  for (Tensor* scale : {&layer.qkv_input.scale, &layer.o_input.scale, &layer.mlp_input.scale,
                        &layer.down_input.scale, &layer.k_scale, &layer.v_scale}) {
    VIVACE_TRY(mover.replace(*scale, DType::f32, "scale"));
  }
  VIVACE_TRY(place_parts(mover, {&layer.q, &layer.k, &layer.v}, layer.qkv, "q, k and v projection"));
  VIVACE_TRY(place_matrix(mover, layer.o, "output projection"));
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
