// FP8 models: reading every form of scales, refusing what does not fit, writing with quantize_folder() and running.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>

#include "src/core/number.h"
#include "src/model/hf_names.h"
#include "src/model/quantize.h"
#include "tests/model/altered_checkpoint.h"

namespace vivace::testing {
namespace {

using model::WeightFormat;

cpu::ThreadPool& threads() {
  static cpu::ThreadPool pool(2);
  return pool;
}

/// What calibration and comparisons read: for the MoE models random ids are as good as a text.
std::vector<int32_t> text_of(const model::Checkpoint& checkpoint, int64_t tokens) {
  return random_ids(tokens, checkpoint.config().vocab, 5);
}

model::Calibration calibration_of(const std::string& path) {
  const auto checkpoint = open_checkpoint(path);
  auto calibration =
      model::calibrate(*checkpoint, text_of(*checkpoint, 192), {.window = 96}, Stream{.threads = &threads()});
  EXPECT_TRUE(calibration.ok()) << calibration.status().message();
  return calibration.ok() ? std::move(*calibration) : model::Calibration();
}

/// A quantised copy of a folder. Static scales are calibrated.
class QuantisedFolder {
 public:
  QuantisedFolder(const std::string& source, model::QuantizeOptions options) {
    model::Calibration calibration;
    if (options.format == WeightFormat::fp8_static) {
      calibration = calibration_of(source);
      options.calibration = &calibration;
    }
    auto written = model::quantize_folder(source, path(), options, Stream{.threads = &threads()});
    EXPECT_TRUE(written.ok()) << written.status().message();
    if (written.ok()) result = std::move(*written);
  }
  std::string path() const { return folder_.file("fp8"); }

  model::QuantizeResult result;

 private:
  TempFolder folder_;
};

/// The quantised tiny models, made once.
const QuantisedFolder& tiny(const std::string& source, WeightFormat format) {
  static std::map<std::pair<std::string, WeightFormat>, std::unique_ptr<QuantisedFolder>> folders;
  auto& folder = folders[{source, format}];
  if (!folder) folder = std::make_unique<QuantisedFolder>(source, model::QuantizeOptions{.format = format});
  return *folder;
}

constexpr WeightFormat kFormats[] = {WeightFormat::fp8_static, WeightFormat::fp8_block128};

/// Mean difference of the log-probabilities of all tokens, weighted by how likely the first model finds them.
double divergence(const std::vector<float>& a, const std::vector<float>& b) {
  const auto p = log_probabilities(a), q = log_probabilities(b);
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) sum += std::exp(p[i]) * (p[i] - q[i]);
  return sum;
}

/// Above what the formats cost after random ids (0.01 to 0.04); Fp8Quality holds the exact amount.
constexpr double kMostDivergence = 0.1;

Tensor scale_tensor(AlteredCheckpoint& checkpoint, DType type, std::initializer_list<int64_t> shape,
                    double value) {
  const Tensor tensor = checkpoint.make(type, shape);
  for (int64_t i = 0; i < tensor.elements(); ++i) store(type, tensor.data, i, value);
  return tensor;
}

TEST(Quantize, BothSchemesRunCloseToTheModelTheyCameFrom) {
  for (const std::string& source : {kQwen, kHy3}) {
    const auto original = open_checkpoint(source);
    const auto ids = text_of(*original, 70);
    const auto expected = logits_after(original, ids);
    for (const WeightFormat format : kFormats) {
      SCOPED_TRACE(source + ", " + std::string(name_of(format)));
      const QuantisedFolder& folder = tiny(source, format);
      const auto checkpoint = open_checkpoint(folder.path());
      ASSERT_NE(checkpoint, nullptr);
      EXPECT_EQ(checkpoint->config().weight_format, format);
      const auto logits = logits_after(checkpoint, ids);
      ASSERT_EQ(logits.size(), expected.size());
      const double kl = divergence(expected, logits);
      EXPECT_GT(kl, 0) << "nothing was quantised";
      EXPECT_LT(kl, kMostDivergence);
      // e4m3 has steps of 2^-3 to 2^-4 of a number, so a normal weight is off by 2 to 4 % on average.
      for (const model::QuantizedGroup& group : folder.result.groups) {
        EXPECT_GT(group.relative_error(), 0.015) << group.name;
        EXPECT_LT(group.relative_error(), 0.04) << group.name;
        EXPECT_LT(group.bytes_after, 0.52 * static_cast<double>(group.bytes_before)) << group.name;
      }
    }
  }
}

TEST(Quantize, WritesTheNamesOfHuggingFaceCheckpoints) {
  const auto per_tensor = open_checkpoint(tiny(kHy3, WeightFormat::fp8_static).path());
  const auto blocks = open_checkpoint(tiny(kHy3, WeightFormat::fp8_block128).path());
  const std::string q = "model.layers.1.self_attn.q_proj.",
                    expert = "model.layers.2.mlp.experts.11.down_proj.";
  for (const std::string& stem : {q, expert, std::string("model.layers.0.mlp.up_proj."),
                                  std::string("model.layers.1.mlp.shared_mlp.gate_proj.")}) {
    EXPECT_EQ(per_tensor->tensor(stem + "weight")->dtype, DType::fp8_e4m3) << stem;
    EXPECT_EQ(per_tensor->tensor(stem + "weight_scale")->rank, 0) << stem;
    EXPECT_EQ(to_string(*per_tensor->tensor(stem + "input_scale")), "f32[1]") << stem;
    EXPECT_EQ(blocks->tensor(stem + "weight")->dtype, DType::fp8_e4m3) << stem;
    EXPECT_TRUE(blocks->has(stem + "weight_scale_inv")) << stem;
    EXPECT_FALSE(blocks->has(stem + "input_scale")) << stem;
  }
  EXPECT_EQ(to_string(*blocks->tensor(q + "weight_scale_inv")), "f32[8, 2]");
  for (const auto& checkpoint : {per_tensor, blocks}) {
    for (const char* kept :
         {"lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.router.gate.weight",
          "model.layers.1.mlp.expert_bias", "model.layers.0.input_layernorm.weight"}) {
      EXPECT_EQ(checkpoint->tensor(kept)->dtype, DType::bf16) << kept;
    }
  }
  EXPECT_TRUE(per_tensor->has("model.layers.2.self_attn.k_scale")) << "stored as k_cache.scale";
  EXPECT_FALSE(blocks->has("model.layers.2.self_attn.k_scale"));

  const auto config =
      read_json(tiny(kHy3, WeightFormat::fp8_static).path() + "/config.json").at("quantization_config");
  EXPECT_EQ(config.at("quant_method"), "fp8");
  EXPECT_EQ(config.at("activation_scheme"), "static");
  EXPECT_EQ(config.at("kv_cache_scheme"), "static");
  EXPECT_FALSE(config.contains("weight_block_size"));
  const auto ignored = config.at("ignored_layers").get<std::vector<std::string>>();
  for (const char* name : {"lm_head", "model.embed_tokens", "model.layers.2.mlp.router.gate"}) {
    EXPECT_NE(std::find(ignored.begin(), ignored.end(), name), ignored.end()) << name;
  }
  const auto block_config =
      read_json(tiny(kQwen, WeightFormat::fp8_block128).path() + "/config.json").at("quantization_config");
  EXPECT_EQ(block_config.at("activation_scheme"), "dynamic");
  EXPECT_EQ(block_config.at("weight_block_size"), nlohmann::json::array({128, 128}));
  EXPECT_TRUE(block_config.contains("modules_to_not_convert"));
  EXPECT_TRUE(std::filesystem::exists(tiny(kQwen, WeightFormat::fp8_block128).path() + "/tokenizer.json"));
}

TEST(Quantize, StackedExpertsAndSmallFilesGiveTheSameBits) {
  const TempFolder folder;
  write_outer_layout(kHy3, folder);
  const auto ids = random_ids(70, 512);
  for (const WeightFormat format : kFormats) {
    // One matrix per file, nearly.
    const QuantisedFolder outer(folder.path(), {.format = format, .max_shard_bytes = 100'000});
    EXPECT_GT(outer.result.files, 20);
    const auto expected = logits_after(open_checkpoint(tiny(kHy3, format).path()), ids);
    ASSERT_EQ(expected.size(), 512u);
    EXPECT_EQ(logits_after(open_checkpoint(outer.path()), ids), expected);
  }
}

/// The experts of an fp8 folder stacked into 3-D tensors with their scales.
void stack_experts(AlteredCheckpoint& checkpoint, bool one_scale_each) {
  const model::ModelConfig& config = checkpoint.config();
  const auto name_of = [](int64_t layer, const std::string& part) {
    return "model.layers." + std::to_string(layer) + ".mlp.experts." + part;
  };
  // Tensors of `names` of every expert behind each other; what a stack of them holds.
  const auto gather = [&](int64_t layer, std::initializer_list<std::string> names, const std::string& to,
                          std::initializer_list<int64_t> shape) {
    const Tensor first = *checkpoint.tensor(name_of(layer, "0." + *names.begin()));
    const Tensor stack = checkpoint.make(first.dtype, shape);
    auto* at = stack.as<uint8_t>();
    for (int64_t e = 0; e < config.experts; ++e) {
      for (const std::string& part : names) {
        const std::string name = name_of(layer, std::to_string(e) + "." + part);
        const Tensor tensor = *checkpoint.tensor(name);
        at = std::copy_n(tensor.as<uint8_t>(), tensor.bytes(), at);
        checkpoint.remove(name);
      }
    }
    checkpoint.replace(name_of(layer, to), stack);
  };
  const int64_t e = config.experts, i = config.moe_intermediate, h = config.hidden;
  for (int64_t l = 0; l < config.layers; ++l) {
    if (!config.sparse_layer[l]) continue;
    if (one_scale_each) {
      gather(l, {"gate_proj.weight_scale", "up_proj.weight_scale"}, "gate_up_proj_scale", {e, 2});
      gather(l, {"down_proj.weight_scale"}, "down_proj.weight_scale", {e});
      gather(l, {"gate_proj.input_scale", "up_proj.input_scale"}, "gate_up_proj_input_scale", {e, 2});
      gather(l, {"down_proj.input_scale"}, "down_proj.input_scale", {e});
    } else {
      gather(l, {"gate_proj.weight_scale_inv", "up_proj.weight_scale_inv"}, "gate_up_proj_scale_inv",
             {e, 2 * i / 128, h / 128});
      gather(l, {"down_proj.weight_scale_inv"}, "down_proj_scale_inv", {e, h / 128, i / 128});
    }
    gather(l, {"gate_proj.weight", "up_proj.weight"}, "gate_up_proj", {e, 2 * i, h});
    gather(l, {"down_proj.weight"}, "down_proj", {e, h, i});
  }
}

TEST(Scales, StackedExpertsBringTheirs) {
  for (const std::string& source : {kQwen, kHy3}) {
    for (const WeightFormat format : kFormats) {
      SCOPED_TRACE(source + ", " + std::string(name_of(format)));
      const std::string path = tiny(source, format).path();
      auto stacked = std::make_shared<AlteredCheckpoint>(path);
      const auto ids = random_ids(40, stacked->config().vocab);
      const auto expected = logits_after(open_checkpoint(path), ids);
      ASSERT_FALSE(expected.empty());
      stack_experts(*stacked, format == WeightFormat::fp8_static);
      EXPECT_EQ(logits_after(stacked, ids), expected);
    }
  }
}

TEST(Scales, TheirTypeDoesNotMatter) {
  for (const WeightFormat format : kFormats) {
    SCOPED_TRACE(name_of(format));
    const QuantisedFolder folder(kHy3, {.format = format, .scale_type = DType::bf16});
    const auto ids = random_ids(40, 512);
    const auto expected = logits_after(open_checkpoint(folder.path()), ids);
    ASSERT_FALSE(expected.empty());
    auto as_f32 = std::make_shared<AlteredCheckpoint>(folder.path());
    int64_t converted = 0;
    for (const std::string& name : as_f32->tensor_names()) {
      const Tensor scale = *as_f32->tensor(name);
      if (name.find("weight_scale") == std::string::npos) continue;
      ASSERT_EQ(scale.dtype, DType::bf16) << name;
      // f32, and a scalar once as [] and once as [1].
      const Tensor wide = scale.rank == 2 ? as_f32->make(DType::f32, {scale.shape[0], scale.shape[1]})
                                          : as_f32->make(DType::f32, {1});
      for (int64_t i = 0; i < scale.elements(); ++i)
        store(DType::f32, wide.data, i, load(scale.dtype, scale.data, i));
      as_f32->replace(name, wide);
      ++converted;
    }
    EXPECT_GT(converted, 80);
    EXPECT_EQ(logits_after(as_f32, ids), expected);
  }
}

TEST(Scales, OneNumberHasAnyNumberOfDimensions) {
  const auto ids = random_ids(40, 512);
  const std::string path = tiny(kHy3, WeightFormat::fp8_static).path();
  auto altered = std::make_shared<AlteredCheckpoint>(path);
  for (const std::string& name : altered->tensor_names()) {
    if (!name.ends_with("_scale")) continue;
    const Tensor scale = *altered->tensor(name);
    altered->replace(name, Tensor(scale.data, scale.dtype, {1, 1}));
  }
  const auto expected = logits_after(open_checkpoint(path), ids);
  ASSERT_FALSE(expected.empty());
  EXPECT_EQ(logits_after(altered, ids), expected);
}

TEST(Scales, AnInputThatMatricesShareHasTheLargestOfTheirScales) {
  const std::string path = tiny(kHy3, WeightFormat::fp8_static).path();
  const auto ids = random_ids(40, 512);
  const auto with_scales = [&](double first, double second) {
    auto checkpoint = std::make_shared<AlteredCheckpoint>(path);
    const auto set = [&](const std::string& name, double value) {
      checkpoint->replace(name, scale_tensor(*checkpoint, DType::f32, {1}, value));
    };
    set("model.layers.1.self_attn.k_proj.input_scale", first);
    set("model.layers.1.self_attn.v_proj.input_scale", second);
    set("model.layers.0.mlp.gate_proj.input_scale", first);
    set("model.layers.0.mlp.up_proj.input_scale", second);
    set("model.layers.2.mlp.experts.3.gate_proj.input_scale", first);
    set("model.layers.2.mlp.shared_mlp.up_proj.input_scale", second);
    return logits_after(checkpoint, ids);
  };
  const auto largest_last = with_scales(0.5, 1), largest_first = with_scales(1, 0.5);
  ASSERT_FALSE(largest_last.empty());
  EXPECT_EQ(largest_last, largest_first);
  EXPECT_NE(largest_last, with_scales(0.5, 0.5));
}

TEST(Scales, WhatDoesNotFitIsRefusedByName) {
  const std::string static_path = tiny(kHy3, WeightFormat::fp8_static).path();
  const std::string block_path = tiny(kHy3, WeightFormat::fp8_block128).path();
  const auto refused = [](const std::string& path, const std::function<void(AlteredCheckpoint&)>& change,
                          Code code, std::initializer_list<const char*> texts) {
    AlteredCheckpoint checkpoint(path);
    change(checkpoint);
    expect_load_fails(checkpoint, {}, code, texts);
  };
  const std::string q = "model.layers.1.self_attn.q_proj.", expert = "model.layers.2.mlp.experts.7.up_proj.";
  for (const double value : {0.0, -1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    refused(static_path,
            [&](auto& c) { c.replace(q + "weight_scale", scale_tensor(c, DType::f32, {}, value)); },
            Code::invalid_argument, {"q_proj.weight_scale: element 0 is", "needs a finite number > 0"});
    refused(block_path,
            [&](auto& c) {
              const Tensor scales = scale_tensor(c, DType::f32, {8, 2}, 1);
              scales.as<float>()[13] = static_cast<float>(value);
              c.replace(q + "weight_scale_inv", scales);
            },
            Code::invalid_argument, {"weight_scale_inv: element 13 is"});
    refused(static_path,
            [&](auto& c) { c.replace(expert + "input_scale", scale_tensor(c, DType::f32, {1}, value)); },
            Code::invalid_argument, {"experts.7.up_proj.input_scale: element 0 is"});
    refused(static_path,
            [&](auto& c) {
              c.replace("model.layers.1.self_attn.v_scale", scale_tensor(c, DType::f32, {1}, value));
            },
            Code::invalid_argument, {"self_attn.v_cache.scale: element 0 is"});
  }
  refused(static_path,
          [&](auto& c) {
            const std::string gate = "model.layers.2.mlp.shared_mlp.gate_proj.";
            c.call(gate + "weight", "model.layers.2.mlp.shared_experts.gate_proj.weight");
            c.remove(gate + "weight_scale");
          },
          Code::not_found, {"model.layers.2.mlp.shared_experts.gate_proj.weight is fp8 and "});
  refused(static_path, [&](auto& c) { c.remove(q + "weight_scale"); }, Code::not_found,
          {"q_proj.weight is fp8 and", "q_proj.weight_scale is missing"});
  refused(static_path, [&](auto& c) { c.remove(q + "input_scale"); }, Code::not_found,
          {"q_proj.input_scale is missing", "'static'"});
  refused(static_path,
          [&](auto& c) {
            c.replace(q + "weight_scale", scale_tensor(c, DType::f32, {1024, 1}, 1));
          },
          Code::unsupported, {"q_proj.weight_scale is f32[1024, 1]", "needs one element, or [8, 2]"});
  refused(block_path,
          [&](auto& c) {
            c.replace(q + "weight_scale_inv", scale_tensor(c, DType::f32, {16, 4}, 1));
          },
          Code::unsupported, {"f32[16, 4]", "[8, 2] for blocks of 128 x 128"});
  refused(static_path, [&](auto& c) { c.replace(q + "weight_scale", c.make(DType::i32, {1})); },
          Code::unsupported, {"q_proj.weight_scale is i32[1]", "needs one of the types f32, f16, bf16"});
  refused(static_path,
          [&](auto& c) { c.replace(q + "weight_scale_inv", scale_tensor(c, DType::f32, {1}, 1)); },
          Code::invalid_argument, {"has both", "weight_scale_inv"});
  refused(static_path, [&](auto& c) { c.replace(q + "input_scale", scale_tensor(c, DType::f32, {2}, 1)); },
          Code::unsupported, {"q_proj.input_scale is f32[2]", "needs one element"});
  refused(
      static_path,
      [&](auto& c) { c.replace("model.layers.1.self_attn.k_scale", scale_tensor(c, DType::f32, {2}, 1)); },
      Code::unsupported, {"self_attn.k_cache.scale is f32[2]"});
  // A matrix that was left unquantised beside fp8 ones with the same input.
  refused(static_path,
          [&](auto& c) {
            c.replace(q + "weight", c.make(DType::bf16, {1024, 256}));
            c.remove(q + "weight_scale");
            c.remove(q + "input_scale");
          },
          Code::unsupported, {"k_proj is fp8 with one scale and an input_scale, but", "q_proj is not fp8"});
  refused(static_path,
          [&](auto& c) {
            for (const char* part : {"gate_proj", "up_proj", "down_proj"}) {
              const std::string stem = std::string("model.layers.2.mlp.shared_mlp.") + part;
              const Tensor weight = *c.tensor(stem + ".weight");
              c.replace(stem + ".weight", c.make(DType::bf16, {weight.shape[0], weight.shape[1]}));
              c.remove(stem + ".weight_scale");
              c.remove(stem + ".input_scale");
            }
          },
          Code::unsupported, {"shared_mlp.gate_proj is not fp8, but", "experts.0.gate_proj is fp8"});
  refused(static_path,
          [&](auto& c) {
            c.change_config().weight_format = WeightFormat::fp8_dynamic;
            for (const std::string& name : c.tensor_names()) {
              if (name.ends_with("input_scale")) c.remove(name);
            }
          },
          Code::unsupported, {"mlp.experts", "no input_scale"});
  // Left over: a scale beside a matrix of another type.
  refused(kHy3, [&](auto& c) { c.replace(q + "weight_scale", scale_tensor(c, DType::f32, {1}, 1)); },
          Code::unsupported, {"no place for tensor", "q_proj.weight_scale"});
  refused(static_path,
          [&](auto& c) {
            c.replace("lm_head.weight", c.make(DType::fp8_e4m3, {512, 256}));
          },
          Code::unsupported, {"lm_head.weight is fp8"});
}

/// A llama with sizes that no block divides, in f32. `norm` is what its last norm multiplies by; `first` takes the place
/// of the first weight of each q_proj where it is not 0.
void write_odd_llama(const TempFolder& folder, float o_proj, float norm = 1, float first = 0) {
  constexpr int64_t kHidden = 80, kIntermediate = 200, kHeadDim = 40, kVocab = 67;
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  SafetensorsBuilder file;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, float deviation, float mean = 0) {
    ByteWriter data;
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    const bool replaced = first != 0 && name.ends_with("q_proj.weight");
    for (int64_t i = 0; i < count; ++i) {
      data.put<float>(replaced && i == 0 ? first : mean + deviation * normal(rng));
    }
    file.tensor(name, "F32", shape, data.bytes);
  };
  add("model.embed_tokens.weight", {kVocab, kHidden}, 1);
  add("model.norm.weight", {kHidden}, 0, norm);
  add("lm_head.weight", {kVocab, kHidden}, 0.2f);
  for (int l = 0; l < 2; ++l) {
    const std::string prefix = "model.layers." + std::to_string(l) + ".";
    add(prefix + "input_layernorm.weight", {kHidden}, 0.1f, 1);
    add(prefix + "post_attention_layernorm.weight", {kHidden}, 0.1f, 1);
    add(prefix + "self_attn.q_proj.weight", {2 * kHeadDim, kHidden}, 0.1f);
    add(prefix + "self_attn.k_proj.weight", {kHeadDim, kHidden}, 0.1f);
    add(prefix + "self_attn.v_proj.weight", {kHeadDim, kHidden}, 0.1f);
    add(prefix + "self_attn.o_proj.weight", {kHidden, 2 * kHeadDim}, o_proj);
    add(prefix + "mlp.gate_proj.weight", {kIntermediate, kHidden}, 0.1f);
    add(prefix + "mlp.up_proj.weight", {kIntermediate, kHidden}, 0.1f);
    add(prefix + "mlp.down_proj.weight", {kHidden, kIntermediate}, 0.1f);
  }
  folder.write("model.safetensors", file.bytes());
  folder.write("config.json",
               R"({"model_type": "llama", "hidden_size": 80, "intermediate_size": 200, "num_hidden_layers": 2,
                   "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 40, "vocab_size": 67,
                   "max_position_embeddings": 256})");
}

TEST(Quantize, SizesThatBlocksDoNotDivide) {
  const TempFolder folder;
  write_odd_llama(folder, 0.1f);
  const auto ids = random_ids(60, 67);
  const auto expected = logits_after(open_checkpoint(folder.path()), ids);
  for (const WeightFormat format : kFormats) {
    SCOPED_TRACE(name_of(format));
    const QuantisedFolder fp8(folder.path(), {.format = format});
    const auto checkpoint = open_checkpoint(fp8.path());
    const double kl = divergence(expected, logits_after(checkpoint, ids));
    EXPECT_GT(kl, 0);
    EXPECT_LT(kl, kMostDivergence);
    if (format == WeightFormat::fp8_block128) {
      EXPECT_EQ(to_string(*checkpoint->tensor("model.layers.1.mlp.down_proj.weight_scale_inv")), "f32[1, 2]");
    }
  }
}

TEST(Quantize, ScalesOfTokensWhereTheFileGivesNone) {
  const TempFolder folder;
  write_odd_llama(folder, 0.1f);
  const QuantisedFolder fp8(folder.path(), {.format = WeightFormat::fp8_static});
  auto dynamic = std::make_shared<AlteredCheckpoint>(fp8.path());
  dynamic->change_config().weight_format = WeightFormat::fp8_dynamic;
  for (const std::string& name : dynamic->tensor_names()) {
    if (name.ends_with("input_scale")) dynamic->remove(name);
  }
  const auto ids = random_ids(60, 67);
  const auto expected = logits_after(open_checkpoint(folder.path()), ids);
  EXPECT_LT(divergence(expected, logits_after(dynamic, ids)), kMostDivergence);
}

TEST(Quantize, ZeroWeightsHaveAScaleToo) {
  const TempFolder folder;
  write_odd_llama(folder, 0);
  for (const WeightFormat format : kFormats) {
    const QuantisedFolder fp8(folder.path(), {.format = format});
    const auto logits = logits_after(open_checkpoint(fp8.path()), random_ids(20, 67));
    ASSERT_FALSE(logits.empty());
    for (const float logit : logits) ASSERT_TRUE(std::isfinite(logit));
  }
}

TEST(Quantize, OneHugeWeightShowsInTheFigures) {
  const auto attention_of = [](float first, WeightFormat format) {
    const TempFolder folder;
    write_odd_llama(folder, 0.1f, 1, first);
    const QuantisedFolder fp8(folder.path(), {.format = format});
    return fp8.result.groups.front();
  };
  for (const WeightFormat format : kFormats) {
    const model::QuantizedGroup plain = attention_of(0, format);
    EXPECT_EQ(plain.name, "attention");
    EXPECT_EQ(plain.weights, 2 * (2 * 40 + 40 + 40 + 2 * 40) * 80);
    EXPECT_LT(plain.lost_share(), 1e-3);
    EXPECT_GT(plain.worst_mean_error, 0.01);
    EXPECT_LT(plain.worst_mean_error, 0.03);
  }
  // One scale for all 6,400 weights of a q_proj: all but one become 0, and the sum of squares does not notice.
  const model::QuantizedGroup huge = attention_of(1e7f, WeightFormat::fp8_static);
  EXPECT_LT(huge.relative_error(), 1e-3);
  EXPECT_EQ(huge.lost, 2 * (6400 - 1));
  EXPECT_NEAR(huge.worst_mean_error, 1, 1e-3);
  EXPECT_GT(huge.worst_mean_error, model::kPoorMeanError);
  EXPECT_EQ(huge.worst_matrix, "model.layers.0.self_attn.q_proj.weight");
}

TEST(Quantize, TakesAlongWhatAModelFolderNeeds) {
  const TempFolder folder;
  write_odd_llama(folder, 0.1f);
  const std::set<std::string> needed = {"generation_config.json",
                                        "tokenizer.json",
                                        "tokenizer_config.json",
                                        "merges.txt",
                                        "chat_template.jinja",
                                        "LICENSE.txt",
                                        "README.md"};
  for (const std::string& name : needed) folder.write(name, std::string("{}"));
  for (const char* name :
       {"training_args.bin", "notes.txt", "credentials", "model.gguf", "modeling_llama.py"}) {
    folder.write(name, std::string("x"));
  }
  const QuantisedFolder fp8(folder.path(), {.format = WeightFormat::fp8_block128});
  std::set<std::string> copied;
  for (const auto& entry : std::filesystem::directory_iterator(fp8.path())) {
    copied.insert(entry.path().filename().string());
  }
  std::set<std::string> expected = needed;
  expected.insert({"config.json", "model.safetensors"});
  EXPECT_EQ(copied, expected);
}

TEST(Quantize, RefusesWhatItCannotWrite) {
  const TempFolder folder;
  const auto refused = [&](const std::string& source, const std::string& out,
                           const model::QuantizeOptions& options, Code code, const char* text) {
    const auto result = model::quantize_folder(source, out, options, Stream{});
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.status().code(), code) << result.status().message();
    EXPECT_NE(result.status().message().find(text), std::string::npos) << result.status().message();
  };
  const model::QuantizeOptions blocks{.format = WeightFormat::fp8_block128};
  const std::string out = folder.file("out");
  folder.write("model.gguf", std::string("GGUF"));
  refused(kHy3, folder.path(), blocks, Code::invalid_argument, "the folder is not empty");
  refused(kHy3, folder.file("model.gguf"), blocks, Code::invalid_argument, "is not a folder");
  refused(folder.file("model.gguf"), out, blocks, Code::unsupported, "GGUF");
  refused("/nowhere", out, blocks, Code::not_found, "/nowhere");
  refused("synthetic:llama3-8b", out, blocks, Code::unsupported, "dtype=");
  refused(kHy3, out, {}, Code::invalid_argument, "need a calibration");
  refused(kHy3, out, {.format = WeightFormat::plain}, Code::invalid_argument, "format is plain");
  refused(kHy3, out, {.format = WeightFormat::fp8_block128, .margin = 0.5}, Code::invalid_argument,
          "margin is 0.5");
  refused(tiny(kHy3, WeightFormat::fp8_block128).path(), out, blocks, Code::unsupported, "quantised already");
  EXPECT_FALSE(std::filesystem::exists(out));

  // What another run has begun is its own.
  const TempFolder begun;
  begun.write("config.json.part", std::string());
  refused(kHy3, begun.path(), blocks, Code::invalid_argument, "has the files of a quantize that was killed");
  const int lock = ::open(begun.file("config.json.part").c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::flock(lock, LOCK_EX), 0);
  refused(kHy3, begun.path(), blocks, Code::invalid_argument, "another quantize writes here now");
  ::close(lock);
  EXPECT_TRUE(std::filesystem::exists(begun.file("config.json.part")));
  refused(kHy3, "/proc/vivace", blocks, Code::io_error, "/proc/vivace: cannot be made");

  // A source that could not be loaded makes nothing.
  const TempFolder incomplete;
  std::filesystem::copy(kQwen, incomplete.path(), std::filesystem::copy_options::recursive);
  nlohmann::json config = read_json(kQwen + "/config.json");
  config["num_hidden_layers"] = config["num_hidden_layers"].get<int>() + 1;
  incomplete.write("config.json", config.dump());
  refused(incomplete.path(), out, blocks, Code::not_found, "has no tensor 'model.layers.4.");
  EXPECT_FALSE(std::filesystem::exists(out));

  // A weight that is not finite is seen when its turn comes; nothing stays behind.
  const TempFolder broken;
  write_odd_llama(broken, NAN);
  refused(broken.path(), out, blocks, Code::invalid_argument,
          "o_proj.weight has a weight that is not finite");
  EXPECT_FALSE(std::filesystem::exists(out));
  const auto calibrated =
      model::calibrate(*open_checkpoint(broken.path()), random_ids(20, 67), {.window = 20}, Stream{});
  ASSERT_FALSE(calibrated.ok());

  // So is a number of a tensor that is kept.
  for (const float norm : {NAN, -INFINITY}) {
    const TempFolder bad_norm;
    write_odd_llama(bad_norm, 0.1f, norm);
    refused(bad_norm.path(), out, blocks, Code::invalid_argument,
            std::isnan(norm) ? "model.norm.weight: element 0 is nan, needs a finite number"
                             : "model.norm.weight: element 0 is -inf, needs a finite number");
    EXPECT_FALSE(std::filesystem::exists(out));
  }
}

TEST(Quantize, LeavesNothingWhereverItIsStopped) {
  const TempFolder folder;
  int asked = 0;
  model::QuantizeOptions options{.format = WeightFormat::fp8_block128};
  options.stop = [&] { return ++asked < 0; };
  ASSERT_TRUE(model::quantize_folder(kHy3, folder.file("whole"), options, Stream{}).ok());
  const int all = std::exchange(asked, 0);
  ASSERT_GT(all, 10);
  const std::string out = folder.file("out"), there = folder.file("there");
  std::filesystem::create_directory(there);
  for (const int last : {1, 2, all / 2, all - 1, all}) {
    for (const std::string& to : {out, there}) {
      asked = 0;
      options.stop = [&] { return ++asked == last; };
      const auto result = model::quantize_folder(kHy3, to, options, Stream{});
      ASSERT_FALSE(result.ok()) << last;
      EXPECT_EQ(result.status().code(), Code::cancelled) << result.status().message();
      EXPECT_NE(result.status().message().find(to + ": quantize was interrupted"), std::string::npos);
    }
    EXPECT_FALSE(std::filesystem::exists(out)) << last;
    EXPECT_TRUE(std::filesystem::is_empty(there)) << last;  // it was the caller's
  }
}

TEST(Calibration, SeesEveryRange) {
  const model::Calibration calibration = calibration_of(kHy3);
  ASSERT_EQ(calibration.layers.size(), 3u);
  EXPECT_GT(calibration.score.perplexity, 1);
  for (size_t l = 0; l < calibration.layers.size(); ++l) {
    const model::LayerRanges& r = calibration.layers[l];
    for (const float range : {r.qkv, r.o, r.mlp, r.k, r.v}) EXPECT_GT(range, 0) << l;
    EXPECT_EQ(r.down > 0, l == 0);
    EXPECT_EQ(r.shared_down > 0, l > 0);
    EXPECT_EQ(r.experts_down.size(), l == 0 ? 0u : 12u);
    EXPECT_LE(std::count(r.experts_down.begin(), r.experts_down.end(), 0.f), 4)
        << "192 tokens reach most experts";
  }
}

TEST(Calibration, ExpertsThatNobodyVisitedTakeTheLargestRange) {
  model::Calibration calibration = calibration_of(kHy3);
  std::vector<float>& experts = calibration.layers[1].experts_down;
  for (size_t e = 0; e < experts.size(); ++e) experts[e] = 0.5f + static_cast<float>(e % 7);
  experts[4] = 0;
  int64_t unvisited = 0;
  for (const model::LayerRanges& layer : calibration.layers) {
    unvisited += std::count(layer.experts_down.begin(), layer.experts_down.end(), 0.f);
  }
  const TempFolder folder;
  const auto result =
      model::quantize_folder(kHy3, folder.file("out"), {.calibration = &calibration, .margin = 2}, Stream{});
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->unvisited_experts, unvisited);
  const auto checkpoint = open_checkpoint(folder.file("out"));
  const auto scale = [&](const std::string& name) { return *checkpoint->tensor(name)->as<float>(); };
  EXPECT_FLOAT_EQ(scale("model.layers.1.mlp.experts.4.down_proj.input_scale"), 2 * 6.5f / 448);
  EXPECT_FLOAT_EQ(scale("model.layers.1.mlp.experts.5.down_proj.input_scale"), 2 * 5.5f / 448);
  EXPECT_FLOAT_EQ(scale("model.layers.0.self_attn.v_scale"), 2 * calibration.layers[0].v / 448);
}

TEST(Fp8Cache, IsAQuarterOfF32AndStaysClose) {
  for (const std::string& path : {kQwen, kHy3, tiny(kHy3, WeightFormat::fp8_static).path(),
                                  tiny(kQwen, WeightFormat::fp8_block128).path()}) {
    SCOPED_TRACE(path);
    LoadedModel wide(open_checkpoint(path), {}, 256),
        narrow(open_checkpoint(path), {.kv_dtype = DType::fp8_e4m3}, 256);
    ASSERT_TRUE(wide.ok() && narrow.ok());
    EXPECT_EQ(4 * narrow.model().page_bytes(), wide.model().page_bytes());
    const auto ids = random_ids(90, wide.model().config().vocab);
    Conversation a = wide.conversation(), b = narrow.conversation();
    // A prompt in two chunks, then decode steps.
    wide.feed(a, std::span(ids).first(80), 50);
    narrow.feed(b, std::span(ids).first(80), 50);
    const double kl = divergence(wide.feed(a, std::span(ids).subspan(80), 1, true),
                                 narrow.feed(b, std::span(ids).subspan(80), 1, true));
    EXPECT_GT(kl, 0);
    EXPECT_LT(kl, kMostDivergence);
  }
}

TEST(Fp8Cache, TakesTheScalesOfTheCheckpoint) {
  // With a scale far too small everything saturates: the scales are used, and K's by K.
  const auto saturated = [&](const char* which) {
    auto checkpoint = std::make_shared<AlteredCheckpoint>(tiny(kHy3, WeightFormat::fp8_static).path());
    for (int l = 0; l < 3; ++l) {
      const std::string name = "model.layers." + std::to_string(l) + ".self_attn." + which;
      checkpoint->replace(name, scale_tensor(*checkpoint, DType::bf16, {}, 1e-6));
    }
    LoadedModel loaded(checkpoint, {.kv_dtype = DType::fp8_e4m3}, 128);
    Conversation request = loaded.conversation();
    return loaded.feed(request, random_ids(60, 512), 60);
  };
  LoadedModel loaded(open_checkpoint(tiny(kHy3, WeightFormat::fp8_static).path()),
                     {.kv_dtype = DType::fp8_e4m3}, 128);
  Conversation request = loaded.conversation();
  const auto expected = loaded.feed(request, random_ids(60, 512), 60);
  const double k = divergence(expected, saturated("k_scale")), v = divergence(expected, saturated("v_scale"));
  EXPECT_GT(k, 1e-4);
  EXPECT_GT(v, 1e-3);
  EXPECT_NE(k, v);
}

TEST(Explain, ListsWhatFp8Adds) {
  LoadedModel loaded(open_checkpoint(tiny(kHy3, WeightFormat::fp8_block128).path()),
                     {.kv_dtype = DType::fp8_e4m3}, 64);
  ASSERT_TRUE(loaded.ok());
  for (const model::Phase phase : {model::Phase::decode, model::Phase::prefill}) {
    std::map<int64_t, std::map<std::string, int>> calls;
    for (const model::OpUse& use : loaded.model().explain(phase, 3, loaded.stream())) {
      EXPECT_FALSE(use.choice.row.empty()) << use.op;
      EXPECT_NE(use.choice.row, "reference") << use.op;
      ++calls[use.layer][use.op];
    }
    EXPECT_EQ(calls[0]["quantize_fp8"], 1) << "the input of o";
    EXPECT_EQ(calls[1]["quantize_fp8"], 1) << "the same; rms_norm gives the experts' beside the router's";
    EXPECT_EQ(calls[1]["rms_norm"], 2);
    EXPECT_EQ(calls[0]["linear"], 4);
  }
}

TEST(Fp8Determinism, ChunksAndDecodeStepsGiveTheBitsOfOnePrefill) {
  for (const WeightFormat format : kFormats) {
    LoadedModel loaded(open_checkpoint(tiny(kHy3, format).path()),
                       {.kv_dtype = DType::fp8_e4m3, .deterministic = true}, 160, 2);
    ASSERT_TRUE(loaded.ok());
    const auto ids = random_ids(100, 512);
    Conversation whole = loaded.conversation(0), parts = loaded.conversation(1);
    const auto expected = loaded.feed(whole, ids, 128);
    loaded.feed(parts, std::span(ids).first(90), 37);
    EXPECT_EQ(loaded.feed(parts, std::span(ids).subspan(90), 1, true), expected);
  }
}

TEST(Scales, OfKeysAndValuesUnderEveryWritersName) {
  const model::ModelConfig config = open_checkpoint(kHy3)->config();
  const auto canonical = [&](const std::string& part) {
    const auto name = model::hf_tensor_name(config, "model.layers.2.self_attn." + part);
    EXPECT_TRUE(name.ok()) << part;
    return name->use == model::HfName::Use::keep ? name->canonical : "left out";
  };
  for (const char* part : {"k_cache.scale", "attn.k_scale", "k_proj.k_scale", "k_scale"}) {
    EXPECT_EQ(canonical(part), "model.layers.2.self_attn.k_scale") << part;
  }
  for (const char* part : {"v_cache.scale", "attn.v_scale", "v_proj.v_scale", "v_scale"}) {
    EXPECT_EQ(canonical(part), "model.layers.2.self_attn.v_scale") << part;
  }
  for (const char* part : {"q.scale", "q_scale", "attn.q_scale"})
    EXPECT_EQ(canonical(part), "left out") << part;
  EXPECT_EQ(canonical("k_proj.weight_scale"), "model.layers.2.self_attn.k_proj.weight_scale");
}

TEST(Synthetic, FormatsByNameAndByOption) {
  const auto config = [](const std::string& path) {
    const auto checkpoint = model::Checkpoint::open("synthetic:" + path);
    EXPECT_TRUE(checkpoint.ok()) << path << ": " << checkpoint.status().message();
    return checkpoint.ok() ? (*checkpoint)->config() : model::ModelConfig();
  };
  EXPECT_EQ(config("hy3").weight_format, WeightFormat::fp8_static);
  EXPECT_EQ(config("hy3@tp8").weight_format, WeightFormat::fp8_static);
  EXPECT_EQ(config("qwen3-235b@tp8").weight_format, WeightFormat::fp8_static);
  EXPECT_EQ(config("qwen3-30b-a3b").weight_format, WeightFormat::fp8_block128);
  EXPECT_EQ(config("llama3-8b").weight_format, WeightFormat::plain);
  EXPECT_EQ(config("hy3@tp8,dtype=bf16").weight_format, WeightFormat::plain);
  EXPECT_EQ(config("llama3-8b,dtype=fp8").weight_format, WeightFormat::fp8_static);
  for (const char* both : {"hy3,layers=4,dtype=fp8-block128", "hy3,dtype=fp8-block128,layers=4"}) {
    EXPECT_EQ(config(both).weight_format, WeightFormat::fp8_block128) << both;
    EXPECT_EQ(config(both).layers, 4) << both;
    EXPECT_EQ(config(both).sparse_layer.size(), 4u) << both;
  }
  for (const char* wrong : {"hy3,dtype=int4", "hy3,dtype", "hy3,", "hy3,layers=0", "hy3,layers=81",
                            "hy3,layers=4,x=1", "hy3,layers=4x"}) {
    const auto refused = model::Checkpoint::open(std::string("synthetic:") + wrong);
    ASSERT_FALSE(refused.ok()) << wrong;
    EXPECT_EQ(refused.status().code(), Code::invalid_argument) << wrong;
  }
}

}  // namespace
}  // namespace vivace::testing
