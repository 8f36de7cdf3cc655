#include "src/model/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "src/model/mapped_file.h"
#include "src/model/safetensors.h"
#include "tests/model/file_builders.h"

namespace vivace::model {
namespace {

using namespace vivace::testing;  // NOLINT: a test
using nlohmann::json;

std::string data(const std::string& name) {
  return std::string(VIVACE_TEST_DATA) + "/" + name;
}

std::unique_ptr<Checkpoint> opened(const std::string& path) {
  auto result = Checkpoint::open(path);
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? std::move(result).value() : nullptr;
}

void expect_refused(const std::string& path, const std::string& part, Code code) {
  const auto result = Checkpoint::open(path);
  ASSERT_FALSE(result.ok()) << "accepted, should mention " << part;
  EXPECT_EQ(result.status().code(), code) << result.status().message();
  EXPECT_NE(result.status().message().find(part), std::string::npos) << result.status().message();
}

void expect_shape(const Checkpoint& checkpoint, const std::string& name, DType dtype,
                  std::vector<int64_t> shape) {
  const Result<Tensor> tensor = checkpoint.tensor(name);
  ASSERT_TRUE(tensor.ok()) << tensor.status().message();
  EXPECT_EQ(tensor->dtype, dtype) << name;
  EXPECT_TRUE(tensor->contiguous()) << name;
  EXPECT_EQ(std::vector<int64_t>(tensor->shape.begin(), tensor->shape.begin() + tensor->rank), shape) << name;
}

Bytes content(const Checkpoint& checkpoint, const std::string& name) {
  const Result<Tensor> tensor = checkpoint.tensor(name);
  EXPECT_TRUE(tensor.ok()) << tensor.status().message();
  if (!tensor.ok()) return {};
  const auto* begin = tensor->as<const uint8_t>();
  return Bytes(begin, begin + tensor->bytes());
}

// A small dense model for folders whose files are under test.
const char* const kSmallConfig =
    R"({"model_type":"llama","hidden_size":4,"num_hidden_layers":1,"num_attention_heads":1,
                                     "intermediate_size":8,"vocab_size":10,"eos_token_id":2,"bos_token_id":1})";
Bytes small_weights() {
  return SafetensorsBuilder()
      .tensor("model.embed_tokens.weight", "F32", {10, 4}, floats(40))
      .tensor("model.norm.weight", "F32", {4}, floats(4, 100))
      .tensor("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", {2}, floats(2))
      .bytes();
}

TEST(MappedFile, WhatCannotBeMapped) {
  const TempFolder folder;
  const auto code = [](const std::string& path) { return MappedFile::open(path).status().code(); };
  EXPECT_EQ(code(folder.file("absent")), Code::not_found);
  EXPECT_EQ(code(folder.write("file", std::string("x")) + "/below"), Code::not_found);
  EXPECT_EQ(code(folder.path()), Code::invalid_argument);
  EXPECT_EQ(code(folder.write("empty", std::string())), Code::invalid_argument);
  ASSERT_EQ(mkfifo(folder.file("pipe").c_str(), 0600), 0);
  EXPECT_EQ(code(folder.file("pipe")), Code::invalid_argument);
  EXPECT_EQ(read_text_file(folder.write("text", std::string("12345")), 4).status().code(),
            Code::invalid_argument);
  EXPECT_EQ(*read_text_file(folder.file("text"), 5), "12345");
}

TEST(MappedFile, AFileLargerThanTheAddressSpaceIsAnError) {
  // A file in memory may be sparse at any length; the one of a disk may not.
  const int fd = memfd_create("sparse", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, off_t{1} << 60), 0);
  const Status status = MappedFile::open("/proc/self/fd/" + std::to_string(fd)).status();
  close(fd);
  EXPECT_EQ(status.code(), Code::io_error);
  EXPECT_NE(status.message().find("1152921504606846976 bytes cannot be mapped"), std::string::npos)
      << status.message();
}

TEST(MappedFile, DroppedPagesReadTheSameAgain) {
  const TempFolder folder;
  Bytes bytes(100'000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 31);
  const auto file = MappedFile::open(folder.write("pages", bytes));
  ASSERT_TRUE(file.ok()) << file.status().message();
  const std::span<const uint8_t> map = (*file)->bytes();
  ASSERT_TRUE(std::equal(map.begin(), map.end(), bytes.begin(), bytes.end()));
  (*file)->drop_pages(map.subspan(5, 90'000));
  (*file)->drop_pages(map.subspan(5, 10));
  (*file)->drop_pages(map.last(0));
  (*file)->drop_pages(bytes);  // not of this file: ignored
  EXPECT_TRUE(std::equal(map.begin(), map.end(), bytes.begin(), bytes.end()));
}

TEST(Checkpoint, TinyQwen3Moe) {
  const auto c = opened(data("tiny-qwen3-moe"));
  ASSERT_NE(c, nullptr);
  const ModelConfig& config = c->config();
  EXPECT_EQ(config.architecture, Architecture::qwen3_moe);
  EXPECT_EQ(config.layers, 4);
  EXPECT_EQ(config.hidden, 256);
  EXPECT_EQ(config.vocab, 4096);
  EXPECT_EQ(config.heads_q, 4);
  EXPECT_EQ(config.heads_kv, 1);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.experts, 12);
  EXPECT_EQ(config.top_k, 3);
  EXPECT_EQ(config.moe_intermediate, 128);
  EXPECT_TRUE(config.router_renormalise);
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_EQ(config.sparse_layer, std::vector<bool>(4, true));
  EXPECT_EQ(config.eos_ids, std::vector<int32_t>{2});
  EXPECT_EQ(config.sliding_window, 0);
  EXPECT_EQ(c->summary(), "safetensors, qwen3_moe, 182 tensors in 1 file");
  EXPECT_EQ(c->tensor_names().size(), 182u);
  EXPECT_EQ(c->mapped_bytes(),
            static_cast<int64_t>(std::filesystem::file_size(data("tiny-qwen3-moe/model.safetensors"))));
  expect_shape(*c, "model.embed_tokens.weight", DType::bf16, {4096, 256});
  expect_shape(*c, "model.layers.3.mlp.router.gate.weight", DType::bf16, {12, 256});
  expect_shape(*c, "model.layers.0.mlp.experts.11.down_proj.weight", DType::bf16, {256, 128});
  EXPECT_FALSE(c->has("model.layers.3.mlp.gate.weight"));
  EXPECT_FALSE(c->has("lm_head.weight"));
  EXPECT_NE(c->tokenizer().tokenizer_json.find("\"model\""), std::string::npos);
  EXPECT_TRUE(c->tokenizer().present());
  const Status missing = c->tensor("model.nothing").status();
  EXPECT_EQ(missing.code(), Code::not_found);
  EXPECT_NE(missing.message().find("tiny-qwen3-moe: has no tensor 'model.nothing'"), std::string::npos)
      << missing.message();

  const Bytes before = content(*c, "model.embed_tokens.weight");
  c->drop_pages(*c->tensor("model.embed_tokens.weight"));
  EXPECT_EQ(content(*c, "model.embed_tokens.weight"), before);
}

TEST(Checkpoint, TinyHy3) {
  const auto c = opened(data("tiny-hy3"));
  ASSERT_NE(c, nullptr);
  const ModelConfig& config = c->config();
  EXPECT_EQ(config.architecture, Architecture::hy_v3);
  EXPECT_EQ(config.layers, 3);
  EXPECT_EQ(config.heads_q, 8);
  EXPECT_EQ(config.intermediate, 384);
  EXPECT_EQ(config.moe_intermediate, 128);
  EXPECT_EQ(config.top_k, 4);
  EXPECT_EQ(config.shared_experts, 1);
  EXPECT_EQ(config.router_score, RouterScore::sigmoid);
  EXPECT_EQ(config.router_scale, 2.826);
  EXPECT_EQ(config.rope_theta, 11158840);
  EXPECT_EQ(config.rms_eps, 1e-5);
  EXPECT_EQ(config.sparse_layer, (std::vector<bool>{false, true, true}));
  expect_shape(*c, "model.layers.0.mlp.gate_proj.weight", DType::bf16, {384, 256});
  expect_shape(*c, "model.layers.2.mlp.router.gate.weight", DType::bf16, {12, 256});
  expect_shape(*c, "model.layers.2.mlp.expert_bias", DType::bf16, {12});
  expect_shape(*c, "model.layers.2.mlp.shared_mlp.up_proj.weight", DType::bf16, {128, 256});
  expect_shape(*c, "lm_head.weight", DType::bf16, {512, 256});
  EXPECT_FALSE(c->tokenizer().present());
}

// Writes the tiny Hy3 in the layout that Tencent's converter makes, with a layer behind the last one.
void write_outer_layout(const Checkpoint& from, const TempFolder& folder) {
  SafetensorsBuilder builder;
  const ModelConfig& config = from.config();
  const auto shape_of = [&](const std::string& name) {
    const Tensor t = *from.tensor(name);
    return std::vector<int64_t>(t.shape.begin(), t.shape.begin() + t.rank);
  };
  const auto append = [](Bytes& to, const Bytes& more) { to.insert(to.end(), more.begin(), more.end()); };
  for (const std::string& name : from.tensor_names()) {
    if (name.find(".mlp.experts.") != std::string::npos) continue;
    std::string outer = name;
    const std::pair<std::string, std::string> renames[] = {{"mlp.router.gate.weight", "mlp.gate.weight"},
                                                           {"mlp.expert_bias", "mlp.e_score_correction_bias"},
                                                           {"mlp.shared_mlp.", "mlp.shared_experts."}};
    for (const auto& [inner, other] : renames)
      if (const size_t at = outer.find(inner); at != std::string::npos)
        outer.replace(at, inner.size(), other);
    builder.tensor(outer, "BF16", shape_of(name), content(from, name));
  }
  for (int64_t layer = 1; layer < config.layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".mlp.experts.";
    Bytes gate_up, down;
    for (int64_t e = 0; e < config.experts; ++e) {
      append(gate_up, content(from, prefix + std::to_string(e) + ".gate_proj.weight"));
      append(gate_up, content(from, prefix + std::to_string(e) + ".up_proj.weight"));
      append(down, content(from, prefix + std::to_string(e) + ".down_proj.weight"));
    }
    builder.tensor(prefix + "gate_up_proj", "BF16",
                   {config.experts, 2 * config.moe_intermediate, config.hidden}, gate_up);
    builder.tensor(prefix + "down_proj", "BF16", {config.experts, config.hidden, config.moe_intermediate},
                   down);
  }
  builder.tensor("model.layers.3.eh_proj.weight", "BF16", {1, 2}, Bytes(4));
  builder.tensor("model.layers.3.mlp.gate.weight", "BF16", {1, 2}, Bytes(4));
  folder.write("model.safetensors", builder.bytes());
  folder.write("config.json", *read_text_file(data("tiny-hy3/config.json"), 1 << 20));
}

TEST(Checkpoint, Hy3OuterLayoutHasTheSameNamesAndBytes) {
  const auto inner = opened(data("tiny-hy3"));
  ASSERT_NE(inner, nullptr);
  const TempFolder folder;
  write_outer_layout(*inner, folder);
  const auto outer = opened(folder.path());
  ASSERT_NE(outer, nullptr);
  for (const std::string& name : inner->tensor_names()) {
    if (name.find(".mlp.experts.") != std::string::npos) continue;
    EXPECT_EQ(content(*outer, name), content(*inner, name)) << name;
  }
  expect_shape(*outer, "model.layers.1.mlp.experts.gate_up_proj", DType::bf16, {12, 256, 256});
  expect_shape(*outer, "model.layers.1.mlp.experts.down_proj", DType::bf16, {12, 256, 128});
  const Tensor fused = *outer->tensor("model.layers.2.mlp.experts.gate_up_proj");
  const Tensor up = fused.at(7).rows(128, 128);
  const Bytes expected = content(*inner, "model.layers.2.mlp.experts.7.up_proj.weight");
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), up.as<const uint8_t>()));
  for (const std::string& name : outer->tensor_names())
    EXPECT_EQ(name.find("model.layers.3."), std::string::npos) << name;
  EXPECT_NE(outer->summary().find("; 2 tensors of the MTP layer skipped"), std::string::npos)
      << outer->summary();
}

TEST(Checkpoint, TensorsOfLayersThatDoNotExist) {
  const TempFolder folder;
  folder.write("config.json", std::string(kSmallConfig));
  folder.write("model.safetensors",
               SafetensorsBuilder().tensor("model.layers.1.x", "F32", {1}, floats(1)).bytes());
  expect_refused(folder.path(), "'model.layers.1.x' is of layer 1, needs a layer below num_hidden_layers = 1",
                 Code::invalid_argument);
  folder.write("model.safetensors",
               SafetensorsBuilder().tensor("model.layers.x.y", "F32", {1}, floats(1)).bytes());
  expect_refused(folder.path(), "has no layer number", Code::invalid_argument);
}

TEST(Checkpoint, ShardedByAnIndex) {
  const TempFolder folder;
  folder.write("config.json", std::string(kSmallConfig));
  folder.write("a.safetensors", SafetensorsBuilder()
                                    .tensor("x", "F32", {2}, floats(2))
                                    .tensor("unlisted", "F32", {1}, floats(1))
                                    .bytes());
  folder.write("b.safetensors", SafetensorsBuilder().tensor("y", "F32", {3}, floats(3, 50)).bytes());
  const auto index = [&](const json& weight_map) {
    folder.write("model.safetensors.index.json", json{{"weight_map", weight_map}}.dump());
  };
  index({{"x", "a.safetensors"}, {"y", "b.safetensors"}});
  const auto c = opened(folder.path());
  ASSERT_NE(c, nullptr);
  EXPECT_EQ(c->tensor_names(), (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(content(*c, "y"), floats(3, 50));
  EXPECT_EQ(c->summary(), "safetensors, llama, 2 tensors in 2 files");

  index({{"x", "a.safetensors"}, {"y", "c.safetensors"}});
  expect_refused(folder.path(), "c.safetensors: there is no such file", Code::not_found);
  index({{"x", "b.safetensors"}, {"y", "b.safetensors"}});
  expect_refused(folder.path(), "b.safetensors: tensor 'x' is not in this file", Code::not_found);
  index({{"x", "../a.safetensors"}});
  expect_refused(folder.path(), "weight_map['x'] is \"../a.safetensors\"", Code::invalid_argument);
}

TEST(Checkpoint, FolderErrorsNameTheFile) {
  const TempFolder folder;
  expect_refused(folder.file("nothing"), "nothing: there is no such file", Code::not_found);
  expect_refused(folder.path(), "config.json: there is no such file", Code::not_found);
  folder.write("config.json", std::string(kSmallConfig));
  expect_refused(folder.path(), "has neither model.safetensors nor model.safetensors.index.json",
                 Code::not_found);
  folder.write("model.safetensors", std::string("short"));
  expect_refused(folder.path(), "model.safetensors: safetensors: the file has 5 bytes",
                 Code::invalid_argument);
  folder.write("model.safetensors", SafetensorsBuilder().tensor("t", "F64", {1}, Bytes(8)).bytes());
  const auto c = opened(folder.path());
  ASSERT_NE(c, nullptr);
  EXPECT_TRUE(c->has("t"));
  EXPECT_EQ(c->tensor("t").status().code(), Code::unsupported);
  expect_refused(folder.write("model.gguf", std::string("GGUF")), "the file ends inside version",
                 Code::invalid_argument);
}

TEST(Checkpoint, TokenizerFilesOfAFolder) {
  const TempFolder folder;
  folder.write("config.json", std::string(kSmallConfig));
  folder.write("generation_config.json", std::string(R"({"eos_token_id":[2,3]})"));
  folder.write("model.safetensors", small_weights());
  folder.write("tokenizer.json", std::string("{}"));
  const auto with_config = [&](const json& config) {
    folder.write("tokenizer_config.json", config.dump());
    return opened(folder.path());
  };
  auto c = with_config({{"bos_token", {{"content", "<b>"}}},
                        {"eos_token", "<e>"},
                        {"add_bos_token", true},
                        {"chat_template", "T"}});
  ASSERT_NE(c, nullptr);
  EXPECT_EQ(c->tensor_names(), (std::vector<std::string>{"model.embed_tokens.weight", "model.norm.weight"}));
  EXPECT_EQ(c->config().eos_ids, (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(c->tokenizer().tokenizer_json, "{}");
  EXPECT_EQ(c->tokenizer().bos_token, "<b>");
  EXPECT_EQ(c->tokenizer().eos_token, "<e>");
  EXPECT_EQ(c->tokenizer().bos_id, 1);
  EXPECT_EQ(c->tokenizer().eos_id, 2);
  EXPECT_TRUE(c->tokenizer().add_bos);
  EXPECT_EQ(c->tokenizer().chat_template, "T");
  c = with_config({{"chat_template",
                    {{{"name", "tool_use"}, {"template", "U"}}, {{"name", "default"}, {"template", "D"}}}}});
  ASSERT_NE(c, nullptr);
  EXPECT_EQ(c->tokenizer().chat_template, "D");
  folder.write("chat_template.jinja", std::string("J"));
  c = with_config({{"chat_template", "T"}});
  ASSERT_NE(c, nullptr);
  EXPECT_EQ(c->tokenizer().chat_template, "J");

  folder.write("tokenizer_config.json", json{{"bos_token", 3}}.dump());
  expect_refused(folder.path(), "tokenizer_config.json: bos_token is 3", Code::invalid_argument);
  folder.write("tokenizer_config.json", json{{"chat_template", json::array()}}.dump());
  expect_refused(folder.path(), "chat_template is a list with 0 elements", Code::invalid_argument);
}

TEST(Checkpoint, Gguf) {
  const TempFolder folder;
  for (const uint32_t version : {2u, 3u}) {
    const auto c = opened(folder.write("model.gguf", tiny_llama_gguf(version).bytes()));
    ASSERT_NE(c, nullptr);
    EXPECT_EQ(c->summary(), "GGUF v" + std::to_string(version) + ", llama, 11 tensors");
    EXPECT_EQ(c->config().rope_style, RopeStyle::interleaved);
    expect_shape(*c, "model.embed_tokens.weight", DType::f32, {6, 8});
    expect_shape(*c, "model.layers.0.mlp.down_proj.weight", DType::f32, {8, 16});
    EXPECT_EQ(content(*c, "model.layers.0.mlp.up_proj.weight"), floats(128));
    EXPECT_EQ(c->tokenizer().tokens[4], "ab");
    c->drop_pages(*c->tensor("model.norm.weight"));
  }
  expect_refused(
      folder.write("bias.gguf", tiny_llama_gguf().tensor("blk.0.attn_q.bias", 0, {8}, floats(8)).bytes()),
      "a llama model has no place for tensor 'blk.0.attn_q.bias'", Code::unsupported);
}

TEST(Checkpoint, GgufExpertsAreStacked) {
  GgufBuilder b;
  b.string("general.architecture", "qwen3moe")
      .u32("qwen3moe.block_count", 1)
      .u32("qwen3moe.embedding_length", 8)
      .u32("qwen3moe.attention.head_count", 2)
      .f32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6f)
      .u32("qwen3moe.context_length", 64)
      .u32("qwen3moe.expert_count", 3)
      .u32("qwen3moe.expert_used_count", 2)
      .u32("qwen3moe.expert_feed_forward_length", 4)
      .tensor("token_embd.weight", 0, {8, 6}, floats(48))
      .tensor("blk.0.ffn_gate_inp.weight", 0, {8, 3}, floats(24))
      .tensor("blk.0.ffn_gate_exps.weight", 0, {8, 4, 3}, floats(96))
      .tensor("blk.0.ffn_up_exps.weight", 0, {8, 4, 3}, floats(96))
      .tensor("blk.0.ffn_down_exps.weight", 0, {4, 8, 3}, floats(96));
  const TempFolder folder;
  const auto c = opened(folder.write("moe.gguf", b.bytes()));
  ASSERT_NE(c, nullptr);
  expect_shape(*c, "model.layers.0.mlp.experts.gate_proj", DType::f32, {3, 4, 8});
  expect_shape(*c, "model.layers.0.mlp.experts.down_proj", DType::f32, {3, 8, 4});
  expect_shape(*c, "model.layers.0.mlp.router.gate.weight", DType::f32, {3, 8});
}

}  // namespace
}  // namespace vivace::model
