#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "vivace/status.h"
#include "vivace/tensor.h"

namespace vivace::model {

enum class GgufType : uint32_t {
  u8 = 0,
  i8 = 1,
  u16 = 2,
  i16 = 3,
  u32 = 4,
  i32 = 5,
  f32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  u64 = 10,
  i64 = 11,
  f64 = 12,
};
std::string_view name_of(GgufType type);

/// One metadata value. It refers to the file's bytes and owns nothing; `count` elements were seen to lie
/// inside the file.
class GgufValue {
 public:
  GgufType type = GgufType::u8;      ///< array: see `element`
  GgufType element = GgufType::u8;   ///< type of the elements; equals `type` for a single value
  uint64_t count = 1;                ///< elements of an array
  std::span<const uint8_t> payload;  ///< the elements as stored

  /// A single integer or bool, when it fits.
  std::optional<int64_t> integer() const;
  /// A single number of any type.
  std::optional<double> number() const;
  std::optional<bool> boolean() const;
  /// A single string; valid while the file's bytes are.
  std::optional<std::string_view> text() const;
  /// All elements of an array of strings, or of an array of integers that fit int32.
  std::optional<std::vector<std::string>> texts() const;
  std::optional<std::vector<int32_t>> integers() const;

  /// "u32 7", "array of 3 string"; for messages.
  std::string describe() const;
};

struct GgufTensor {
  std::string name;
  DType dtype = DType::none;
  int rank = 0;
  int64_t shape[4] = {};          ///< row-major: the reverse of the file's order
  std::span<const uint8_t> data;  ///< inside the file, as long as shape and type say
};

/// The directory of a GGUF file. Everything refers to the bytes that were parsed.
struct GgufFile {
  uint32_t version = 0;
  uint64_t alignment = 32;
  std::map<std::string_view, GgufValue> metadata;
  std::vector<GgufTensor> tensors;  ///< in the file's order

  const GgufValue* find(std::string_view key) const;
};

/// Reads the directory of a little-endian GGUF file, version 2 or 3. Time and memory are linear in the bytes
/// of the directory, whatever counts it claims. invalid_argument: names the field, its value and what would
/// fit. unsupported: another version or byte order, a nested array, a tensor of a type that is not in DType.
Result<GgufFile> parse_gguf(std::span<const uint8_t> bytes);

}  // namespace vivace::model
