#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "src/core/error.h"
#include "src/model/hf_names.h"
#include "src/model/json.h"
#include "src/model/mapped_checkpoint.h"
#include "src/model/safetensors.h"

// A Hugging Face folder: config.json, optional generation_config.json, tokenizer files, safetensors.

namespace vivace::model {

namespace {

using nlohmann::json;

constexpr size_t kMaxConfigBytes = size_t{16} << 20;
constexpr size_t kMaxTokenizerBytes = size_t{256} << 20;
constexpr size_t kMaxIndexBytes = size_t{256} << 20;

// The text of a file of the folder that may be absent, then "".
Result<std::string> optional_text(const std::string& path, size_t max_bytes) {
  if (!is_regular_file(path)) return std::string();
  return read_text_file(path, max_bytes);
}

// A special token is a string, or an object that has it as `content`.
Result<std::string> token_text(const std::string& place, const JsonFields& fields, const char* field) {
  const json* value = fields.find(field);
  if (value == nullptr) return std::string();
  if (value->is_string()) return value->get<std::string>();
  if (value->is_object())
    if (const auto content = value->find("content"); content != value->end() && content->is_string())
      return content->get<std::string>();
  return invalid_argument("{}: {} is {}, needs a string or an object with a string 'content'", place, field,
                          excerpt(*value));
}

// A string, or a list of {name, template} of which "default" counts.
Result<std::string> chat_template_text(const std::string& place, const JsonFields& fields) {
  const json* value = fields.find("chat_template");
  if (value == nullptr) return std::string();
  if (value->is_string()) return value->get<std::string>();
  if (value->is_array())
    for (const json& entry : *value) {
      if (!entry.is_object() || !entry.contains("template") || entry.value("name", json()) != "default")
        continue;
      if (entry["template"].is_string()) return entry["template"].get<std::string>();
    }
  return invalid_argument("{}: chat_template is {}, needs a string or a list with the entry 'default'", place,
                          excerpt(*value));
}

Status read_tokenizer(const std::string& folder, const ModelConfig& config, TokenizerSource& source) {
  VIVACE_TRY_ASSIGN(source.tokenizer_json, optional_text(folder + "/tokenizer.json", kMaxTokenizerBytes));
  source.bos_id = config.bos_id;
  source.eos_id = config.eos_ids.empty() ? -1 : config.eos_ids.front();
  const std::string place = folder + "/tokenizer_config.json";
  VIVACE_TRY_ASSIGN(const std::string text, optional_text(place, kMaxTokenizerBytes));
  if (!text.empty()) {
    VIVACE_TRY_ASSIGN(const json object, parse_json_object(place, text));
    JsonFields fields(place, object);
    source.add_bos = fields.boolean("add_bos_token", false);
    source.add_eos = fields.boolean("add_eos_token", false);
    VIVACE_TRY(fields.status());
    VIVACE_TRY_ASSIGN(source.bos_token, token_text(place, fields, "bos_token"));
    VIVACE_TRY_ASSIGN(source.eos_token, token_text(place, fields, "eos_token"));
    VIVACE_TRY_ASSIGN(source.chat_template, chat_template_text(place, fields));
  }
  VIVACE_TRY_ASSIGN(std::string separate, optional_text(folder + "/chat_template.jinja", kMaxConfigBytes));
  if (!separate.empty()) source.chat_template = std::move(separate);
  return {};
}

// Adds the tensors of safetensors files to a checkpoint and counts what was left out.
class Loader {
 public:
  Loader(const std::string& folder, MappedCheckpoint& checkpoint)
      : folder_(folder), checkpoint_(checkpoint) {}

  /// The listed tensors of one file; all of them with an empty list.
  Status add_file(const std::string& file_name, const std::set<std::string>& listed) {
    const std::string path = folder_ + "/" + file_name;
    VIVACE_TRY_ASSIGN(std::shared_ptr<MappedFile> file, MappedFile::open(path));
    const Result<std::vector<SafetensorsEntry>> entries = parse_safetensors(file->bytes());
    if (!entries.ok()) return entries.status().at(path);
    size_t found = 0;
    for (const SafetensorsEntry& entry : *entries) {
      if (!listed.empty() && !listed.contains(entry.name)) continue;
      ++found;
      VIVACE_TRY(add(entry, path).at(path));
    }
    if (!listed.empty() && found != listed.size()) return missing_from(path, *entries, listed);
    checkpoint_.files.push_back(std::move(file));
    return {};
  }

  std::string left_out() const {
    return mtp_tensors_ == 0 ? std::string()
                             : fmt::format("; {} tensors of the MTP layer skipped", mtp_tensors_);
  }

 private:
  Status add(const SafetensorsEntry& entry, const std::string& path) {
    VIVACE_TRY_ASSIGN(const HfName name, hf_tensor_name(checkpoint_.model_config, entry.name));
    mtp_tensors_ += name.use == HfName::Use::mtp_layer;
    if (name.use != HfName::Use::keep) return {};
    StoredTensor stored;
    if (const Result<Tensor> tensor = to_tensor(entry); tensor.ok()) {
      stored.tensor = *tensor;
    } else {
      stored.refusal = tensor.status().at(path);
    }
    return checkpoint_.add(name.canonical, entry.name, std::move(stored));
  }

  static Status missing_from(const std::string& path, const std::vector<SafetensorsEntry>& entries,
                             const std::set<std::string>& listed) {
    std::set<std::string> missing = listed;
    for (const SafetensorsEntry& entry : entries) missing.erase(entry.name);
    return not_found(
        "{}: tensor '{}' is not in this file, but model.safetensors.index.json says so ({} tensors are "
        "missing)",
        path, *missing.begin(), missing.size());
  }

  const std::string& folder_;
  MappedCheckpoint& checkpoint_;
  int64_t mtp_tensors_ = 0;
};

/// " (fp8, per tensor)", or nothing.
std::string format_note(const ModelConfig& config) {
  if (config.weight_format == WeightFormat::plain) return {};
  return fmt::format(" ({})", name_of(config.weight_format));
}

}  // namespace

Result<WeightFiles> hf_weight_files(const std::string& folder) {
  const std::string single = "model.safetensors", index = "model.safetensors.index.json";
  WeightFiles files;
  if (is_regular_file(folder + "/" + single)) {
    files[single] = {};
    return files;
  }
  const std::string index_path = folder + "/" + index;
  if (!is_regular_file(index_path)) return not_found("{}: has neither {} nor {}", folder, single, index);
  VIVACE_TRY_ASSIGN(const std::string text, read_text_file(index_path, kMaxIndexBytes));
  const Result<std::map<std::string, std::string>> weight_map = parse_safetensors_index(text);
  if (!weight_map.ok()) return weight_map.status().at(folder);
  for (const auto& [tensor, file] : *weight_map) files[file].insert(tensor);
  return files;
}

Result<std::unique_ptr<Checkpoint>> open_hf_folder(const std::string& path) {
  auto checkpoint = std::make_unique<MappedCheckpoint>();
  checkpoint->path = path;
  const std::string config_path = path + "/config.json";
  std::error_code failure;
  if (!std::filesystem::exists(config_path, failure) && !failure) {
    return not_found("{}: there is no such file; a model is {}", config_path, kModelForms);
  }
  VIVACE_TRY_ASSIGN(const std::string config, read_text_file(config_path, kMaxConfigBytes));
  VIVACE_TRY_ASSIGN(const std::string generation,
                    optional_text(path + "/generation_config.json", kMaxConfigBytes));
  Result<ModelConfig> parsed = parse_hf_config(config, generation);
  if (!parsed.ok()) return parsed.status().at(path);
  checkpoint->model_config = std::move(parsed).value();
  VIVACE_TRY(read_tokenizer(path, checkpoint->model_config, checkpoint->tokenizer_source));

  Loader loader(path, *checkpoint);
  VIVACE_TRY_ASSIGN(const WeightFiles files, hf_weight_files(path));
  for (const auto& [file, listed] : files) VIVACE_TRY(loader.add_file(file, listed));
  checkpoint->one_line = fmt::format(
      "safetensors, {}{}, {} tensors in {} file{}{}", name_of(checkpoint->model_config.architecture),
      format_note(checkpoint->model_config), checkpoint->tensors.size(), checkpoint->files.size(),
      checkpoint->files.size() == 1 ? "" : "s", loader.left_out());
  return std::unique_ptr<Checkpoint>(std::move(checkpoint));
}

}  // namespace vivace::model
