#include "src/model/safetensors.h"

#include <gtest/gtest.h>

#include "tests/model/file_builders.h"

namespace vivace::model {
namespace {

using namespace vivace::testing;  // NOLINT: a test

void expect_refused(const Bytes& bytes, const std::vector<std::string>& parts,
                    Code code = Code::invalid_argument) {
  const auto result = parse_safetensors(bytes);
  ASSERT_FALSE(result.ok()) << "accepted, should mention " << parts.front();
  EXPECT_EQ(result.status().code(), code) << result.status().message();
  for (const std::string& part : parts)
    EXPECT_NE(result.status().message().find(part), std::string::npos) << result.status().message();
}

// One tensor 'w' over eight bytes of data.
Bytes one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return SafetensorsBuilder::with_header(
      R"({"w":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}",
      Bytes(8, 1));
}

// https://github.com/ml-explore/mlx/issues/3363: a declared shape larger than its span was read beyond the
// file.
TEST(SafetensorsH41, ShapeAgainstSpan) {
  expect_refused(one("BF16", "[512,512]", "[0,8]"), {"tensor 'w'", "524288 bytes", "span 8"});
  expect_refused(one("BF16", "[4]", "[8,0]"), {"tensor 'w'", "data_offsets is [8, 0]"});
  expect_refused(one("BF16", "[4]", "[0,9223372036854775808]"),
                 {"tensor 'w'", "data_offsets[1] is 9223372036854775808"});
  expect_refused(one("BF16", "[4]", "[0,9223372036854775807]"),
                 {"tensor 'w'", "data_offsets is [0, 9223372036854775807]"});
  expect_refused(one("BF16", "[4]", "[0,99999999999999999999999]"), {"tensor 'w'", "data_offsets[1]"});
  expect_refused(one("BF16", "[4]", "[-1,8]"), {"tensor 'w'", "data_offsets[0] is -1"});
  expect_refused(one("BF16", "[4]", "[0]"), {"tensor 'w'", "data_offsets has 1 entries"});
  expect_refused(one("BF16", "[4]", "[0,4,8]"), {"tensor 'w'", "data_offsets has 3 entries"});
  expect_refused(one("BF16", "[4]", "\"0,8\""), {"tensor 'w'", "data_offsets is \"0,8\""});
  expect_refused(one("BF16", "[-1]", "[0,8]"), {"tensor 'w'", "shape[0] is -1"});
  expect_refused(one("BF16", "[4.0]", "[0,8]"), {"tensor 'w'", "shape[0] is 4.0"});
  expect_refused(one("BF16", "[8589934592,8589934592]", "[0,8]"),
                 {"tensor 'w'", "shape [8589934592, 8589934592] multiplies"});
  expect_refused(one("BF99", "[4]", "[0,8]"), {"tensor 'w'", "dtype is \"BF99\""}, Code::unsupported);
  expect_refused(one("F4", "[3]", "[0,1]"), {"tensor 'w'", "12 bits"});
}

TEST(SafetensorsH41, AnEmptyShapeIsAScalar) {
  const auto entries = parse_safetensors(one("I64", "[]", "[0,8]"));
  ASSERT_TRUE(entries.ok()) << entries.status().message();
  const auto tensor = to_tensor(entries->front());
  ASSERT_TRUE(tensor.ok()) << tensor.status().message();
  EXPECT_EQ(tensor->rank, 0);
  EXPECT_EQ(tensor->elements(), 1);
  EXPECT_EQ(tensor->bytes(), 8);
  expect_refused(one("BF16", "[]", "[0,8]"), {"tensor 'w'", "takes 2 bytes", "span 8"});
}

TEST(Safetensors, HeaderLengthAndText) {
  expect_refused({}, {"the file has 0 bytes"});
  expect_refused(Bytes(7), {"the file has 7 bytes"});
  expect_refused(ByteWriter().put(~uint64_t{0}).raw("{}").bytes,
                 {"header length is 18446744073709551615", "at most 2"});
  expect_refused(ByteWriter().put(uint64_t{3}).raw("{}").bytes, {"header length is 3"});
  expect_refused(SafetensorsBuilder::with_header("", {}), {"header: is empty, needs a JSON object"});
  expect_refused(SafetensorsBuilder::with_header("[]", {}), {"is array, needs a JSON object"});
  expect_refused(SafetensorsBuilder::with_header("{\"w\":", {}), {"not valid JSON"});
  expect_refused(SafetensorsBuilder::with_header("{\"w\xff\":1}", {}), {"not valid JSON"});
  expect_refused(SafetensorsBuilder::with_header("{\"w\":3}", {}), {"tensor 'w': is 3"});
  expect_refused(SafetensorsBuilder::with_header("{\"w\":{}}", {}), {"tensor 'w': dtype is missing"});
  expect_refused(SafetensorsBuilder::with_header("{\"w\":" + std::string(100000, '[') + "}", {}),
                 {"deeper than 64"});
  expect_refused(
      SafetensorsBuilder::with_header(R"({"w":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"w":{}})", {1}),
      {"the key 'w' twice"});
  expect_refused(SafetensorsBuilder::with_header(R"({"w":{"dtype":"U8","dtype":"I8"}})", {}),
                 {"the key 'dtype' twice"});
  const auto none =
      parse_safetensors(SafetensorsBuilder::with_header(R"({"__metadata__":{"format":"pt"}})", {}));
  ASSERT_TRUE(none.ok()) << none.status().message();
  EXPECT_TRUE(none->empty());
}

TEST(Safetensors, AFileCutAfterAnyByteIsRefused) {
  const Bytes whole =
      SafetensorsBuilder().tensor("a", "F32", {2}, floats(2)).tensor("b", "F32", {3}, floats(3)).bytes();
  ASSERT_TRUE(parse_safetensors(whole).ok());
  for (size_t length = 0; length < whole.size(); ++length) {
    const auto result = parse_safetensors(std::span(whole).first(length));
    ASSERT_FALSE(result.ok()) << length;
    ASSERT_EQ(result.status().message().rfind("safetensors: ", 0), 0u) << result.status().message();
  }
}

TEST(Safetensors, EveryReadableType) {
  const std::pair<const char*, DType> types[] = {
      {"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16}, {"F8_E4M3", DType::fp8_e4m3},
      {"U8", DType::u8},   {"I32", DType::i32}, {"I64", DType::i64}};
  for (const auto& [name, dtype] : types) {
    const Bytes data(static_cast<size_t>(6 * info_of(dtype).block_bytes), 5);
    const Bytes file = SafetensorsBuilder().tensor("t", name, {2, 3}, data).bytes();
    const auto entries = parse_safetensors(file);
    ASSERT_TRUE(entries.ok()) << entries.status().message();
    const auto tensor = to_tensor(entries->front());
    ASSERT_TRUE(tensor.ok()) << tensor.status().message();
    EXPECT_EQ(tensor->dtype, dtype);
    EXPECT_EQ(tensor->rank, 2);
    EXPECT_EQ(tensor->shape[0], 2);
    EXPECT_EQ(tensor->shape[1], 3);
    EXPECT_TRUE(tensor->contiguous());
    EXPECT_EQ(tensor->as<uint8_t>()[data.size() - 1], 5);
  }
}

TEST(Safetensors, OtherTypesRanksAndAlignmentsAreListedAndRefusedWhenAskedFor) {
  const Bytes file = SafetensorsBuilder()
                         .tensor("double", "F64", {1}, Bytes(8))
                         .tensor("six", "F32", {1, 1, 1, 1, 1, 1}, Bytes(4))
                         .tensor("odd", "U8", {3}, Bytes(3))
                         .tensor("shifted", "F32", {1}, Bytes(4))
                         .bytes();
  const auto entries = parse_safetensors(file);
  ASSERT_TRUE(entries.ok()) << entries.status().message();
  ASSERT_EQ(entries->size(), 4u);
  const auto refusal = [&](const std::string& name) {
    for (const SafetensorsEntry& entry : *entries)
      if (entry.name == name) return to_tensor(entry).status().message();
    return std::string("absent");
  };
  EXPECT_NE(refusal("double").find("dtype is F64, needs one of F32"), std::string::npos) << refusal("double");
  EXPECT_NE(refusal("six").find("has 6 dimensions"), std::string::npos) << refusal("six");
  EXPECT_NE(refusal("shifted").find("not a multiple of 4"), std::string::npos) << refusal("shifted");
  EXPECT_EQ(refusal("odd"), "");
}

TEST(Safetensors, EmptyDimensionsAndOverlap) {
  const auto empty = parse_safetensors(one("F32", "[0,9223372036854775807,4]", "[0,0]"));
  ASSERT_TRUE(empty.ok()) << empty.status().message();
  const auto tensor = to_tensor(empty->front());
  ASSERT_TRUE(tensor.ok());
  EXPECT_EQ(tensor->shape[1], INT64_MAX);
  expect_refused(SafetensorsBuilder::with_header(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
                                                    "b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
                                                 Bytes(8)),
                 {"tensor 'b'", "overlap those of 'a'"});
}

TEST(SafetensorsIndex, FileNamesStayInsideTheFolder) {
  const auto ok = parse_safetensors_index(
      R"({"metadata":{"total_size":3},"weight_map":{"a":"x-1.safetensors","b":"x-2.safetensors"}})");
  ASSERT_TRUE(ok.ok()) << ok.status().message();
  EXPECT_EQ(ok->at("b"), "x-2.safetensors");
  for (const char* name : {"../x.safetensors", "/etc/passwd", "..", ".", "", "a/b", "a\\\\b", "a\\u0000b"}) {
    const auto refused = parse_safetensors_index(std::string(R"({"weight_map":{"a":")") + name + "\"}}");
    ASSERT_FALSE(refused.ok()) << name;
    EXPECT_NE(refused.status().message().find("weight_map['a']"), std::string::npos)
        << refused.status().message();
  }
  for (const char* text : {"{}", R"({"weight_map":[]})", R"({"weight_map":{"a":1}})", "nonsense"})
    EXPECT_FALSE(parse_safetensors_index(text).ok()) << text;
}

}  // namespace
}  // namespace vivace::model
