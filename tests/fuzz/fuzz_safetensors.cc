#include <cstdlib>

#include "src/model/hf_names.h"
#include "src/model/safetensors.h"

// Any bytes as a safetensors file, and as an index of shards.

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace vivace::model;  // NOLINT: a fuzz target
  if (const auto index = parse_safetensors_index({reinterpret_cast<const char*>(data), size}); index.ok())
    for (const auto& [name, file] : *index)
      if (file.empty() || file == ".." || file.find('/') != std::string::npos) std::abort();

  ModelConfig config;
  config.architecture = Architecture::hy_v3;
  config.layers = 3;
  config.experts = 2;
  const auto entries = parse_safetensors({data, size});
  if (!entries.ok()) return 0;
  for (const SafetensorsEntry& entry : *entries) {
    if (entry.data.data() < data || entry.data.data() + entry.data.size() > data + size) std::abort();
    (void)hf_tensor_name(config, entry.name);
    const auto tensor = to_tensor(entry);
    if (tensor.ok() && !entry.data.empty() && tensor->bytes() != static_cast<int64_t>(entry.data.size()))
      std::abort();
  }
  return 0;
}
