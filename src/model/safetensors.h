#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "vivace/status.h"
#include "vivace/tensor.h"

namespace vivace::model {

/// One tensor of a safetensors file. `shape` is as long as the file says (empty for a scalar).
struct SafetensorsEntry {
  std::string name;
  std::string type_name;      ///< "BF16"
  DType dtype = DType::none;  ///< none: a type of the format that nothing here reads
  std::vector<int64_t> shape;
  std::span<const uint8_t> data;  ///< exactly as long as shape and type say
};

/// Reads the directory of a safetensors file, sorted by name; `bytes` is the whole file. invalid_argument
/// names the tensor and the field; a shape that disagrees with its data_offsets is refused with both sizes.
Result<std::vector<SafetensorsEntry>> parse_safetensors(std::span<const uint8_t> bytes);

/// The tensor as a view of the file. unsupported: a type, rank or alignment that Tensor does not have.
Result<Tensor> to_tensor(const SafetensorsEntry& entry);

/// The weight_map of a model.safetensors.index.json: tensor name -> file name. A file name that is not a
/// plain name inside the folder is refused.
Result<std::map<std::string, std::string>> parse_safetensors_index(std::string_view text);

}  // namespace vivace::model
