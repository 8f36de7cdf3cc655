#include "vivace/tensor.h"

#include <fmt/format.h>

#include <array>
#include <cassert>

namespace vivace {

namespace {

/// At its number each type's, and that of DType::none at those of no type.
constexpr auto kInfos = [] {
  std::array<DTypeInfo, 32> infos;
  infos.fill({"none", 1, 0});
  const auto set = [&infos](DType dtype, DTypeInfo info) { infos.at(static_cast<size_t>(dtype)) = info; };
  set(DType::f32, {"f32", 1, 4});
  set(DType::f16, {"f16", 1, 2});
  set(DType::bf16, {"bf16", 1, 2});
  set(DType::fp8_e4m3, {"fp8", 1, 1});
  set(DType::u8, {"u8", 1, 1});
  set(DType::i32, {"i32", 1, 4});
  set(DType::i64, {"i64", 1, 8});
  set(DType::q4_0, {"q4_0", 32, 18});
  set(DType::q4_1, {"q4_1", 32, 20});
  set(DType::q8_0, {"q8_0", 32, 34});
  set(DType::q4_k, {"q4_k", 256, 144});
  set(DType::q6_k, {"q6_k", 256, 210});
  return infos;
}();

}  // namespace

DTypeInfo info_of(DType dtype) {
  const auto number = static_cast<size_t>(dtype);
  return kInfos[number < kInfos.size() ? number : 0];
}

DType dtype_from_name(std::string_view name) {
  for (size_t number = 0; number < kInfos.size(); ++number)
    if (kInfos[number].name == name) return static_cast<DType>(number);
  return DType::none;
}

std::string_view name_of(Device device) {
  return device == Device::cpu ? "cpu" : "cuda";
}

Tensor::Tensor(void* data, DType dtype, std::initializer_list<int64_t> dims, Device device)
    : data(data), dtype(dtype), device(device), rank(static_cast<int>(dims.size())) {
  assert(rank <= kMaxRank);
  int i = 0;
  for (int64_t dim : dims) shape[i++] = dim;
  int64_t step = 1;
  for (i = rank - 1; i >= 0; --i) {
    stride[i] = step;
    step *= shape[i];
  }
}

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (int i = 0; i < rank; ++i) count *= shape[i];
  return count;
}

int64_t Tensor::bytes() const {
  const DTypeInfo info = info_of(dtype);
  return elements() / info.block_elements * info.block_bytes;
}

bool Tensor::contiguous() const {
  int64_t step = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (shape[i] != 1 && stride[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

int64_t Tensor::row_offset_bytes(int64_t i) const {
  const DTypeInfo info = info_of(dtype);
  return i * stride[0] / info.block_elements * info.block_bytes;
}

Tensor Tensor::at(int64_t i) const {
  Tensor sub = *this;
  sub.data = static_cast<char*>(data) + row_offset_bytes(i);
  sub.rank = rank - 1;
  for (int d = 0; d + 1 < rank; ++d) {
    sub.shape[d] = shape[d + 1];
    sub.stride[d] = stride[d + 1];
  }
  sub.shape[rank - 1] = sub.stride[rank - 1] = 0;
  return sub;
}

Tensor Tensor::rows(int64_t begin, int64_t count) const {
  Tensor sub = *this;
  if (data != nullptr) sub.data = static_cast<char*>(data) + row_offset_bytes(begin);
  sub.shape[0] = count;
  return sub;
}

std::string to_string(const Tensor& tensor) {
  if (!tensor.present()) return "absent";
  std::string text = fmt::format("{}[", name_of(tensor.dtype));
  for (int i = 0; i < tensor.rank; ++i) text += fmt::format("{}{}", i ? ", " : "", tensor.shape[i]);
  text += "]";
  if (!tensor.contiguous()) {
    text += " strides [";
    for (int i = 0; i < tensor.rank; ++i) text += fmt::format("{}{}", i ? ", " : "", tensor.stride[i]);
    text += "]";
  }
  return text;
}

}  // namespace vivace
