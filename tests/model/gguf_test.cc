#include "src/model/gguf.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "src/model/gguf_model.h"
#include "tests/model/cpu_time.h"
#include "tests/model/file_builders.h"

// Every byte that a reader asks for is counted, so that "memory does not grow" is a number and not an
// impression.
namespace {
size_t g_allocated = 0;
}  // namespace
// Not inlined: the compiler would see malloc's memory go to delete and warn.
__attribute__((noinline)) void* operator new(size_t size) {
  g_allocated += size;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace vivace::model {
namespace {

using namespace vivace::testing;  // NOLINT: a test
using testing::gguf::kArray;

// Parses, and checks what holds for every input, however broken: fast, and no memory from an untrusted count.
Result<GgufFile> parse_bounded(const Bytes& bytes) {
  const size_t before = g_allocated;
  const double start = thread_seconds();
  Result<GgufFile> result = parse_gguf(bytes);
  EXPECT_LT(thread_seconds() - start, 0.1);
  EXPECT_LT(g_allocated - before, size_t{16} << 20);
  return result;
}

void expect_refused(const Bytes& bytes, const std::string& part, Code code = Code::invalid_argument) {
  const Result<GgufFile> result = parse_bounded(bytes);
  ASSERT_FALSE(result.ok()) << "accepted, should mention " << part;
  EXPECT_EQ(result.status().code(), code) << result.status().message();
  EXPECT_NE(result.status().message().find(part), std::string::npos) << result.status().message();
}

Bytes header(uint64_t tensors, uint64_t keys, uint32_t version = 3) {
  return ByteWriter().raw("GGUF").put<uint32_t>(version).put<uint64_t>(tensors).put<uint64_t>(keys).bytes;
}

// https://github.com/ggml-org/llama.cpp/issues/15711: counts whose product with an element size wraps
// overwrite the heap.
TEST(GgufH40, HugeCountsAreRefusedByName) {
  for (const uint64_t count :
       {(uint64_t{1} << 63) - 1, uint64_t{1} << 61, uint64_t{1} << 56, uint64_t{1} << 32, uint64_t{1}})
    expect_refused(header(count, 0), "tensor_count is " + std::to_string(count));
  expect_refused(header(0, uint64_t{1} << 63), "metadata_kv_count is 9223372036854775808");
  Bytes key = header(0, 1);
  const Bytes rest = ByteWriter().put<uint64_t>(uint64_t{1} << 63).put<uint64_t>(0).bytes;
  key.insert(key.end(), rest.begin(), rest.end());
  expect_refused(key, "length of name of metadata key 0 is 9223372036854775808");
  expect_refused(
      GgufBuilder().raw_key("k", ByteWriter().put(uint32_t{8}).put(uint64_t{1} << 63).bytes).bytes(),
      "length of metadata 'k' is 9223372036854775808");
  for (const uint64_t count : {~uint64_t{0}, uint64_t{1} << 61, uint64_t{3}})
    expect_refused(
        GgufBuilder()
            .raw_key("k", ByteWriter().put(kArray).put(uint32_t{10}).put(count).put(uint64_t{0}).bytes)
            .bytes(),
        "element count of metadata 'k' is " + std::to_string(count));
}

// https://github.com/ggml-org/llama.cpp/pull/14595: the same family, through dimensions and offsets.
TEST(GgufH40, DimensionsAlignmentAndOffsets) {
  const auto dims = [](std::vector<uint64_t> d) {
    return GgufBuilder().tensor("t", 0, std::move(d), floats(4)).bytes();
  };
  expect_refused(dims({uint64_t{1} << 32, uint64_t{1} << 32}), "dimensions of tensor 't' multiply");
  expect_refused(dims({uint64_t{1} << 62, 4}), "dimensions of tensor 't' multiply");
  expect_refused(dims({uint64_t{1} << 62}), "dimensions of tensor 't' multiply");
  expect_refused(dims({0}), "dimension 0 of tensor 't' is 0");
  expect_refused(dims({~uint64_t{0}}), "dimension 0 of tensor 't' is 18446744073709551615");
  expect_refused(dims({1, 1, 1, 1, 1}), "dimension count of tensor 't' is 5");
  expect_refused(dims({}), "dimension count of tensor 't' is 0");
  for (const uint32_t alignment : {0u, 3u, 4u, 48u})
    expect_refused(GgufBuilder().u32("general.alignment", alignment).bytes(),
                   "general.alignment is u32 " + std::to_string(alignment));
  expect_refused(GgufBuilder().string("general.alignment", "32").bytes(), "general.alignment is string '32'");
  expect_refused(GgufBuilder().tensor_at("t", 0, {4}, uint64_t{1} << 40).bytes(),
                 "tensor 't' has offset 1099511627776");
  expect_refused(GgufBuilder().tensor_at("t", 0, {4}, ~uint64_t{0} - 31).bytes(), "tensor 't' has offset");
  expect_refused(GgufBuilder().tensor("a", 0, {4}, floats(4)).tensor_at("t", 0, {4}, 4).bytes(),
                 "offset of tensor 't' is 4");
  expect_refused(GgufBuilder().tensor("a", 0, {4}, floats(3)).bytes(),
                 "tensor 'a' has offset 0 and 16 bytes");
  // The largest alignment that an integer holds: padding must not wrap around.
  expect_refused(GgufBuilder()
                     .key<uint64_t>("general.alignment", 10, uint64_t{1} << 62)
                     .tensor("t", 0, {4}, floats(4))
                     .bytes(),
                 "tensor 't' has offset 0");
}

TEST(GgufH40, AFileCutAfterAnyByteIsRefused) {
  const Bytes whole = tiny_llama_gguf().bytes();
  ASSERT_TRUE(parse_gguf(whole).ok()) << parse_gguf(whole).status().message();
  for (size_t length = 0; length < whole.size(); ++length) {
    const Bytes cut(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(length));
    const Result<GgufFile> result = parse_bounded(cut);
    ASSERT_FALSE(result.ok()) << length;
    ASSERT_EQ(result.status().code(), Code::invalid_argument) << length;
    ASSERT_EQ(result.status().message().rfind("gguf: ", 0), 0u) << result.status().message();
  }
}

TEST(Gguf, HeaderFields) {
  expect_refused({}, "the file ends inside magic");
  expect_refused(ByteWriter().raw("GGML").put<uint32_t>(3).bytes, "magic is");
  expect_refused(header(0, 0, 1), "version is 1, needs 2 or 3", Code::unsupported);
  expect_refused(header(0, 0, 4), "version is 4, needs 2 or 3", Code::unsupported);
  expect_refused(header(0, 0, 0), "version is 0", Code::unsupported);
  expect_refused(header(0, 0, 0x03000000), "big-endian", Code::unsupported);
  for (const uint32_t version : {2u, 3u}) {
    const Result<GgufFile> file = parse_gguf(header(0, 0, version));
    ASSERT_TRUE(file.ok()) << file.status().message();
    EXPECT_EQ(file->version, version);
  }
}

TEST(Gguf, EveryMetadataType) {
  const Bytes bytes = GgufBuilder()
                          .key<uint8_t>("u8", 0, 200)
                          .key<int8_t>("i8", 1, -3)
                          .key<uint16_t>("u16", 2, 60000)
                          .key<int16_t>("i16", 3, -300)
                          .key<uint32_t>("u32", 4, 4000000000u)
                          .key<int32_t>("i32", 5, -70000)
                          .key<float>("f32", 6, 0.5f)
                          .key<uint8_t>("bool", 7, 1)
                          .string("string", "text")
                          .key<uint64_t>("u64", 10, uint64_t{1} << 63)
                          .key<int64_t>("i64", 11, -5)
                          .key<double>("f64", 12, 0.25)
                          .strings("strings", {"", "x", "yz"})
                          .i32s("numbers", {1, -2})
                          .strings("none", {})
                          .bytes();
  const Result<GgufFile> file = parse_gguf(bytes);
  ASSERT_TRUE(file.ok()) << file.status().message();
  const auto integer = [&](const char* key) { return file->find(key)->integer(); };
  EXPECT_EQ(integer("u8"), 200);
  EXPECT_EQ(integer("i8"), -3);
  EXPECT_EQ(integer("u16"), 60000);
  EXPECT_EQ(integer("i16"), -300);
  EXPECT_EQ(integer("u32"), 4000000000);
  EXPECT_EQ(integer("i32"), -70000);
  EXPECT_EQ(integer("i64"), -5);
  EXPECT_EQ(integer("u64"), std::nullopt);  // 2^63 is no int64
  EXPECT_EQ(integer("f32"), std::nullopt);
  EXPECT_EQ(integer("string"), std::nullopt);
  EXPECT_EQ(integer("numbers"), std::nullopt);
  EXPECT_EQ(file->find("f32")->number(), 0.5);
  EXPECT_EQ(file->find("f64")->number(), 0.25);
  EXPECT_EQ(file->find("u64")->number(), 9223372036854775808.0);
  EXPECT_EQ(file->find("bool")->boolean(), true);
  EXPECT_EQ(file->find("u8")->boolean(), std::nullopt);
  EXPECT_EQ(file->find("string")->text(), "text");
  EXPECT_EQ(file->find("strings")->texts(), (std::vector<std::string>{"", "x", "yz"}));
  EXPECT_EQ(file->find("none")->texts(), std::vector<std::string>{});
  EXPECT_EQ(file->find("numbers")->integers(), (std::vector<int32_t>{1, -2}));
  EXPECT_EQ(file->find("numbers")->texts(), std::nullopt);
  EXPECT_EQ(file->find("strings")->integers(), std::nullopt);
  EXPECT_EQ(file->find("absent"), nullptr);
}

TEST(Gguf, MetadataThatCannotBe) {
  const auto raw = [](const Bytes& value) { return GgufBuilder().raw_key("k", value).bytes(); };
  expect_refused(raw(ByteWriter().put(uint32_t{13}).bytes), "type of metadata 'k' is 13");
  expect_refused(raw(ByteWriter().put(kArray).put(uint32_t{77}).put(uint64_t{0}).bytes),
                 "element type of metadata 'k' is 77");
  expect_refused(raw(ByteWriter().put(kArray).put(kArray).put(uint64_t{0}).bytes), "array of arrays",
                 Code::unsupported);
  expect_refused(GgufBuilder().u32("k", 1).u32("k", 1).bytes(), "metadata 'k' occurs twice");
}

TEST(Gguf, TensorsHaveRowMajorShapesAndTheirBytes) {
  const Bytes bytes = GgufBuilder()
                          .tensor("f", gguf::kTensorF32, {2, 3}, floats(6))
                          .tensor("q", gguf::kTensorQ41, {64, 1, 2}, Bytes(80, 7))
                          .tensor("k", gguf::kTensorQ6K, {256}, Bytes(210, 9))
                          .bytes();
  const Result<GgufFile> file = parse_gguf(bytes);
  ASSERT_TRUE(file.ok()) << file.status().message();
  const GgufTensor& f = file->tensors[0];
  EXPECT_EQ(f.rank, 2);
  EXPECT_EQ(f.shape[0], 3);
  EXPECT_EQ(f.shape[1], 2);
  EXPECT_EQ(f.data.size(), 24u);
  const GgufTensor& q = file->tensors[1];
  EXPECT_EQ(q.dtype, DType::q4_1);
  EXPECT_EQ(q.shape[0], 2);
  EXPECT_EQ(q.shape[2], 64);
  EXPECT_EQ(q.data.size(), 80u);
  EXPECT_EQ(q.data[0], 7);
  EXPECT_EQ(file->tensors[2].data[209], 9);
  EXPECT_EQ((q.data.data() - bytes.data()) % 32, 0);

  const Result<GgufFile> wide = parse_gguf(
      GgufBuilder().alignment(256).tensor("a", 0, {1}, floats(1)).tensor("b", 0, {1}, floats(1)).bytes());
  ASSERT_TRUE(wide.ok()) << wide.status().message();
  EXPECT_EQ(wide->tensors[1].data.data() - wide->tensors[0].data.data(), 256);
}

TEST(Gguf, TensorsThatCannotBe) {
  expect_refused(GgufBuilder().tensor("t", gguf::kTensorQ50, {32}, Bytes(22)).bytes(),
                 "tensor 't' has type q5_0, needs one of f32, f16, q4_0, q4_1, q8_0, q4_k, q6_k, bf16",
                 Code::unsupported);
  expect_refused(GgufBuilder().tensor("t", 99, {32}, Bytes(22)).bytes(), "tensor 't' has the unknown type 99",
                 Code::unsupported);
  expect_refused(GgufBuilder().tensor("t", gguf::kTensorQ80, {40}, Bytes(68)).bytes(),
                 "tensor 't' has rows of 40 elements");
  expect_refused(GgufBuilder().tensor("t", 0, {1}, floats(1)).tensor("t", 0, {1}, floats(1)).bytes(),
                 "tensor 't' occurs twice");
  expect_refused(GgufBuilder().tensor("", 0, {1}, floats(1)).tensor("u", 0, {1}, floats(1)).bytes(),
                 "name of tensor 0 is empty");
  expect_refused(GgufBuilder().tensor("a", 0, {16}, floats(16)).tensor_at("b", 0, {4}, 32).bytes(),
                 "the bytes of tensor 'b' overlap those of 'a'");
}

TEST(GgufModel, ConfigurationAndTokenizer) {
  for (const uint32_t version : {2u, 3u}) {
    const Bytes bytes = tiny_llama_gguf(version).bytes();
    const Result<GgufFile> file = parse_gguf(bytes);
    ASSERT_TRUE(file.ok()) << file.status().message();
    const Result<ModelConfig> config = gguf_config(*file);
    ASSERT_TRUE(config.ok()) << config.status().message();
    EXPECT_EQ(config->architecture, Architecture::llama);
    EXPECT_EQ(config->rope_style, RopeStyle::interleaved);
    EXPECT_EQ(config->layers, 1);
    EXPECT_EQ(config->hidden, 8);
    EXPECT_EQ(config->heads_q, 2);
    EXPECT_EQ(config->heads_kv, 1);
    EXPECT_EQ(config->head_dim, 4);
    EXPECT_EQ(config->rotary_dim, 4);
    EXPECT_EQ(config->intermediate, 16);
    EXPECT_EQ(config->vocab, 6);
    EXPECT_EQ(config->max_position, 64);
    EXPECT_FLOAT_EQ(static_cast<float>(config->rms_eps), 1e-5f);
    EXPECT_EQ(config->rope_theta, 100000);
    EXPECT_TRUE(config->tied_embeddings);
    EXPECT_FALSE(config->is_moe());
    EXPECT_EQ(config->bos_id, 0);
    EXPECT_EQ(config->eos_ids, (std::vector<int32_t>{1, 5}));

    const Result<TokenizerSource> source = gguf_tokenizer(*file);
    ASSERT_TRUE(source.ok()) << source.status().message();
    EXPECT_TRUE(source->present());
    EXPECT_EQ(source->gguf_model, "gpt2");
    EXPECT_EQ(source->gguf_pre, "smollm");
    EXPECT_EQ(source->tokens.size(), 6u);
    EXPECT_EQ(source->merges, std::vector<std::string>{"a b"});
    EXPECT_EQ(source->token_types, (std::vector<int32_t>{3, 3, 1, 1, 1, 3}));
    EXPECT_EQ(source->bos_token, "<s>");
    EXPECT_EQ(source->eos_token, "</s>");
    EXPECT_EQ(source->chat_template, "{{ bos_token }}");
    EXPECT_FALSE(source->add_bos);
  }
}

void expect_config_refused(const GgufBuilder& builder, const std::string& part,
                           Code code = Code::invalid_argument) {
  const Bytes bytes = builder.bytes();
  const Result<GgufFile> file = parse_gguf(bytes);
  ASSERT_TRUE(file.ok()) << file.status().message();
  const Result<ModelConfig> config = gguf_config(*file);
  ASSERT_FALSE(config.ok()) << "accepted, should mention " << part;
  EXPECT_EQ(config.status().code(), code);
  EXPECT_NE(config.status().message().find(part), std::string::npos) << config.status().message();
}

TEST(GgufModel, ConfigurationsThatCannotBe) {
  expect_config_refused(GgufBuilder(), "'general.architecture' is missing");
  expect_config_refused(GgufBuilder().string("general.architecture", "mamba"),
                        "general.architecture is string 'mamba'", Code::unsupported);
  expect_config_refused(GgufBuilder().string("general.architecture", "llama"),
                        "'llama.block_count' is missing");
  expect_config_refused(
      GgufBuilder().string("general.architecture", "llama").u32("llama.block_count", 4000000000u),
      "llama.block_count is u32 4000000000");
  expect_config_refused(tiny_llama_gguf().u32("llama.expert_count", 8), "llama.expert_count is 8",
                        Code::unsupported);
  expect_config_refused(tiny_llama_gguf().string("llama.rope.scaling.type", "yarn"),
                        "llama.rope.scaling.type is 'yarn'", Code::unsupported);
  expect_config_refused(tiny_llama_gguf().u32("llama.attention.key_length", 6), "value_length",
                        Code::unsupported);
  expect_config_refused(tiny_llama_gguf().u32("tokenizer.ggml.padding_token_id", 6),
                        "tokenizer.ggml.padding_token_id is 6");
}

TEST(GgufModel, TensorNames) {
  ModelConfig llama;
  llama.layers = 2;
  ModelConfig moe = llama;
  moe.architecture = Architecture::qwen3_moe;
  moe.experts = 4;
  const auto name = [](const ModelConfig& config, const char* text) {
    const Result<std::string> result = gguf_tensor_name(config, text);
    return result.ok() ? *result : std::string(vivace::name_of(result.status().code()));
  };
  EXPECT_EQ(name(llama, "token_embd.weight"), "model.embed_tokens.weight");
  EXPECT_EQ(name(llama, "output.weight"), "lm_head.weight");
  EXPECT_EQ(name(llama, "rope_freqs.weight"), "rope_freqs.weight");
  EXPECT_EQ(name(llama, "blk.1.attn_output.weight"), "model.layers.1.self_attn.o_proj.weight");
  EXPECT_EQ(name(llama, "blk.2.attn_output.weight"), "invalid_argument");
  EXPECT_EQ(name(llama, "blk.-1.attn_output.weight"), "invalid_argument");
  EXPECT_EQ(name(llama, "blk.0.attn_q.bias"), "unsupported");
  EXPECT_EQ(name(llama, "blk.0.ffn_gate_inp.weight"), "unsupported");
  EXPECT_EQ(name(llama, "blk..attn_q.weight"), "unsupported");
  EXPECT_EQ(name(llama, "blk.1"), "unsupported");
  EXPECT_EQ(name(moe, "blk.0.ffn_gate_inp.weight"), "model.layers.0.mlp.router.gate.weight");
  EXPECT_EQ(name(moe, "blk.0.ffn_down_exps.weight"), "model.layers.0.mlp.experts.down_proj");
  EXPECT_EQ(name(moe, "blk.0.attn_k_norm.weight"), "model.layers.0.self_attn.k_norm.weight");
}

TEST(GgufModel, Qwen3MoeIsNeoxWithStackedExperts) {
  GgufBuilder b;
  b.string("general.architecture", "qwen3moe")
      .u32("qwen3moe.block_count", 2)
      .u32("qwen3moe.embedding_length", 8)
      .u32("qwen3moe.feed_forward_length", 16)
      .u32("qwen3moe.attention.head_count", 2)
      .u32("qwen3moe.attention.head_count_kv", 1)
      .u32("qwen3moe.attention.key_length", 8)
      .u32("qwen3moe.attention.value_length", 8)
      .f32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6f)
      .u32("qwen3moe.context_length", 64)
      .u32("qwen3moe.expert_count", 3)
      .u32("qwen3moe.expert_used_count", 2)
      .u32("qwen3moe.expert_feed_forward_length", 4)
      .tensor("token_embd.weight", 0, {8, 6}, floats(48))
      .tensor("output.weight", 0, {8, 6}, floats(48))
      .tensor("blk.1.ffn_gate_inp.weight", 0, {8, 3}, floats(24));
  const Bytes bytes = b.bytes();
  const Result<GgufFile> file = parse_gguf(bytes);
  ASSERT_TRUE(file.ok()) << file.status().message();
  const Result<ModelConfig> config = gguf_config(*file);
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->architecture, Architecture::qwen3_moe);
  EXPECT_EQ(config->rope_style, RopeStyle::neox);
  EXPECT_EQ(config->head_dim, 8);
  EXPECT_TRUE(config->qk_norm);
  EXPECT_TRUE(config->router_renormalise);
  EXPECT_FALSE(config->tied_embeddings);
  EXPECT_EQ(config->experts, 3);
  EXPECT_EQ(config->top_k, 2);
  EXPECT_EQ(config->sparse_layer, (std::vector<bool>{false, true}));
}

}  // namespace
}  // namespace vivace::model
