#include "src/model/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace vivace::model {
namespace {

using nlohmann::json;

json llama() {
  return {{"model_type", "llama"},    {"hidden_size", 64},       {"num_hidden_layers", 2},
          {"num_attention_heads", 4}, {"intermediate_size", 96}, {"vocab_size", 100}};
}
json qwen() {
  json c = llama();
  c["model_type"] = "qwen3_moe";
  c["num_key_value_heads"] = 2;
  c["num_experts"] = 8;
  c["num_experts_per_tok"] = 2;
  c["moe_intermediate_size"] = 32;
  return c;
}
json hy3() {
  json c = qwen();
  c["model_type"] = "hy_v3";
  c["num_hidden_layers"] = 3;
  return c;
}
json with(json c, const char* field, json value) {
  c[field] = std::move(value);
  return c;
}
json without(json c, const char* field) {
  c.erase(field);
  return c;
}

ModelConfig parsed(const json& c, const std::string& generation = {}) {
  const Result<ModelConfig> config = parse_hf_config(c.dump(), generation);
  EXPECT_TRUE(config.ok()) << config.status().message();
  return config.ok() ? *config : ModelConfig{};
}

void expect_refused(const json& c, const std::string& part, Code code = Code::invalid_argument) {
  const Result<ModelConfig> config = parse_hf_config(c.dump());
  ASSERT_FALSE(config.ok()) << "accepted, should mention " << part;
  EXPECT_EQ(config.status().code(), code) << config.status().message();
  EXPECT_NE(config.status().message().find(part), std::string::npos) << config.status().message();
}

TEST(HfConfig, LlamaDefaults) {
  const ModelConfig c = parsed(llama());
  EXPECT_EQ(c.architecture, Architecture::llama);
  EXPECT_EQ(c.heads_kv, 4);
  EXPECT_EQ(c.head_dim, 16);
  EXPECT_EQ(c.rotary_dim, 16);
  EXPECT_EQ(c.rms_eps, 1e-6);
  EXPECT_EQ(c.rope_theta, 10000);
  EXPECT_EQ(c.rope_style, RopeStyle::neox);
  EXPECT_EQ(c.rope_scaling.type, "default");
  EXPECT_EQ(c.max_position, 2048);
  EXPECT_FALSE(c.tied_embeddings);
  EXPECT_FALSE(c.qk_norm);
  EXPECT_FALSE(c.is_moe());
  EXPECT_EQ(c.bos_id, -1);
  EXPECT_TRUE(c.eos_ids.empty());
}

TEST(HfConfig, QwenDefaultsAndExpertNames) {
  const ModelConfig c = parsed(qwen());
  EXPECT_EQ(c.experts, 8);
  EXPECT_EQ(c.top_k, 2);
  EXPECT_EQ(c.moe_intermediate, 32);
  EXPECT_EQ(c.shared_experts, 0);
  EXPECT_TRUE(c.qk_norm);
  EXPECT_EQ(c.router_score, RouterScore::softmax);
  EXPECT_FALSE(c.router_renormalise);  // the class default, although published files say true
  EXPECT_EQ(c.router_scale, 1);
  EXPECT_EQ(c.sparse_layer, (std::vector<bool>{true, true}));
  EXPECT_TRUE(parsed(with(qwen(), "norm_topk_prob", true)).router_renormalise);

  const json renamed = with(without(qwen(), "num_experts"), "num_local_experts", 8);
  EXPECT_EQ(parsed(renamed).experts, 8);
  EXPECT_EQ(parsed(with(qwen(), "num_local_experts", 8)).experts, 8);
  expect_refused(with(qwen(), "num_local_experts", 9), "num_experts is 8, but num_local_experts is 9");
  expect_refused(without(qwen(), "num_experts"), "num_experts is missing");
}

TEST(HfConfig, WhichLayersAreSparse) {
  json c = with(qwen(), "num_hidden_layers", 4);
  EXPECT_EQ(parsed(with(c, "decoder_sparse_step", 2)).sparse_layer,
            (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(parsed(with(c, "mlp_only_layers", {0, 3, 17})).sparse_layer,
            (std::vector<bool>{false, true, true, false}));
  EXPECT_EQ(parsed(with(c, "mlp_layer_types", {"dense", "sparse", "sparse", "dense"})).sparse_layer,
            (std::vector<bool>{false, true, true, false}));
  EXPECT_FALSE(parsed(with(qwen(), "num_experts", 0)).is_moe());
  expect_refused(with(c, "mlp_only_layers", {-1}), "mlp_only_layers has the entry -1");
  expect_refused(with(c, "mlp_only_layers", 3), "mlp_only_layers is 3");
  expect_refused(with(c, "decoder_sparse_step", 0), "decoder_sparse_step is 0");
  expect_refused(with(c, "mlp_layer_types", {"dense"}), "mlp_layer_types is a list with 1 elements");
  expect_refused(with(c, "mlp_layer_types", {"dense", "sparse", "sparse", "moe"}),
                 "mlp_layer_types[3] is \"moe\"");

  EXPECT_EQ(parsed(hy3()).sparse_layer, (std::vector<bool>{false, true, true}));
  EXPECT_EQ(parsed(with(hy3(), "first_k_dense_replace", 2)).sparse_layer,
            (std::vector<bool>{false, false, true}));
  EXPECT_EQ(parsed(with(hy3(), "mlp_layer_types", {"sparse", "sparse", "dense"})).sparse_layer,
            (std::vector<bool>{true, true, false}));
}

TEST(HfConfig, Hy3Defaults) {
  const ModelConfig c = parsed(hy3());
  EXPECT_EQ(c.architecture, Architecture::hy_v3);
  EXPECT_EQ(c.rms_eps, 1e-5);
  EXPECT_EQ(c.rope_theta, 11158840);
  EXPECT_EQ(c.shared_experts, 1);
  EXPECT_EQ(c.router_score, RouterScore::sigmoid);
  EXPECT_TRUE(c.router_renormalise);
  EXPECT_EQ(c.router_scale, 2.826);
  EXPECT_TRUE(c.qk_norm);
  const ModelConfig other =
      parsed(with(with(with(hy3(), "route_norm", false), "router_scaling_factor", 1.5), "qk_norm", false));
  EXPECT_FALSE(other.router_renormalise);
  EXPECT_EQ(other.router_scale, 1.5);
  EXPECT_FALSE(other.qk_norm);
  const json renamed = with(without(hy3(), "moe_intermediate_size"), "expert_hidden_dim", 48);
  EXPECT_EQ(parsed(renamed).moe_intermediate, 48);
  expect_refused(with(hy3(), "expert_hidden_dim", 48), "expert_hidden_dim is 48");
}

TEST(HfConfig, RopeOfBothTransformersVersions) {
  const ModelConfig v4 = parsed(with(with(llama(), "rope_theta", 500000.0), "rope_scaling",
                                     {{"rope_type", "llama3"},
                                      {"factor", 8.0},
                                      {"low_freq_factor", 1.0},
                                      {"high_freq_factor", 4.0},
                                      {"original_max_position_embeddings", 8192}}));
  const ModelConfig v5 = parsed(with(llama(), "rope_parameters",
                                     {{"rope_theta", 500000.0},
                                      {"rope_type", "llama3"},
                                      {"factor", 8.0},
                                      {"low_freq_factor", 1.0},
                                      {"high_freq_factor", 4.0},
                                      {"original_max_position_embeddings", 8192}}));
  for (const ModelConfig& c : {v4, v5}) {
    EXPECT_EQ(c.rope_theta, 500000);
    EXPECT_EQ(c.rope_scaling.type, "llama3");
    EXPECT_EQ(c.rope_scaling.factor, 8);
    EXPECT_EQ(c.rope_scaling.low_freq_factor, 1);
    EXPECT_EQ(c.rope_scaling.high_freq_factor, 4);
    EXPECT_EQ(c.rope_scaling.original_max_position, 8192);
  }
  const ModelConfig linear = parsed(with(llama(), "rope_scaling", {{"type", "linear"}, {"factor", 2}}));
  EXPECT_EQ(linear.rope_scaling.type, "linear");
  EXPECT_EQ(linear.rope_scaling.factor, 2);
  EXPECT_EQ(parsed(with(llama(), "rope_scaling", nullptr)).rope_scaling.factor, 1);
  EXPECT_EQ(
      parsed(with(llama(), "rope_parameters", {{"rope_theta", 7}, {"rope_type", "default"}})).rope_theta, 7);

  expect_refused(with(llama(), "rope_scaling", {{"rope_type", "yarn"}, {"factor", 2}}),
                 "rope_scaling.rope_type is 'yarn'", Code::unsupported);
  // Both in one file: what one of them says must not be lost.
  const json yarn = {{"rope_type", "yarn"}, {"factor", 4}},
             plain = {{"rope_theta", 7}, {"rope_type", "default"}};
  expect_refused(with(with(llama(), "rope_parameters", plain), "rope_scaling", yarn),
                 "needs one of them, or both alike");
  expect_refused(with(with(llama(), "rope_parameters", plain), "rope_theta", 8),
                 "rope_theta is 8 and rope_parameters.rope_theta 7");
  EXPECT_EQ(parsed(with(with(llama(), "rope_parameters", plain), "rope_theta", 7)).rope_theta, 7);
  expect_refused(with(llama(), "rope_parameters", {{"full_attention", {{"rope_theta", 7}}}}),
                 "rope_parameters.full_attention is an object", Code::unsupported);
  expect_refused(with(llama(), "rope_scaling", {{"rope_type", "linear"}}), "factor is missing");
  expect_refused(with(llama(), "rope_scaling", {{"rope_type", "linear"}, {"factor", 0}}),
                 "rope_scaling.factor is 0");
  expect_refused(with(llama(), "rope_scaling", "linear"), "rope_scaling is \"linear\"");
  expect_refused(with(llama(), "rope_theta", -1), "rope_theta is -1");
  expect_refused(with(llama(), "partial_rotary_factor", 0.5), "partial_rotary_factor is 0.5",
                 Code::unsupported);
}

TEST(HfConfig, EndIdsFromBothFiles) {
  EXPECT_EQ(parsed(with(llama(), "eos_token_id", 2)).eos_ids, std::vector<int32_t>{2});
  EXPECT_EQ(parsed(with(llama(), "eos_token_id", {2, 5, 2})).eos_ids, (std::vector<int32_t>{2, 5}));
  EXPECT_EQ(parsed(with(llama(), "eos_token_id", nullptr)).eos_ids, std::vector<int32_t>{});
  EXPECT_EQ(parsed(with(llama(), "eos_token_id", 2), R"({"eos_token_id":[7,2]})").eos_ids,
            (std::vector<int32_t>{2, 7}));
  EXPECT_EQ(parsed(with(llama(), "bos_token_id", 1)).bos_id, 1);
  expect_refused(with(llama(), "eos_token_id", "2"), "eos_token_id is \"2\"");
  expect_refused(with(llama(), "eos_token_id", {-1}), "eos_token_id is -1");
  expect_refused(with(llama(), "eos_token_id", 100),
                 "config.json: eos_token_id is 100, needs token ids in [0, 99]");
  const auto beyond = parse_hf_config(llama().dump(), R"({"eos_token_id":[2,100]})");
  EXPECT_EQ(beyond.status().message(),
            "generation_config.json: eos_token_id is 100, needs token ids in [0, 99]");
  const auto bad = parse_hf_config(llama().dump(), R"({"eos_token_id":3000000000})");
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().message().rfind("generation_config.json: eos_token_id is 3000000000", 0), 0u)
      << bad.status().message();
}

TEST(HfConfig, WhatIsNotThereIsRefusedByName) {
  expect_refused(without(llama(), "model_type"), "model_type is missing");
  expect_refused(with(llama(), "model_type", "gpt2"), "model_type is 'gpt2'", Code::unsupported);
  expect_refused(with(llama(), "attention_bias", true), "attention_bias is true", Code::unsupported);
  expect_refused(with(llama(), "mlp_bias", true), "mlp_bias is true", Code::unsupported);
  expect_refused(with(llama(), "hidden_act", "gelu"), "hidden_act is 'gelu'", Code::unsupported);
  expect_refused(with(llama(), "quantization_config", {{"quant_method", "awq"}}),
                 "quant_method 'awq', needs fp8", Code::unsupported);
  expect_refused(with(llama(), "quantization_config", {1}), "quantization_config", Code::unsupported);
  expect_refused(with(hy3(), "n_group", 8), "n_group is 8", Code::unsupported);
}

TEST(HfConfig, Fp8Formats) {
  const auto format = [](const json& fields) {
    json quantisation = {{"quant_method", "fp8"}};
    quantisation.update(fields);
    return with(llama(), "quantization_config", quantisation);
  };
  EXPECT_EQ(parsed(llama()).weight_format, WeightFormat::plain);
  EXPECT_EQ(parsed(with(llama(), "quantization_config", nullptr)).weight_format, WeightFormat::plain);
  EXPECT_EQ(parsed(format(json::object())).weight_format, WeightFormat::fp8_dynamic);
  EXPECT_EQ(parsed(format({{"activation_scheme", "static"},
                           {"ignored_layers", {"lm_head", "model.embed_tokens"}},
                           {"kv_cache_scheme", "static"}}))
                .weight_format,
            WeightFormat::fp8_static);
  EXPECT_EQ(parsed(format({{"activation_scheme", "dynamic"},
                           {"fmt", "e4m3"},
                           {"weight_block_size", {128, 128}},
                           {"modules_to_not_convert", json::array()},
                           {"kv_cache_scheme", {{"num_bits", 8}, {"type", "float"}}}}))
                .weight_format,
            WeightFormat::fp8_block128);
  const auto unsupported = [&](const json& fields, const std::string& text) {
    expect_refused(format(fields), text, Code::unsupported);
  };
  unsupported({{"weight_block_size", {64, 64}}}, "weight_block_size is [64,64], needs [128, 128]");
  unsupported({{"weight_block_size", {128}}}, "weight_block_size is [128]");
  unsupported({{"weight_block_size", {128, 128}}, {"activation_scheme", "static"}}, "needs dynamic");
  unsupported({{"activation_scheme", "none"}}, "activation_scheme is 'none'");
  unsupported({{"fmt", "e5m2"}}, "fmt is 'e5m2', needs e4m3");
  unsupported({{"kv_cache_scheme", {{"num_bits", 8}, {"type", "int"}}}}, "type 'int', needs 8 and 'float'");
  expect_refused(format({{"ignored_layers", "lm_head"}}), "ignored_layers is \"lm_head\", needs a list");
  expect_refused(format({{"modules_to_not_convert", {1}}}), "modules_to_not_convert is a list");
  expect_refused(format({{"kv_cache_scheme", 8}}), "kv_cache_scheme is 8");
  expect_refused(format({{"activation_scheme", 1}}), "activation_scheme is 1, needs a string");
}

TEST(HfConfig, SizesAreChecked) {
  for (const char* field :
       {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}) {
    expect_refused(without(llama(), field), std::string(field) + " is missing");
    for (const json& value :
         {json(0), json(-1), json(1.5), json("8"), json(true), json(int64_t{1} << 40), json(~uint64_t{0})})
      expect_refused(with(llama(), field, value), std::string(field) + " is " + value.dump());
  }
  expect_refused(with(llama(), "num_key_value_heads", 3),
                 "config.json: model configuration: num_attention_heads is 4, needs a multiple of "
                 "num_key_value_heads = 3");
  expect_refused(with(llama(), "num_key_value_heads", 8), "num_key_value_heads is 8");
  expect_refused(with(llama(), "num_attention_heads", 5), "head_dim is missing");
  expect_refused(with(llama(), "head_dim", 5), "head_dim is 5, needs an even number");
  expect_refused(with(llama(), "rms_norm_eps", 0), "rms_norm_eps is 0");
  expect_refused(with(llama(), "rms_norm_eps", "1e-6"), "rms_norm_eps is \"1e-6\"");
  expect_refused(with(llama(), "tie_word_embeddings", 1), "tie_word_embeddings is 1");
  expect_refused(with(qwen(), "num_experts_per_tok", 9), "num_experts_per_tok is 9, needs a value in [1, 8]");
  EXPECT_EQ(parsed(with(llama(), "head_dim", 32)).head_dim, 32);
  // What attention takes is what a model may have.
  expect_refused(with(llama(), "head_dim", 514), "head_dim is 514");
  // Each is in range, their product is not.
  expect_refused(
      with(with(with(llama(), "num_attention_heads", 256), "head_dim", 512), "num_hidden_layers", 4096),
      "num_hidden_layers * num_key_value_heads * head_dim is 536870912");
  expect_refused(with(with(hy3(), "num_shared_experts", 65536), "moe_intermediate_size", 4096),
                 "num_shared_experts * moe_intermediate_size is 268435456");
}

TEST(HfConfig, SlidingWindowCountsOnlyWhenUsed) {
  EXPECT_EQ(parsed(with(qwen(), "sliding_window", 128)).sliding_window, 0);
  EXPECT_EQ(parsed(with(with(qwen(), "sliding_window", 128), "use_sliding_window", true)).sliding_window,
            128);
  EXPECT_EQ(parsed(with(with(qwen(), "sliding_window", 32768), "use_sliding_window", true)).sliding_window,
            0);
}

TEST(HfConfig, LayersOfDifferentWindowsAreRefused) {
  const json used = with(with(qwen(), "sliding_window", 128), "use_sliding_window", true);
  EXPECT_EQ(parsed(with(used, "max_window_layers", 0)).sliding_window, 128);
  EXPECT_EQ(parsed(with(used, "max_window_layers", 2)).sliding_window, 0);
  expect_refused(with(used, "max_window_layers", 1), "max_window_layers is 1, needs 0 or at least",
                 Code::unsupported);
  EXPECT_EQ(parsed(with(with(qwen(), "sliding_window", 128), "max_window_layers", 1)).sliding_window, 0);
  EXPECT_EQ(parsed(with(with(llama(), "sliding_window", 128), "use_sliding_window", true)).sliding_window, 0);

  const json full = json::array({"full_attention", "full_attention"});
  EXPECT_EQ(parsed(with(llama(), "layer_types", full)).sliding_window, 0);
  expect_refused(with(used, "layer_types", full), "layer_types has full_attention alone", Code::unsupported);
  expect_refused(with(llama(), "layer_types", json::array({"full_attention", "sliding_attention"})),
                 "layer_types[1] is \"sliding_attention\"", Code::unsupported);
  expect_refused(with(llama(), "layer_types", "full_attention"), "layer_types is \"full_attention\"");
}

TEST(HfConfig, TextThatIsNoObject) {
  for (const char* text : {"", "[]", "3", "{", "{\"model_type\":\"llama\",}", "\xff\xfe{}"}) {
    const auto refused = parse_hf_config(text);
    ASSERT_FALSE(refused.ok()) << text;
    EXPECT_EQ(refused.status().code(), Code::invalid_argument);
    EXPECT_EQ(refused.status().message().rfind("config.json: ", 0), 0u) << refused.status().message();
  }
  const auto twice = parse_hf_config(R"({"model_type":"llama","hidden_size":1,"hidden_size":2})");
  EXPECT_NE(twice.status().message().find("the key 'hidden_size' twice"), std::string::npos)
      << twice.status().message();
}

}  // namespace
}  // namespace vivace::model
