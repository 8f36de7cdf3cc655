#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace vivace {

/// Element types. Block formats (q*) are GGUF's: `block_elements` weights share `block_bytes` bytes along the
/// last dimension. The numbers are part of the C ABI and never change.
enum class DType : uint8_t {
  none = 0,
  f32 = 1,
  f16 = 2,
  bf16 = 3,
  fp8_e4m3 = 4,
  u8 = 5,
  i32 = 6,
  i64 = 7,
  q4_0 = 16,  ///< 32 weights: f16 d, 16 bytes of nibbles;           w = d (q - 8)
  q4_1 = 17,  ///< 32 weights: f16 d, f16 m, 16 bytes of nibbles;    w = d q + m
  q8_0 = 18,  ///< 32 weights: f16 d, 32 int8;                       w = d q
  q4_k = 19,  ///< 256 weights: f16 d, f16 dmin, 12 bytes of 6-bit scales and mins, 128 bytes of nibbles
  q6_k = 20,  ///< 256 weights: 128 low nibbles, 64 high pairs, 16 int8 scales, f16 d
};

struct DTypeInfo {
  std::string_view name;
  int64_t block_elements;  ///< 1 for plain types
  int64_t block_bytes;
};

DTypeInfo info_of(DType dtype);
inline std::string_view name_of(DType dtype) {
  return info_of(dtype).name;
}
inline bool is_block_format(DType dtype) {
  return info_of(dtype).block_elements > 1;
}
/// The type of that name ("bf16", "q4_1", ...), or DType::none.
DType dtype_from_name(std::string_view name);

enum class Device : uint8_t { cpu = 0, cuda = 1 };
std::string_view name_of(Device device);

/// A view of memory that somebody else owns: pointer, type, shape and strides. Copying it copies the view.
///
/// Strides count elements (for block formats too, where the last stride is 1 and the others are multiples of
/// the block). An absent optional tensor is a default-constructed one: `present()` is false. A tensor with no
/// elements may have a null pointer.
struct Tensor {
  static constexpr int kMaxRank = 5;

  void* data = nullptr;
  DType dtype = DType::none;
  Device device = Device::cpu;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};

  Tensor() = default;
  /// A contiguous row-major view of `data`.
  Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = Device::cpu);

  bool present() const { return dtype != DType::none; }
  int64_t elements() const;
  /// Bytes that a contiguous tensor of this shape and type takes.
  int64_t bytes() const;
  bool contiguous() const;
  /// The offset in bytes of index (i, 0, ..., 0), where `i` counts along dimension 0.
  int64_t row_offset_bytes(int64_t i) const;
  /// The sub-tensor at index `i` of dimension 0.
  Tensor at(int64_t i) const;
  /// Rows [begin, begin + count) of dimension 0.
  Tensor rows(int64_t begin, int64_t count) const;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

/// "bf16[4, 576]" with strides when they are not contiguous, "absent" when not present; for
/// messages and logs.
std::string to_string(const Tensor& tensor);

}  // namespace vivace
