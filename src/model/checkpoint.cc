#include "src/model/checkpoint.h"

#include <filesystem>

#include "src/core/error.h"
#include "src/model/gguf_model.h"
#include "src/model/mapped_checkpoint.h"
#include "src/model/synthetic.h"

namespace vivace::model {

std::vector<std::string> MappedCheckpoint::tensor_names() const {
  std::vector<std::string> names;
  for (const auto& [name, stored] : tensors) names.push_back(name);
  return names;
}

Result<Tensor> MappedCheckpoint::tensor(std::string_view name) const {
  const auto it = tensors.find(name);
  if (it == tensors.end()) return not_found("{}: has no tensor '{}'", path, name);
  if (!it->second.refusal.ok()) return it->second.refusal;
  return it->second.tensor;
}

std::string MappedCheckpoint::name_in_files(std::string_view name) const {
  const auto it = tensors.find(name);
  return it == tensors.end() ? std::string(name) : it->second.name_in_files;
}

void MappedCheckpoint::drop_pages(const Tensor& tensor) const {
  if (tensor.data == nullptr || !tensor.contiguous()) return;
  const std::span<const uint8_t> part(tensor.as<const uint8_t>(), static_cast<size_t>(tensor.bytes()));
  for (const auto& file : files) file->drop_pages(part);
}

int64_t MappedCheckpoint::mapped_bytes() const {
  int64_t sum = 0;
  for (const auto& file : files) sum += static_cast<int64_t>(file->bytes().size());
  return sum;
}

Status MappedCheckpoint::add(const std::string& canonical, const std::string& file_name,
                             StoredTensor stored) {
  stored.name_in_files = file_name;
  if (tensors.emplace(canonical, std::move(stored)).second) return {};
  return invalid_argument("{}: tensor '{}' is there twice: another one has the same meaning ('{}')", path,
                          file_name, canonical);
}

Result<std::unique_ptr<Checkpoint>> open_gguf(const std::string& path) {
  auto checkpoint = std::make_unique<MappedCheckpoint>();
  checkpoint->path = path;
  VIVACE_TRY_ASSIGN(const std::shared_ptr<MappedFile> mapped, MappedFile::open(path));
  const Result<GgufFile> parsed = parse_gguf(mapped->bytes());
  if (!parsed.ok()) return parsed.status().at(path);
  const GgufFile& file = *parsed;
  Result<ModelConfig> config = gguf_config(file);
  if (!config.ok()) return config.status().at(path);
  Result<TokenizerSource> tokenizer = gguf_tokenizer(file);
  if (!tokenizer.ok()) return tokenizer.status().at(path);

  for (const GgufTensor& tensor : file.tensors) {
    const Result<std::string> name = gguf_tensor_name(*config, tensor.name);
    if (!name.ok()) return name.status().at(path);
    StoredTensor stored;
    // A Tensor has no read-only form; the pages themselves are read-only.
    stored.tensor.data = const_cast<uint8_t*>(tensor.data.data());
    stored.tensor.dtype = tensor.dtype;
    stored.tensor.rank = tensor.rank;
    int64_t step = 1;
    for (int d = tensor.rank - 1; d >= 0; --d) {
      stored.tensor.shape[d] = tensor.shape[d];
      stored.tensor.stride[d] = step;
      step *= tensor.shape[d];
    }
    VIVACE_TRY(checkpoint->add(*name, tensor.name, std::move(stored)));
  }
  checkpoint->one_line = fmt::format("GGUF v{}, {}, {} tensors", file.version, name_of(config->architecture),
                                     file.tensors.size());
  checkpoint->model_config = std::move(config).value();
  checkpoint->tokenizer_source = std::move(tokenizer).value();
  checkpoint->files.push_back(mapped);
  return std::unique_ptr<Checkpoint>(std::move(checkpoint));
}

Status check_whole_model(const std::string& path) {
  const std::filesystem::path file(path), folder = file.parent_path();
  const std::string ending = file.extension();
  std::error_code failure;
  if ((ending != ".json" && ending != ".safetensors") || std::filesystem::is_directory(path, failure) ||
      !std::filesystem::exists(folder / "config.json", failure)) {
    return {};
  }
  return invalid_argument("{}: is one file of a model; give the folder, {}", path,
                          folder.empty() ? "." : folder.string());
}

Result<std::unique_ptr<Checkpoint>> Checkpoint::open(const std::string& path) {
  if (is_synthetic(path)) return open_synthetic(path);
  std::error_code failure;  // a failure reads as "no folder"; opening the file then says why
  if (std::filesystem::is_directory(path, failure)) return open_hf_folder(path);
  if (!std::filesystem::exists(path, failure) && !failure) {
    return not_found("{}: there is no such file or folder; a model is {}", path, kModelForms);
  }
  VIVACE_TRY(check_whole_model(path));
  return open_gguf(path);
}

}  // namespace vivace::model
