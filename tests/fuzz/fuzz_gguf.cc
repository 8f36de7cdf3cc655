#include <cstdlib>

#include "src/model/gguf_model.h"

// Any bytes as a GGUF file: the directory, and what the model reader makes of it.

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace vivace::model;  // NOLINT: a fuzz target
  const auto file = parse_gguf({data, size});
  if (!file.ok()) return 0;
  for (const GgufTensor& tensor : file->tensors) {
    // What was accepted lies inside the input; touching the ends lets the sanitizer say otherwise.
    if (tensor.data.data() < data || tensor.data.data() + tensor.data.size() > data + size) std::abort();
    const volatile uint8_t touched = tensor.data.front() ^ tensor.data.back();  // no tensor is empty
    (void)touched;
  }
  for (const auto& [key, value] : file->metadata) (void)value.describe();
  (void)gguf_tokenizer(*file);
  const auto config = gguf_config(*file);
  if (!config.ok()) return 0;
  if (!validate(*config).ok()) std::abort();
  for (const GgufTensor& tensor : file->tensors) (void)gguf_tensor_name(*config, tensor.name);
  return 0;
}
