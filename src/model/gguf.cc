#include "src/model/gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <unordered_set>

#include "src/core/error.h"

namespace vivace::model {

namespace {

static_assert(std::endian::native == std::endian::little, "GGUF values are read as they lie in the file");

struct ScalarInfo {
  std::string_view name;
  uint64_t bytes;  // 0: not of a fixed size
};

std::optional<ScalarInfo> scalar_info(uint32_t type) {
  constexpr ScalarInfo kTypes[] = {{"u8", 1},  {"i8", 1},  {"u16", 2},  {"i16", 2},    {"u32", 4},
                                   {"i32", 4}, {"f32", 4}, {"bool", 1}, {"string", 0}, {"array", 0},
                                   {"u64", 8}, {"i64", 8}, {"f64", 8}};
  if (type >= std::size(kTypes)) return std::nullopt;
  return kTypes[type];
}

struct GgmlType {
  uint32_t id;
  std::string_view name;
  DType dtype;
};

constexpr GgmlType kGgmlTypes[] = {
    {0, "f32", DType::f32},      {1, "f16", DType::f16},       {2, "q4_0", DType::q4_0},
    {3, "q4_1", DType::q4_1},    {6, "q5_0", DType::none},     {7, "q5_1", DType::none},
    {8, "q8_0", DType::q8_0},    {9, "q8_1", DType::none},     {10, "q2_k", DType::none},
    {11, "q3_k", DType::none},   {12, "q4_k", DType::q4_k},    {13, "q5_k", DType::none},
    {14, "q6_k", DType::q6_k},   {15, "q8_k", DType::none},    {16, "iq2_xxs", DType::none},
    {17, "iq2_xs", DType::none}, {18, "iq3_xxs", DType::none}, {19, "iq1_s", DType::none},
    {20, "iq4_nl", DType::none}, {21, "iq3_s", DType::none},   {22, "iq2_s", DType::none},
    {23, "iq4_xs", DType::none}, {24, "i8", DType::none},      {25, "i16", DType::none},
    {26, "i32", DType::none},    {27, "i64", DType::none},     {28, "f64", DType::none},
    {29, "iq1_m", DType::none},  {30, "bf16", DType::bf16},    {34, "tq1_0", DType::none},
    {35, "tq2_0", DType::none},  {39, "mxfp4", DType::none},
};

std::string supported_types() {
  std::string list;
  for (const GgmlType& type : kGgmlTypes)
    if (type.dtype != DType::none) list += fmt::format("{}{}", list.empty() ? "" : ", ", type.name);
  return list;
}

template <class T>
T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Names come from the file: bounded and printable in messages.
std::string shown(std::string_view name) {
  constexpr size_t kLongest = 80;
  std::string text;
  for (const char c : name.substr(0, kLongest)) text += c >= 0x20 && c < 0x7f ? c : '?';
  return name.size() > kLongest ? text + "..." : text;
}

// A position in the file. Every read checks what is left before it moves, and says what it was reading.
class Cursor {
 public:
  explicit Cursor(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  uint64_t offset() const { return offset_; }
  uint64_t left() const { return bytes_.size() - offset_; }

  template <class T>
  Status read(std::string_view field, T& value) {
    VIVACE_TRY(need(field, sizeof(T)));
    value = load<T>(bytes_.data() + offset_);
    offset_ += sizeof(T);
    return {};
  }

  Status read_string(std::string_view field, std::string_view& value) {
    // Vocabularies have hundreds of thousands of these: no message is put together before something is wrong.
    if (left() < sizeof(uint64_t)) return need(fmt::format("length of {}", field), sizeof(uint64_t));
    const auto length = load<uint64_t>(bytes_.data() + offset_);
    offset_ += sizeof length;
    if (length > left())
      return invalid_argument("gguf: length of {} is {}, but only {} bytes are left in the file", field,
                              length, left());
    value = {reinterpret_cast<const char*>(bytes_.data() + offset_), static_cast<size_t>(length)};
    offset_ += length;
    return {};
  }

  Status skip(std::string_view field, uint64_t count) {
    VIVACE_TRY(need(field, count));
    offset_ += count;
    return {};
  }

  // A count of things that take at least `min_bytes` each.
  Status read_count(std::string_view field, uint64_t min_bytes, uint64_t& count) {
    VIVACE_TRY(read(field, count));
    if (count > left() / min_bytes)
      return invalid_argument("gguf: {} is {}, but the {} bytes left in the file hold at most {}", field,
                              count, left(), left() / min_bytes);
    return {};
  }

 private:
  Status need(std::string_view field, uint64_t count) const {
    if (count <= left()) return {};
    return invalid_argument("gguf: the file ends inside {} (at byte {}: {} bytes left, needs {})", field,
                            offset_, left(), count);
  }

  std::span<const uint8_t> bytes_;
  uint64_t offset_ = 0;
};

Status read_elements(Cursor& cursor, std::string_view field, GgufValue& value) {
  const ScalarInfo info = *scalar_info(static_cast<uint32_t>(value.element));
  if (value.element == GgufType::string) {
    for (uint64_t i = 0; i < value.count; ++i) {
      std::string_view ignored;
      VIVACE_TRY(cursor.read_string(field, ignored));
    }
    return {};
  }
  // No overflow: the count was checked against the bytes left.
  return cursor.skip(field, value.count * info.bytes);
}

Result<GgufValue> read_value(Cursor& cursor, std::span<const uint8_t> bytes, const std::string& field) {
  GgufValue value;
  uint32_t type = 0;
  VIVACE_TRY(cursor.read(fmt::format("type of {}", field), type));
  if (!scalar_info(type)) return invalid_argument("gguf: type of {} is {}, needs 0 to 12", field, type);
  value.type = value.element = static_cast<GgufType>(type);
  if (value.type == GgufType::array) {
    uint32_t element = 0;
    VIVACE_TRY(cursor.read(fmt::format("element type of {}", field), element));
    if (!scalar_info(element))
      return invalid_argument("gguf: element type of {} is {}, needs 0 to 12", field, element);
    value.element = static_cast<GgufType>(element);
    if (value.element == GgufType::array)
      return unsupported("gguf: {} is an array of arrays, needs single elements", field);
    const uint64_t min_bytes =
        value.element == GgufType::string ? sizeof(uint64_t) : scalar_info(element)->bytes;
    VIVACE_TRY(cursor.read_count(fmt::format("element count of {}", field), min_bytes, value.count));
  }
  const uint64_t begin = cursor.offset();
  VIVACE_TRY(read_elements(cursor, field, value));
  value.payload = bytes.subspan(begin, cursor.offset() - begin);
  return value;
}

struct TensorInfo {
  GgufTensor tensor;
  uint64_t offset = 0;  // from the start of the data section
  int64_t bytes = 0;
};

Result<DType> read_tensor_type(Cursor& cursor, const std::string& place) {
  uint32_t id = 0;
  VIVACE_TRY(cursor.read(fmt::format("type of {}", place), id));
  for (const GgmlType& type : kGgmlTypes) {
    if (type.id != id) continue;
    if (type.dtype != DType::none) return type.dtype;
    return unsupported("gguf: {} has type {}, needs one of {}", place, type.name, supported_types());
  }
  return unsupported("gguf: {} has the unknown type {}, needs one of {}", place, id, supported_types());
}

Result<int64_t> checked_bytes(const GgufTensor& tensor, const std::string& place) {
  const DTypeInfo info = info_of(tensor.dtype);
  const int64_t row = tensor.shape[tensor.rank - 1];
  if (row % info.block_elements != 0)
    return invalid_argument("gguf: {} has rows of {} elements, needs a multiple of {} for {}", place, row,
                            info.block_elements, info.name);
  int64_t bytes = row / info.block_elements;
  bool overflow = __builtin_mul_overflow(bytes, info.block_bytes, &bytes);
  // The number of elements must fit too: everything that counts them later uses int64.
  int64_t elements = row;
  for (int d = 0; d + 1 < tensor.rank; ++d) {
    overflow |= __builtin_mul_overflow(bytes, tensor.shape[d], &bytes);
    overflow |= __builtin_mul_overflow(elements, tensor.shape[d], &elements);
  }
  if (overflow) return invalid_argument("gguf: dimensions of {} multiply to more than 2^63 - 1", place);
  return bytes;
}

Result<TensorInfo> read_tensor_info(Cursor& cursor, uint64_t index) {
  TensorInfo info;
  std::string_view name;
  VIVACE_TRY(cursor.read_string(fmt::format("name of tensor {}", index), name));
  if (name.empty()) return invalid_argument("gguf: name of tensor {} is empty", index);
  const std::string place = fmt::format("tensor '{}'", shown(name));
  info.tensor.name = name;
  uint32_t rank = 0;
  VIVACE_TRY(cursor.read(fmt::format("dimension count of {}", place), rank));
  if (rank < 1 || rank > 4)
    return invalid_argument("gguf: dimension count of {} is {}, needs 1 to 4", place, rank);
  info.tensor.rank = static_cast<int>(rank);
  for (uint32_t d = 0; d < rank; ++d) {
    uint64_t dim = 0;
    VIVACE_TRY(cursor.read(fmt::format("dimension {} of {}", d, place), dim));
    if (dim < 1 || dim > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      return invalid_argument("gguf: dimension {} of {} is {}, needs 1 to 2^63 - 1", d, place, dim);
    info.tensor.shape[rank - 1 - d] = static_cast<int64_t>(dim);
  }
  VIVACE_TRY_ASSIGN(info.tensor.dtype, read_tensor_type(cursor, place));
  VIVACE_TRY_ASSIGN(info.bytes, checked_bytes(info.tensor, place));
  VIVACE_TRY(cursor.read(fmt::format("offset of {}", place), info.offset));
  return info;
}

Status read_header(Cursor& cursor, GgufFile& file, uint64_t& tensor_count, uint64_t& key_count) {
  uint32_t magic = 0;
  VIVACE_TRY(cursor.read("magic", magic));
  if (magic != 0x46554747u)
    return invalid_argument("gguf: magic is {:#010x}, needs 'GGUF' (0x46554747)", magic);
  VIVACE_TRY(cursor.read("version", file.version));
  if (file.version != 0 && (file.version & 0xffffu) == 0)
    return unsupported("gguf: version is {:#010x}: the file is big-endian, needs little-endian",
                       file.version);
  if (file.version != 2 && file.version != 3)
    return unsupported("gguf: version is {}, needs 2 or 3", file.version);
  // The smallest tensor info: name of one byte, one dimension, type, offset. The smallest key: empty name,
  // type, one byte.
  VIVACE_TRY(cursor.read("tensor_count", tensor_count));
  VIVACE_TRY(cursor.read_count("metadata_kv_count", 8 + 4 + 1, key_count));
  constexpr uint64_t kMinTensorInfo = 8 + 1 + 4 + 8 + 4 + 8;
  if (tensor_count > cursor.left() / kMinTensorInfo)
    return invalid_argument("gguf: tensor_count is {}, but the {} bytes left in the file hold at most {}",
                            tensor_count, cursor.left(), cursor.left() / kMinTensorInfo);
  return {};
}

Status read_alignment(GgufFile& file) {
  const GgufValue* value = file.find("general.alignment");
  if (value == nullptr) return {};
  const std::optional<int64_t> alignment = value->integer();
  // Eight is the format's own minimum; with it every element type is aligned.
  if (!alignment || *alignment < 8 || !std::has_single_bit(static_cast<uint64_t>(*alignment)))
    return invalid_argument("gguf: general.alignment is {}, needs a power of two of at least 8",
                            value->describe());
  file.alignment = static_cast<uint64_t>(*alignment);
  return {};
}

Status place_tensor(TensorInfo& info, std::span<const uint8_t> bytes, uint64_t data_begin,
                    uint64_t alignment) {
  const std::string place = fmt::format("tensor '{}'", shown(info.tensor.name));
  if (info.offset % alignment != 0)
    return invalid_argument("gguf: offset of {} is {}, needs a multiple of general.alignment = {}", place,
                            info.offset, alignment);
  const uint64_t room = data_begin <= bytes.size() ? bytes.size() - data_begin : 0;
  if (info.offset > room || static_cast<uint64_t>(info.bytes) > room - info.offset)
    return invalid_argument("gguf: {} has offset {} and {} bytes, but the data section has {} bytes", place,
                            info.offset, info.bytes, room);
  info.tensor.data = bytes.subspan(data_begin + info.offset, static_cast<size_t>(info.bytes));
  return {};
}

// No tensor is empty: each dimension is at least 1.
Status check_overlap(const std::vector<GgufTensor>& tensors) {
  std::vector<const GgufTensor*> order;
  for (const GgufTensor& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(),
            [](const auto* a, const auto* b) { return a->data.data() < b->data.data(); });
  for (size_t i = 1; i < order.size(); ++i)
    if (order[i - 1]->data.data() + order[i - 1]->data.size() > order[i]->data.data())
      return invalid_argument("gguf: the bytes of tensor '{}' overlap those of '{}'", shown(order[i]->name),
                              shown(order[i - 1]->name));
  return {};
}

}  // namespace

std::string_view name_of(GgufType type) {
  const std::optional<ScalarInfo> info = scalar_info(static_cast<uint32_t>(type));
  return info ? info->name : "unknown";
}

namespace {

std::optional<int64_t> load_integer(GgufType type, const uint8_t* at) {
  switch (type) {
    case GgufType::u8:
      return *at;
    case GgufType::i8:
      return load<int8_t>(at);
    case GgufType::u16:
      return load<uint16_t>(at);
    case GgufType::i16:
      return load<int16_t>(at);
    case GgufType::u32:
      return load<uint32_t>(at);
    case GgufType::i32:
      return load<int32_t>(at);
    case GgufType::i64:
      return load<int64_t>(at);
    case GgufType::boolean:
      return *at != 0;
    case GgufType::u64: {
      const auto value = load<uint64_t>(at);
      if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
        return static_cast<int64_t>(value);
      return std::nullopt;
    }
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<int64_t> GgufValue::integer() const {
  return type == GgufType::array ? std::nullopt : load_integer(type, payload.data());
}

std::optional<double> GgufValue::number() const {
  if (type == GgufType::f32) return load<float>(payload.data());
  if (type == GgufType::f64) return load<double>(payload.data());
  if (type == GgufType::u64) return static_cast<double>(load<uint64_t>(payload.data()));
  const std::optional<int64_t> whole = integer();
  return whole ? std::optional<double>(static_cast<double>(*whole)) : std::nullopt;
}

std::optional<bool> GgufValue::boolean() const {
  return type == GgufType::boolean ? std::optional<bool>(payload[0] != 0) : std::nullopt;
}

std::optional<std::string_view> GgufValue::text() const {
  if (type != GgufType::string) return std::nullopt;
  const std::span<const uint8_t> chars = payload.subspan(sizeof(uint64_t));
  return std::string_view(reinterpret_cast<const char*>(chars.data()), chars.size());
}

std::optional<std::vector<std::string>> GgufValue::texts() const {
  if (type != GgufType::array || element != GgufType::string) return std::nullopt;
  std::vector<std::string> list;
  list.reserve(count);  // each takes at least eight bytes of the file
  for (const uint8_t* at = payload.data(); list.size() < count;) {
    const auto length = load<uint64_t>(at);
    list.emplace_back(reinterpret_cast<const char*>(at + sizeof length), length);
    at += sizeof length + length;
  }
  return list;
}

std::optional<std::vector<int32_t>> GgufValue::integers() const {
  if (type != GgufType::array) return std::nullopt;
  const uint64_t size = scalar_info(static_cast<uint32_t>(element))->bytes;
  std::vector<int32_t> list;
  for (uint64_t i = 0; i < count; ++i) {
    const std::optional<int64_t> value = load_integer(element, payload.data() + i * size);
    if (!value || *value != static_cast<int32_t>(*value)) return std::nullopt;
    list.push_back(static_cast<int32_t>(*value));
  }
  return list;
}

std::string GgufValue::describe() const {
  if (type == GgufType::array) return fmt::format("an array of {} {}", count, name_of(element));
  if (type == GgufType::string) return fmt::format("string '{}'", shown(*text()));
  if (const std::optional<int64_t> whole = integer()) return fmt::format("{} {}", name_of(type), *whole);
  return fmt::format("{} {}", name_of(type), *number());
}

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto it = metadata.find(key);
  return it == metadata.end() ? nullptr : &it->second;
}

Result<GgufFile> parse_gguf(std::span<const uint8_t> bytes) {
  GgufFile file;
  Cursor cursor(bytes);
  uint64_t tensor_count = 0, key_count = 0;
  VIVACE_TRY(read_header(cursor, file, tensor_count, key_count));

  for (uint64_t i = 0; i < key_count; ++i) {
    std::string_view key;
    VIVACE_TRY(cursor.read_string(fmt::format("name of metadata key {}", i), key));
    VIVACE_TRY_ASSIGN(GgufValue value, read_value(cursor, bytes, fmt::format("metadata '{}'", shown(key))));
    if (!file.metadata.emplace(key, value).second)
      return invalid_argument("gguf: metadata '{}' occurs twice", shown(key));
  }
  VIVACE_TRY(read_alignment(file));

  std::vector<TensorInfo> infos;
  std::unordered_set<std::string> names;
  for (uint64_t i = 0; i < tensor_count; ++i) {
    VIVACE_TRY_ASSIGN(TensorInfo info, read_tensor_info(cursor, i));
    if (!names.insert(info.tensor.name).second)
      return invalid_argument("gguf: tensor '{}' occurs twice", shown(info.tensor.name));
    infos.push_back(std::move(info));
  }

  // The data section starts at the next multiple of the alignment. No overflow: the offset is below 2^63.
  const uint64_t data_begin = (cursor.offset() + file.alignment - 1) / file.alignment * file.alignment;
  for (TensorInfo& info : infos) {
    VIVACE_TRY(place_tensor(info, bytes, data_begin, file.alignment));
    file.tensors.push_back(std::move(info.tensor));
  }
  VIVACE_TRY(check_overlap(file.tensors));
  return file;
}

}  // namespace vivace::model
