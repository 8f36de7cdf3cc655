#pragma once

#include <stdlib.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Writers of small model files, valid ones and (through the raw calls) broken ones, and a folder to put them
// in.

namespace vivace::testing {

using Bytes = std::vector<uint8_t>;

class ByteWriter {
 public:
  template <class T>
  ByteWriter& put(T value) {
    const size_t at = bytes.size();
    bytes.resize(at + sizeof value);
    std::memcpy(bytes.data() + at, &value, sizeof value);
    return *this;
  }
  ByteWriter& raw(std::string_view text) {
    bytes.insert(bytes.end(), text.begin(), text.end());
    return *this;
  }
  ByteWriter& raw(const Bytes& more) {
    bytes.insert(bytes.end(), more.begin(), more.end());
    return *this;
  }
  /// A GGUF string: length and characters.
  ByteWriter& text(std::string_view value) { return put<uint64_t>(value.size()).raw(value); }
  ByteWriter& pad_to(size_t multiple) {
    while (bytes.size() % multiple != 0) bytes.push_back(0);
    return *this;
  }
  Bytes bytes;
};

/// GGUF type numbers, of metadata values and of tensors.
namespace gguf {
inline constexpr uint32_t kU8 = 0, kI8 = 1, kU16 = 2, kI16 = 3, kU32 = 4, kI32 = 5, kF32 = 6, kBool = 7,
                          kString = 8, kArray = 9, kU64 = 10, kI64 = 11, kF64 = 12;
inline constexpr uint32_t kTensorF32 = 0, kTensorF16 = 1, kTensorQ40 = 2, kTensorQ41 = 3, kTensorQ50 = 6,
                          kTensorQ80 = 8, kTensorQ4K = 12, kTensorQ6K = 14, kTensorBf16 = 30;
}  // namespace gguf

class GgufBuilder {
 public:
  explicit GgufBuilder(uint32_t version = 3) : version_(version) {}

  template <class T>
  GgufBuilder& key(std::string_view name, uint32_t type, T value) {
    keys_.text(name).put<uint32_t>(type).put<T>(value);
    ++key_count_;
    return *this;
  }
  GgufBuilder& u32(std::string_view name, uint32_t value) { return key(name, gguf::kU32, value); }
  GgufBuilder& f32(std::string_view name, float value) { return key(name, gguf::kF32, value); }
  GgufBuilder& boolean(std::string_view name, bool value) { return key<uint8_t>(name, gguf::kBool, value); }
  GgufBuilder& string(std::string_view name, std::string_view value) {
    keys_.text(name).put<uint32_t>(gguf::kString).text(value);
    ++key_count_;
    return *this;
  }
  GgufBuilder& strings(std::string_view name, const std::vector<std::string>& values) {
    keys_.text(name).put<uint32_t>(gguf::kArray).put<uint32_t>(gguf::kString).put<uint64_t>(values.size());
    for (const std::string& value : values) keys_.text(value);
    ++key_count_;
    return *this;
  }
  GgufBuilder& i32s(std::string_view name, const std::vector<int32_t>& values) {
    keys_.text(name).put<uint32_t>(gguf::kArray).put<uint32_t>(gguf::kI32).put<uint64_t>(values.size());
    for (const int32_t value : values) keys_.put(value);
    ++key_count_;
    return *this;
  }
  /// A key whose type and value are written by hand.
  GgufBuilder& raw_key(std::string_view name, const Bytes& type_and_value) {
    keys_.text(name).raw(type_and_value);
    ++key_count_;
    return *this;
  }

  /// `dims` in the file's order (fastest first).
  GgufBuilder& tensor(std::string name, uint32_t type, std::vector<uint64_t> dims, Bytes data) {
    tensors_.push_back({std::move(name), type, std::move(dims), std::move(data), -1});
    return *this;
  }
  /// The same with an offset of choice instead of the next free one.
  GgufBuilder& tensor_at(std::string name, uint32_t type, std::vector<uint64_t> dims, uint64_t offset) {
    tensors_.push_back({std::move(name), type, std::move(dims), {}, static_cast<int64_t>(offset)});
    return *this;
  }
  GgufBuilder& alignment(uint32_t value) {
    alignment_ = value;
    return u32("general.alignment", value);
  }

  Bytes bytes() const {
    ByteWriter out, data;
    out.raw("GGUF")
        .put<uint32_t>(version_)
        .put<uint64_t>(tensors_.size())
        .put<uint64_t>(key_count_)
        .raw(keys_.bytes);
    for (const Entry& t : tensors_) {
      if (t.offset < 0) data.pad_to(alignment_);
      out.text(t.name).put<uint32_t>(static_cast<uint32_t>(t.dims.size()));
      for (const uint64_t dim : t.dims) out.put(dim);
      out.put<uint32_t>(t.type).put<uint64_t>(t.offset < 0 ? data.bytes.size()
                                                           : static_cast<uint64_t>(t.offset));
      data.raw(t.data);
    }
    if (!data.bytes.empty()) out.pad_to(alignment_).raw(data.bytes);
    return out.bytes;
  }

 private:
  struct Entry {
    std::string name;
    uint32_t type;
    std::vector<uint64_t> dims;
    Bytes data;
    int64_t offset;
  };
  uint32_t version_;
  uint32_t alignment_ = 32;
  uint64_t key_count_ = 0;
  ByteWriter keys_;
  std::vector<Entry> tensors_;
};

/// The bytes of `count` float32 numbers first, first + 1, ...
inline Bytes floats(size_t count, float first = 0) {
  ByteWriter out;
  for (size_t i = 0; i < count; ++i) out.put<float>(first + static_cast<float>(i));
  return out.bytes;
}

/// A whole llama model in a few kilobytes: 1 layer, hidden 8, 2 query heads, 1 KV head of 4, 16 wide MLP, 6
/// tokens.
inline GgufBuilder tiny_llama_gguf(uint32_t version = 3) {
  GgufBuilder b(version);
  b.string("general.architecture", "llama")
      .u32("llama.block_count", 1)
      .u32("llama.embedding_length", 8)
      .u32("llama.feed_forward_length", 16)
      .u32("llama.attention.head_count", 2)
      .u32("llama.attention.head_count_kv", 1)
      .f32("llama.attention.layer_norm_rms_epsilon", 1e-5f)
      .f32("llama.rope.freq_base", 100000.f)
      .u32("llama.rope.dimension_count", 4)
      .u32("llama.context_length", 64)
      .string("tokenizer.ggml.model", "gpt2")
      .string("tokenizer.ggml.pre", "smollm")
      .strings("tokenizer.ggml.tokens", {"<s>", "</s>", "a", "b", "ab", "<eot>"})
      .strings("tokenizer.ggml.merges", {"a b"})
      .i32s("tokenizer.ggml.token_type", {3, 3, 1, 1, 1, 3})
      .u32("tokenizer.ggml.bos_token_id", 0)
      .u32("tokenizer.ggml.eos_token_id", 1)
      .u32("tokenizer.ggml.eot_token_id", 5)
      .string("tokenizer.chat_template", "{{ bos_token }}");
  const auto add = [&b](const char* name, std::vector<uint64_t> dims) {
    size_t count = 1;
    for (const uint64_t dim : dims) count *= dim;
    b.tensor(name, gguf::kTensorF32, std::move(dims), floats(count));
  };
  add("token_embd.weight", {8, 6});
  add("blk.0.attn_norm.weight", {8});
  add("blk.0.attn_q.weight", {8, 8});
  add("blk.0.attn_k.weight", {8, 4});
  add("blk.0.attn_v.weight", {8, 4});
  add("blk.0.attn_output.weight", {8, 8});
  add("blk.0.ffn_norm.weight", {8});
  add("blk.0.ffn_gate.weight", {8, 16});
  add("blk.0.ffn_up.weight", {8, 16});
  add("blk.0.ffn_down.weight", {16, 8});
  add("output_norm.weight", {8});
  return b;
}

class SafetensorsBuilder {
 public:
  SafetensorsBuilder& tensor(const std::string& name, const std::string& dtype,
                             const std::vector<int64_t>& shape, const Bytes& data) {
    std::string dims;
    for (const int64_t dim : shape) dims += (dims.empty() ? "" : ",") + std::to_string(dim);
    const size_t begin = data_.bytes.size();
    data_.raw(data);
    header_ += (header_.empty() ? "{" : ",") + std::string("\"") + name + "\":{\"dtype\":\"" + dtype +
               "\",\"shape\":[" + dims + "],\"data_offsets\":[" + std::to_string(begin) + "," +
               std::to_string(data_.bytes.size()) + "]}";
    return *this;
  }
  Bytes bytes() const { return with_header(header_.empty() ? "{}" : header_ + "}", data_.bytes); }

  /// A file of a hand-written header; the header is padded as writers do unless `pad` is false.
  static Bytes with_header(std::string header, const Bytes& data, bool pad = true) {
    while (pad && header.size() % 8 != 0) header += ' ';
    return ByteWriter().put<uint64_t>(header.size()).raw(header).raw(data).bytes;
  }

 private:
  std::string header_;
  ByteWriter data_;
};

/// A folder of its own under the system's temporary one, removed with everything in it.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "vivace-test-XXXXXX").string();
    if (mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  /// Writes a file and gives its path.
  std::string write(const std::string& name, const Bytes& bytes) const {
    return write(name, std::string(bytes.begin(), bytes.end()));
  }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(file(name), std::ios::binary) << text;
    return file(name);
  }

 private:
  std::string path_;
};

}  // namespace vivace::testing
