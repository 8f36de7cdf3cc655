#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "src/core/number.h"
#include "vivace/tensor.h"

// What a case needs to become a call: owned memory with canaries, filled with random or poisoned data. Used
// by the cases.h of each operator, and through them by tests and benchmarks.

namespace vivace {

/// Which cases a reader of cases.h wants.
enum class CaseSize { test, serving };

/// Where cases put their tensors: host memory, or memory that a device and the host both reach.
struct CaseMemory {
  Device device = Device::cpu;
  void* (*allocate)(size_t bytes) = [](size_t bytes) { return ::operator new(bytes); };
  void (*release)(void* memory) = [](void* memory) { ::operator delete(memory); };

  static CaseMemory& current() {
    static CaseMemory memory;
    return memory;
  }
};

/// Cases made while it lives are in `memory`.
class CaseMemoryScope {
 public:
  explicit CaseMemoryScope(const CaseMemory& memory) : before_(CaseMemory::current()) {
    CaseMemory::current() = memory;
  }
  ~CaseMemoryScope() { CaseMemory::current() = before_; }
  CaseMemoryScope(const CaseMemoryScope&) = delete;
  CaseMemoryScope& operator=(const CaseMemoryScope&) = delete;

 private:
  CaseMemory before_;
};

/// Owned memory of one tensor between two guard zones. Outputs start as NaN (or 0xA5 bytes), so an element
/// that nobody wrote shows.
class Guarded {
 public:
  Guarded() = default;
  /// Contiguous unless `row_stride` (elements between rows of a matrix, >= the last extent) is given.
  Guarded(DType dtype, std::vector<int64_t> shape, int64_t row_stride = 0) {
    Tensor t;
    t.dtype = dtype;
    t.rank = static_cast<int>(shape.size());
    int64_t step = 1;
    for (int i = t.rank - 1; i >= 0; --i) {
      t.shape[i] = shape[i];
      t.stride[i] = step;
      step *= shape[i];
      if (i == t.rank - 1 && row_stride > 0) step = row_stride;
    }
    const DTypeInfo info = info_of(dtype);
    bytes_ = (step + info.block_elements - 1) / info.block_elements * info.block_bytes;
    const CaseMemory& memory = CaseMemory::current();
    const size_t total = static_cast<size_t>(bytes_) + 2 * kGuard;
    memory_ = {static_cast<uint8_t*>(memory.allocate(total)), memory.release};
    std::memset(memory_.get(), kCanary, total);
    t.device = memory.device;
    t.data = memory_.get() + kGuard;
    tensor_ = t;
    poison();
  }
  Guarded(Guarded&& other) noexcept { *this = std::move(other); }
  Guarded& operator=(Guarded&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    std::swap(tensor_, other.tensor_);
    return *this;
  }

  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(tensor_.data);
  }
  int64_t bytes() const { return bytes_; }

  /// NaN in floating-point tensors, 0xA5 in others.
  void poison() {
    const int64_t count = bytes_ / std::max<int64_t>(1, info_of(tensor_.dtype).block_bytes);
    switch (tensor_.dtype) {
      case DType::f32:
      case DType::f16:
      case DType::bf16:
        for (int64_t i = 0; i < count; ++i) store(tensor_.dtype, tensor_.data, i, NAN);
        break;
      case DType::fp8_e4m3:
        std::memset(tensor_.data, 0x7f, bytes_);
        break;
      default:
        std::memset(tensor_.data, kCanary, bytes_);
    }
  }
  void zero() { std::memset(tensor_.data, 0, bytes_); }
  /// Every element of a floating-point tensor, normal with this deviation and mean.
  Guarded& random(std::mt19937& rng, double deviation = 1, double mean = 0) {
    std::normal_distribution<double> normal(mean, deviation);
    const int64_t count = bytes_ / info_of(tensor_.dtype).block_bytes;
    for (int64_t i = 0; i < count; ++i) store(tensor_.dtype, tensor_.data, i, normal(rng));
    return *this;
  }
  bool canaries_intact() const {
    if (memory_ == nullptr) return true;
    const uint8_t* after = memory_.get() + kGuard + bytes_;
    for (size_t i = 0; i < kGuard; ++i) {
      if (memory_[i] != kCanary || after[i] != kCanary) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 4096;
  static constexpr uint8_t kCanary = 0xA5;
  std::unique_ptr<uint8_t[], void (*)(void*)> memory_{nullptr, [](void*) {}};
  int64_t bytes_ = 0;
  Tensor tensor_;
};

}  // namespace vivace
