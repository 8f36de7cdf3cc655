#pragma once

#include <cstring>
#include <map>
#include <random>
#include <set>

#include "tests/model/file_builders.h"
#include "tests/model/model_harness.h"

// The tiny models, and changed copies of them in memory and on disk.

namespace vivace::testing {

inline const std::string kQwen = std::string(VIVACE_TEST_DATA) + "/tiny-qwen3-moe";
inline const std::string kHy3 = std::string(VIVACE_TEST_DATA) + "/tiny-hy3";

inline std::vector<int32_t> random_ids(int64_t count, int64_t vocab, uint32_t seed = 1) {
  std::mt19937 rng(seed);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(rng() % static_cast<uint32_t>(vocab));
  return ids;
}

/// A checkpoint with some tensors replaced, added or taken away.
class AlteredCheckpoint final : public model::Checkpoint {
 public:
  explicit AlteredCheckpoint(const std::string& path)
      : base_(open_checkpoint(path)), config_(base_->config()) {}

  model::ModelConfig& change_config() { return config_; }
  void replace(const std::string& name, Tensor tensor) { replaced_[name] = tensor; }
  void remove(const std::string& name) { removed_.insert(name); }
  /// What messages call a tensor.
  void call(const std::string& name, const std::string& in_files) { called_[name] = in_files; }
  /// Owned memory of a new tensor.
  Tensor make(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor tensor(nullptr, dtype, shape);
    memory_.emplace_back(static_cast<size_t>(tensor.bytes()));
    tensor.data = memory_.back().data();
    return tensor;
  }

  const model::ModelConfig& config() const override { return config_; }
  const model::TokenizerSource& tokenizer() const override { return base_->tokenizer(); }
  std::vector<std::string> tensor_names() const override {
    std::set<std::string> names;
    for (const std::string& name : base_->tensor_names())
      if (!removed_.contains(name)) names.insert(name);
    for (const auto& [name, tensor] : replaced_) names.insert(name);
    return {names.begin(), names.end()};
  }
  bool has(std::string_view name) const override {
    return replaced_.contains(std::string(name)) ||
           (!removed_.contains(std::string(name)) && base_->has(name));
  }
  Result<Tensor> tensor(std::string_view name) const override {
    const auto found = replaced_.find(std::string(name));
    if (found != replaced_.end()) return found->second;
    if (removed_.contains(std::string(name))) {
      return Status(Code::not_found, "no tensor " + std::string(name));
    }
    return base_->tensor(name);
  }
  std::string name_in_files(std::string_view name) const override {
    const auto found = called_.find(std::string(name));
    return found != called_.end() ? found->second : base_->name_in_files(name);
  }
  void drop_pages(const Tensor& tensor) const override { base_->drop_pages(tensor); }
  int64_t mapped_bytes() const override { return base_->mapped_bytes(); }
  std::string summary() const override { return base_->summary(); }

 private:
  std::shared_ptr<const model::Checkpoint> base_;
  model::ModelConfig config_;
  std::map<std::string, Tensor> replaced_;
  std::map<std::string, std::string> called_;
  std::set<std::string> removed_;
  std::vector<std::vector<uint8_t>> memory_;
};

/// Copies the per-expert folder into Tencent's "outer" layout: other names, experts stacked into 3-D tensors.
inline void write_outer_layout(const std::string& source, const TempFolder& folder) {
  std::ifstream file(source + "/model.safetensors", std::ios::binary);
  uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes);
  std::string header(header_bytes, ' ');
  file.read(header.data(), static_cast<std::streamsize>(header.size()));
  const nlohmann::json directory = nlohmann::json::parse(header);
  const auto bytes_of = [&](const std::string& name) {
    const auto offsets = directory.at(name).at("data_offsets").get<std::vector<uint64_t>>();
    Bytes bytes(offsets[1] - offsets[0]);
    file.seekg(static_cast<std::streamoff>(8 + header_bytes + offsets[0]));
    file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return bytes;
  };
  const auto config = read_json(source + "/config.json");
  const int64_t experts = config.at("num_experts"), hidden = config.at("hidden_size");
  const int64_t intermediate = config.at("moe_intermediate_size");

  SafetensorsBuilder out;
  for (const auto& [name, entry] : directory.items()) {
    if (name == "__metadata__" || name.find(".experts.") != std::string::npos) continue;
    std::string renamed = name;
    const auto rename = [&](const std::string& from, const std::string& to) {
      const size_t at = renamed.find(from);
      if (at != std::string::npos) renamed.replace(at, from.size(), to);
    };
    rename("mlp.router.gate.", "mlp.gate.");
    rename("mlp.expert_bias", "mlp.e_score_correction_bias");
    rename("mlp.shared_mlp.", "mlp.shared_experts.");
    out.tensor(renamed, entry.at("dtype"), entry.at("shape").get<std::vector<int64_t>>(), bytes_of(name));
  }
  for (int64_t l = 0; l < config.at("num_hidden_layers"); ++l) {
    const std::string prefix = "model.layers." + std::to_string(l) + ".mlp.experts.";
    if (!directory.contains(prefix + "0.gate_proj.weight")) continue;
    ByteWriter gate_up, down;
    for (int64_t e = 0; e < experts; ++e) {
      const std::string expert = prefix + std::to_string(e) + ".";
      gate_up.raw(bytes_of(expert + "gate_proj.weight")).raw(bytes_of(expert + "up_proj.weight"));
      down.raw(bytes_of(expert + "down_proj.weight"));
    }
    out.tensor(prefix + "gate_up_proj", "BF16", {experts, 2 * intermediate, hidden}, gate_up.bytes);
    out.tensor(prefix + "down_proj", "BF16", {experts, hidden, intermediate}, down.bytes);
  }
  folder.write("model.safetensors", out.bytes());
  folder.write("config.json", config.dump());
}

inline std::vector<float> logits_after(std::shared_ptr<const model::Checkpoint> checkpoint,
                                       const std::vector<int32_t>& ids) {
  LoadedModel loaded(std::move(checkpoint), {}, 256);
  if (!loaded.ok()) return {};
  Conversation request = loaded.conversation();
  return loaded.feed(request, ids, 128);
}

/// Loading must fail with this code and a message that holds all of these texts.
inline void expect_load_fails(const model::Checkpoint& checkpoint, const model::ModelOptions& options,
                              Code code, std::initializer_list<const char*> texts) {
  const auto loaded = model::Model::load(checkpoint, options);
  ASSERT_FALSE(loaded.ok());
  EXPECT_EQ(loaded.status().code(), code) << loaded.status().message();
  for (const char* text : texts) {
    EXPECT_NE(loaded.status().message().find(text), std::string::npos) << loaded.status().message();
  }
}

}  // namespace vivace::testing
