#include "src/model/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>

#include "src/core/error.h"
#include "src/model/json.h"

namespace vivace::model {

namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "safetensors values are read as they lie in the file");

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

struct FormatType {
  std::string_view name;
  int64_t bits;
  DType dtype;
};

constexpr FormatType kTypes[] = {
    {"F32", 32, DType::f32},         {"F16", 16, DType::f16},     {"BF16", 16, DType::bf16},
    {"F8_E4M3", 8, DType::fp8_e4m3}, {"U8", 8, DType::u8},        {"I32", 32, DType::i32},
    {"I64", 64, DType::i64},         {"F64", 64, DType::none},    {"F8_E5M2", 8, DType::none},
    {"F8_E8M0", 8, DType::none},     {"F6_E2M3", 6, DType::none}, {"F6_E3M2", 6, DType::none},
    {"F4", 4, DType::none},          {"I8", 8, DType::none},      {"I16", 16, DType::none},
    {"U16", 16, DType::none},        {"U32", 32, DType::none},    {"U64", 64, DType::none},
    {"BOOL", 8, DType::none},        {"C64", 64, DType::none},
};

std::string readable_types() {
  std::string list;
  for (const FormatType& type : kTypes)
    if (type.dtype != DType::none) list += fmt::format("{}{}", list.empty() ? "" : ", ", type.name);
  return list;
}

std::string shown(std::string_view name) {
  constexpr size_t kLongest = 120;
  return name.size() > kLongest ? std::string(name.substr(0, kLongest)) + "..." : std::string(name);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

bool is_offset(const json& value) {
  return value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
}

Result<std::vector<int64_t>> whole_numbers(const std::string& place, const json& info, const char* field) {
  const auto it = info.find(field);
  if (it == info.end()) return invalid_argument("{}: {} is missing", place, field);
  if (!it->is_array())
    return invalid_argument("{}: {} is {}, needs a list of whole numbers", place, field, excerpt(*it));
  std::vector<int64_t> numbers;
  for (const json& value : *it) {
    if (!is_offset(value))
      return invalid_argument("{}: {}[{}] is {}, needs 0 to 2^63 - 1", place, field, numbers.size(),
                              excerpt(value));
    numbers.push_back(value.get<int64_t>());
  }
  return numbers;
}

Result<FormatType> type_of(const std::string& place, const json& info) {
  const auto it = info.find("dtype");
  if (it == info.end()) return invalid_argument("{}: dtype is missing", place);
  if (it->is_string())
    for (const FormatType& type : kTypes)
      if (it->get_ref<const std::string&>() == type.name) return type;
  return unsupported("{}: dtype is {}, needs one of {}", place, excerpt(*it), readable_types());
}

// Bytes that the shape takes, or an error when they overflow or are not whole.
Result<int64_t> shape_bytes(const std::string& place, const std::vector<int64_t>& shape,
                            const FormatType& type) {
  int64_t bits = type.bits;
  bool overflow = false;
  // An empty dimension makes the product zero whatever the others are.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  for (const int64_t dim : shape) overflow |= __builtin_mul_overflow(bits, dim, &bits);
  if (overflow)
    return invalid_argument("{}: shape {} multiplies to more than 2^63 - 1 bits", place, shape_text(shape));
  if (bits % 8 != 0)
    return invalid_argument("{}: shape {} of {} takes {} bits, needs whole bytes", place, shape_text(shape),
                            type.name, bits);
  return bits / 8;
}

Result<SafetensorsEntry> read_entry(const std::string& name, const json& info,
                                    std::span<const uint8_t> data) {
  const std::string place = fmt::format("safetensors: tensor '{}'", shown(name));
  if (!info.is_object()) return invalid_argument("{}: is {}, needs an object", place, excerpt(info));
  VIVACE_TRY_ASSIGN(const FormatType type, type_of(place, info));
  SafetensorsEntry entry;
  entry.name = name;
  entry.type_name = type.name;
  entry.dtype = type.dtype;
  VIVACE_TRY_ASSIGN(entry.shape, whole_numbers(place, info, "shape"));
  VIVACE_TRY_ASSIGN(const std::vector<int64_t> offsets, whole_numbers(place, info, "data_offsets"));
  if (offsets.size() != 2)
    return invalid_argument("{}: data_offsets has {} entries, needs [begin, end]", place, offsets.size());
  const auto [begin, end] = std::pair(offsets[0], offsets[1]);
  if (begin > end || static_cast<uint64_t>(end) > data.size())
    return invalid_argument(
        "{}: data_offsets is [{}, {}], needs begin <= end <= {} (the bytes after the header)", place, begin,
        end, data.size());
  VIVACE_TRY_ASSIGN(const int64_t bytes, shape_bytes(place, entry.shape, type));
  if (bytes != end - begin)
    return invalid_argument("{}: {}{} takes {} bytes, but data_offsets [{}, {}] span {}", place, type.name,
                            shape_text(entry.shape), bytes, begin, end, end - begin);
  entry.data = data.subspan(static_cast<size_t>(begin), static_cast<size_t>(bytes));
  return entry;
}

Status check_overlap(const std::vector<SafetensorsEntry>& entries) {
  std::vector<const SafetensorsEntry*> order;
  for (const SafetensorsEntry& entry : entries)
    if (!entry.data.empty()) order.push_back(&entry);
  std::sort(order.begin(), order.end(),
            [](const auto* a, const auto* b) { return a->data.data() < b->data.data(); });
  for (size_t i = 1; i < order.size(); ++i)
    if (order[i - 1]->data.data() + order[i - 1]->data.size() > order[i]->data.data())
      return invalid_argument("safetensors: tensor '{}': data_offsets overlap those of '{}'",
                              shown(order[i]->name), shown(order[i - 1]->name));
  return {};
}

}  // namespace

Result<std::vector<SafetensorsEntry>> parse_safetensors(std::span<const uint8_t> bytes) {
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof header_bytes)
    return invalid_argument("safetensors: the file has {} bytes, needs at least 8 for the header length",
                            bytes.size());
  std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
  const std::span<const uint8_t> rest = bytes.subspan(sizeof header_bytes);
  if (header_bytes > kMaxHeaderBytes || header_bytes > rest.size())
    return invalid_argument("safetensors: header length is {}, needs at most {}", header_bytes,
                            std::min<uint64_t>(kMaxHeaderBytes, rest.size()));
  const std::string_view header(reinterpret_cast<const char*>(rest.data()),
                                static_cast<size_t>(header_bytes));
  VIVACE_TRY_ASSIGN(const json object, parse_json_object("safetensors: header", header));

  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, info] : object.items()) {
    if (name == "__metadata__") continue;
    VIVACE_TRY_ASSIGN(SafetensorsEntry entry, read_entry(name, info, rest.subspan(header.size())));
    entries.push_back(std::move(entry));
  }
  VIVACE_TRY(check_overlap(entries));
  return entries;
}

Result<Tensor> to_tensor(const SafetensorsEntry& entry) {
  const std::string place = fmt::format("safetensors: tensor '{}'", shown(entry.name));
  if (entry.dtype == DType::none)
    return unsupported("{}: dtype is {}, needs one of {}", place, entry.type_name, readable_types());
  if (entry.shape.size() > Tensor::kMaxRank)
    return unsupported("{}: has {} dimensions, needs at most {}", place, entry.shape.size(),
                       Tensor::kMaxRank);
  // Writers since 2023 pad the header so that this holds; element loads need it.
  const auto element_bytes = static_cast<uintptr_t>(info_of(entry.dtype).block_bytes);
  if (!entry.data.empty() && reinterpret_cast<uintptr_t>(entry.data.data()) % element_bytes != 0)
    return unsupported(
        "{}: begins at an address that is not a multiple of {} bytes (its element size); save the file again",
        place, element_bytes);
  Tensor tensor;
  // A Tensor has no read-only form; the pages themselves are read-only.
  tensor.data = const_cast<uint8_t*>(entry.data.data());
  tensor.dtype = entry.dtype;
  tensor.rank = static_cast<int>(entry.shape.size());
  const bool empty = entry.data.empty();
  int64_t step = 1;
  for (int d = tensor.rank - 1; d >= 0; --d) {
    tensor.shape[d] = entry.shape[d];
    tensor.stride[d] = step;
    // Beside an empty dimension the others are unchecked; their product is not needed.
    step = empty ? 0 : step * entry.shape[d];
  }
  return tensor;
}

Result<std::map<std::string, std::string>> parse_safetensors_index(std::string_view text) {
  const std::string place = "model.safetensors.index.json";
  VIVACE_TRY_ASSIGN(const json object, parse_json_object(place, text));
  const auto map = object.find("weight_map");
  if (map == object.end() || !map->is_object())
    return invalid_argument("{}: weight_map is {}, needs an object of file names", place,
                            map == object.end() ? "missing" : excerpt(*map));
  std::map<std::string, std::string> shards;
  for (const auto& [name, value] : map->items()) {
    if (!value.is_string())
      return invalid_argument("{}: weight_map['{}'] is {}, needs a file name", place, shown(name),
                              excerpt(value));
    const auto& file = value.get_ref<const std::string&>();
    if (file.empty() || file == "." || file == ".." ||
        file.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos)
      return invalid_argument("{}: weight_map['{}'] is {}, needs the name of a file in the same folder",
                              place, shown(name), excerpt(value));
    shards[name] = file;
  }
  return shards;
}

}  // namespace vivace::model
